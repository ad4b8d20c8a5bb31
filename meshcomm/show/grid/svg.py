"""The rank grid as one SVG file that needs nothing else: light and dark, each rank named under the pointer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Final
from xml.sax.saxutils import escape

import numpy as np

from meshcomm.show.grid.cells import Cell, Grid, Room, Slot, between, colours, headlines, tag, widest_label
from meshcomm.show.page import svg_file

Facts = dict[str, Any]

_EDGE: Final = 24
# Groups in the legend at most.
_LEGEND: Final = 16

_STYLE: Final = """
.mc text { font-family: ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial,
  sans-serif; font-size: 13px; fill: #1f2328; font-variant-numeric: tabular-nums; }
.mc .paper { fill: #ffffff; }
.mc .panel { fill: #f3f4f6; }
.mc .head { font-size: 19px; font-weight: 600; }
.mc .quiet { fill: #59636e; }
.mc .name { font-weight: 600; }
.mc .node { fill: none; stroke: #1f2328; stroke-width: 2.5; stroke-linecap: round; stroke-linejoin: round; }
.mc .mine { fill: none; stroke: #1f2328; stroke-width: 3; }
.mc .rank { font-weight: 500; text-anchor: middle; }
.mc .tag { font-size: 9px; text-anchor: middle; }
.mc g.cell:hover rect { opacity: 0.75; }
@media (prefers-color-scheme: dark) {
  .mc text { fill: #e6edf3; }
  .mc .paper { fill: #0d1117; }
  .mc .panel { fill: #1b2129; }
  .mc .quiet { fill: #9ba5b0; }
  .mc .node, .mc .mine { stroke: #f0f3f6; }
}
"""


def grid_svg(facts: Facts) -> str:
    """The picture of `grid_facts`. Long dims are folded so that it stays readable."""
    cell = max(40, 22 + 8 * len(str(max(facts["ranks"]))))
    grid = Grid(facts, Room(1280, cell, 8, 34, 22), Room(1000, 32, 8, 34, 22))
    heads = (grid.across.size > 1) + (grid.inside_columns.size > 1) + _names_blocks(grid)
    left, top = int(_EDGE + 28 + 9.2 * widest_label(facts)), _EDGE + 78 + 20 * heads
    lines = headlines(facts)
    found, notes = grid.legend(_LEGEND)
    if facts["rank"] is not None:
        notes.append(f"outlined: rank {facts['rank']}")
    entry = 52 + 7.8 * max(len(text) for _, text in found)
    said = max(7.8 * len(line) for line in [*lines[1:], *notes])
    right = max(left + _end(grid.columns), _EDGE + max(12 * len(lines[0]), entry, said))
    legend_rows = -(-len(found) // max(1, int((right - _EDGE) // entry)))
    legend_at = top + _end(grid.rows) + 34
    notes_at = legend_at + 24 * legend_rows + 8
    width, height = round(right + _EDGE), notes_at + 20 * len(notes) + (_EDGE - 12 if notes else 4)
    parts = [
        _text(_EDGE, _EDGE + 18, lines[0], "head"),
        *(_text(_EDGE, _EDGE + 42 + 18 * n, line, "quiet") for n, line in enumerate(lines[1:])),
        f'<g transform="translate({left} {top})">',
        *_panels(grid),
        *_labels(grid),
        *(part for row in grid.cells for cell in row for part in _cell(grid, cell)),
        *_node_lines(grid),
        "</g>",
    ]
    for number, (group, text) in enumerate(found):
        column, row = divmod(number, legend_rows)
        x, y = _EDGE + column * entry, legend_at + 24 * row
        parts.append(_tile(x, y, 24, 16, group))
        parts += [_on_tile(x + 12, y + 11.5, tag(group), "tag", group)] if grid.lettered else []
        parts.append(_text(x + 34, y + 12.5, text))
    parts += [_text(_EDGE, notes_at + 12 + 20 * n, note, "quiet") for n, note in enumerate(notes)]
    return svg_file(width, height, f"rank grid: {lines[0]}", filter(None, parts), "mc", _STYLE)


def _names_blocks(grid: Grid) -> bool:
    """Whether blocks have names of their own above them, left of the picture."""
    return grid.down.size > 1 and grid.inside_rows.size > 1


def _end(slots: Sequence[Slot]) -> int:
    return slots[-1].at + slots[-1].size


def _blocks(slots: Sequence[Slot]) -> Iterator[tuple[str, int, int]]:
    """Label, begin and end of each block."""
    for label, inside in groupby(slots, key=lambda slot: slot.block):
        members = list(inside)
        if label != "…":
            yield label, members[0].at, _end(members)


def _panels(grid: Grid) -> Iterator[str]:
    """A surface under every block."""
    for _, top, bottom in _blocks(grid.rows):
        for _, left, right in _blocks(grid.columns):
            size = f'width="{right - left + 18}" height="{bottom - top + 18}"'
            yield f'<rect class="panel" x="{left - 9}" y="{top - 9}" {size} rx="9"/>'


def _labels(grid: Grid) -> Iterator[str]:
    """Names and coords of the dims, above and to the left."""
    side, above = -26, -24 - 20 * _names_blocks(grid)
    if grid.inside_columns.size > 1:
        yield _text(side, above, grid.inside_columns.name, "name", "end")
        for slot in grid.columns:
            yield _text(slot.at + slot.size / 2, above, slot.coord, "quiet", "middle")
        above -= 20
    if grid.across.size > 1:
        yield _text(side, above, grid.across.name, "name", "end")
        for label, left, right in _blocks(grid.columns):
            yield _text((left + right) / 2, above, label, "name", "middle")
    for row in grid.rows:
        block, label = grid.row_labels(row)
        yield _text(side, row.at + row.size / 2 + 4.5, label, "quiet", "end")
        yield _text(side, row.at - 16, block, "name", "end")


def _cell(grid: Grid, cell: Cell) -> Iterator[str]:
    """A rank in its group's colour, and its coords, group and node under the pointer."""
    x, y, width, height = cell.column.at, cell.row.at, cell.column.size, cell.row.size
    if cell.rank is None:
        yield _text(x + width / 2, y + height / 2 + 4.5, "…", "quiet", "middle")
        return
    about = f"rank {cell.rank}: {cell.coords}\ngroup {cell.group_name}"
    about += "" if cell.node is None else f"\nnode {cell.node}"
    yield f'<g class="cell"><title>{escape(about)}</title>'
    yield _tile(x, y, width, height, cell.group)
    if cell.rank == grid.facts["rank"]:
        yield f'<rect class="mine" x="{x}" y="{y}" width="{width}" height="{height}" rx="5"/>'
    yield _on_tile(
        x + width / 2, y + height / 2 + 4.5 - 4 * grid.lettered, str(cell.rank), "rank", cell.group
    )
    if grid.lettered:
        yield _on_tile(x + width / 2, y + height - 5, tag(cell.group), "tag", cell.group)
    yield "</g>"


def _node_lines(grid: Grid) -> Iterator[str]:
    left, above = grid.node_lines()
    xs, ys = between(grid.columns, 16), between(grid.rows, 16)
    path = [f"M{xs[j]} {ys[i]}H{xs[j + 1]}" for i, j in np.argwhere(above[:, 1:-1])]
    path += [f"M{xs[j]} {ys[i]}V{ys[i + 1]}" for i, j in np.argwhere(left[1:-1])]
    if path:
        yield f'<path class="node" d="{"".join(path)}"/>'


def _tile(x: float, y: float, width: int, height: int, group: int) -> str:
    place = f'x="{x:g}" y="{y:g}" width="{width}" height="{height}" rx="5"'
    return f'<rect {place} fill="{colours(group)[0]}"/>'


def _on_tile(x: float, y: float, text: str, kind: str, group: int) -> str:
    """Text on a group's colour, in light and dark the same."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" style="fill: {colours(group)[1]}">{escape(text)}</text>'


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "") -> str:
    """Text at a point; "" where there is none."""
    if not text:
        return ""
    named = f' class="{kind}"' if kind else ""
    placed = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{x:g}" y="{y:g}"{named}{placed}>{escape(text)}</text>'
