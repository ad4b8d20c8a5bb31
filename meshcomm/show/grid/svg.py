"""The rank grid as one SVG file that needs nothing else: light and dark, each rank named under the pointer."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any, Final
from xml.sax.saxutils import escape, quoteattr

from meshcomm.layout.sizes import coords_text
from meshcomm.show.grid.facts import group_label, headlines, legend, place_coords, tag
from meshcomm.show.grid.frame import PALETTE, Frame, Slot, Units, frame, middles

Facts = dict[str, Any]

_EDGE: Final = 24
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
.mc .black { fill: #000000; }
.mc .white { fill: #ffffff; }
.mc g.cell:hover rect { opacity: 0.75; }
@media (prefers-color-scheme: dark) {
  .mc text { fill: #e6edf3; }
  .mc .paper { fill: #0d1117; }
  .mc .panel { fill: #1b2129; }
  .mc .quiet { fill: #9ba5b0; }
  .mc .node, .mc .mine { stroke: #f0f3f6; }
  .mc .rank.black, .mc .tag.black { fill: #000000; }
  .mc .rank.white, .mc .tag.white { fill: #ffffff; }
}
"""

# Over the colours where they come again: the second, third and fourth time; then from the start.
_HATCHES: Final = (
    '<path d="M-2 2 L2 -2 M0 8 L8 0 M6 10 L10 6" stroke="#000" stroke-width="1.6" stroke-opacity="0.32"/>',
    '<path d="M-2 6 L2 10 M0 0 L8 8 M6 -2 L10 2" stroke="#fff" stroke-width="1.6" stroke-opacity="0.5"/>',
    '<circle cx="4" cy="4" r="1.5" fill="#000" fill-opacity="0.34"/>',
)


def grid_svg(facts: Facts) -> str:
    """The picture of `grid_facts`. Long dims are folded so that it stays readable."""
    cell = max(40, 22 + 8 * len(str(max(facts["ranks"]))))
    wide, tall = Units(1280, cell, 8, 34, 22, 32), Units(1000, 32, 8, 34, 22, 24)
    drawn = frame(facts, wide, tall)
    # Blocks have names of their own, above and to the left.
    over, beside = drawn.across.size > 1, drawn.down.size > 1 and drawn.rows.size > 1
    labels = [drawn.columns.name, drawn.across.name, *drawn.rows.labels(), *drawn.down.labels()]
    top = _EDGE + 78 + 20 * over + 20 * (drawn.columns.size > 1) + 20 * beside
    x, y = drawn.x(wide, int(_EDGE + 28 + 9.2 * max(map(len, labels)))), drawn.y(tall, top)
    lines = headlines(facts)
    found, rest = legend(facts, drawn, _LEGEND)
    marked = [] if facts["rank"] is None else [f"outlined: rank {facts['rank']}"]
    notes = [*rest, *marked, *drawn.notes()]
    entries = [(group, f"{label}  {ranks}") for group, label, ranks in found]
    entry = 52 + 7.8 * max(len(line) for _, line in entries)
    said = max(7.8 * len(line) for line in [*lines[1:], *notes])
    wanted = max(x[-1].at + x[-1].size, _EDGE + max(12 * len(lines[0]), entry, said))
    down = -(-len(entries) // max(1, int((wanted - _EDGE) // entry)))
    legend_at = y[-1].at + y[-1].size + 34
    notes_at = legend_at + 24 * down + 8
    width, height = round(wanted + _EDGE), notes_at + 20 * len(notes) + (_EDGE - 12 if notes else 4)
    title = f"rank grid: {lines[0]}"
    tagged = facts["groups"] > len(PALETTE)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="mc" role="img" aria-label={quoteattr(title)} '
        f'width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        *_patterns(facts, drawn),
        f'<rect class="paper" width="{width}" height="{height}"/>',
        _text(_EDGE, _EDGE + 18, lines[0], "head"),
        *(_text(_EDGE, _EDGE + 42 + 18 * n, line, "quiet") for n, line in enumerate(lines[1:])),
        *_panels_and_heads(drawn, x, y, beside),
        *(part for row in y for column in x for part in _cell(facts, drawn, row, column, tagged)),
        *_node_lines(facts, drawn, middles(x, 16), middles(y, 16)),
    ]
    for number, (group, line) in enumerate(entries):
        column, row = divmod(number, down)
        left, at = _EDGE + column * entry, legend_at + 24 * row
        parts += _tile(left, at, 24, 16, group)
        parts += [_on_tile(left + 12, at + 11.5, tag(group), "tag", group)] if tagged else []
        parts.append(_text(left + 34, at + 12.5, line))
    parts += [_text(_EDGE, notes_at + 12 + 20 * n, note, "quiet") for n, note in enumerate(notes)]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _patterns(facts: Facts, drawn: Frame) -> list[str]:
    used = sorted({_hatch(facts["group"][place]) for place in drawn.places()} - {0})
    shared = 'width="8" height="8" patternUnits="userSpaceOnUse"'
    defined = [f'<pattern id="mc-hatch-{n}" {shared}>{_HATCHES[n - 1]}</pattern>' for n in used]
    return ["<defs>", *defined, "</defs>"] if defined else []


def _panels_and_heads(drawn: Frame, x: list[Slot], y: list[Slot], beside: bool) -> Iterator[str]:
    """A surface under every block; names and coords of the dims, above and to the left."""
    for _, top, bottom in _blocks(y):
        for _, left, right in _blocks(x):
            size = f'width="{right - left + 18}" height="{bottom - top + 18}"'
            yield f'<rect class="panel" x="{left - 9}" y="{top - 9}" {size} rx="9"/>'
    side, above = x[0].at - 26, y[0].at - 24 - 20 * beside
    if drawn.columns.size > 1:
        yield _text(side, above, drawn.columns.name, "name", "end")
        for slot in x:
            if slot.outer is not None:
                coord = "…" if slot.inner is None else str(slot.inner)
                yield _text(slot.at + slot.size / 2, above, coord, "quiet", "middle")
        above -= 20
    if drawn.across.size > 1:
        yield _text(side, above, drawn.across.name, "name", "end")
        for outer, left, right in _blocks(x):
            yield _text((left + right) / 2, above, drawn.across.label(outer), "name", "middle")
    for slot in y:
        label = "⋮"
        if slot.outer is not None and slot.inner is not None:
            label = drawn.rows.label(slot.inner) if drawn.rows.size > 1 else drawn.down.label(slot.outer)
        if label:
            yield _text(side, slot.at + slot.size / 2 + 4.5, label, "quiet", "end")
        if beside and slot.starts_block and slot.outer is not None:
            yield _text(side, slot.at - 16, drawn.down.label(slot.outer), "name", "end")


def _blocks(slots: list[Slot]) -> Iterator[tuple[int, int, int]]:
    """Coord, begin and end of each block."""
    for outer, inside in groupby(slots, key=lambda slot: slot.outer):
        members = list(inside)
        if outer is not None:
            yield outer, members[0].at, members[-1].at + members[-1].size


def _cell(facts: Facts, drawn: Frame, row: Slot, column: Slot, tagged: bool) -> Iterator[str]:
    """A rank in its group's colour, and what is said of it under the pointer."""
    place, middle = drawn.place(row, column), column.at + column.size / 2
    if place is None:
        if row.inner is not None:
            yield _text(middle, row.at + row.size / 2 + 4.5, "…", "quiet", "middle")
        return
    group, rank = facts["group"][place], facts["ranks"][place]
    told = f"rank {rank}: {coords_text(place_coords(facts, place))}\ngroup {group_label(facts, place)}"
    told += "" if facts["node"] is None else f"\nnode {facts['node'][place]}"
    yield f'<g class="cell"><title>{escape(told)}</title>'
    yield from _tile(column.at, row.at, column.size, row.size, group)
    if rank == facts["rank"]:
        size = f'width="{column.size}" height="{row.size}"'
        yield f'<rect class="mine" x="{column.at}" y="{row.at}" {size} rx="5"/>'
    yield _on_tile(middle, row.at + row.size / 2 + 4.5 - 4 * tagged, str(rank), "rank", group)
    if tagged:
        yield _on_tile(middle, row.at + row.size - 5, tag(group), "tag", group)
    yield "</g>"


def _node_lines(facts: Facts, drawn: Frame, xs: list[int], ys: list[int]) -> Iterator[str]:
    left, above = (lines.tolist() for lines in drawn.borders(facts))
    path = [
        f"M{xs[column]} {y}H{xs[column + 1]}"
        for row, y in enumerate(ys)
        for column in range(len(xs) - 1)
        if above[row][column + 1]
    ]
    path += [
        f"M{x} {ys[row]}V{ys[row + 1]}"
        for column, x in enumerate(xs)
        for row in range(len(ys) - 1)
        if left[row + 1][column]
    ]
    if path:
        yield f'<path class="node" d="{"".join(path)}"/>'


def _hatch(group: int) -> int:
    """Number of the pattern over a group's colour; 0: none."""
    return group // len(PALETTE) % (len(_HATCHES) + 1)


def _tile(x: float, y: float, width: int, height: int, group: int) -> Iterator[str]:
    place = f'x="{x:g}" y="{y:g}" width="{width}" height="{height}" rx="5"'
    yield f'<rect {place} fill="{PALETTE[group % len(PALETTE)][0]}"/>'
    if _hatch(group):
        yield f'<rect {place} fill="url(#mc-hatch-{_hatch(group)})"/>'


def _on_tile(x: float, y: float, text: str, kind: str, group: int) -> str:
    """Text on a group's colour; over a hatch it has the colour around it."""
    colour, ink = PALETTE[group % len(PALETTE)]
    halo = f' stroke="{colour}" stroke-width="3" paint-order="stroke"' if group >= len(PALETTE) else ""
    shade = "white" if ink == "#ffffff" else "black"
    return f'<text x="{x:g}" y="{y:g}" class="{kind} {shade}"{halo}>{escape(text)}</text>'


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    placed = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{x:g}" y="{y:g}"{named}{placed}>{escape(text)}</text>'
