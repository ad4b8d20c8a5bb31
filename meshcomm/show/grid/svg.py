"""The rank grid as one SVG file that needs nothing else: light and dark, each rank named under the pointer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, final
from xml.sax.saxutils import escape, quoteattr

from meshcomm.show.grid.borders import Borders
from meshcomm.show.grid.boxes import GAP, INNER, OUTER, blocks, boxes, middles, runs
from meshcomm.show.grid.colours import PALETTE, fill, turn
from meshcomm.show.grid.facts import group_label, headlines, legend, place_coords, tag
from meshcomm.show.grid.frame import Frame, Units, frame

Facts = dict[str, Any]

_CELL_H: Final = 32
_EDGE: Final = 24
_LEGEND: Final = 16
_LEGEND_ROW: Final = 24

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
    return _Drawing(facts).text()


@final
class _Drawing:
    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        digits = len(str(max(facts["ranks"])))
        self._cell_w = max(40, 22 + 8 * digits)
        self._tagged = facts["groups"] > len(PALETTE)
        width = Units(1280, self._cell_w, INNER, OUTER, GAP, 32)
        height = Units(1000, _CELL_H, INNER, OUTER, GAP, 24)
        self._frame: Frame = frame(facts, width, height)
        self._rows, self._columns = self._frame.row_slots(), self._frame.column_slots()
        found = self._frame
        labels = [found.columns.name, found.across.name]
        labels += [found.rows.label(coord) for coord in found.rows.coords() if found.rows.size > 1]
        labels += [found.down.label(coord) for coord in found.down.coords() if found.down.size > 1]
        left = _EDGE + 28 + 9.2 * max(map(len, labels))
        top = _EDGE + 78 + 20 * (found.across.size > 1) + 20 * (found.columns.size > 1)
        top += 20 * (found.down.size > 1 and found.rows.size > 1)
        self._x = boxes(self._columns, left, self._cell_w)
        self._y = boxes(self._rows, top, _CELL_H)

    # -- the whole ------------------------------------------------------------------------------

    def text(self) -> str:
        """The file."""
        facts = self._facts
        lines = headlines(facts)
        right, bottom = self._x[-1].at + self._x[-1].size, self._y[-1].at + self._y[-1].size
        entries = [
            (group, f"{label}  {ranks}") for group, label, ranks in legend(facts, self._frame, _LEGEND)
        ]
        notes = self._frame.notes()
        if facts["rank"] is not None:
            notes = [f"outlined: rank {facts['rank']}", *notes]
        rest = facts["groups"] - len(entries)
        if rest:
            notes = [f"and {rest:,} more groups", *notes]
        entry = 52 + 7.8 * max(len(line) for _, line in entries)
        wanted = max(right, _EDGE + 12 * len(lines[0]), *(_EDGE + 7.8 * len(line) for line in lines[1:]))
        wanted = max(wanted, _EDGE + entry, *(_EDGE + 7.8 * len(note) for note in notes), 0)
        columns = max(1, int((wanted - _EDGE) // entry))
        down = -(-len(entries) // columns)
        legend_at = bottom + 34
        notes_at = legend_at + down * _LEGEND_ROW + 8
        width, height = wanted + _EDGE, notes_at + 20 * len(notes) + (_EDGE - 12 if notes else 4)
        title = f"rank grid: {lines[0]}"
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="mc" role="img" aria-label={quoteattr(title)} '
            f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}">',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}</style>",
            *self._patterns(),
            f'<rect class="paper" width="{width:.0f}" height="{height:.0f}"/>',
            _text(_EDGE, _EDGE + 18, lines[0], "head"),
            *(_text(_EDGE, _EDGE + 42 + 18 * n, line, "quiet") for n, line in enumerate(lines[1:])),
            *self._panels(),
            *self._heads(),
            *self._cells(),
            *self._node_lines(),
        ]
        for number, (group, line) in enumerate(entries):
            column, row = divmod(number, down)
            x, y = _EDGE + column * entry, legend_at + row * _LEGEND_ROW
            parts += [
                *_tile(x, y, 24, 16, group),
                *([_on_tile(x + 12, y + 11.5, tag(group), "tag", group)] if self._tagged else []),
                _text(x + 34, y + 12.5, line),
            ]
        parts += [_text(_EDGE, notes_at + 12 + 20 * n, note, "quiet") for n, note in enumerate(notes)]
        return "\n".join([*parts, "</svg>"]) + "\n"

    def _patterns(self) -> list[str]:
        turns = {turn(self._facts["group"][place]) % (len(_HATCHES) + 1) for place in self._frame.places()}
        defined = [
            f'<pattern id="mc-hatch-{number}" width="8" height="8" patternUnits="userSpaceOnUse">'
            f"{_HATCHES[number - 1]}</pattern>"
            for number in sorted(turns - {0})
        ]
        return ["<defs>", *defined, "</defs>"] if defined else []

    def _panels(self) -> Iterator[str]:
        """A surface under every block."""
        for top, bottom in blocks(self._rows, self._y):
            for left, right in blocks(self._columns, self._x):
                yield (
                    f'<rect class="panel" x="{left - 9:.1f}" y="{top - 9:.1f}" width="{right - left + 18:.1f}" '
                    f'height="{bottom - top + 18:.1f}" rx="9"/>'
                )

    def _heads(self) -> Iterator[str]:
        """Names and coords of the dims, above and to the left."""
        found = self._frame
        side = self._x[0].at - 26
        y = self._y[0].at - 24 - 20 * (found.down.size > 1 and found.rows.size > 1)
        if found.columns.size > 1:
            yield _text(side, y, found.columns.name, "name", "end")
            for slot, box in zip(self._columns, self._x, strict=True):
                if slot.outer is not None:
                    shown = "…" if slot.inner is None else str(slot.inner)
                    yield _text(box.at + box.size / 2, y, shown, "quiet", "middle")
            y -= 20
        if found.across.size > 1:
            yield _text(side, y, found.across.name, "name", "end")
            across = list(blocks(self._columns, self._x))
            for (left, right), coord in zip(across, found.across.coords(), strict=True):
                yield _text((left + right) / 2, y, found.across.label(coord), "name", "middle")
        named = found.down.size > 1 and found.rows.size > 1
        for slot, box in zip(self._rows, self._y, strict=True):
            middle = box.at + box.size / 2 + 4.5
            if slot.outer is None or slot.inner is None:
                yield _text(side, middle, "⋮", "quiet", "end")
            elif found.rows.size > 1:
                yield _text(side, middle, found.rows.label(slot.inner), "quiet", "end")
            elif found.down.size > 1:
                yield _text(side, middle, found.down.label(slot.outer), "quiet", "end")
            if named and slot.starts_block and slot.outer is not None:
                yield _text(side, box.at - 16, found.down.label(slot.outer), "name", "end")

    def _cells(self) -> Iterator[str]:
        facts = self._facts
        for row, down in zip(self._rows, self._y, strict=True):
            for column, across in zip(self._columns, self._x, strict=True):
                place = self._frame.place(row, column)
                if place is None:
                    if row.inner is not None:
                        middle = down.at + down.size / 2 + 4.5
                        yield _text(across.at + across.size / 2, middle, "…", "quiet", "middle")
                    continue
                group, rank = facts["group"][place], facts["ranks"][place]
                x, y = across.at, down.at
                yield '<g class="cell">'
                yield f"<title>{escape(self._told(place))}</title>"
                yield from _tile(x, y, across.size, down.size, group)
                if rank == facts["rank"]:
                    yield f'<rect class="mine" x="{x:.1f}" y="{y:.1f}" width="{across.size}" height="{down.size}" rx="5"/>'
                middle = x + across.size / 2
                lifted = 4 * self._tagged
                yield _on_tile(middle, y + down.size / 2 + 4.5 - lifted, str(rank), "rank", group)
                if self._tagged:
                    yield _on_tile(middle, y + down.size - 5, tag(group), "tag", group)
                yield "</g>"

    def _told(self, place: int) -> str:
        """What is said of a rank under the pointer."""
        facts = self._facts
        coords = " ".join(f"{name}={coord}" for name, coord in place_coords(facts, place).items())
        text = f"rank {facts['ranks'][place]}: {coords}\ngroup {group_label(facts, place)}"
        return text if facts["node"] is None else f"{text}\nnode {facts['node'][place]}"

    # -- lines between nodes --------------------------------------------------------------------

    def _node_lines(self) -> Iterator[str]:
        borders = Borders(self._facts, self._frame)
        xs, ys = middles(self._x), middles(self._y)
        segments = []
        for row in range(len(ys)):
            pieces = runs(borders.above(row, column) for column in range(len(xs) - 1))
            segments += [f"M{xs[a]:.1f} {ys[row]:.1f}H{xs[b]:.1f}" for a, b in pieces]
        for column in range(len(xs)):
            pieces = runs(borders.left_of(row, column) for row in range(len(ys) - 1))
            segments += [f"M{xs[column]:.1f} {ys[a]:.1f}V{ys[b]:.1f}" for a, b in pieces]
        if segments:
            yield f'<path class="node" d="{" ".join(segments)}"/>'


def _tile(x: float, y: float, width: float, height: float, group: int) -> Iterator[str]:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.0f}" height="{height:.0f}" rx="5"'
    yield f'<rect {place} fill="{fill(group)[0]}"/>'
    hatch = turn(group) % (len(_HATCHES) + 1)
    if hatch:
        yield f'<rect {place} fill="url(#mc-hatch-{hatch})"/>'


def _on_tile(x: float, y: float, text: str, kind: str, group: int) -> str:
    """Text on a group's colour; over a hatch it has the colour around it."""
    colour, ink = fill(group)
    halo = f' stroke="{colour}" stroke-width="3" paint-order="stroke"' if turn(group) else ""
    shade = "white" if ink == "#ffffff" else "black"
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind} {shade}"{halo}>{escape(text)}</text>'


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    placed = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{named}{placed}>{escape(text)}</text>'
