"""The rank grid: the position of every rank, and its group along one dim.

The two innermost dims form blocks of rows and columns, and the outer dims arrange the blocks. `grid_facts` returns the
data, and `RankGrid` draws it for a rich console. All other output formats are derived from that drawing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, product
from math import prod
from operator import itemgetter
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, final

import numpy as np
import numpy.typing as npt

from meshcomm.config import TopologyConfig
from meshcomm.config.write import check_ending, write_whole
from meshcomm.layout import Dims, Plan
from meshcomm.layout.sizes import coords_text, fold
from meshcomm.predict.links import places_of
from meshcomm.show.page import Facts, as_text, svg_of
from meshcomm.show.units import count

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

# Column, text, style.
Piece: TypeAlias = tuple[int, str, str]
Lines = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.int64]

# Okabe and Ito's palette (Color Universal Design, 2008) of eight colors that color-blind readers can distinguish, with gray
# instead of black.
PALETTE: Final = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#f0e442", "#0072b2", "#d55e00", "#b3b3b3")
_OUTSIDE, _LEFT_OUT = -1, -2
# The bits 1, 2, 4, 8 of the index mean that a line goes up, down, left, right.
_NODE_LINES: Final = " ┃┃┃━┛┓┫━┗┏┣━┻┳╋"
_ASCII: Final = str.maketrans(_NODE_LINES + "…⋮", " |||-+++-+++-+++.:")
# The maximum number of groups in the legend.
_LEGEND: Final = 16


def grid_facts(
    plan: Plan, by: Dims | None = None, topology: TopologyConfig | None = None, rank: int | None = None
) -> Facts:
    """Return the rank grid, with the groups along `by`, as JSON-serializable data.

    by: a dim, a merged dim, a view dim, or a tuple of dims. If None, the innermost base dim is used. rank: a rank to mark.

    ranks, group and node have one entry per grid position, in row-major order over `dims` (the dims of `view`): the rank,
    the index of its group, and its node. ranks_per_node, nodes and node are None if they are unknown.
    Raises UnknownDim, or LayoutError if the mesh does not have `rank`.
    """
    layout = plan.layout
    chosen: Dims = list(layout.dims)[-1] if by is None else by
    size, view = layout.digits(chosen).size, layout.home(chosen)
    if rank is not None:
        layout.position(rank)
    positions = np.arange(layout.world_size, dtype=np.int64)
    per_node = None if topology is None else topology.ranks_per_node
    nodes = None if per_node is None or topology is None else places_of(topology, layout.ranks) // per_node
    return {
        "world_size": layout.world_size,
        "fingerprint": plan.fingerprint,
        "by": chosen if isinstance(chosen, str) else " ".join(chosen),
        "by_dims": list(layout.expand(chosen)),
        "size": size,
        "groups": layout.world_size // size,
        "view": view,
        "dims": dict(layout.views[view] if view else layout.dims),
        "ranks_per_node": per_node,
        "nodes": None if nodes is None else len(np.unique(nodes)),
        "ranks": layout.ranks.tolist(),
        "group": layout.others(chosen).coord(positions).tolist(),
        "node": None if nodes is None else nodes.tolist(),
        "rank": rank,
    }


class Room(NamedTuple):
    """Sizes in columns or lines: in total, of one rank's cell, between ranks of a block, and between blocks."""

    total: int
    cell: int
    inner: int
    outer: int


class Axis(NamedTuple):
    """One direction of the picture: a dim, several merged dims, or no dim (size 1).

    sizes: the sizes of its dims, outermost first. stride: the number of positions from one coord to the next.
    coords: the coords to draw, in order, with None in place of omitted coords.
    """

    name: str
    size: int
    sizes: dict[str, int]
    stride: int
    coords: list[int | None]


class Slot(NamedTuple):
    """One row or column of the picture.

    at, size: its start, and its width or height. offset: the amount that it adds to a cell's position, or a negative number
    for omitted coords. coord, block: its labels.
    """

    at: int
    size: int
    offset: int
    coord: str
    block: str
    starts_block: bool


def _between(slots: Sequence[Slot]) -> list[int]:
    """Return where lines between slots are drawn: in the middle of each gap, and next to both ends."""
    middles = [after.at - (after.at - before.at - before.size + 1) // 2 for before, after in pairwise(slots)]
    # A cell ends with a space, in which the last line is drawn.
    return [slots[0].at - 1, *middles, slots[-1].at + slots[-1].size]


def tag(index: int) -> str:
    """Return the letters for a group's index, which are shown if colors do not distinguish all groups.

    >>> tag(0), tag(25), tag(26), tag(16383)
    ('a', 'z', 'aa', 'xfd')
    """
    letters = ""
    index += 1
    while index:
        index, rest = divmod(index - 1, 26)
        letters = chr(ord("a") + rest) + letters
    return letters


def _digits(sizes: Mapping[str, int], number: int) -> dict[str, int]:
    """Return the coords by dim for a row-major index."""
    return dict(zip(sizes, map(int, np.unravel_index(number, tuple(sizes.values()))), strict=True))


def _directions(facts: Facts) -> list[dict[str, int]]:
    """Return the dims of the four directions: blocks down, blocks across, rows in a block, and columns in a block."""
    dims = [(name, size) for name, size in facts["dims"].items() if size > 1]
    return [dict(dims[:-3]), dict(dims[-3:-2]), dict(dims[-2:-1]), dict(dims[-1:])]


def _axes(facts: Facts, width: Room, height: Room) -> tuple[Axis, Axis, Axis, Axis]:
    """Return the axes of blocks down, blocks across, rows and columns, with as many coords as fit, including the marked
    rank's.
    """
    down, across, rows, columns = _directions(facts)
    sizes = prod(columns.values()), prod(across.values())
    if not down and _drawn(*sizes, width, 1) != sizes:
        down, across = across, down
    marked = facts["rank"] is not None
    place = facts["ranks"].index(facts["rank"]) if marked else 0
    drawn_columns, drawn_across = _drawn(prod(columns.values()), prod(across.values()), width, 1 + marked)
    drawn_rows, drawn_down = _drawn(prod(rows.values()), prod(down.values()), height, 1 + marked)
    inside_columns = _axis(columns, 1, drawn_columns, place)
    inside_rows = _axis(rows, inside_columns.size, drawn_rows, place)
    blocks_across = _axis(across, inside_rows.stride * inside_rows.size, drawn_across, place)
    blocks_down = _axis(down, blocks_across.stride * blocks_across.size, drawn_down, place)
    return blocks_down, blocks_across, inside_rows, inside_columns


def _axis(sizes: dict[str, int], stride: int, drawn: int, place: int) -> Axis:
    """Return an axis with `drawn` coords of the dims: the first ones, the last one, and the coord of position `place`."""
    size = prod(sizes.values())
    marked = place // stride % size
    chosen = [*range(drawn - 1), size - 1] if drawn > 1 else [0]
    if marked not in chosen:
        chosen[max(drawn - 2, 0)] = marked
    coords: list[int | None] = []
    for before, coord in pairwise([-1, *sorted(chosen), size]):
        coords += [coord] if coord == before + 1 else [None, coord]
    return Axis(" ".join(sizes), size, sizes, stride, coords[:-1])


def _drawn(inside: int, blocks: int, room: Room, gaps: int) -> tuple[int, int]:
    """Return how many coords per block, and how many blocks, to draw: as many ranks as fit, but at least one.

    gaps: the maximum number of marks for omitted coords. Each mark takes one column or line.
    """
    best, score = (1, 1), (0, 0, 0)
    limit = max(1, room.total // room.cell)
    for inner, outer in product(range(1, min(inside, limit) + 1), range(1, min(blocks, limit) + 1)):
        block = _length(inner, inside - inner, room.cell, room.inner, gaps)
        # Showing the first and last coords in both directions is better than showing more coords in one direction.
        new_score = (min(inner, 2) + min(outer, 2), inner * outer, inner)
        if new_score > score and _length(outer, blocks - outer, block, room.outer, gaps) <= room.total:
            best, score = (inner, outer), new_score
    return best


def _length(drawn: int, left_out: int, size: int, between: int, gaps: int) -> int:
    marks = min(left_out, gaps)
    return drawn * size + (drawn - 1 + marks) * between + marks


def _slots(blocks: Axis, inside: Axis, room: Room) -> list[Slot]:
    slots: list[Slot] = []
    place = 0
    for block in blocks.coords:
        for index, coord in enumerate([None] if block is None else inside.coords):
            place += 0 if not slots else room.inner if index else room.outer
            label = "…" if block is None else coords_text(_digits(blocks.sizes, block))
            if block is None or coord is None:
                slots.append(Slot(place, 1, _LEFT_OUT, "" if block is None else "…", label, index == 0))
            else:
                offset = block * blocks.stride + coord * inside.stride
                slots.append(Slot(place, room.cell, offset, str(coord), label, index == 0))
            place += slots[-1].size
    return slots


def _parted(a: Numbers, b: Numbers) -> Lines:
    left_out, outside = (a == _LEFT_OUT) | (b == _LEFT_OUT), (a == _OUTSIDE) | (b == _OUTSIDE)
    parted: Lines = np.where(left_out, outside, a != b)
    return parted


@final
class RankGrid:
    """Shows ranks as colored blocks, with one color for each group along a dim and lines between nodes.

    str() returns text of 100 columns without color. A rich console shows color and uses its full width, and a notebook
    shows a picture. Coords that do not fit are omitted. Groups also have letters if there are more groups than colors, or
    if there are no colors (NO_COLOR, TERM=dumb, no terminal). `facts`: see `grid_facts`.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield headlines, the picture, a legend, and a note on omitted ranks."""
        from rich.text import Text

        facts = self.facts
        coloured = console.color_system is not None and not console.no_color
        picture = _Picture(facts, options.max_width, coloured)
        view = f" of view {facts['view']}" if facts["view"] else ""
        groups = f"{count(facts['groups'], 'group')} of {facts['size']:,}"
        yield Text(f"{coords_text(facts['dims'])}{view}, by {facts['by']}: {groups}")
        nodes, each = facts["nodes"], facts["ranks_per_node"]
        if nodes is None:
            yield Text("nodes are unknown: set topology.ranks_per_node to show them")
        else:
            full = "" if nodes * each == facts["world_size"] else "up to "
            yield Text(f"lines separate nodes: {count(nodes, 'node')}, {full}{each:,} ranks on each")
        for line in picture.lines():
            if options.ascii_only:
                line.plain = line.plain.translate(_ASCII)
            # In a very narrow window, lines are truncated instead of wrapped.
            line.truncate(options.max_width)
            line.no_wrap = True
            yield line
        entries, notes = picture.legend()
        width = max(1, *(len(picture.letters(group)) for group, _ in entries))
        for group, text in entries:
            swatch = Text(f" {picture.letters(group):<{width}} ", picture.style(group))
            yield swatch.append(f" {text}", "default on default")
        yield from map(Text, notes)
        if facts["rank"] is not None:
            yield Text(f"[ ] rank {facts['rank']}")

    def __str__(self) -> str:
        return as_text(self)

    def __repr__(self) -> str:
        return f"RankGrid({coords_text(self.facts['dims'])}, by {self.facts['by']})"

    def svg(self) -> str:
        """Return the grid as a self-contained SVG document."""
        return svg_of(self)

    # Called by notebooks.
    _repr_svg_ = svg

    def save(self, path: str | PathLike[str]) -> None:
        """Write the grid to an .svg file. Raises ConfigError, and leaves the file unchanged, if the path has another suffix
        or cannot be written.
        """
        where = Path(fspath(path))
        check_ending(where, "--export", ".svg")
        write_whole(where, self.svg())


class _Picture:
    """Draws labels in the margin, ranks, and lines between nodes within a given width. Long dims are shortened."""

    def __init__(self, facts: Facts, width: int, coloured: bool) -> None:
        self.facts = facts
        self.coloured = coloured
        self.lettered = not coloured or facts["groups"] > len(PALETTE)
        edge = int(facts["node"] is not None)
        *labelled, innermost = _directions(facts)
        labels = [coords_text({name: size - 1 for name, size in sizes.items()}) for sizes in labelled]
        self.left = 1 + max(map(len, [" ".join(innermost), *labels])) + edge
        letters = len(self.letters(facts["groups"] - 1))
        # Two more columns, for a bracket or a space on each side.
        cell = len(str(max(facts["ranks"]))) + letters + 2
        wide = Room(width - self.left - edge, cell, inner=1, outer=3)
        high = Room(40, 1, inner=edge, outer=1)
        self.down, self.across, self.inside_rows, self.inside_columns = _axes(facts, wide, high)
        self.rows = _slots(self.down, self.inside_rows, high)
        self.columns = _slots(self.across, self.inside_columns, wide)
        self.bars = _between(self.columns)
        # The index of each drawn cell in the facts; negative for omitted ranks.
        rows, columns = np.ix_(*([slot.offset for slot in slots] for slots in (self.rows, self.columns)))
        self.places = np.where(np.minimum(rows, columns) < 0, _LEFT_OUT, rows + columns)

    def letters(self, group: int) -> str:
        """Return a group's letters, or "" if colors distinguish all groups."""
        return tag(group) if self.lettered else ""

    def style(self, group: int) -> str:
        """Return the style of a group: black or white text on the group's color."""
        colour = PALETTE[group % len(PALETTE)]
        ink = "#ffffff" if colour == "#0072b2" else "#000000"
        return f"{ink} on {colour}" if self.coloured else "default"

    def lines(self) -> Iterator[Text]:
        """Yield the headings, then every row with the line above it, then the bottom line."""
        if self.across.size > 1:
            blocks = [(slot.at, f"{slot.block} ", "bold") for slot in self.columns if slot.starts_block]
            yield self._line(self.across.name, blocks)
        if self.inside_columns.size > 1:
            coords = [(slot.at, slot.coord.center(slot.size), "bold") for slot in self.columns]
            yield self._line(self.inside_columns.name, coords)
        left, above = self._node_lines()
        crossings = left[:-1] + 2 * left[1:] + 4 * above[:, :-1] + 8 * above[:, 1:]
        for number, row in enumerate(self.rows):
            block, label = self._row_labels(row)
            if block or above[number].any() or (row.starts_block and number > 0):
                yield self._border(block, crossings[number], above[number])
            pieces: list[Piece] = [
                (column, _NODE_LINES[3], "")
                for column, bar in zip(self.bars, left[number + 1], strict=True)
                if bar
            ]
            if row.offset >= 0:
                pieces += map(self._cell, self.places[number].tolist(), self.columns)
            yield self._line(label, sorted(pieces, key=itemgetter(0)))
        if above[-1].any():
            yield self._border("", crossings[-1], above[-1])

    def legend(self) -> tuple[list[tuple[int, str]], list[str]]:
        """Return the index and description of each of the first drawn groups, and notes on what is omitted."""
        facts = self.facts
        drawn = {facts["group"][place]: place for place in self.places[self.places >= 0].tolist()}
        ranks, groups = np.array(facts["ranks"]), np.array(facts["group"])
        entries = []
        for index in sorted(drawn)[:_LEGEND]:
            coords = _digits(facts["dims"], drawn[index])
            common = coords_text({dim: coords[dim] for dim in coords if dim not in facts["by_dims"]})
            entries.append((index, f"{facts['by']}[{common}] {fold(ranks[groups == index])}"))
        rest = facts["groups"] - len(entries)
        notes = [f"and {rest:,} more groups"] if rest else []
        if len(self.down.sizes) > 1:
            notes.append(f"more than four dims: {self.down.name} are merged downwards")
        axes = (self.down, self.across, self.inside_rows, self.inside_columns)
        hidden = {
            axis.name: (axis.size - sum(c is not None for c in axis.coords), axis.size) for axis in axes
        }
        left_out = [f"{left:,} of {size:,} along {name}" for name, (left, size) in hidden.items() if left]
        return entries, [*notes, f"not drawn: {'; '.join(left_out)}"] if left_out else notes

    def _row_labels(self, row: Slot) -> tuple[str, str]:
        """Return the labels to the left of a row: the name of the block if one begins there, or "", and the row's label."""
        if row.offset < 0:
            return "", "⋮"
        if self.inside_rows.size == 1:
            return "", row.block
        return row.block if row.starts_block else "", f"{self.inside_rows.name}={row.coord}"

    def _cell(self, place: int, column: Slot) -> Piece:
        width = column.size
        if place < 0:
            return column.at, "…".center(width), ""
        rank, group = self.facts["ranks"][place], self.facts["group"][place]
        name = f"{rank}{self.letters(group)}"
        if rank == self.facts["rank"]:
            return column.at, f"[{name}]".rjust(width), f"bold {self.style(group)}"
        return column.at, f"{name} ".rjust(width), self.style(group)

    def _node_lines(self) -> tuple[Lines, Lines]:
        """Return whether there is a line to the left of [row + 1, column], and above [row, column + 1].

        Lines separate ranks on different nodes, and surround the grid. If nodes are unknown, there are no lines.
        Next to omitted coords, lines are drawn only at the edge of the picture.
        """
        known = self.facts["node"]
        drawn = np.full_like(self.places, _LEFT_OUT)
        if known is not None:
            drawn = np.where(self.places < 0, _LEFT_OUT, np.array(known)[self.places])
        nodes = np.pad(drawn, 1, constant_values=_LEFT_OUT if known is None else _OUTSIDE)
        return _parted(nodes[:, :-1], nodes[:, 1:]), _parted(nodes[:-1], nodes[1:])

    def _border(self, label: str, crossings: Numbers, above: Lines) -> Text:
        """Return the line above a row, with the label of the block that begins there."""
        drawn = ""
        for column, crossing, before in zip(self.bars, crossings, above, strict=False):
            drawn = drawn.ljust(column - self.bars[0], _NODE_LINES[12 * before]) + _NODE_LINES[crossing]
        return self._line(label, [(self.bars[0], drawn.rstrip(), "")])

    def _line(self, label: str, pieces: Iterable[Piece]) -> Text:
        """Return a line with a label in the margin and texts at their columns, each in its own style."""
        from rich.text import Text

        line = Text().append(label, "bold")
        for column, text, style in pieces:
            line.append(" " * (self.left + column - len(line)))
            line.append(text, style)
        return line
