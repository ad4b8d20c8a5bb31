"""What a notebook shows in place of an object's repr: tables as HTML, and the ranks of a layout as a picture."""

from __future__ import annotations

from html import escape
from typing import Any

from meshcomm.layout import Layout, Plan
from meshcomm.show.grid import RankGrid, grid_facts
from meshcomm.show.page import Cells, PagePart
from meshcomm.show.plan import plan_view


def shown(what: Any) -> str:
    """Return a Layout as SVG, and a Plan, or an object with `__rich__`, as HTML."""
    if isinstance(what, Layout):
        return RankGrid(grid_facts(Plan(what))).svg()
    view = plan_view(what) if isinstance(what, Plan) else what.__rich__()
    return "\n".join(map(_html, view.renderables))


def _html(part: PagePart) -> str:
    if not isinstance(part, Cells):
        return f'<p style="white-space: pre-wrap">{escape(part.text)}</p>' if part.text else ""
    # A notebook aligns all cells to the right, and a site all to the left.
    sides = ["right" if name in part.right else "left" for name in part.columns]
    lines = [part.columns, *part.shown_rows()]
    rows = [
        "".join(
            f'<{tag} style="text-align: {side}">{escape(cell)}</{tag}>'
            for cell, side in zip(line, sides, strict=True)
        )
        for tag, line in zip(["th", *["td"] * len(part.rows)], lines, strict=True)
    ]
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"
