"""`meshcomm plan`: what it prints, what it refuses, and what it does not need."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from typer.testing import CliRunner

from meshcomm.cli import app
from meshcomm.config import TopologyConfig, load
from meshcomm.errors import LayoutError
from meshcomm.show.plan import plan_facts

ROOT = Path(__file__).parents[2]
BIG = ["configs/gpt_1024.toml", "--world", "131072", "--rank", "777"]


class Shown(NamedTuple):
    """What a command has left."""

    returncode: int
    stdout: str
    stderr: str


def meshcomm(*arguments: str) -> Shown:
    """`meshcomm` with these arguments in this process, 100 columns wide."""
    with contextlib.chdir(ROOT):
        done = CliRunner().invoke(app, arguments, prog_name="meshcomm", env={"COLUMNS": "100"})
    # An exception that the command does not turn into its words is a traceback to who types it.
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return Shown(done.exit_code, done.stdout, done.stderr)


def as_process(*arguments: str) -> Shown:
    """The same as a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "meshcomm", *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "100", "PYTHONUTF8": "1", "NO_COLOR": "1"},
        timeout=200,
    )
    return Shown(done.returncode, done.stdout, done.stderr)


def lines(text: str) -> list[str]:
    """The lines of a table, without the spaces that fill the last column."""
    return [line.rstrip() for line in text.splitlines()]


MESH = """\
mesh of 8 ranks, plan 6475287aabc3531a: 16 groups, 5 created per rank
dim    kind          size  stride  groups  backend  timeout  lane
─────────────────────────────────────────────────────────────────
pp     dim              2       4       4  auto        60 s  p2p
dp     dim              2       2       4  auto       600 s  -
tp     dim              2       1       4  auto       600 s  -
model  merged pp tp     4  uneven       2  auto       600 s  -
edp    view expert      1       -       0  auto       600 s  -
ep     view expert      4       1       2  auto       600 s  -
rank 5: pp=1 dp=0 tp=1; expert: pp=1 edp=0 ep=1
dim     coord       prev       next  my group, in coord order
─────────────────────────────────────────────────────────────
pp     1 of 2          1  1 (wraps)  1 5
dp     0 of 2  7 (wraps)          7  5 7
tp     1 of 2          4  4 (wraps)  4 5
model  3 of 4          4  0 (wraps)  0 1 4 5
edp    0 of 1          -          -  5 (alone: no group)
ep     1 of 4          4          6  4 5 6 7
"""

GPT = """\
mesh of 131,072 ranks, plan 3116d2547e60fb2c: 32,832 groups, 3 created per rank
dim  kind   size  stride  groups  backend             timeout  nodes  link
─────────────────────────────────────────────────────────────────────────────────────────────
pp   dim       8  16,384  16,384  nccl high_priority    300 s      8  network, 10 us, 50 GB/s
dp   dim   2,048       8      64  nccl                 1800 s  2,048  network, 10 us, 50 GB/s
tp   dim       8       1  16,384  nccl                 1800 s      1  node, 2 us, 300 GB/s
a rank has up to 4 NCCL communicators: about 2.1 GB, an estimate from NVIDIA/nccl#964
rank 777: pp=0 dp=97 tp=1
dim       coord            prev   next  my group, in coord order                        nodes
─────────────────────────────────────────────────────────────────────────────────────────────
pp       0 of 8  115465 (wraps)  17161  777 17161 33545 49929 66313 82697 99081 115465      8
dp   97 of 2048             769    785  1 9 17 25 .. 16377 (2048)                        2048
tp       1 of 8             776    778  776 777 778 779 780 781 782 783                     1
"""


def test_the_plan_of_a_small_mesh() -> None:
    for shown in (run("plan", "configs/mesh.toml", "--rank", "5") for run in (as_process, meshcomm)):
        assert (shown.returncode, shown.stderr) == (0, "")
        assert lines(shown.stdout) == MESH.splitlines()


def test_the_plan_of_a_large_mesh() -> None:
    shown = meshcomm("plan", *BIG)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert lines(shown.stdout) == GPT.splitlines()
    assert max(map(len, shown.stdout.splitlines())) <= 100


def test_without_a_rank_only_the_dims_are_shown() -> None:
    shown = meshcomm("plan", "configs/mesh.toml", "--world", "8")
    assert lines(shown.stdout) == MESH.splitlines()[:9]


def test_a_shared_group_is_marked() -> None:
    shown = meshcomm("plan", "configs/mesh.toml", "--set", "mesh.merge.both=['dp', 'tp']")
    header, both, ep = (
        next(line for line in lines(shown.stdout) if line.startswith(w)) for w in ("dim", "both", "ep")
    )
    assert header.endswith("lane  shared with")
    assert ep.endswith("both")
    assert both.endswith("-")
    assert "16 groups, 5 created per rank" in shown.stdout


def test_json_is_the_facts_that_the_tables_show() -> None:
    shown = meshcomm("plan", *BIG, "--json")
    config = load(ROOT / "configs/gpt_1024.toml")
    facts = json.loads(shown.stdout)
    # 3 groups of more than two, and the default group, which is idle.
    cost = {"nccl": 4, "gloo": 0, "nccl_mb": 3 * 688, "descriptors": 1, "undecided": 0}
    assert facts.pop("footprint") == cost
    assert facts == plan_facts(config.plan(131_072), 777, config.topology)
    small = meshcomm("plan", "configs/mesh.toml", "--json")
    assert json.loads(small.stdout) == plan_facts(load(ROOT / "configs/mesh.toml").plan(8))


# -- refused ----------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Sequence[str], str]] = {
    "a world that does not divide": (
        ["configs/gpt_1024.toml", "--world", "96"],
        """\
configs/gpt_1024.toml: 1 problem
  mesh.dims: the mesh does not divide the world: 8*8 = 64, world is 96
    given:    dims = { pp = 8, dp = -1, tp = 8 }, 96 processes
    expected: 96 divisible by the sizes that are given; 96 % 64 = 32
    try:      mesh.dims = { pp = 6, dp = -1, tp = 8 }, or
              mesh.dims = { pp = 8, dp = -1, tp = 6 }, or
              mesh.dims = { pp = 12, dp = -1, tp = 8 }, or
              64 processes
""",
    ),
    "an open size without a world": (
        ["configs/gpt_1024.toml"],
        """\
configs/gpt_1024.toml: 1 problem
  mesh.dims: the mesh leaves dp = -1 open and the world's size is not known
    given:    dims = { pp = 8, dp = -1, tp = 8 }
    expected: a number of processes, or a size for every dim
    try:      --world 128, or --set mesh.dims.dp=2
""",
    ),
    "a rank outside the mesh": (
        ["configs/mesh.toml", "--rank", "8"],
        """\
rank 8 is not in the mesh
  given:    rank 8
  expected: 0 to 7
  try:      the mesh has 2*2*2 = 8 ranks
""",
    ),
    "a negative rank": (
        ["configs/mesh.toml", "--rank", "-1"],
        """\
rank -1 is not in the mesh
  given:    rank -1
  expected: 0 to 7
  try:      the mesh has 2*2*2 = 8 ranks
""",
    ),
    "a world of nobody": (
        ["configs/gpt_1024.toml", "--world", "0"],
        """\
0 is not a number of processes
  given:    a world of 0
  expected: 1 to 16777216
  try:      the number of processes that the job has
""",
    ),
    "a wrong override": (
        ["configs/mesh.toml", "--set", "mesh.backend=[gloo", "--set", "mesh.dimz=1"],
        """\
configs/mesh.toml --set mesh.backend=[gloo --set mesh.dimz=1: 2 problems
  --set mesh.backend=[gloo: [gloo is not a TOML value
    given:    [gloo
    expected: a number, true, false, "text" in quotes, [ ... ] or { key = value }
    try:      close every quote and bracket, and write key = value
  mesh.dimz: unknown key
    given:    dimz = 1
    expected: one of dims, merge, views, rank_order, ranks, device, backend, timeout_s, validate_calls, warm_up, reports, options
    try:      did you mean "mesh.dims"?
""",
    ),
    "no file": (
        ["configs/mash.toml"],
        """\
configs/mash.toml: cannot be read: no such file or directory
  given:    configs/mash.toml
  expected: a TOML, JSON or YAML file
  try:      did you mean configs/mesh.toml?
""",
    ),
    "an option that does not exist": (
        ["configs/mesh.toml", "--ranks", "3"],
        """\
Usage: meshcomm plan [OPTIONS] {CONFIG}
Try 'meshcomm plan --help' for help.

Error: No such option: --ranks (Possible options: --rank)
""",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_said_on_stderr_with_exit_code_2(name: str) -> None:
    arguments, report = REFUSED[name]
    shown = meshcomm("plan", *arguments)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr == report


def test_a_process_says_it_the_same_way() -> None:
    arguments, report = REFUSED["a world that does not divide"]
    assert as_process("plan", *arguments) == (2, "", report)


# -- the facts --------------------------------------------------------------------------------------


def counted(config: dict[str, Any], topology: TopologyConfig) -> list[dict[str, Any]]:
    """Size, stride and nodes of every family, group by group."""
    plan = load(config).plan(None)
    per_node = topology.ranks_per_node
    assert per_node is not None
    found = []
    for family in plan.families:
        groups = plan.layout.groups(family.name).tolist()
        steps = {after - before for group in groups for before, after in pairwise(group)}
        nodes = [len({rank // per_node for rank in group}) for group in groups]
        found.append(
            {
                "name": family.name,
                "size": len(groups[0]),
                "groups": len(groups) if family.size > 1 else 0,
                "stride": steps.pop() if len(steps) == 1 else None,
                "nodes": {"fewest": min(nodes), "most": max(nodes)},
            }
        )
    return found


@pytest.mark.parametrize("per_node", [1, 3, 4, 5, 24])
@pytest.mark.parametrize("order", ["identity", "reversed", "shuffled", "a part"])
def test_the_facts_of_every_dim_against_plain_counting(per_node: int, order: str) -> None:
    dims = {"a": 2, "one": 1, "b": 3, "c": 4}
    ranks = list(range(24))
    if order == "reversed":
        ranks.reverse()
    elif order == "shuffled":
        np.random.default_rng(0).shuffle(ranks)
    mesh: dict[str, Any] = {
        "dims": dims,
        "merge": {"ab": ["a", "b"], "ca": ["c", "a"], "bc": ["b", "c"]},
        "views": {"other": {"x": 6, "y": 4}},
        "rank_order": ranks,
    }
    if order == "a part":
        ranks = sorted(np.random.default_rng(1).permutation(40)[:24].tolist())
        mesh |= {"ranks": ranks}
        del mesh["rank_order"]
    topology = TopologyConfig(ranks_per_node=per_node)
    facts = plan_facts(load({"mesh": mesh}).plan(None), topology=topology)["dims"]
    expected = counted({"mesh": mesh}, topology)
    assert [{key: fact[key] for key in expected[0]} for fact in facts] == expected
    for fact in facts:
        crosses = None if fact["size"] == 1 else "node" if fact["nodes"]["most"] == 1 else "network"
        assert (fact["link"] and fact["link"]["name"]) == crosses


def test_the_facts_of_a_rank_against_the_layout() -> None:
    config = load(ROOT / "configs/mesh.toml", ["mesh.rank_order=[5, 2, 7, 0, 1, 6, 3, 4]"])
    plan = config.plan(8)
    for rank in range(8):
        facts = plan_facts(plan, rank)["rank"]
        assert facts["coords"] == plan.layout.coords(rank)
        assert facts["views"] == {"expert": plan.layout.coords(rank, "expert")}
        for group in facts["groups"]:
            ranks, coord, size = group["ranks"], group["coord"], group["size"]
            assert ranks[coord] == rank
            assert len(ranks) == size
            assert plan.layout.groups(group["name"]).tolist()[group["index"]] == ranks
            around = (None, None) if size == 1 else (ranks[coord - 1], ranks[(coord + 1) % size])
            assert (group["prev"], group["next"]) == around
            assert (group["first"], group["last"]) == (coord == 0, coord == size - 1)
        assert facts["creations"] == sum(family.creates for family in plan.families) == 5


def test_the_number_of_groups_is_the_number_in_the_plan() -> None:
    plan = load(ROOT / "configs/mesh.toml", ["mesh.merge.both=['dp', 'tp']"]).plan(8)
    facts = plan_facts(plan)
    created = [group for group in plan.groups() if group.shares is None]
    assert facts["groups"] == len(created)
    assert facts["groups_per_rank"] == sum(3 in group.ranks for group in created)


def test_a_rank_outside_the_mesh_has_no_facts() -> None:
    with pytest.raises(
        LayoutError, match=r"^rank 8 is not in the mesh\n  given:    rank 8\n  expected: 0 to 7"
    ):
        plan_facts(load(ROOT / "configs/mesh.toml").plan(8), 8)


# -- what it does not need --------------------------------------------------------------------------


@pytest.mark.parametrize("dims", ["from the file", "written out"])
def test_131072_ranks_need_no_torch_and_little_memory(dims: str) -> None:
    program = """
import json, sys
from meshcomm.cli import main
try:
    main()
except SystemExit as done:
    code = done.code
try:
    # Not getrusage: on Linux a child's peak starts at its parent's, and pytest holds torch.
    with open("/proc/self/status") as status:
        peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
except FileNotFoundError:
    import resource
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
loaded = [name for name in sys.modules if name.split(".")[0] in ("torch", "yaml")]
print(json.dumps([code, peak, loaded]), file=sys.stderr)
"""
    written = ["--set", "mesh.dims={ pp = 8, dp = 2048, tp = 8 }"] if dims == "written out" else []
    shown = subprocess.run(
        [sys.executable, "-c", program, "plan", *BIG, *written],
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "100", "PYTHONUTF8": "1", "NO_COLOR": "1"},
        timeout=200,
    )
    assert lines(shown.stdout)[1:] == GPT.splitlines()[1:]
    code, peak_kb, loaded = json.loads(shown.stderr)
    assert (code, loaded) == (0, [])
    assert peak_kb * 1024 < 150e6
