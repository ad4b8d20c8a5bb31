"""Run the programs of the error reference: `python -m tests.documents.error_page` writes their output into the page.

A section of docs/reference/errors.md has a class as its heading, a program that raises it, the program's
output, and a corrected program. Comments of tests/documents in the page distinguish the blocks.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import re
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import meshcomm.comm.handle
import meshcomm.errors
import meshcomm.rendezvous.exposure
from meshcomm.errors import MeshcommError, RankFailed
from meshcomm.layout.sizes import fold
from meshcomm.testing import Pool, RankFailure
from meshcomm.testing.pool import Held
from tests.documents.blocks import ROOT, Block, blocks

PAGE: Final = "docs/reference/errors.md"
# The name of a corrected program.
_RIGHT: Final = "right.py"

# Parts that differ between two runs: process numbers, ports, line numbers, start times, hosts.
_VARIES: Final = (
    (re.compile(r"process \d+ of [^,]+, started at \d+"), "process 4711 of node, started at 815"),
    (re.compile(r"\[?127\.0\.0\.1\]?:\d+"), "127.0.0.1:29500"),
    (re.compile(r"^( *)File .*\n(?:\1 .*\n)+", re.MULTILINE), r"\1...\n"),
    (re.compile(r"/tmp/[\w./-]+"), "/tmp/meeting"),
    (re.compile(r"(?<=fail at )/\S*(?=third_party/)"), ""),
    (re.compile(r"(by host: |; )[\w.-]+(?=: rank)"), r"\1node"),
)


def public_errors() -> set[str]:
    """Every exception and warning that a user can encounter by its class."""
    modules = (meshcomm.errors, meshcomm.rendezvous.exposure, meshcomm.comm.handle)
    found = {RankFailure.__name__}
    for module in modules:
        for name, value in vars(module).items():
            if (
                inspect.isclass(value)
                and issubclass(value, Exception)
                and value.__module__ == module.__name__
            ):
                found.add(name)
    return found


@dataclass(frozen=True)
class Entry:
    """One section. ranks: processes that each run the programs, or 0 for the process that reads the page."""

    name: str
    words: str
    wrong: Block
    printed: Block
    right: Block

    @property
    def ranks(self) -> int:
        """The number of processes that run the program, or 0 for this one."""
        return int(self.wrong.notes.get("processes", "0").rpartition("=")[2])


def entries(text: str | None = None) -> dict[str, Entry]:
    """The page's sections, by class. Raises ValueError for a section without its three blocks."""
    text = (ROOT / PAGE).read_text(encoding="utf-8") if text is None else text
    found = {}
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        name, _, body = part.partition("\n")
        if not re.fullmatch(r"[A-Z]\w+", name):
            continue
        three = blocks(PAGE, body)
        kinds = [("raises" in each.notes, "output" in each.notes) for each in three]
        if kinds != [(True, False), (False, True), (False, False)]:
            raise ValueError(f"{name}: not a failing program, what it printed, and the corrected one")
        found[name] = Entry(name, body.partition("<!--")[0].strip(), *three)
    return found


def outcome(source: str, name: str) -> str | None:
    """Run a program. Returns its exception, or meshcomm's last warning, as Python prints it."""
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        try:
            exec(compile(source, name, "exec"), {"__name__": "__main__"})
        except RankFailed as error:
            ours = {rank: each for rank, each in error.by_rank.items() if isinstance(each, MeshcommError)}
            # The simulator's exception names the ranks around the errors; the page names them in one line.
            return _told({rank: _text(each) for rank, each in ours.items()}) if ours else _text(error)
        except (MeshcommError, RankFailure) as error:
            return _text(error)
        # A handle warns when its last reference is gone.
        gc.collect()
    told = [each for each in given if each.category.__name__ in public_errors()]
    return f"{told[-1].category.__name__}: {told[-1].message}" if told else None


def outcome_on_rank(source: str, name: str) -> Held:
    """The `outcome` in a process of a pool. A program that fails on some rank leaves meshes open, so its processes run no other."""
    return Held(outcome(source, name), reusable=name == _RIGHT)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _told(by_rank: Mapping[int, str]) -> str:
    first = min(by_rank)
    whose = f"rank {first}:" if len(by_rank) == 1 else f"ranks {fold(sorted(by_rank))}, here rank {first}:"
    return f"{whose}\n{by_rank[first]}"


def shown(entry: Entry, block: Block, pool: Pool) -> str | None:
    """The text that the page should show for a program, or None if it raised nothing."""
    name = "wrong.py" if block is entry.wrong else _RIGHT
    if entry.ranks == 0:
        return outcome(block.text, name)
    values = pool.run(outcome_on_rank, block.text, name, ranks=entry.ranks, allow=True, timeout_s=60)
    for value in values:
        # A program may end its process; any other exception is a mistake in the page.
        if isinstance(value, BaseException) and not isinstance(value, ChildProcessError):
            raise value
    raised = {rank: value for rank, value in enumerate(values) if isinstance(value, str)}
    return _told(raised) if raised else None


def class_of(text: str) -> str:
    """The class at the start of a shown text."""
    lines = text.splitlines()
    return lines[1 if lines[0].startswith("rank") else 0].partition(":")[0]


def steady(text: str) -> str:
    """The text without the parts that differ between two runs."""
    for pattern, instead in _VARIES:
        text = pattern.sub(instead, text)
    return "\n".join(line.rstrip() for line in text.splitlines())


def main() -> None:
    """Run every failing program and write its output into the page."""
    path = ROOT / PAGE
    text = path.read_text(encoding="utf-8")
    pool = Pool()
    try:
        for entry in entries(text).values():
            with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
                printed = shown(entry, entry.wrong, pool)
            print(f"{entry.name}: {printed}\n")
            if printed is None:
                continue
            before = f"{entry.wrong.text}\n```\n\n<!-- output -->\n```text\n"
            at = text.index(before) + len(before)
            text = text[:at] + steady(printed) + "\n" + text[text.index("```", at) :]
    finally:
        pool.close()
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    main()
