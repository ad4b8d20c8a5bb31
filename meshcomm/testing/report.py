"""What is shown of a test whose body has ended on every rank? Each failure once, with its ranks and their coords."""

from __future__ import annotations

import pickle
import sys
import unittest
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeAlias, final

import pytest

from meshcomm.layout import Layout
from meshcomm.layout.sizes import coords_text, ranks_text
from meshcomm.mesh.logs import prefix
from meshcomm.testing.marker import MeshRequest
from meshcomm.testing.outcome import Ends
from meshcomm.testing.pool import RankFailure

FAILURE: pytest.StashKey[MeshFailure] = pytest.StashKey()
SKIPPED: pytest.StashKey[tuple[str, int, str]] = pytest.StashKey()

Part: TypeAlias = tuple[str, str]
"""A header, and the text below it."""


class Crash(NamedTuple):
    """Where and why a test failed: pytest's summary has the message in one line."""

    path: str
    lineno: int
    message: str


@final
@dataclass(eq=False)
class MeshFailure:
    """The failure's text: a part for each group of ranks with equal texts. pytest calls `toterminal` and reads `reprcrash`."""

    parts: list[Part]
    reprcrash: Crash

    def toterminal(self, terminal: Any) -> None:
        """Write it to pytest's terminal."""
        for number, (header, text) in enumerate(self.parts):
            if number:
                terminal.line("")
            terminal.sep("-", header)
            for line in text.splitlines():
                terminal.line(line, red=line.startswith("E  "), bold=line.startswith(("E  ", ">  ")))

    def __str__(self) -> str:
        # pytest-xdist sends this text alone; its first line is then the summary's.
        parts = [f"--- {header} ---\n{text}".rstrip() for header, text in self.parts]
        return "\n\n".join([self.reprcrash.message, *parts])


def settle(item: pytest.Function, request: MeshRequest, ends: Ends) -> None:
    """Print what the ranks printed, and return, skip, xfail or raise as they did."""
    __tracebackhide__ = True
    _print(request.layout, ends)
    outcomes = [*ends.returned.values()]
    by_kind = {outcome.kind: outcome for outcome in reversed(outcomes)}
    if "exited" in by_kind:
        pytest.exit(by_kind["exited"].reason)
    own_failure = ends.died or not all(outcome.after for outcome in ends.failed.values())
    if "xfailed" in by_kind and not own_failure:
        # Ranks that still waited did so for those that had given up.
        pytest.xfail(by_kind["xfailed"].reason)
    failure = failure_of(ends, request)
    if failure is not None:
        item.stash[FAILURE] = failure
        _raise(ends, request)
    if [*by_kind] == ["skipped"]:
        skipped = by_kind["skipped"]
        item.stash[SKIPPED] = (skipped.path, skipped.line, f"Skipped: {skipped.reason}")
        pytest.skip(skipped.reason)


def _print(layout: Layout, ends: Ends) -> None:
    noted: dict[tuple[Any, ...], None] = {}
    for rank, end in enumerate(ends.ranks):
        mark, out = prefix(layout, rank), end.out.splitlines()
        if end.state == "returned":
            noted.update(dict.fromkeys(end.value.warnings))
            if end.value.kind == "skipped":
                out += f"skipped: {end.value.reason}".splitlines()
        for stream, lines in ((sys.stdout, out), (sys.stderr, end.err.splitlines())):
            stream.write("".join(f"{mark} {line}\n" for line in lines))
    for text, category, file, line in noted:
        warnings.warn_explicit(text, category, file, line)


def _raise(ends: Ends, request: MeshRequest) -> NoReturn:
    """The first failing rank's exception if it can be pickled, so that xfail(raises=...) and the like work."""
    __tracebackhide__ = True
    if ends.verdict is not None:
        raise ends.verdict
    failed = ends.failed
    first = next(iter(failed.values()), None)
    if first is not None and first.error is not None and not ends.died:
        error = pickle.loads(first.error)
        # These would end the run, or mean something else here.
        if not isinstance(error, (KeyboardInterrupt, GeneratorExit, unittest.SkipTest)):
            raise error
    texts = {rank: end.text for rank, end in enumerate(ends.ranks) if end.state != "returned"}
    raise RankFailure(texts | {rank: each.reason for rank, each in failed.items()}, request.world_size)


def failure_of(ends: Ends, request: MeshRequest) -> MeshFailure | None:
    """What to show, or None if no rank failed."""
    if not (ends.failed or ends.died or ends.late or ends.verdict):
        return None
    parts: list[Part] = []
    if ends.verdict is not None:
        parts.append(
            (f"all {len(ends.ranks)} ranks together", f"{type(ends.verdict).__name__}: {ends.verdict}")
        )
    groups: dict[tuple[int, str, str], list[_Text]] = {}
    for text in _texts(ends, request.layout):
        groups.setdefault((text.order, text.state, text.key), []).append(text)
    for (_, state, _), same in sorted(groups.items(), key=lambda group: group[0][0]):
        header = _header([text.rank for text in same], request) + (f": {state}" if state else "")
        if len({text.shown for text in same}) > 1:
            # Equal keys: the texts differ in the names of the ranks.
            header += f", in the words of rank {same[0].rank}"
        parts.append((header, same[0].shown))
    return MeshFailure(parts, _crash(ends, parts, request.layout))


class _Text(NamedTuple):
    """What is shown of one rank. order: among the parts. key: equal for ranks that are shown together."""

    order: int
    rank: int
    state: str
    key: str
    shown: str


def _texts(ends: Ends, layout: Layout) -> Iterator[_Text]:
    failed = ends.failed
    for rank, end in enumerate(ends.ranks):
        if rank in failed:
            outcome = failed[rank]
            yield _Text(2 if outcome.after else 0, rank, "", outcome.key, outcome.text)
            if end.stack:
                yield _Text(4, rank, "when the time was up", end.stack, end.stack)
        elif end.state == "returned":
            yield _Text(5, rank, "no failure", "", "")
        elif end.state == "late":
            state = "still running" if failed or ends.died else end.text
            yield _Text(3, rank, state, end.stack, end.stack)
        else:
            shown = f"{layout.label(rank)} {end.text}\n{end.stack}".rstrip()
            yield _Text(1, rank, "", f"{end.text}\n{end.stack}", shown)


def _crash(ends: Ends, parts: Sequence[Part], layout: Layout) -> Crash:
    """The line of the summary."""
    rank, first = next(iter(ends.failed.items()), (0, None))
    if ends.verdict is not None:
        return Crash("", 0, parts[0][1].splitlines()[0])
    if ends.died and (first is None or first.after):
        return Crash("", 0, f"{layout.label(ends.died[0])} {ends.ranks[ends.died[0]].text}")
    if first is not None:
        return Crash(first.path, first.line, f"{prefix(layout, rank)} {first.reason}")
    return Crash("", 0, parts[0][0])


def _header(ranks: Sequence[int], request: MeshRequest) -> str:
    """Who they are: `rank 1 (dp=0 tp=1) of 4`, `ranks 1 3 (all with tp=1) of 4`."""
    world, layout = request.world_size, request.layout
    if len(ranks) == 1:
        return f"{layout.label(ranks[0])} of {world}"
    if len(ranks) == world:
        return f"all {world} ranks"
    coords = [layout.coords(rank) if rank in layout else {} for rank in ranks]
    common = {dim: at for dim, at in coords[0].items() if all(each.get(dim) == at for each in coords)}
    return f"{ranks_text(ranks)}{f' (all with {coords_text(common)})' if common else ''} of {world}"
