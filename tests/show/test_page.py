"""Lines and tables at every width, from the same facts."""

from __future__ import annotations

import re

import pytest
from rich.cells import cell_len

from meshcomm.config import load_config
from meshcomm.show.diff import diff_facts, diff_view
from meshcomm.show.grid import RankGrid, grid_facts
from meshcomm.show.page import as_text
from meshcomm.show.plan import plan_facts, plan_view
from tests.show.shown import GPT, LLAMA, MESH, QUICK, ROOT, nodes, plan_at, run
from tests.show.test_plan import NODES


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
