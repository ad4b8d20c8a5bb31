"""Every example runs on real processes and in the simulator, and prints the output in its docstring."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import runpy
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import meshcomm
from meshcomm.config import load_config
from meshcomm.simulator.run import simulate_script
from meshcomm.testing import Pool

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples"
# These have several commands or files, so test_finetune_llama.py and test_reinforce.py test them.
SEVERAL = ("finetune_llama", "finetune_chat", "reinforce")
NAMES = sorted(
    str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.py") if path.parent.name not in SEVERAL
)

FORM = re.compile(
    r"(?P<shows>[^\n]+[.?!])\n"
    r"\n"
    r"Look at: (?P<look>[^\n]+\n(?:[^\n]+\n)*)"
    r"\n"
    r"(?P<commands>(?:    meshcomm [^\n]+\n)+)"
    r"\n"
    r"Prints:\n"
    r"(?P<prints>(?:    [^\n]+\n)+)"
)
NUMBER = re.compile(r"(\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]\d+)?)")
# Numbers up to this size are rounding errors, so two of them count as equal.
NOTHING = 1e-9


class Command(NamedTuple):
    """config: None if the example defines its mesh."""

    config: Path | None
    world: int


class Said(NamedTuple):
    """The contents of an example's docstring. prints: lines; "..." matches any number of lines."""

    shows: str
    run: Command
    simulate: Command
    prints: list[str]


def said(name: str) -> Said:
    text = ast.get_docstring(ast.parse((FOLDER / name).read_text()), clean=False)
    found = FORM.fullmatch(text or "")
    assert found, f"{name}: the docstring is one sentence, `Look at: `, the commands, and `Prints:`"
    commands: dict[str, Command] = {}
    for line in found["commands"].splitlines():
        words = shlex.split(line)
        assert words[-1] == f"examples/{name}", line
        if words[2] == "--world-size":
            assert len(words) == 5, line
            commands[words[1]] = Command(None, int(words[3]))
        else:
            assert len(words) == 4, line
            config = ROOT / words[2]
            commands[words[1]] = Command(config, load_config(config).mesh.smallest_world())
    assert set(commands) == {"run", "simulate"}
    prints = [line[4:] for line in found["prints"].splitlines()]
    return Said(found["shows"], commands["run"], commands["simulate"], prints)


def printed(path: str) -> str:
    out = io.StringIO()
    before = torch.get_default_dtype()
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_path(path, run_name="__main__")
    finally:
        torch.set_default_dtype(before)
    return out.getvalue()


def alike(one: str, other: str) -> bool:
    """Equal except for process ids, the last digits of numbers, and trailing spaces."""
    texts, others = NUMBER.split(one.rstrip()), NUMBER.split(other.rstrip())
    if texts[::2] != others[::2]:
        return False
    for i in range(1, len(texts), 2):
        a, b = (float(part[i].replace(",", "")) for part in (texts, others))
        close = abs(a - b) < 1e-3 * abs(a) if "." in texts[i] else a == b
        if not close and max(a, b) > NOTHING and not texts[i - 1].endswith("'pid': "):
            return False
    return True


def missing(lines: list[str], others: list[str]) -> list[str]:
    """The lines without a separate match in `others`."""
    left, alone = list(others), []
    for line in lines:
        partner = next((each for each in left if alike(line, each)), None)
        if partner is None:
            alone.append(line)
        else:
            left.remove(partner)
    return alone


def check(name: str, what: Said, lines: list[str]) -> None:
    promised = [line for line in what.prints if line != "..."]
    assert missing(promised, lines) == [], f"{name} printed\n" + "\n".join(lines)
    if "..." not in what.prints:
        assert len(lines) == len(promised), f"{name} printed\n" + "\n".join(lines)
    for number in re.findall(r"\d\.\d+e[-+]\d+", "\n".join(lines)):
        assert float(number) < NOTHING, f"{name}: a difference of {number}"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.deep_cases(r"\[(bring_your_own_model|hybrid_training)")
def test_it_prints_what_it_says(pool: Pool, name: str) -> None:
    what = said(name)
    assert (what.run.config is None) == ("init(dims=" in (FOLDER / name).read_text())
    env = {} if what.run.config is None else {"MESHCOMM_CONFIG": str(what.run.config)}
    texts = pool.run(printed, str(FOLDER / name), ranks=what.run.world, env=env)
    lines = [line for text in texts for line in text.splitlines()]
    check(name, what, lines)
    config, world = what.simulate
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        simulate_script(config, FOLDER / name, (), (), world, 0)
    simulated = out.getvalue().splitlines()
    check(name, what, simulated)
    if "print(mesh)" in (FOLDER / name).read_text():
        # The table of a mesh shows the nodes of its ranks, which the simulator does not know.
        lines, simulated = ([x for x in each if re.match(r"rank \d+ \(", x)] for each in (lines, simulated))
    assert missing(lines, simulated) == missing(simulated, lines) == []


def test_the_table_has_every_example() -> None:
    rows = re.findall(r"^\| \[\w+\]\(([\w/]+\.py)\) \| .+ \|$", (FOLDER / "README.md").read_text(), re.M)
    assert sorted(rows) == NAMES


def test_alike() -> None:
    assert alike("norm 1.1e-16", "norm 0.0e+00") and alike("pad  ", "pad")
    assert alike("{'pid': 17}", "{'pid': 2345}") and alike("loss 1.2345", "loss 1.2346")
    assert not alike("rank 1: 16", "rank 1: 17") and not alike("norm 1.1e-16", "norm 1.0e-06")
    assert not alike("loss 1.23", "loss 1.25") and not alike("a 1", "b 1") and not alike("1", "1 1")
    assert missing(["a", "a", "b"], ["a", "b", "c"]) == ["a"]


def allocated() -> tuple[int, int]:
    """The bytes that torch allocates in scatter, then in broadcast, including the library's buffers."""
    found = []
    with meshcomm.init(dims={"all": -1}, device="cpu") as mesh:
        data = torch.ones(mesh.size("all") * 1000, 250) if mesh.coord("all") == 0 else None
        for call in ("scatter", "broadcast"):
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
                if call == "scatter":
                    mesh.scatter("all", data, src=0)
                else:
                    mesh.broadcast("all", torch.empty(4000, 250) if data is None else data, src=0)
            changes = [event.self_cpu_memory_usage for event in seen.events() or ()]
            found.append(sum(change for change in changes if change > 0))
    return found[0], found[1]


def test_what_scatter_allocates(pool: Pool) -> None:
    """Check the memory figures of scatter_memory.py below Python, because its own count covers only tensors."""
    part = 1_000_000
    root, *others = pool.run(allocated, ranks=4)
    few = 50_000  # headers, and the comparison of the first calls
    assert 5 * part <= root[0] < 5 * part + few and root[1] < few  # its part, and a second copy of all
    for scatter, broadcast in others:
        assert part <= scatter < part + few
        assert 4 * part <= broadcast < 4 * part + few
