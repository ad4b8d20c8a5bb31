"""Plans, places and differences as they are shown, at every width and in every form, all from the same facts."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len

import meshcomm
from meshcomm.config import load_config
from meshcomm.config.write import write_whole
from meshcomm.errors import ConfigError, LayoutError, UnknownDim
from meshcomm.show.diff import diff_facts, diff_view
from meshcomm.show.grid import RankGrid, grid_facts
from meshcomm.show.page import Cells, as_text
from meshcomm.show.plan import dims_table, plan_facts, plan_page, plan_view, read_rank
from tests.show.shown import (
    GPT,
    LLAMA,
    MESH,
    QUICK,
    ROOT,
    WIDE,
    nodes,
    plan_at,
    plan_of,
    python,
    run,
)

NODES = ("--set", "topology.ranks_per_node=4")
BIG = (GPT, "--world-size", "131072", "--rank", "777")

# -- plan -----------------------------------------------------------------------------------------

SMALL_PLAN = """\
mesh of 8 ranks, plan c933ff8e076056e1: 16 groups, 5 created per rank
dim    kind          size  stride  groups  backend  timeout  comm_id
────────────────────────────────────────────────────────────────────
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
LARGE_PLAN = """\
mesh of 131,072 ranks, plan 7db49d3026294566: 32,832 groups, 3 created per rank
dim  kind   size  stride  groups  backend             timeout  nodes  link
─────────────────────────────────────────────────────────────────────────────────────────────
pp   dim       8  16,384  16,384  nccl high_priority    300 s      8  network, 10 us, 50 GB/s
dp   dim   2,048       8      64  nccl                 1800 s  2,048  network, 10 us, 50 GB/s
tp   dim       8       1  16,384  nccl                 1800 s      1  node, 2 us, 300 GB/s
a rank has up to 4 NCCL communicators: about 2.1 GB, an estimate from NVIDIA/nccl#964
rank 777: pp=0 dp=97 tp=1
node 97, local rank 1; ranks on the node: 776 777 778 779 780 781 782 783
dim       coord            prev   next  my group, in coord order                        nodes
─────────────────────────────────────────────────────────────────────────────────────────────
pp       0 of 8  115465 (wraps)  17161  777 17161 33545 49929 66313 82697 99081 115465      8
dp   97 of 2048             769    785  1 9 17 25 .. 16377 (2048)                        2048
tp       1 of 8             776    778  776 777 778 779 780 781 782 783                     1
"""


def test_the_plan_of_a_small_and_of_a_large_mesh() -> None:
    for words, text in (((MESH, "--rank", "5"), SMALL_PLAN), (BIG, LARGE_PLAN)):
        assert run("plan", *words) == (0, text, "")
    assert run("plan", MESH, "--world-size", "8").out.splitlines() == SMALL_PLAN.splitlines()[:9]
    shared = run("plan", MESH, "--set", "mesh.merge.both=['dp', 'tp']").out.splitlines()
    assert shared[1].endswith("comm_id  shared with") and shared[-1].split()[-1] == "both"
    assert shared[-1].startswith("ep") and "16 groups, 5 created per rank" in shared[0]


def test_json_is_the_facts_that_the_tables_show() -> None:
    facts = json.loads(run("plan", *BIG, "--json").out)
    # 3 groups of more than two, and the idle default group.
    cost = {"nccl": 4, "gloo": 0, "nccl_mb": 3 * 688, "descriptors": 1, "undecided": 0}
    assert facts.pop("footprint") == cost
    config = load_config(ROOT / GPT)
    assert plan_facts(config.plan(131_072), 777, config.topology).items() <= facts.items()


class Read(dict[str, Any]):
    """Facts that remember which of them have been read."""

    def __init__(self, facts: dict[str, Any]) -> None:
        super().__init__(facts)
        self.read = set[str]()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)


def test_every_column_has_a_fact_of_its_own_and_every_fact_of_json_a_column(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tables: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []
    of = Cells.of
    monkeypatch.setattr(
        Cells, "of", lambda items, columns: tables.append((items, columns)) or of(items, columns)
    )
    plan_page(plan_facts(plan_at(MESH, 8, "mesh.merge.both=['dp', 'tp']"), 5, nodes(4)))
    # JSON alone has the last names.
    for (items, columns), alone in zip(tables, ({"created"}, {"index", "shares"}), strict=True):
        facts = {name: Read(items[0]) for name in columns}
        for name, column in columns.items():
            of([facts[name]], {name: column})
        counts = Counter(fact for each in facts.values() for fact in each.read)
        assert [name for name, each in facts.items() if all(counts[fact] > 1 for fact in each.read)] == []
        assert set(items[0]) - set(counts) == alone


def test_every_column_of_the_table_of_dims_is_described() -> None:
    facts = plan_facts(plan_at(MESH, 8, "mesh.merge.both=['dp', 'tp']"), topology=nodes(4))
    page = (ROOT / "docs/guide/looking.md").read_text()
    rows = page.partition("| column | contents |\n|---|---|\n| ")[2].partition("\n\n")[0].split("\n| ")
    described = [name for row in rows for name in row.partition(" |")[0].split(", ")]
    assert described == [*dims_table(facts["dims"]).columns[1:]]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            [GPT, "--world-size", "96"],
            ["mesh.dims: ", "world is 96", "96 % 64 = 32", "dp = -1, tp = 6 }, or", "64 processes"],
        ),
        ([GPT], ["dp = -1 open", "try:      --world-size 128, or --set mesh.dims.dp=2"]),
        (
            [MESH, "--rank", "8"],
            ["given:    rank 8\n  expected: 0 to 7\n  try:      the mesh has 2*2*2 = 8 ranks"],
        ),
        ([MESH, "--rank", "-1"], ["given:    rank -1\n  expected: 0 to 7"]),
        ([GPT, "--world-size", "0"], ["given:    a world of 0\n  expected: 1 to 16777216"]),
        (
            [MESH, "--set", "mesh.backend=[gloo", "--set", "mesh.dimz=1"],
            [": 2 problems", "close every quote and bracket", 'did you mean "mesh.dims"?'],
        ),
        (["configs/mash.toml"], ["no such file", "try:      did you mean configs/mesh.toml?"]),
        ([MESH, "--ranks", "3"], ["No such option: --ranks", "--rank)"]),
        ([MESH, "--diff", MESH, "--grid"], ["--diff only compares"]),
        ([MESH, "--diff", "nothing.toml"], ["nothing.toml: cannot be read"]),
        ([MESH, "--diff", GPT, "--world-size", "64"], ["world"]),
        (
            ["nothing.toml", "--export", "topo.png"],
            ["the extension .png", ".svg", "--export topo.svg"],
        ),
        ([MESH, "--export", "none/topo.svg"], ["none/topo.svg: cannot be written", "mkdir -p none"]),
        ([MESH, "--export", "topo.svg", "--json"], ["leave out --json"]),
        ([MESH, "--diff", MESH, "--by", "dp", "--grid"], ["leave out --grid and --by"]),
        ([MESH, "--export", "topo.svg", "--schedule"], ["--json and --schedule"]),
        ([MESH, "--rank", "pp=1,tp=0"], ["given:    pp=1, tp=0", "try:      add dp"]),
    ],
)
def test_what_is_wrong_is_said_on_stderr_with_exit_code_2(words: list[str], said: list[str]) -> None:
    shown = run("plan", *words)
    assert (shown.code, shown.out) == (2, "")
    for part in said:
        assert part in shown.err or part in " ".join(shown.err.split())
    assert not (ROOT / "topo.svg").exists()


@pytest.mark.parametrize("per_node", [1, 3, 4, 5, 24])
@pytest.mark.parametrize("order", ["identity", "reversed", "shuffled", "a part"])
def test_the_facts_of_every_dim_against_plain_counting(per_node: int, order: str) -> None:
    ranks = list(range(24))
    if order == "reversed":
        ranks.reverse()
    elif order == "shuffled":
        np.random.default_rng(0).shuffle(ranks)
    mesh: dict[str, Any] = {
        "dims": {"a": 2, "one": 1, "b": 3, "c": 4},
        "merge": {"ab": ["a", "b"], "ca": ["c", "a"], "bc": ["b", "c"]},
        "views": {"other": {"x": 6, "y": 4}},
        "rank_order": ranks,
    }
    if order == "a part":
        mesh["ranks"] = sorted(np.random.default_rng(1).permutation(40)[:24].tolist())
        del mesh["rank_order"]
    plan = plan_of(**mesh)
    found = plan_facts(plan, topology=nodes(per_node))["dims"]
    assert [fact["name"] for fact in found] == [family.name for family in plan.families]
    for fact in found:
        groups = plan.layout.groups(fact["name"]).tolist()
        size = len(groups[0])
        steps = {after - before for group in groups for before, after in pairwise(group)}
        over = [len({rank // per_node for rank in group}) for group in groups]
        assert (fact["size"], fact["groups"]) == (size, len(groups) if size > 1 else 0)
        assert fact["stride"] == (steps.pop() if len(steps) == 1 else None)
        assert fact["nodes"] == {"fewest": min(over), "most": max(over)}
        crosses = None if size == 1 else "node" if max(over) == 1 else "network"
        assert (fact["link"] and fact["link"]["name"]) == crosses


def test_the_facts_of_a_rank_against_the_layout() -> None:
    plan = plan_at(MESH, 8, "mesh.rank_order=[5, 2, 7, 0, 1, 6, 3, 4]", "mesh.merge.both=['dp', 'tp']")
    created = [group for group in plan.groups() if group.shares is None]
    assert plan_facts(plan)["groups"] == len(created)
    for rank in range(8):
        facts = plan_facts(plan, rank)["rank"]
        assert facts["coords"] == plan.layout.coords(rank)
        assert facts["views"] == {"expert": plan.layout.coords(rank, "expert")}
        for group in facts["groups"]:
            ranks, coord, size = group["ranks"], group["coord"], group["size"]
            assert ranks[coord] == rank and len(ranks) == size
            assert plan.layout.groups(group["name"]).tolist()[group["index"]] == ranks
            around = (None, None) if size == 1 else (ranks[coord - 1], ranks[(coord + 1) % size])
            assert (group["prev"], group["next"]) == around
            assert (group["first"], group["last"]) == (coord == 0, coord == size - 1)
        assert facts["creations"] == sum(rank in group.ranks for group in created)


def test_131072_ranks_need_no_torch_and_little_memory(tmp_path: Path) -> None:
    program = """
import sys
from meshcomm.commands import app
from typer.testing import CliRunner
for words in eval(sys.argv[1]):
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, (words, done.output)
    # Not getrusage: on Linux a child's peak starts at its parent's, and pytest holds torch.
    with open("/proc/self/status") as status:
        peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    print(peak, [name for name in sys.modules if name.split(".")[0] in ("torch", "yaml")])
"""
    world = [GPT, "--world-size", "131072"]
    words = [
        ["plan", *BIG, "--set", "mesh.dims={ pp = 8, dp = 2048, tp = 8 }"],
        ["plan", *BIG, "--by", "dp"],
        ["plan", *world, "--export", str(tmp_path / "topo.svg")],
        ["plan", *world, "--rank", "777"],
        ["plan", *world, "--rank", "pp=3,dp=5,tp=1"],
        ["plan", *world, "--diff", GPT],
    ]
    done = python("-c", program, repr(words))
    assert done.code == 0, done.err
    peaks = [int(line.removesuffix(" []")) for line in done.out.splitlines()]
    assert len(peaks) == len(words) and peaks[0] * 1024 < 150e6


# -- every width --------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 80, 120])
def test_no_line_is_wider_than_the_console_and_no_word_of_a_table_is_broken(width: int) -> None:
    a, b = (
        load_config(ROOT / MESH).resolved(8),
        load_config(ROOT / MESH, ["mesh.dims={ dp = 2, tp = 2, pp = 2 }", "mesh.views="]),
    )
    shown = [diff_view(diff_facts(a, b, a.plan(8), b.plan(8)))]
    deep = {"dims": {"a": 2, "b": 3, "c": 4, "d": 2, "e": 5}, "merge": {"all_of_them": ["a", "b", "c"]}}
    sources = ((ROOT / MESH, 8, 5), (ROOT / GPT, 131_072, 130_777), ({"mesh": deep}, 240, 200))
    for source, world, rank in (*sources, (ROOT / LLAMA, None, 9_999), (ROOT / QUICK, 8, 3)):
        settings = load_config(source).resolved(world)
        plan = settings.plan(world)
        topology = settings.topology if settings.topology.ranks_per_node else nodes(4)
        shown.append(plan_view(plan, rank, topology))
        shown += [RankGrid(grid_facts(plan, by, topology, rank)) for by in (*plan.layout.names, None)]
    for view in shown:
        lines = as_text(view, width).splitlines()
        # A path is one word and may be longer.
        assert max(cell_len(line) for line in lines if " " in line.strip()) <= width and len(lines) < 130
    for command in (
        ["plan", GPT, "--world-size", "1024"],
        ["plan", QUICK, "--schedule"],
        ["costs", GPT, "--world-size", "1024", "--bytes", "1KiB", "--bytes", "1GiB"],
        ["tune", LLAMA, "--world-size", "16384"],
        ["lint", GPT, "--world-size", "1024", "--set", "mesh.dims={ tp = 16, dp = 16, pp = 4 }"],
        ["doctor", QUICK, "--all"],
    ):
        code, text, _ = run(*command, columns=width)
        wide = [line for line in text.splitlines() if len(line) > width and " " in line.strip()]
        assert code == 0 and "…" not in text and not wide, command
        # A record has the dim's name as its title, so it has no column "dim".
        words = set(re.findall(r"[a-z_]{3,}", run(*command, columns=400).out)) - {"dim"}
        assert words <= set(re.findall(r"[a-z_]{3,}", text)), command


def test_costs_have_sizes_as_they_were_asked_for_and_say_that_a_backend_chooses() -> None:
    words = (
        "costs",
        GPT,
        "--world-size",
        "1024",
        "--op",
        "all_reduce",
        "--bytes",
        "64KiB",
        "--bytes",
        "64MB",
    )
    shown = run(*words).out
    assert shown.count("  64 KiB  ") == shown.count("  64 MB  ") == 3
    assert "NCCL and other backends may" in shown


def test_a_table_as_text_displays_nothing_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, displayed = plan_at(MESH, 8), list[object]()
    text = as_text(plan_view(plan, 5))
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda *what: displayed.append(what))
    assert as_text(plan_view(plan, 5)) == text and not displayed


def test_a_narrow_table_is_records_with_the_same_facts() -> None:
    plan = plan_at(MESH, 8)
    narrow = " ".join(as_text(plan_view(plan, 5), 40).split())
    for each in plan_facts(plan, 5)["rank"]["groups"]:
        assert f"{each['name']} coord {each['coord']} of {each['size']}" in narrow
    shown = run("tune", QUICK, "--world-size", "8", "--top", "1", *NODES, columns=40)
    assert "dp 8 network\n  operation all_reduce; what gradients\n  calls 1; bytes 3.41 MB" in shown.out


def test_a_file_that_cannot_be_written_whole_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "topo.svg"
    path.write_text("old", encoding="utf-8")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(ConfigError, match=r"topo.svg: cannot be written: no space left on device"):
        write_whole(path, "new")
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("topo.svg", "old")]


# -- where --------------------------------------------------------------------------------------------


def test_a_rank_is_read_and_refused() -> None:
    layout = plan_of(**WIDE, rank_order=np.random.default_rng(0).permutation(24).tolist()).layout
    assert read_rank("5", layout) == 5
    for a, b, c in product(range(2), range(3), range(4)):
        assert read_rank(f"a={a}, b={b} c={c}", layout) == layout.get_rank(a=a, one=0, b=b, c=c)
    for x, y in product(range(6), range(4)):
        assert read_rank(f"x={x},y={y}", layout) == layout.get_rank(x=x, y=y)
    for wrong, said in (
        ("five", "'five' is not a coord"),
        ("a=1,a=0", "a is given twice"),
        (" ", "' ' is not a coord"),
        ("a=1,c=0", "the coords do not identify one rank"),
        ("a=0,b=0,c=4", r"c=4 is outside the mesh(.|\n)*expected: 0 to 3"),
    ):
        with pytest.raises(LayoutError, match=said):
            read_rank(wrong, layout)
    with pytest.raises(UnknownDim, match=r"has no dim 'd'"):
        read_rank("d=0", layout)


def test_where_a_rank_is() -> None:
    facts = json.loads(run("plan", QUICK, "--rank", "6", *NODES, "--json").out)
    assert facts["rank"]["machine"] == {"node": 1, "rack": None, "local_rank": 2, "ranks": [4, 5, 6, 7]}
    settings = load_config(ROOT / QUICK, ["topology.ranks_per_node=4"])
    assert facts["rank"] == plan_facts(settings.plan(8), 6, settings.topology)["rank"]
    # The coords lead back to the rank.
    coords = ",".join(f"{name}={coord}" for name, coord in facts["rank"]["coords"].items())
    assert json.loads(run("plan", QUICK, "--rank", coords, *NODES, "--json").out) == facts
    shown = run("plan", QUICK, "--rank", "6", *NODES).out
    assert "\nnode 1, local rank 2; ranks on the node: 4 5 6 7\n" in shown


# -- diff ---------------------------------------------------------------------------------------------


def difference(a: list[str], b: list[str], source: Any = ROOT / MESH) -> dict[str, Any]:
    one, other = load_config(source, a).resolved(None), load_config(source, b).resolved(None)
    return diff_facts(one, other, one.plan(None), other.plan(None))


def test_a_difference_ends_with_1_and_equal_configs_with_0(tmp_path: Path) -> None:
    code, shown, _ = run("plan", MESH, "--diff", MESH)
    assert code == 0 and shown.startswith(
        "equal: 8 ranks, plan c933ff8e076056e1; every setting is the same\n"
    )
    mesh = {"dims": {"pp": 2, "dp": -1, "tp": 2}, "device": "auto", "timeout_s": 600}
    (tmp_path / "same.json").write_text(json.dumps({"mesh": mesh}))
    (tmp_path / "plain.toml").write_text("[mesh]\ndims = { pp = 2, dp = 2, tp = 2 }\n")
    same = run(
        "plan", str(tmp_path / "same.json"), "--diff", str(tmp_path / "plain.toml"), "--world-size", "8"
    )
    assert same.code == 0
    code, shown, _ = run("plan", MESH, "--diff", QUICK)
    assert code == 1 and shown.startswith("different: plans c933ff8e076056e1 and a67aa15a9d454214\n")


def test_swapped_dims() -> None:
    facts = difference([], ["mesh.dims={ dp = 2, pp = 2, tp = 2 }", "mesh.views="])
    assert not facts["equal"]
    assert [each[0] for each in facts["settings"]] == ["mesh.views", "mesh.dims, order"]
    changed = {each["name"]: each for each in facts["groups"]}
    assert set(changed) == {"pp", "dp", "model", "edp", "ep"}
    assert (changed["pp"]["same"], changed["pp"]["only_a"], changed["pp"]["only_b"]) == (0, 4, 4)
    assert changed["pp"]["examples"] == [[[0, 4], [1, 5], [2, 6]], [[0, 2], [1, 3], [4, 6]]]
    assert changed["ep"]["status"] == "only in a"
    assert facts["ranks"]["moved"] == 4
    assert facts["ranks"]["examples"][0] == {"rank": 2, "coords": {"pp": [0, 1], "dp": [1, 0]}}


@pytest.mark.parametrize("seed", range(4))
def test_a_permuted_order_against_plain_sets(seed: int) -> None:
    words = [f"mesh.rank_order={np.random.default_rng(seed).permutation(8).tolist()}"]
    facts = difference([], words)
    a, b = plan_at(MESH, 8).layout, plan_at(MESH, 8, *words).layout
    coords = [[{**side.coords(r), **side.coords(r, "expert")} for r in range(8)] for side in (a, b)]
    assert facts["ranks"]["moved"] == sum(ours != theirs for ours, theirs in zip(*coords, strict=True))
    for each in facts["groups"]:
        ours, theirs = ({tuple(row) for row in side.groups(each["name"]).tolist()} for side in (a, b))
        sets = {frozenset(row) for row in ours}, {frozenset(row) for row in theirs}
        assert each["same"] == len(ours & theirs)
        assert each["reordered"] == len(sets[0] & sets[1]) - len(ours & theirs)
        assert (each["only_a"], each["only_b"]) == (len(sets[0] - sets[1]), len(sets[1] - sets[0]))


def test_options_names_and_worlds_that_differ() -> None:
    facts = difference([], ["mesh.timeout_s=30.0", "mesh.options.dp={ comm_id = 'x' }"])
    assert [each[0] for each in facts["settings"]] == ["mesh.timeout_s", "mesh.options.dp"]
    assert facts["groups"] == [] and facts["ranks"]["moved"] == 0

    def to(dims: str) -> dict[str, Any]:
        return difference(
            ["mesh.dims={ dp = 4, tp = 2 }"], [f"mesh.dims={dims}"], {"mesh": {"dims": {"dp": 8}}}
        )

    renamed = [
        (each["name"], each["status"], each["also"]) for each in to("{ dp = 4, tensor = 2 }")["groups"]
    ]
    assert renamed == [("tp", "only in a", "tensor"), ("tensor", "only in b", "tp")]
    larger = to("{ dp = 8, tp = 2 }")["ranks"]
    assert (larger["common"], larger["only_b"], larger["moved"]) == (8, 8, 0)
    # Ranks keep their places if a dim of size 1 is added.
    one = to("{ dp = 4, cp = 1, tp = 2 }")
    assert one["ranks"]["moved"] == 0 and not one["equal"]


# -- a live mesh, a shell -----------------------------------------------------------------------------


def test_a_live_mesh_shows_what_the_config_says() -> None:
    config = load_config(
        {"mesh": {"dims": {"dp": 2, "tp": 2}, "device": "cpu"}, "topology": {"ranks_per_node": 2}}
    )

    def look(mesh: meshcomm.Mesh) -> tuple[str, str, dict[str, Any]]:
        return str(mesh), str(mesh.show(by="dp")), mesh.show().facts

    plan, topology = config.plan(4).on("cpu", "gloo"), config.topology
    for rank, (table, grid, facts) in enumerate(meshcomm.simulate(look, config)):
        assert table == as_text(plan_view(plan, rank, topology)) and "nodes" in table
        assert grid == as_text(RankGrid(grid_facts(plan, "dp", topology, rank))) and f"[{rank}" in grid
        assert facts == grid_facts(plan, "tp", topology, rank)


def test_a_shell_completes_commands_and_options() -> None:
    for words, offered in {
        "meshcomm t": ["train", "tune"],
        "meshcomm plan configs/mesh.toml --expo": ["--export"],
    }.items():
        asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
        shown = python("-m", "meshcomm", _MESHCOMM_COMPLETE="complete_bash", **asked)
        assert (shown.code, shown.out.split(), shown.err) == (0, offered, ""), words
