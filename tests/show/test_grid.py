"""The rank grid: its facts against plain counting, and the same facts as text, picture and tables."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from io import StringIO
from itertools import product
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from meshcomm.errors import LayoutError, UnknownDim
from meshcomm.show.grid import PALETTE, RankGrid, grid_facts
from meshcomm.show.page import as_text
from meshcomm.show.plan import plan_facts
from tests.show.shown import GPT, MESH, ROOT, SVG, WIDE, nodes, plan_at, plan_of, run

SMALL, BIG = plan_at(MESH, 8), plan_at(GPT, 131_072)


@pytest.mark.parametrize("by", ["a", "one", "b", "c", "ac", "cb", "x", "y", "q", ("b", "c")])
@pytest.mark.parametrize("order", ["identity", "shuffled", "a part"])
def test_the_facts_against_plain_counting(by: str | tuple[str, ...], order: str) -> None:
    mesh = dict(WIDE)
    ranks = list(range(24))
    if order == "shuffled":
        np.random.default_rng(0).shuffle(ranks)
        mesh["rank_order"] = ranks
    elif order == "a part":
        mesh["ranks"] = ranks = sorted(np.random.default_rng(1).permutation(40)[:24].tolist())
    plan = plan_of(**mesh)
    facts = grid_facts(plan, by, nodes(5), ranks[3])
    groups = plan.layout.groups(by).tolist()
    assert facts["ranks"] == ranks
    assert (facts["groups"], facts["size"]) == (len(groups), len(groups[0]))
    assert [groups[index].count(rank) for rank, index in zip(ranks, facts["group"], strict=True)] == [1] * 24
    assert facts["node"] == [rank // 5 for rank in ranks]
    assert facts["nodes"] == len({rank // 5 for rank in ranks})
    # Row-major over the drawn dims: coords in nested loops.
    coords = list(product(*(range(size) for size in facts["dims"].values())))
    assert [tuple(plan.layout.coords(rank, facts["view"] or None).values()) for rank in ranks] == coords
    assert json.loads(json.dumps(facts)) == facts


def test_which_groups_the_colours_are() -> None:
    assert grid_facts(plan_of(**WIDE))["by"] == "c"
    for by, rank, error in (("d", None, UnknownDim), ("a", 24, LayoutError)):
        with pytest.raises(error, match=r"has no dim 'd'|rank 24 is not in the mesh"):
            grid_facts(plan_of(**WIDE), by, None, rank)
    facts = json.loads(run("plan", MESH, "--by", "tp, pp", "--rank", "3", "--json").out)
    assert facts.pop("grid") == grid_facts(SMALL, ("tp", "pp"), None, 3)
    assert plan_facts(SMALL, 3).items() <= facts.items()
    shown = run("plan", MESH, "--by", "modle")
    assert shown.code == 2 and 'did you mean "model"?' in shown.err


# -- text -----------------------------------------------------------------------------------------

FOUR = """\
a=2 b=3 c=2 d=2, by a: 12 groups of 2
lines separate nodes: 3 nodes, 8 ranks on each
b    b=0           b=1           b=2
d      0     1       0     1       0     1
a=0 ┏━━━━━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━━━┓
c=0 ┃  0a    1b      4e    5f  ┃   8i    9j ┃
c=1 ┃  2c    3d      6g   [7h] ┃  10k   11l ┃
a=1 ┣━━━━━━━━━━━━┳━━━━━━━━━━━━━┻━━━━━━━━━━━━┫
c=0 ┃ 12a   13b  ┃  16e   17f     20i   21j ┃
c=1 ┃ 14c   15d  ┃  18g   19h     22k   23l ┃
    ┗━━━━━━━━━━━━┻━━━━━━━━━━━━━━━━━━━━━━━━━━┛
 a  a[b=0 c=0 d=0] 0 12
 b  a[b=0 c=0 d=1] 1 13
"""


def test_the_grid_of_four_dims() -> None:
    facts = grid_facts(plan_of(dims={"a": 2, "b": 3, "c": 2, "d": 2}), "a", nodes(8), 7)
    lines = as_text(RankGrid(facts), 80).splitlines()
    assert lines[:13] == FOUR.splitlines()
    assert lines[-2:] == [" l  a[b=2 c=1 d=1] 11 23", "[ ] rank 7"]


def test_a_large_mesh_is_folded_and_says_what_is_not_drawn() -> None:
    text = as_text(RankGrid(grid_facts(BIG, "dp", nodes(8))), 40)
    told = " ".join(text.split())
    assert "not drawn: 6 of 8 along pp; 2,040 of 2,048 along dp; 6 of 8 along tp" in told
    assert "and 60 more groups" in told and "16,384 nodes, 8 ranks on each" in told
    numbers = set(map(int, re.findall(r"(\d+)[a-z]+ ", text)))
    # The first and last coord of every dim is drawn.
    assert {0, 7, 16_376, 16_383, 114_688, 131_071} <= numbers
    for rank in (0, 777, 65_536, 131_071):
        drawn = as_text(RankGrid(grid_facts(BIG, "tp", nodes(8), rank)), 60)
        assert f"{rank}" in re.findall(r"\[ *(\d+)[a-z]*\]", drawn)


@pytest.mark.parametrize("per_node", [1, 2, 3, 4, 6, 16])
@pytest.mark.parametrize("sizes", [(16,), (4, 4), (2, 2, 4), (2, 2, 2, 2), (2, 2, 2, 1, 2), (8, 2)])
def test_lines_are_where_nodes_end_and_nowhere_else(sizes: tuple[int, ...], per_node: int) -> None:
    plan = plan_of(dims={f"d{index}": size for index, size in enumerate(sizes)})
    lines = as_text(RankGrid(grid_facts(plan, None, nodes(per_node))), 120).splitlines()
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
            parted = rank // per_node != found[row, min(beside)] // per_node
            assert ("┃" in lines[row][column : min(beside)]) == parted, rank
        below = [r for (r, at) in found if at == column and r > row]
        if below:
            crossed = any(lines[r][column : column + 1] == "━" for r in range(row + 1, min(below)))
            assert crossed == (rank // per_node != found[min(below), column] // per_node), rank


def test_more_than_four_dims_share_a_direction_and_one_rank_is_a_grid() -> None:
    text = as_text(RankGrid(grid_facts(plan_of(dims=dict.fromkeys("abcde", 2)), "b")), 80)
    assert "more than four dims: a b are merged downwards" in text and "a=1 b=0" in text
    assert sorted(map(int, re.findall(r"(\d+)[a-p](?=\s)", text))) == list(range(32))
    one = RankGrid(grid_facts(plan_of(dims={"dp": 1}), rank=0))
    assert "[0a]" in str(one) and "1 group of 1" in str(one) and "dp=1" in one.svg()


def coloured(facts: dict[str, Any], **environment: str) -> str:
    """The text for a terminal, with escape codes."""
    file = StringIO()
    environment = {"TERM": "xterm-256color", "COLORTERM": "truecolor", **environment}
    Console(file=file, force_terminal=True, width=80, _environ=environment).print(RankGrid(facts))
    return file.getvalue()


def test_a_group_is_a_colour_where_there_are_colours_and_else_a_letter() -> None:
    facts = grid_facts(SMALL, "dp")
    text = coloured(facts)
    cells = re.findall(r"\x1b\[38;2;(?:\d+;){3}48;2;(\d+);(\d+);(\d+)m +(\d+) \x1b", text)
    assert len(cells) == 8
    for red, green, blue, rank in cells:
        wanted = PALETTE[facts["group"][int(rank)]]
        assert f"#{int(red):02x}{int(green):02x}{int(blue):02x}" == wanted
    for environment in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        text = coloured(facts, **environment)
        assert not re.search(r"\x1b\[[\d;]*48;", text)
        plain = re.sub(r"\x1b\[[\d;]*m", "", text)
        assert re.findall(r"(\d+)([a-z])\s", plain)[:4] == [("0", "a"), ("1", "b"), ("4", "c"), ("5", "d")]
    # With more groups than colours, each group has a colour and a letter.
    assert re.search(r"48;2;[\d;]+m +16i \x1b", coloured(grid_facts(plan_of(dims={"p": 9, "t": 2}), "t")))


def test_a_console_of_ascii_gets_ascii() -> None:
    console = Console(file=StringIO(), width=80)
    options = console.options.update(width=80)
    options.encoding = "ascii"
    lines = console.render_lines(RankGrid(grid_facts(plan_at(GPT, 1024), "tp", nodes(8))), options)
    text = "\n".join("".join(segment.text for segment in line) for line in lines)
    assert text.isascii() and "+---" in text


# -- SVG ------------------------------------------------------------------------------------------


def test_a_picture_is_the_text_in_colours_and_needs_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    facts = grid_facts(plan_of(dims={"p": 2, "t": 4}), "t", nodes(2), 5)
    picture = RankGrid(facts).svg()
    rows: dict[float, dict[int, str]] = {}
    for each in ElementTree.fromstring(picture).iter(f"{SVG}text"):
        row = rows.setdefault(float(each.get("y") or 0), {})
        row |= {round(float(each.get("x") or 0) / 12.2) + at: char for at, char in enumerate(each.text or "")}
    drawn = ["".join(row.get(at, " ") for at in range(max(row) + 1)) for _, row in sorted(rows.items())]
    monkeypatch.delenv("NO_COLOR")
    printed = re.sub(r"\x1b\[[\d;]*m", "", coloured(facts)).splitlines()
    assert [line.replace("\xa0", " ").rstrip() for line in drawn] == [line.rstrip() for line in printed]
    assert "┳" in drawn[3] and "[5]" in "".join(drawn)
    tiles = [rect.get("fill") for rect in ElementTree.fromstring(picture).iter(f"{SVG}rect")]
    assert {PALETTE[0], PALETTE[1]} <= set(tiles) and "prefers-color-scheme: dark" in picture
    assert re.findall(r"(?:href|src|url)\b|@import|https?://(?!www\.w3\.org/2000/svg\")", picture) == []


def test_two_pictures_in_one_page_keep_their_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = grid_facts(SMALL, "dp")
    pictures = [RankGrid(facts).svg()]
    monkeypatch.setattr("meshcomm.show.grid.PALETTE", PALETTE[::-1])
    pictures.append(RankGrid(facts).svg())
    names = list[set[str]]()
    for picture in pictures:
        root = ElementTree.fromstring(picture)
        own = root.get("class") or ""
        names.append({each.get(key) or own for each in root.iter() for key in ("class", "id")})
        assert all(name.startswith(own) for name in names[-1])
        rules = re.findall(r"([^{}]+)\{", (root.findtext(f"{SVG}style") or ""))
        assert len(rules) > 4
        assert [rule for rule in rules if not rule.strip().startswith((f".{own}", "@media"))] == []
    assert not names[0] & names[1]


def test_a_large_mesh_is_one_picture() -> None:
    grid = RankGrid(grid_facts(BIG, "dp", nodes(8), 777))
    root = ElementTree.fromstring(grid.svg())
    assert float(root.get("width") or 0) < 2000 and float(root.get("height") or 0) < 2000
    for form in (grid.svg().replace("&#160;", " "), str(grid)):
        assert "not drawn: 6 of 8 along pp" in form and "[ ] rank 777" in form and len(form) < 300_000


def test_the_picture_of_the_guide_is_what_its_command_writes(tmp_path: Any) -> None:
    page = (ROOT / "docs/guide/looking.md").read_text(encoding="utf-8")
    command = next(line for line in page.splitlines() if line.endswith("--export topo.svg"))
    path = tmp_path / "topo.svg"
    assert run(*command.split()[1:-1], str(path)).code == 0
    assert (ROOT / "docs/guide/rank_grid.svg").read_text(encoding="utf-8") == path.read_text(encoding="utf-8")
