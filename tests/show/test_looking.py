"""What is shown of a mesh: grids, places, trees, differences; at every width, in every form, from the same facts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner

import meshcomm
from meshcomm.cli import app
from meshcomm.cli.completion import answers_shell, complete_config
from meshcomm.config import Config, TopologyConfig, load
from meshcomm.config.write import write_whole
from meshcomm.errors import ConfigError, LayoutError, UnknownDim
from meshcomm.layout import Plan
from meshcomm.show.diff import diff_facts, diff_page
from meshcomm.show.exchanges import exchange_facts
from meshcomm.show.grid.colours import PALETTE
from meshcomm.show.grid.facts import grid_facts, tag
from meshcomm.show.grid.text import GridText
from meshcomm.show.grid.view import RankGrid
from meshcomm.show.page import as_text, page_markdown, page_view
from meshcomm.show.plan import plan_facts, plan_page, plan_view
from meshcomm.show.traffic import traffic_view
from meshcomm.show.tree import tree_facts, tree_page, tree_view
from meshcomm.show.where import ranks_at, read_place, where_facts, where_page

ROOT = Path(__file__).parents[2]
MESH, GPT = str(ROOT / "configs/mesh.toml"), str(ROOT / "configs/gpt_1024.toml")
SVG = "{http://www.w3.org/2000/svg}"


def plan_of(**mesh: Any) -> Plan:
    return load({"mesh": mesh}).plan(None)


def nodes(per_node: int | None) -> TopologyConfig:
    return TopologyConfig(ranks_per_node=per_node)


def run(*arguments: str, columns: int = 100) -> tuple[int, str, str]:
    done = CliRunner(env={"COLUMNS": str(columns), "NO_COLOR": "1"}).invoke(app, list(arguments))
    return done.exit_code, done.stdout, done.stderr


# -- the grid's facts ---------------------------------------------------------------------------------

WIDE: dict[str, Any] = {
    "dims": {"a": 2, "one": 1, "b": 3, "c": 4},
    "merge": {"ac": ["a", "c"], "cb": ["c", "b"]},
    "views": {"other": {"x": 6, "y": 4}, "third": {"a": 2, "p": 3, "q": 4}},
}


@pytest.mark.parametrize("by", ["a", "one", "b", "c", "ac", "cb", "x", "y", "q", ("b", "c")])
@pytest.mark.parametrize("order", ["identity", "shuffled", "a part"])
def test_the_facts_of_a_grid_against_plain_counting(by: str | tuple[str, ...], order: str) -> None:
    mesh = dict(WIDE)
    ranks = list(range(24))
    if order == "shuffled":
        np.random.default_rng(0).shuffle(ranks)
        mesh["rank_order"] = ranks
    elif order == "a part":
        ranks = sorted(np.random.default_rng(1).permutation(40)[:24].tolist())
        mesh["ranks"] = ranks
    plan = plan_of(**mesh)
    facts = grid_facts(plan, by, nodes(5), ranks[3])
    groups = plan.layout.groups(by).tolist()
    assert facts["ranks"] == ranks
    assert (facts["groups"], facts["size"]) == (len(groups), len(groups[0]))
    assert [groups[index].count(rank) for rank, index in zip(ranks, facts["group"], strict=True)] == [1] * 24
    assert facts["node"] == [rank // 5 for rank in ranks]
    assert facts["nodes"] == len({rank // 5 for rank in ranks})
    # Row-major over the dims that are drawn: coords in nested loops.
    coords = list(product(*(range(size) for size in facts["dims"].values())))
    view = facts["view"] or None
    assert [tuple(plan.layout.coords(rank, view).values()) for rank in ranks] == coords
    assert json.loads(json.dumps(facts)) == facts


def test_the_innermost_dim_is_chosen_where_none_is() -> None:
    assert grid_facts(plan_of(**WIDE))["by"] == "c"


def test_the_command_takes_several_dims_and_gives_the_facts() -> None:
    _, shown, _ = run("plan", MESH, "--by", "tp, pp", "--rank", "3", "--json")
    facts = json.loads(shown)
    assert facts["grid"] == grid_facts(load(MESH).plan(8), ("tp", "pp"), None, 3)
    assert {key: value for key, value in facts.items() if key != "grid"} == plan_facts(load(MESH).plan(8), 3)
    code, _, said = run("plan", MESH, "--by", "modle")
    assert code == 2 and said.startswith("the mesh has no dim 'modle'") and 'did you mean "model"?' in said


@pytest.mark.parametrize(("by", "rank", "error"), [("d", None, UnknownDim), ("a", 24, LayoutError)])
def test_no_grid_of_what_is_not_there(by: str, rank: int | None, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"has no dim 'd'|rank 24 is not in the mesh"):
        grid_facts(plan_of(**WIDE), by, None, rank)


# -- the grid as text ---------------------------------------------------------------------------------

PICTURE = """\
pp=2 dp=2 tp=2, by tp: 4 groups of 2
lines part nodes: 3 nodes, up to 3 ranks on each
pp    pp=0        pp=1
tp     0    1      0    1
     ┏━━━━━━━━━━┳━━━━━━━━━━┓
dp=0 ┃ 0a   1a  ┃  4c  [5c]┃
     ┃    ┏━━━━━╋━━━━━━━━━━┫
dp=1 ┃ 2b ┃ 3b  ┃  6d   7d ┃
     ┗━━━━┻━━━━━┻━━━━━━━━━━┛
 a  tp[pp=0 dp=0] 0 1
 b  tp[pp=0 dp=1] 2 3
 c  tp[pp=1 dp=0] 4 5
 d  tp[pp=1 dp=1] 6 7
[ ] rank 5
"""

FOLDED = """\
pp=8 dp=2048 tp=8, by dp: 64 groups of 2,048
lines part nodes: 16,384 nodes, 8 ranks on each
tp           0      …     7
pp=0    ┏━━━━━━━━━━━━━━━━━━━━━━━┓
dp=0    ┃       0a  …        7h ┃
"""


def test_the_grid_of_a_small_mesh() -> None:
    facts = grid_facts(load(MESH).plan(8), "tp", nodes(3), 5)
    assert as_text(GridText(facts), 80) == PICTURE.rstrip("\n")
    # Across as well: three ranks of one row on each node.
    row = as_text(GridText(grid_facts(plan_of(dims={"p": 2, "t": 6}), "p", nodes(3))))
    assert re.search("0a +1b +2c ┃ +3d +4e +5f ┃", row)


FOUR = """\
a=2 b=3 c=2 d=2, by a: 12 groups of 2
lines part nodes: 3 nodes, 8 ranks on each
b    b=0           b=1           b=2
d      0     1       0     1       0     1
a=0 ┏━━━━━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━━━┓
c=0 ┃  0a    1b      4e    5f  ┃   8i    9j ┃
c=1 ┃  2c    3d      6g    7h  ┃  10k   11l ┃
a=1 ┣━━━━━━━━━━━━┳━━━━━━━━━━━━━┻━━━━━━━━━━━━┫
c=0 ┃ 12a   13b  ┃  16e   17f     20i   21j ┃
c=1 ┃ 14c   15d  ┃  18g   19h     22k   23l ┃
    ┗━━━━━━━━━━━━┻━━━━━━━━━━━━━━━━━━━━━━━━━━┛
"""


def test_the_grid_of_four_dims() -> None:
    text = as_text(GridText(grid_facts(plan_of(dims={"a": 2, "b": 3, "c": 2, "d": 2}), "a", nodes(8))), 80)
    assert text.splitlines()[:11] == FOUR.splitlines()


def test_the_grid_of_a_large_mesh_is_folded_and_says_what_is_not_drawn() -> None:
    facts = grid_facts(load(GPT).plan(131_072), "dp", nodes(8))
    text = as_text(GridText(facts), 40)
    assert "\n".join(line for line in text.splitlines() if "groups of" not in line).count("dp=2047") == 2
    told = " ".join(text.split())
    assert "not drawn: pp=1 to pp=6 (6 of 8); dp=7 to dp=2046 (2,040 of 2,048); tp=1 to tp=6 (6 of 8)" in told
    assert "and 60 more groups" in told
    assert FOLDED.splitlines()[2:] == text.splitlines()[4:7]


def test_the_marked_rank_is_drawn_however_much_is_folded() -> None:
    plan = load(GPT).plan(131_072)
    for rank in (0, 777, 65_536, 131_071):
        assert f"{rank}" in re.findall(
            r"\[ *(\d+)[a-z]*\]", as_text(GridText(grid_facts(plan, "tp", nodes(8), rank)), 60)
        )


@pytest.mark.parametrize("per_node", [1, 2, 3, 4, 6, 16])
@pytest.mark.parametrize("sizes", [(16,), (4, 4), (2, 2, 4), (2, 2, 2, 2), (2, 2, 2, 1, 2), (8, 2)])
def test_lines_are_where_nodes_end_and_nowhere_else(sizes: tuple[int, ...], per_node: int) -> None:
    plan = plan_of(dims={f"d{index}": size for index, size in enumerate(sizes)})
    lines = as_text(GridText(grid_facts(plan, None, nodes(per_node))), 120).splitlines()
    found = {
        (row, match.end() - 1): int(match[1])
        for row, line in enumerate(lines)
        if "┃" in line
        for match in re.finditer(r"(\d+)[a-p](?= )", line)
    }
    assert sorted(found.values()) == list(range(16))
    for (row, column), rank in found.items():
        beside = [at for (r, at) in found if r == row and at > column]
        if beside:
            between = lines[row][column : min(beside)]
            other = found[row, min(beside)]
            assert ("┃" in between) == (rank // per_node != other // per_node), (rank, other)
        below = [r for (r, at) in found if at == column and r > row]
        if below:
            other = found[min(below), column]
            crossed = any(lines[r][column : column + 1] == "━" for r in range(row + 1, min(below)))
            assert crossed == (rank // per_node != other // per_node), (rank, other)


def test_more_than_four_dims_share_a_direction() -> None:
    plan = plan_of(dims={"a": 2, "b": 2, "c": 2, "d": 2, "e": 2})
    text = as_text(GridText(grid_facts(plan, "b")), 80)
    assert "more than four dims: a b go downwards as one" in text
    assert "a=1 b=0" in text
    assert sorted(map(int, re.findall(r"(\d+)[a-p](?=\s)", text))) == list(range(32))


def test_a_mesh_of_one_rank() -> None:
    text = as_text(GridText(grid_facts(plan_of(dims={"dp": 1}), rank=0)), 80)
    assert "[0a]" in text and "1 group of 1" in text
    RankGrid(plan_of(dims={"dp": 1})).svg()


def coloured(facts: dict[str, Any], **environment: str) -> str:
    """What a terminal gets, escape codes and all."""
    file = StringIO()
    console = Console(
        file=file,
        force_terminal=True,
        width=80,
        _environ={"TERM": "xterm-256color", "COLORTERM": "truecolor", **environment},
    )
    console.print(GridText(facts))
    return file.getvalue()


def test_a_group_is_a_colour_on_a_terminal() -> None:
    facts = grid_facts(load(MESH).plan(8), "dp")
    text = coloured(facts)
    cells = re.findall(r"\x1b\[38;2;(?:\d+;){3}48;2;(\d+);(\d+);(\d+)m +(\d+) \x1b", text)
    assert len(cells) == 8
    for red, green, blue, rank in cells:
        wanted = PALETTE[facts["group"][int(rank)]][0]
        assert f"#{int(red):02x}{int(green):02x}{int(blue):02x}" == wanted


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_without_colours_a_group_is_a_letter(environment: dict[str, str]) -> None:
    text = coloured(grid_facts(load(MESH).plan(8), "dp"), **environment)
    assert not re.search(r"\x1b\[[\d;]*48;", text)
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)
    assert re.findall(r"(\d+)([a-z])\s", plain)[:4] == [("0", "a"), ("1", "b"), ("4", "c"), ("5", "d")]


def test_more_groups_than_colours_have_letters_too() -> None:
    text = coloured(grid_facts(plan_of(dims={"p": 9, "t": 2}), "t"))
    assert re.search(r"48;2;[\d;]+m +16i \x1b", text)


def test_a_console_of_ascii_gets_ascii() -> None:
    file = StringIO()
    console = Console(file=file, width=80)
    options = console.options.update(width=80)
    options.encoding = "ascii"
    lines = console.render_lines(GridText(grid_facts(load(GPT).plan(1024), "tp", nodes(8))), options)
    text = "\n".join("".join(segment.text for segment in line) for line in lines)
    assert text.isascii() and "+---" in text


# -- every width --------------------------------------------------------------------------------------


def everything() -> list[tuple[str, Any]]:
    """Every view of small, large, deep and permuted meshes."""
    found: list[tuple[str, Any]] = []
    deep = {
        "mesh": {"dims": {"a": 2, "b": 3, "c": 4, "d": 2, "e": 5}, "merge": {"all_of_them": ["a", "b", "c"]}}
    }
    for name, source, world, rank in (
        ("mesh", MESH, 8, 5),
        ("gpt", GPT, 131_072, 130_777),
        ("deep", deep, 240, 200),
        ("llama", str(ROOT / "configs/llama_405b.toml"), None, 9_999),
        ("quickstart", str(ROOT / "configs/quickstart.toml"), 8, 3),
    ):
        settings = load(source).resolved(world)
        plan = settings.plan(world)
        topology = settings.topology if settings.topology.ranks_per_node else nodes(4)
        found += [
            (f"{name} plan", plan_view(plan, rank, topology)),
            (f"{name} where", page_view(where_page(where_facts(settings, plan, rank, topology)))),
            (f"{name} tree", tree_view(tree_facts(plan, "", topology, 4))),
            (
                f"{name} coords",
                page_view(
                    where_page(where_facts(settings, plan, {next(iter(plan.layout.dims)): 1}, topology))
                ),
            ),
        ]
        for by in (*plan.layout.names, *([None] if rank else [])):
            found.append(
                (f"{name} by {by}", GridText(grid_facts(plan, by, topology, rank if by is None else None)))
            )
    a, b = (
        load(MESH).resolved(8),
        load(MESH, ["mesh.dims={ dp = 2, tp = 2, pp = 2 }", "mesh.views="]).resolved(8),
    )
    found.append(("diff", page_view(diff_page(diff_facts(a, b, a.plan(8), b.plan(8))))))
    return found


@pytest.mark.parametrize("width", [40, 80, 120])
def test_no_line_is_wider_than_the_console(width: int) -> None:
    for name, view in everything():
        lines = as_text(view, width).splitlines()
        assert max(map(cell_len, lines)) <= width, name
        assert len(lines) < 130, name


def test_a_grid_of_40_columns_still_has_first_and_last_of_every_dim() -> None:
    text = as_text(GridText(grid_facts(load(GPT).plan(131_072), "tp", nodes(8))), 40)
    numbers = set(map(int, re.findall(r"(\d+)[a-z]+ ", text)))
    assert {0, 7, 16_376, 16_383, 114_688, 131_071} <= numbers


def test_a_narrow_plan_is_records_with_the_same_facts() -> None:
    plan = load(MESH).plan(8)
    facts = plan_facts(plan, 5)
    narrow = " ".join(as_text(plan_view(plan, 5), 40).split())
    for each in facts["rank"]["groups"]:
        coord = f"{each['name']} coord {each['coord']} of {each['size']}"
        assert coord in narrow
    assert "size 4 stride uneven; groups 2; backend auto" in narrow.replace("4;", "4")


COMMANDS = (
    ["plan", GPT, "--world", "1024"],
    ["plan", str(ROOT / "configs/quickstart.toml"), "--schedule"],
    ["costs", GPT, "--world", "1024", "--bytes", "1KiB", "--bytes", "1GiB"],
    ["place", str(ROOT / "configs/llama_405b.toml"), "--world", "16384"],
)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_no_word_of_a_table_is_broken(width: int) -> None:
    for command in COMMANDS:
        code, shown, _ = run(*command, columns=width)
        assert code == 0 and "…" not in shown and max(map(len, shown.splitlines())) <= width, command
        # A record has no column "dim", which its name is of.
        words = set(re.findall(r"[a-z_]{3,}", run(*command, columns=400)[1])) - {"dim"}
        assert words <= set(re.findall(r"[a-z_]{3,}", shown)), command


def test_what_a_place_is_chosen_for_is_said_in_a_narrow_console_too() -> None:
    command = ["place", str(ROOT / "configs/quickstart.toml"), "--world", "8", "--top", "1"]
    code, shown, _ = run(*command, "--set", "topology.ranks_per_node=4", columns=40)
    assert (code, shown.split("why: ")[1].rstrip().replace(" \n", "\n")) == (
        0,
        """pp=1 tp=1 dp=8
compute 7.3 us in 1 micro-batch, bubble
0 waiting for other stages
dp 8 network
  operation all_reduce; what gradients
  calls 1; bytes 3.41 MB; time 66.1 us
  by hierarchical
memory 31.5 MB a rank: weights 3.41 MB,
gradients 3.41 MB, optimizer 6.82 MB,
activations 17.8 MB""",
    )


def test_a_simulated_program_that_sends_nothing_has_no_empty_table() -> None:
    view = traffic_view({"world": 2, "schedules": 1, "dims": [], "links": None})
    assert (
        as_text(view) == "2 ranks simulated, no deadlock\nnothing was sent along a dim of two ranks or more"
    )


# -- SVG and Markdown ---------------------------------------------------------------------------------


def test_the_picture_names_every_rank_and_needs_nothing_else() -> None:
    plan = load(MESH).plan(8)
    text = RankGrid(plan, "tp", nodes(4), 5).svg()
    root = ElementTree.fromstring(text)
    cells = [group for group in root.iter(f"{SVG}g") if group.get("class") == "cell"]
    assert [
        cell.findtext(f"{SVG}title") for cell in sorted(cells, key=lambda c: c.findtext(f"{SVG}text") or "")
    ] == [
        f"rank {rank}: pp={rank // 4} dp={rank // 2 % 2} tp={rank % 2}\n"
        f"group tp[pp={rank // 4} dp={rank // 2 % 2}]\nnode {rank // 4}"
        for rank in range(8)
    ]
    for cell in cells:
        rank = int(cell.findtext(f"{SVG}text") or "")
        rect = cell.find(f"{SVG}rect")
        assert rect is not None and rect.get("fill") == PALETTE[rank // 2][0]
        assert (cell.find(f"{SVG}rect[@class='mine']") is not None) == (rank == 5)
    assert "prefers-color-scheme: dark" in text
    assert re.findall(r"(?:href|src|url)\b|@import|https?://(?!www\.w3\.org/2000/svg\")", text) == []


def test_the_picture_of_the_guide_is_what_its_command_writes(tmp_path: Path) -> None:
    page = (ROOT / "docs/guide/looking.md").read_text(encoding="utf-8")
    command = next(line for line in page.splitlines() if line.endswith("--export topo.svg"))
    path = tmp_path / "topo.svg"
    words = [GPT if word == "configs/gpt_1024.toml" else word for word in command.split()[1:-1]]
    assert run(*words, str(path))[0] == 0
    assert (ROOT / "docs/guide/rank_grid.svg").read_text(encoding="utf-8") == path.read_text(encoding="utf-8")


def test_the_picture_parts_nodes_where_they_end() -> None:
    plan = plan_of(dims={"p": 2, "t": 4})
    root = ElementTree.fromstring(RankGrid(plan, "t", nodes(2)).svg())
    (path,) = (each for each in root.iter(f"{SVG}path") if each.get("class") == "node")
    # Three rows of lines and, left, in the middle and right, three columns: all of them unbroken.
    assert sorted(re.findall("[HV]", path.get("d") or "")) == ["H"] * 3 + ["V"] * 3
    unknown = RankGrid(plan, "t").svg()
    assert 'class="node"' not in unknown and "nodes are not known" in unknown


def test_colours_that_repeat_are_hatched_and_lettered() -> None:
    text = RankGrid(plan_of(dims={"p": 20, "t": 2}), "t").svg()
    root = ElementTree.fromstring(text)
    patterns = {each.get("id") for each in root.iter(f"{SVG}pattern")}
    assert patterns == {"mc-hatch-1", "mc-hatch-2"}
    cell = next(c for c in root.iter(f"{SVG}g") if c.findtext(f"{SVG}text") == "18")
    fills = [rect.get("fill") for rect in cell.iter(f"{SVG}rect")]
    assert fills == [PALETTE[1][0], "url(#mc-hatch-1)"]
    assert [each.text for each in cell.iter(f"{SVG}text")] == ["18", "j"]


def test_the_picture_of_many_ranks_stays_a_picture() -> None:
    text = RankGrid(load(GPT).plan(131_072), "dp", nodes(8), 777).svg()
    root = ElementTree.fromstring(text)
    assert float(root.get("width") or 0) < 1700 and float(root.get("height") or 0) < 1700
    assert len(text) < 300_000
    assert "not drawn: pp=1 to pp=6" in text and "outlined: rank 777" in text


def check_markdown(text: str) -> list[list[list[str]]]:
    """Every table of GitHub's Markdown, as cells; fails where a row has another number of them."""
    tables: list[list[list[str]]] = []
    for block in text.split("\n\n"):
        lines = block.strip("\n").split("\n")
        if not lines[0].startswith("|"):
            assert len(lines) == 1 and "|" not in lines[0].replace("\\|", "")
            continue
        rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
        assert all(len(row) == len(rows[0]) for row in rows), block
        assert all(re.fullmatch("---:?", cell) for cell in rows[1])
        tables.append([rows[0], *rows[2:]])
    return tables


def test_the_grid_as_markdown_has_every_rank_its_letter_and_its_node() -> None:
    plan = load(MESH).plan(8)
    facts = grid_facts(plan, "dp", nodes(2), 6)
    tables = check_markdown(RankGrid(plan, "dp", nodes(2), 6).markdown())
    found = {}
    for table in tables[:-1]:
        for row in table[1:]:
            for cell in row[1:-1]:
                rank, letters = cell.strip("\\[]").split()
                found[int(rank)] = letters
                assert str(int(rank) // 2) in row[-1].split()
                assert cell.startswith("\\[") == (rank == "6")
    assert found == {rank: tag(group) for rank, group in enumerate(facts["group"])}
    assert tables[-1][1:] == [
        [tag(index), f"dp\\[pp={index // 2} tp={index % 2}\\]", " ".join(map(str, group))]
        for index, group in enumerate(plan.layout.groups("dp").tolist())
    ]


def test_all_markdown_is_tables_that_hold() -> None:
    settings = load(GPT).resolved(131_072)
    plan = settings.plan(131_072)
    a, b = load(MESH).resolved(8), load(MESH, ["mesh.merge={ other = ['dp', 'tp'] }"]).resolved(8)
    pages = [
        plan_page(plan_facts(plan, 777, settings.topology)),
        where_page(where_facts(settings, plan, 777, settings.topology)),
        where_page(where_facts(settings, plan, {"pp": 1}, settings.topology)),
        tree_page(tree_facts(plan, "", settings.topology)),
        diff_page(diff_facts(a, b, a.plan(8), b.plan(8))),
    ]
    assert all(check_markdown(page_markdown(page)) for page in pages)
    assert len(RankGrid(plan, "dp", settings.topology).markdown()) < 20_000


# -- exports ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        ["plan", MESH, "--rank", "5"],
        ["where", MESH, "5"],
        ["plan", MESH, "--tree"],
        ["plan", MESH, "--diff", MESH],
    ],
)
def test_every_command_exports_what_it_shows(command: Sequence[str], tmp_path: Path) -> None:
    for kind in ("svg", "md", "json"):
        path = tmp_path / f"topo.{kind}"
        path.write_text("old", encoding="utf-8")
        code, shown, said = run(*command, "--export", str(path))
        assert (code, shown) == (0, "") and said == f"written: {path}\n"
        text = path.read_text(encoding="utf-8")
        if kind == "svg":
            assert ElementTree.fromstring(text).tag == f"{SVG}svg"
        elif kind == "md":
            assert check_markdown(text) or "--diff" in command
        else:
            _, printed, _ = run(*command, "--json", *(["--grid"] if "--rank" in command else []))
            assert json.loads(text) == json.loads(printed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["topo.json", "topo.md", "topo.svg"]


def test_an_export_that_cannot_be_is_refused_before_any_work(tmp_path: Path) -> None:
    code, shown, said = run("plan", "nothing.toml", "--export", "topo.png")
    assert (code, shown) == (2, "")
    assert said == (
        "topo.png: not a kind of file that can be exported\n  given:    the ending .png\n"
        "  expected: one of .svg, .md, .json\n  try:      --export topo.svg\n"
    )
    code, _, said = run("plan", MESH, "--export", str(tmp_path / "none" / "topo.svg"))
    assert code == 2 and "topo.svg: cannot be written: no such file or directory" in said
    code, _, said = run("plan", MESH, "--export", "topo.svg", "--json")
    assert code == 2 and "one of the two" in said
    code, _, said = run("plan", MESH, "--export", "topo.svg", "--schedule")
    assert code == 2 and "--export FILE.json has its facts" in said
    assert not Path("topo.svg").exists()


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
    assert [(each.name, each.read_text(encoding="utf-8")) for each in tmp_path.iterdir()] == [
        ("topo.svg", "old")
    ]


# -- where --------------------------------------------------------------------------------------------


def test_a_place_is_read_and_refused() -> None:
    assert read_place("5") == 5
    assert read_place("pp=1, dp=0 tp=1") == {"pp": 1, "dp": 0, "tp": 1}
    for wrong, said in (
        ("five", "'five' is not a coord"),
        ("pp=1,pp=0", "pp is there twice"),
        (" ", "neither a rank"),
    ):
        with pytest.raises(LayoutError, match=said):
            read_place(wrong)


def test_ranks_by_coords_against_plain_counting() -> None:
    plan = plan_of(**WIDE, rank_order=np.random.default_rng(0).permutation(24).tolist())
    layout = plan.layout
    for a, c in product(range(2), range(4)):
        wanted = [r for r in range(24) if layout.coords(r)["a"] == a and layout.coords(r)["c"] == c]
        assert sorted(ranks_at(layout, {"a": a, "c": c})) == wanted
    for x, y in product(range(6), range(4)):
        assert ranks_at(layout, {"x": x, "y": y}) == [layout.rank_at(x=x, y=y)]
    for value in range(8):
        assert sorted(ranks_at(layout, {"ac": value})) == [
            r for r in range(24) if layout.coord(r, "ac") == value
        ]
    assert ranks_at(layout, {"a": 0, "x": 5}) == []
    with pytest.raises(LayoutError, match=r"c=4 is outside the mesh"):
        ranks_at(layout, {"c": 4})
    with pytest.raises(UnknownDim, match=r"has no dim 'd'"):
        ranks_at(layout, {"d": 0})


def test_where_a_rank_is() -> None:
    code, shown, _ = run(
        "where", str(ROOT / "configs/quickstart.toml"), "6", "--set", "topology.ranks_per_node=4", "--json"
    )
    facts = json.loads(shown)
    assert code == 0
    assert facts["machine"] == {"node": 1, "rack": None, "local_rank": 2, "ranks": [4, 5, 6, 7]}
    settings = load(ROOT / "configs/quickstart.toml", ["topology.ranks_per_node=4"])
    assert facts["rank"] == plan_facts(settings.plan(8), 6, settings.topology)["rank"]
    # And back, by all of its coords or some of them.
    coords = ",".join(f"{name}={coord}" for name, coord in facts["rank"]["coords"].items())
    _, back, _ = run(
        "where", str(ROOT / "configs/quickstart.toml"), coords, "--set", "topology.ranks_per_node=4", "--json"
    )
    assert {**json.loads(back), "asked": 6} == facts
    _, several, _ = run("where", MESH, "tp=1", "--json")
    assert json.loads(several)["ranks"] == [1, 3, 5, 7]
    _, text, _ = run("where", MESH, "dp=0,edp=0,ep=2")
    assert text.rstrip() == "no rank has dp=0 edp=0 ep=2"


def parts(config: str, rank: int, *changes: str) -> list[tuple[Any, ...]]:
    settings: Config = load(ROOT / "configs" / config, changes).resolved(8)
    found = exchange_facts(settings, settings.plan(8).layout, rank)
    return [(e["part"], e["dims"], e["operation"], e["ranks"] or (e["to"], e["from"])) for e in found]


def test_whom_a_rank_exchanges_what_with() -> None:
    assert parts("quickstart.toml", 5) == [
        ("tensor", ["tp"], "all_reduce", [4, 5]),
        ("pipeline", ["pp"], "send and receive", (None, 1)),
        ("data", ["dp"], "all_reduce", [5, 7]),
    ]
    assert parts("cp2_dp2_tp2.toml", 6) == [
        ("tensor", ["tp"], "all_gather and reduce_scatter", [6, 7]),
        ("context", ["cp"], "send and receive", (2, 2)),
        ("data", ["dp", "cp"], "all_reduce", [0, 4, 2, 6]),
    ]
    assert parts("pp2_cp2_tp2.toml", 0) == [
        ("tensor", ["tp"], "all_reduce", [0, 1]),
        ("context", ["cp"], "all_to_all", [0, 2]),
        ("pipeline", ["pp"], "send and receive", (4, 4)),
        ("context", ["cp"], "all_reduce", [0, 2]),
    ]
    assert parts("hsdp2x2_tp2.toml", 0)[1:] == [
        ("shard", ["fsdp"], "all_gather and reduce_scatter", [0, 2]),
        ("data", ["dp"], "all_reduce", [0, 4]),
    ]
    assert parts("ep4_edp2.toml", 1) == [
        ("expert", ["ep"], "all_to_all", [0, 1, 2, 3]),
        ("data", ["dp"], "all_reduce", list(range(8))),
        ("expert", ["edp"], "all_reduce", [1, 5]),
    ]


# -- tree ---------------------------------------------------------------------------------------------


def leaves(facts: dict[str, Any]) -> list[list[int]]:
    if "ranks" in facts:
        return [facts["ranks"]]
    return [ranks for branch in facts["branches"] for ranks in leaves(branch)]


@pytest.mark.parametrize("view", ["", "other", "third"])
def test_the_leaves_of_a_tree_are_the_innermost_groups(view: str) -> None:
    plan = plan_of(**WIDE, rank_order=np.random.default_rng(2).permutation(24).tolist())
    facts = tree_facts(plan, view, nodes(5))
    innermost = {"": "c", "other": "y", "third": "q"}[view]
    assert leaves(facts) == plan.layout.groups(innermost).tolist()
    for branch in facts["branches"]:
        inside = [rank for ranks in leaves(branch) for rank in ranks]
        assert branch["count"] == len(inside)
        assert (branch["first"], branch["last"]) == (inside[0], inside[-1])
        assert branch["contiguous"] == (inside == list(range(inside[0], inside[0] + len(inside))))
        assert branch["nodes"] == {"first": min(inside) // 5, "last": max(inside) // 5}


TREE = """\
mesh of 1,024 ranks, 8 on each node: pp=2 dp=64 tp=8
├── pp=0  ranks 0 to 511, nodes 0 to 63
│   ├── dp=0  tp: ranks 0 to 7, node 0
│   ├── dp=1  tp: ranks 8 to 15, node 1
│   ├── dp=2  tp: ranks 16 to 23, node 2
│   ├── dp=3 to 62 (60 not shown)
│   └── dp=63  tp: ranks 504 to 511, node 63
└── pp=1  ranks 512 to 1023, nodes 64 to 127
    ├── dp=0  tp: ranks 512 to 519, node 64
    ├── dp=1  tp: ranks 520 to 527, node 65
    ├── dp=2  tp: ranks 528 to 535, node 66
    ├── dp=3 to 62 (60 not shown)
    └── dp=63  tp: ranks 1016 to 1023, node 127
"""


def test_a_tree_is_folded_the_same_way_from_all_facts_and_from_few() -> None:
    command = ["plan", GPT, "--tree", "--world", "1024", "--set", "mesh.dims.pp=2"]
    code, shown, _ = run(*command)
    assert (code, shown) == (0, TREE)
    _, all_of_it, _ = run(*command, "--json")
    assert as_text(tree_view(json.loads(all_of_it))) == TREE.rstrip("\n")
    assert sorted(rank for ranks in leaves(json.loads(all_of_it)) for rank in ranks) == list(range(1024))


def test_a_tree_of_a_view_that_is_not_there() -> None:
    code, _, said = run("plan", MESH, "--tree", "--view", "exprt")
    assert code == 2 and "no view 'exprt'" in said and 'did you mean "expert"?' in said


# -- diff ---------------------------------------------------------------------------------------------


def difference(a: list[str], b: list[str], source: str = MESH, world: int | None = None) -> dict[str, Any]:
    one, other = load(source, a).resolved(world), load(source, b).resolved(world)
    return diff_facts(one, other, one.plan(world), other.plan(world))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--tree", "--diff", MESH], "--tree and --diff"),
        (["--tree", "--rank", "0"], "--tree and --rank"),
        (["--diff", MESH, "--grid"], "--diff and --grid"),
        (["--view", "expert"], "--view has no effect without --tree"),
    ],
)
def test_a_plan_is_one_picture_at_a_time(words: list[str], named: str) -> None:
    code, shown, said = run("plan", MESH, *words)
    assert (code, shown) == (2, "") and named in " ".join(said.split())


def test_equal_configs_are_equal_whatever_they_look_like(tmp_path: Path) -> None:
    code, shown, _ = run("plan", MESH, "--diff", MESH)
    assert code == 0 and shown.startswith(
        "equal: 8 ranks, plan 6475287aabc3531a; every setting is the same\n"
    )
    path = tmp_path / "same.json"
    mesh = {"dims": {"pp": 2, "dp": -1, "tp": 2}, "device": "auto", "timeout_s": 600}
    path.write_text(json.dumps({"mesh": mesh}), encoding="utf-8")
    plain = tmp_path / "plain.toml"
    plain.write_text("[mesh]\ndims = { pp = 2, dp = 2, tp = 2 }\n", encoding="utf-8")
    assert run("plan", str(path), "--diff", str(plain), "--world", "8")[0] == 0


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
    order = np.random.default_rng(seed).permutation(8).tolist()
    facts = difference([], [f"mesh.rank_order={order}"])
    a, b = load(MESH).plan(8).layout, load(MESH, [f"mesh.rank_order={order}"]).plan(8).layout
    moved = [
        r
        for r in range(8)
        if {**a.coords(r), **a.coords(r, "expert")} != {**b.coords(r), **b.coords(r, "expert")}
    ]
    assert facts["ranks"]["moved"] == len(moved)
    for each in facts["groups"]:
        ours = {tuple(row) for row in a.groups(each["name"]).tolist()}
        theirs = {tuple(row) for row in b.groups(each["name"]).tolist()}
        sets = {frozenset(row) for row in ours}, {frozenset(row) for row in theirs}
        if each["size"][0] > 1:
            assert each["same"] == len(ours & theirs)
            assert each["reordered"] == len(sets[0] & sets[1]) - len(ours & theirs)
            assert (each["only_a"], each["only_b"]) == (len(sets[0] - sets[1]), len(sets[1] - sets[0]))


def test_options_names_and_worlds_that_differ() -> None:
    facts = difference([], ["mesh.timeout_s=30.0", "mesh.options.dp={ lane = 'x' }"])
    assert facts["options"] == [
        ["dp", "timeout_s", 600.0, 30.0],
        ["dp", "lane", "", "x"],
        *([name, "timeout_s", 600.0, 30.0] for name in ("tp", "model", "edp", "ep")),
    ]
    assert facts["groups"] == [] and facts["ranks"]["moved"] == 0
    renamed = difference(["mesh.dims={ dp = 4, tp = 2 }"], ["mesh.dims={ dp = 4, tensor = 2 }"], GPT_ALONE)
    assert [(each["name"], each["status"], each["also"]) for each in renamed["groups"]] == [
        ("tp", "only in a", "tensor"),
        ("tensor", "only in b", "tp"),
    ]
    larger = difference(["mesh.dims={ dp = 4, tp = 2 }"], ["mesh.dims={ dp = 8, tp = 2 }"], GPT_ALONE)
    assert (larger["ranks"]["common"], larger["ranks"]["only_b"], larger["ranks"]["moved"]) == (8, 8, 0)
    # A dim of size 1 more or less moves nobody.
    one = difference(["mesh.dims={ dp = 4, tp = 2 }"], ["mesh.dims={ dp = 4, cp = 1, tp = 2 }"], GPT_ALONE)
    assert one["ranks"]["moved"] == 0 and not one["equal"]


GPT_ALONE: Any = {"mesh": {"dims": {"dp": 8}}}


def test_a_difference_ends_with_1_and_an_error_with_2(tmp_path: Path) -> None:
    code, shown, _ = run("plan", MESH, "--diff", str(ROOT / "configs/quickstart.toml"))
    assert code == 1 and shown.startswith("different: plans 6475287aabc3531a and 41397027eee87ec3\n")
    code, shown, said = run("plan", MESH, "--diff", "nothing.toml")
    assert (code, shown) == (2, "") and "nothing.toml: cannot be read" in said
    code, shown, _ = run("plan", MESH, "--diff", GPT, "--world", "64")
    assert code == 2


# -- a live mesh, many ranks, a shell -----------------------------------------------------------------


def test_a_live_mesh_shows_what_the_config_says() -> None:
    source = {"mesh": {"dims": {"dp": 2, "tp": 2}, "device": "cpu"}, "topology": {"ranks_per_node": 2}}

    def look(mesh: meshcomm.Mesh) -> tuple[str, str, dict[str, Any]]:
        return str(mesh), str(mesh.show(by="dp")), mesh.show().facts

    config = load(source)
    plan = config.plan(4).on("cpu", "gloo")
    found = meshcomm.simulate(look, config)
    for rank, (table, grid, facts) in enumerate(found):
        assert table == as_text(plan_view(plan, rank, config.topology))
        assert "nodes" in table
        assert grid == as_text(GridText(grid_facts(plan, "dp", config.topology, rank)))
        assert f"[{rank}" in grid
        assert facts == grid_facts(plan, "tp", config.topology, rank)


def test_131072_ranks_are_looked_at_without_torch(tmp_path: Path) -> None:
    program = """
import sys, time
from pathlib import Path
from meshcomm.cli import app
from typer.testing import CliRunner
took = {}
for name, *arguments in eval(sys.argv[1]):
    began = time.perf_counter()
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, (arguments, done.output)
    took[name] = time.perf_counter() - began
print(max(took.values()), [n for n in sys.modules if n.split(".")[0] == "torch"], took)
"""
    world = [GPT, "--world", "131072"]
    commands = [
        ("grid", "plan", *world, "--by", "dp", "--rank", "777"),
        ("svg", "plan", *world, "--export", str(tmp_path / "topo.svg")),
        ("md", "plan", *world, "--export", str(tmp_path / "topo.md")),
        ("where", "where", *world, "777"),
        ("coords", "where", *world, "pp=3"),
        ("tree", "plan", "--tree", *world),
        ("diff", "plan", GPT, "--diff", GPT, "--world", "131072"),
    ]
    done = subprocess.run(
        [sys.executable, "-c", program, repr(commands)], capture_output=True, text=True, timeout=200, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    slowest, loaded = done.stdout.split(" ", 1)
    # Tenths of a second each; the machine may be busy.
    assert float(slowest) < 20, done.stdout
    assert loaded.startswith("[]")


def asked(words: str) -> dict[str, str]:
    """What bash sets to ask what may stand for the last word."""
    return {
        "_MESHCOMM_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }


def completed(words: str) -> list[str]:
    done = CliRunner(env=asked(words)).invoke(app, [], prog_name="meshcomm")
    assert (done.exit_code, done.stderr) == (0, "")
    return done.stdout.split()


def test_a_shell_completes_commands_options_files_and_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("_MESHCOMM_COMPLETE", "complete_bash")
    answers_shell()
    assert completed("meshcomm whe") == ["where"]
    assert completed("meshcomm plan configs/mesh.toml --expo") == ["--export"]
    assert completed("meshcomm plan configs/mesh.toml --by e") == ["edp", "ep"]
    assert completed("meshcomm plan configs/mesh.toml --tree --view ") == ["expert"]
    assert completed("meshcomm plan configs/gp") == ["configs/gpt_1024.toml"]
    assert completed("meshcomm plan configs/mesh.toml --diff configs/gp") == ["configs/gpt_1024.toml"]
    assert completed("meshcomm plan configs/nothing.toml --by ") == []


def test_a_process_that_a_shell_starts_answers() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "meshcomm"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **asked("meshcomm pla")},
        timeout=200,
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["plan", "place"], "")


def test_files_are_completed_through_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.toml", "b.txt", "conf/c.json", "conf/d.py", ".hidden/e.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert complete_config("") == ["a.toml", "conf/c.json"]
    assert complete_config("conf/") == ["conf/c.json"]
    assert complete_config(".h") == [".hidden/e.toml"]
    assert complete_config("nowhere/x") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "powershell"])
def test_the_script_for_a_shell_is_printed(shell: str) -> None:
    code, shown, _ = run("--show-completion", shell)
    assert code == 0 and f"complete_{shell}" in shown and "meshcomm" in shown


def test_a_shell_that_is_not_known() -> None:
    code, _, said = run("--show-completion", "tcsh")
    assert code == 2 and "bash" in said
