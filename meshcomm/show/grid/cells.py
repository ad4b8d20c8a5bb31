"""The rank grid as a list of cells: which ranks are drawn, where, and in which colour; the writers only print it.

Two inner dims make a block of rows and columns, the outer ones lay out the blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from meshcomm.config import TopologyConfig
from meshcomm.layout import Dims, Plan
from meshcomm.layout.sizes import coords_text, fold
from meshcomm.show.units import count

Facts = dict[str, Any]
Lines = npt.NDArray[np.bool_]

# Okabe and Ito's palette (Color Universal Design, 2008), a grey in place of its black: colours that tell eight
# groups apart, also for people who do not see all colours.
PALETTE: Final = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#f0e442", "#0072b2", "#d55e00", "#b3b3b3")
_OUTSIDE, _LEFT_OUT = -1, -2


def grid_facts(
    plan: Plan, by: Dims | None = None, topology: TopologyConfig | None = None, rank: int | None = None
) -> Facts:
    """The rank grid, with the groups along `by`, as data that JSON can hold.

    by: a dim, a merged dim, a view's dim, or a tuple of them. None: the innermost dim of the base.
    rank: one to mark.

    Keys: world_size, fingerprint; by (its name), by_dims, size (ranks of a group), groups (their
    number); view (whose dims are drawn, "" for the base), dims (their sizes, outermost first); ranks,
    group, node: for each place of the grid, row-major over dims, its rank, the index of the rank's
    group and the rank's node; node, nodes (their number) and ranks_per_node are None where nobody says
    which ranks share a node; rank.
    Raises UnknownDim, and LayoutError where the mesh does not have `rank`.
    """
    layout = plan.layout
    chosen: Dims = list(layout.dims)[-1] if by is None else by
    size, view = layout.digits(chosen).size, layout.home(chosen)
    if rank is not None:
        layout.position(rank)
    positions = np.arange(layout.world_size, dtype=np.int64)
    per_node = None if topology is None else topology.ranks_per_node
    nodes = None if per_node is None else layout.ranks // per_node
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


def headlines(facts: Facts) -> list[str]:
    """What is drawn, what the colours and what the lines mean."""
    where = f" of view {facts['view']}" if facts["view"] else ""
    drawn = f"{coords_text(facts['dims'])}{where}, by {facts['by']}"
    lines = [f"{drawn}: {count(facts['groups'], 'group')} of {facts['size']:,}"]
    nodes, each = facts["nodes"], facts["ranks_per_node"]
    if nodes is None:
        return [*lines, "nodes are not known: topology.ranks_per_node says which ranks share one"]
    full = "" if nodes * each == facts["world_size"] else "up to "
    return [*lines, f"lines part nodes: {count(nodes, 'node')}, {full}{each:,} ranks on each"]


class Room(NamedTuple):
    """How much room there is in one direction, in columns, lines or pixels.

    total: all of it. cell: one rank. inner, outer: between ranks of a block, between blocks.
    gap: the mark of coords that are left out.
    """

    total: int
    cell: int
    inner: int
    outer: int
    gap: int


@dataclass(frozen=True, slots=True)
class Axis:
    """One direction of the picture: a dim, several merged ones, or none (size 1).

    sizes: its dims, outermost first. stride: places from one coord to the next.
    coords: the drawn ones, in order, with None where coords are left out.
    """

    sizes: dict[str, int]
    stride: int
    coords: list[int | None]

    @property
    def size(self) -> int:
        """Number of coords."""
        return prod(self.sizes.values())

    @property
    def name(self) -> str:
        """The dims' names."""
        return " ".join(self.sizes)

    def label(self, coord: int) -> str:
        """Its dims' coords, as in `pp=1`; "" for an axis of size 1."""
        return coords_text(_digits(self.sizes, coord))

    def left_out(self) -> list[str]:
        """The coords that are not drawn, and their number; nothing where all are."""
        drawn = [coord for coord in self.coords if coord is not None]
        ranges = []
        for before, after in pairwise([-1, *drawn, self.size]):
            if after - before > 1:
                last = f" to {self.label(after - 1)}" if after - before > 2 else ""
                ranges.append(self.label(before + 1) + last)
        return [f"{', '.join(ranges)} ({self.size - len(drawn):,} of {self.size:,})"] if ranges else []


class Slot(NamedTuple):
    """One row or column of the picture.

    at, size: where it begins and how long it is. offset: its part of the place of a cell; None: coords are
    left out here. coord, block: labels of its coord inside of the block, and of the block.
    """

    at: int
    size: int
    offset: int | None
    coord: str
    block: str
    starts_block: bool


class Cell(NamedTuple):
    """A rank at a row and a column, with the index and the name of its group; or a mark where ranks are left out."""

    row: Slot
    column: Slot
    rank: int | None = None
    group: int = 0
    group_name: str = ""
    coords: str = ""
    node: int | None = None


class Grid:
    """What is drawn of `grid_facts` in so much room; long dims are folded.

    rows, columns: the drawn slots. cells: a list for each row, empty if the row is left out.
    down, across: the axes of the blocks. inside_rows, inside_columns: the axes of the ranks in a block.
    lettered: there are more groups than colours.
    """

    def __init__(self, facts: Facts, width: Room, height: Room) -> None:
        self.facts = facts
        self.lettered: bool = facts["groups"] > len(PALETTE)
        self.down, self.across, self.inside_rows, self.inside_columns = _axes(facts, width, height)
        self.rows = _slots(self.down, self.inside_rows, height)
        self.columns = _slots(self.across, self.inside_columns, width)
        self.cells = [
            [] if row.offset is None else [self._cell(row, column) for column in self.columns]
            for row in self.rows
        ]

    def _cell(self, row: Slot, column: Slot) -> Cell:
        if row.offset is None or column.offset is None:
            return Cell(row, column)
        facts, place = self.facts, row.offset + column.offset
        coords = _digits(facts["dims"], place)
        common = {name: coord for name, coord in coords.items() if name not in facts["by_dims"]}
        return Cell(
            row,
            column,
            facts["ranks"][place],
            facts["group"][place],
            f"{facts['by']}[{coords_text(common)}]",
            coords_text(coords),
            None if facts["node"] is None else facts["node"][place],
        )

    def row_labels(self, row: Slot) -> tuple[str, str]:
        """Left of a row: the name of the block that begins there, or "", and the row's own label."""
        if row.offset is None:
            return "", "⋮"
        if self.inside_rows.size == 1:
            return "", row.block
        return row.block if row.starts_block else "", f"{self.inside_rows.name}={row.coord}"

    def node_lines(self) -> tuple[Lines, Lines]:
        """Whether a line is left of [row + 1, column], and whether one is above [row, column + 1].

        Lines part ranks of different nodes, and surround all of them; none where nodes are not known.
        Next to coords that are left out a line is only at the edge of the picture.
        """
        left_out = [_LEFT_OUT] * len(self.columns)
        inside = [[_LEFT_OUT if c.node is None else c.node for c in row] or left_out for row in self.cells]
        nodes = np.pad(inside, 1, constant_values=_LEFT_OUT if self.facts["node"] is None else _OUTSIDE)
        return _parted(nodes[:, :-1], nodes[:, 1:]), _parted(nodes[:-1], nodes[1:])

    def legend(self, most: int) -> tuple[list[tuple[int, str]], list[str]]:
        """Index, and name and ranks in coord order, of the first groups that are drawn; and notes on what is not."""
        names = {cell.group: cell.group_name for row in self.cells for cell in row if cell.rank is not None}
        ranks, groups = np.array(self.facts["ranks"]), np.array(self.facts["group"])
        entries = [
            (index, f"{names[index]} {fold(ranks[groups == index])}") for index in sorted(names)[:most]
        ]
        rest = self.facts["groups"] - len(entries)
        notes = [f"and {rest:,} more groups"] if rest else []
        if len(self.down.sizes) > 1:
            notes.append(f"more than four dims: {self.down.name} go downwards as one")
        axes = (self.down, self.across, self.inside_rows, self.inside_columns)
        left_out = "; ".join(text for axis in axes for text in axis.left_out())
        return entries, [*notes, f"not drawn: {left_out}"] if left_out else notes


def between(slots: Sequence[Slot], edge: int) -> list[int]:
    """Where lines between slots go: one in the middle of each gap, one `edge` away at both ends."""
    middles = [after.at - (after.at - before.at - before.size + 1) // 2 for before, after in pairwise(slots)]
    return [slots[0].at - edge, *middles, slots[-1].at + slots[-1].size + edge]


def widest_label(facts: Facts) -> int:
    """Characters of the longest text in the margin."""
    *labelled, columns = _directions(facts)
    last = [coords_text({name: size - 1 for name, size in sizes.items()}) for sizes in labelled]
    return max(map(len, [" ".join(columns), *last]))


def colours(group: int) -> tuple[str, str]:
    """The colour of a group, and black or white for text on it."""
    colour = PALETTE[group % len(PALETTE)]
    return colour, "#ffffff" if colour == "#0072b2" else "#000000"


def tag(index: int) -> str:
    """Letters for a group's index, where colours do not tell groups apart.

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
    """The coords, by dim, that a number stands for in row-major order."""
    return dict(zip(sizes, map(int, np.unravel_index(number, tuple(sizes.values()))), strict=True))


def _directions(facts: Facts) -> list[dict[str, int]]:
    """The dims of blocks downwards, of blocks across, of the rows and of the columns in a block."""
    dims = [(name, size) for name, size in facts["dims"].items() if size > 1]
    return [dict(dims[:-3]), dict(dims[-3:-2]), dict(dims[-2:-1]), dict(dims[-1:])]


def _axes(facts: Facts, width: Room, height: Room) -> tuple[Axis, Axis, Axis, Axis]:
    """Blocks downwards, blocks across, rows, columns: as many coords as fit, those of the marked rank among them."""
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
    """So many coords of the dims: the first ones, the last, and that of a place."""
    size = prod(sizes.values())
    chosen = [*range(drawn - 1), size - 1] if drawn > 1 else [0]
    if place // stride % size not in chosen:
        chosen[max(drawn - 2, 0)] = place // stride % size
    coords: list[int | None] = []
    for before, coord in pairwise([-1, *sorted(chosen), size]):
        coords += [coord] if coord == before + 1 else [None, coord]
    return Axis(sizes, stride, coords[:-1])


def _drawn(inside: int, blocks: int, room: Room, gaps: int) -> tuple[int, int]:
    """How many coords inside a block and how many blocks to draw: as many ranks as fit, at least one.

    gaps: where coords are left out, so many marks say so.
    """
    best, score = (1, 1), (0, 0, 0)
    limit = max(1, room.total // room.cell)
    for inner, outer in product(range(1, min(inside, limit) + 1), range(1, min(blocks, limit) + 1)):
        block = _length(inner, inside - inner, room.cell, room.inner, room.gap, gaps)
        # First and last of each before more of one.
        found = (min(inner, 2) + min(outer, 2), inner * outer, inner)
        if found > score and _length(outer, blocks - outer, block, room.outer, room.gap, gaps) <= room.total:
            best, score = (inner, outer), found
    return best


def _length(drawn: int, left_out: int, size: int, between: int, gap: int, gaps: int) -> int:
    marks = min(left_out, gaps)
    return drawn * size + (drawn - 1 + marks) * between + marks * gap


def _slots(blocks: Axis, inside: Axis, room: Room) -> list[Slot]:
    slots: list[Slot] = []
    at = 0
    for block in blocks.coords:
        for index, coord in enumerate([None] if block is None else inside.coords):
            at += 0 if not slots else room.inner if index else room.outer
            label = "…" if block is None else blocks.label(block)
            if block is None or coord is None:
                slots.append(Slot(at, room.gap, None, "" if block is None else "…", label, index == 0))
            else:
                offset = block * blocks.stride + coord * inside.stride
                slots.append(Slot(at, room.cell, offset, str(coord), label, index == 0))
            at += slots[-1].size
    return slots


def _parted(a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]) -> Lines:
    left_out, outside = (a == _LEFT_OUT) | (b == _LEFT_OUT), (a == _OUTSIDE) | (b == _OUTSIDE)
    parted: Lines = np.where(left_out, outside, a != b)
    return parted
