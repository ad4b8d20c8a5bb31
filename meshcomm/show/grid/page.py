"""The rank grid as lines and tables, for Markdown: a table for each block, and one for the groups."""

from __future__ import annotations

from typing import Any, Final

from meshcomm.show.grid.facts import headlines, legend, tag
from meshcomm.show.grid.frame import Frame, Units, frame
from meshcomm.show.page import Cells, Line, Part

Facts = dict[str, Any]

# Rows or columns of a table, and blocks in one direction, at most; groups listed under them.
_MOST: Final = 16
_BLOCKS: Final = 4
_LEGEND: Final = 32


def grid_page(facts: Facts) -> list[Part]:
    """`grid_facts` as tables: a rank and its group's letters in each cell, nodes behind each row."""
    units = Units(_MOST * _BLOCKS, 1, 0, 0, 0, _MOST)
    found = frame(facts, units, units)
    first, *others = headlines(facts)
    parts: list[Part] = [Line(first, heading=True)]
    if facts["node"] is None:
        parts += [Line(line) for line in others]
    for down in found.down.coords():
        for across in found.across.coords():
            names = [
                axis.label(coord)
                for axis, coord in ((found.down, down), (found.across, across))
                if axis.size > 1
            ]
            if names:
                parts.append(Line(" ".join(names)))
            parts.append(_block(facts, found, down, across))
    parts += [Line(note) for note in found.notes()]
    entries = legend(facts, found, _LEGEND)
    rows = tuple((tag(group), label, ranks) for group, label, ranks in entries)
    parts.append(Cells(("letter", "group", "ranks, in coord order"), rows))
    rest = facts["groups"] - len(entries)
    if rest:
        parts.append(Line(f"and {rest:,} more groups"))
    if facts["rank"] is not None:
        parts.append(Line(f"in brackets: rank {facts['rank']}"))
    return parts


def _block(facts: Facts, found: Frame, down: int, across: int) -> Cells:
    columns = [slot for slot in found.column_slots() if slot.outer == across]
    corner = " / ".join(axis.name for axis in (found.rows, found.columns) if axis.size > 1)
    heads = ["…" if slot.inner is None else found.columns.label(slot.inner) or "rank" for slot in columns]
    with_nodes = facts["node"] is not None
    rows = []
    for row in (slot for slot in found.row_slots() if slot.outer == down):
        places = [found.place(row, column) for column in columns]
        label = "…" if row.inner is None else found.rows.label(row.inner) or "-"
        cells = [label, *(_cell(facts, place) for place in places)]
        if with_nodes:
            nodes = dict.fromkeys(facts["node"][place] for place in places if place is not None)
            cells.append(" ".join(map(str, nodes)) or "…")
        rows.append(tuple(cells))
    names = (corner or "-", *heads, *(["node"] * with_nodes))
    return Cells(names, tuple(rows), frozenset(heads))


def _cell(facts: Facts, place: int | None) -> str:
    if place is None:
        return "…"
    rank = facts["ranks"][place]
    text = f"{rank} {tag(facts['group'][place])}"
    return f"[{text}]" if rank == facts["rank"] else text
