"""What a notebook shows of meshes, plans, layouts and tables."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from IPython.core.formatters import DisplayFormatter

import meshcomm
from meshcomm.layout import Layout, Plan
from meshcomm.mesh import Mesh
from meshcomm.show.grid import RankGrid, grid_facts
from tests.show.shown import MESH, plan_at


@pytest.fixture(scope="module")
def formatter() -> DisplayFormatter:
    made = DisplayFormatter()
    meshcomm.load_ipython_extension(SimpleNamespace(display_formatter=made))
    return made


def words(text: str) -> list[str]:
    """The words of a table, as text or as HTML, without lines."""
    return unescape(re.sub(r"<[^>]*>|─", " ", text)).split()


def test_a_table_has_the_words_of_the_text(formatter: DisplayFormatter) -> None:
    def body(mesh: Mesh) -> list[Any]:
        for _ in range(2):
            mesh.all_reduce("dp", torch.ones(3))
            mesh.all_gather("tp", torch.ones(3), async_op=True).wait()
        return [mesh, mesh.stats(), mesh.debug.global_stats(), mesh.debug.stragglers()]

    cost = meshcomm.explain_transfer(
        Layout({"dp": 4}), Layout({"tp": 2}), {"w": ((8, 4), torch.float32, "n/dp k -> n/tp k")}
    )
    for what in (*meshcomm.simulate(body, dims={"dp": 2, "tp": 2})[3], cost):
        shown, _ = formatter.format(what)
        assert set(shown) == {"text/plain", "text/html"}, what
        assert words(shown["text/html"]) == words(str(what)) and len(shown["text/plain"]) < 400
        ElementTree.fromstring(f"<div>{shown['text/html']}</div>")


def test_numbers_are_to_the_right_and_a_repeated_dim_is_blank(formatter: DisplayFormatter) -> None:
    shown, _ = formatter.format(plan_at(MESH, 8))
    rows = ElementTree.fromstring(f"<div>{shown['text/html']}</div>").findall(".//tr")
    sides = {cell.text: cell.attrib["style"] for cell in rows[0]}
    assert sides["dim"] == "text-align: left" and sides["size"] == "text-align: right"
    assert all([cell.attrib["style"] for cell in row] == list(sides.values()) for row in rows)
    assert [row[0].text for row in rows[1:]] == ["pp", "dp", "tp", "model", "edp", "ep"]

    def body(mesh: Mesh) -> Any:
        mesh.all_reduce("dp", torch.ones(3))
        mesh.broadcast("dp", torch.ones(3), src=0)
        return mesh.stats()

    shown, _ = formatter.format(meshcomm.simulate(body, dims={"dp": 2})[0])
    rows = ElementTree.fromstring(f"<div>{shown['text/html']}</div>").findall(".//tr")
    assert [row[0].text for row in rows] == ["dim", "dp", None]


def test_a_layout_is_a_picture_of_its_ranks(formatter: DisplayFormatter) -> None:
    layout = Layout({"dp": 2, "tp": 2})
    shown, _ = formatter.format(layout)
    grid = RankGrid(grid_facts(Plan(layout)))
    assert shown == {"text/plain": repr(layout), "image/svg+xml": grid.svg()}
    assert repr(grid) == "RankGrid(dp=2 tp=2, by tp)"


def test_every_type_with_a_table_shows_it_in_a_notebook() -> None:
    root = Path(meshcomm.__file__).parent
    found = {
        ".".join([*path.relative_to(root).with_suffix("").parts, name])
        for path in root.rglob("*.py")
        for name, body in re.findall(
            r"^class (\w+)(.*?)(?=^\S|\Z)", path.read_text(), re.DOTALL | re.MULTILINE
        )
        if "def __rich__" in body
    }
    assert found == {*meshcomm._SHOWN["text/html"]} - {"layout.plan.Plan"}
