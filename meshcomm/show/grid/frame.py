"""Which ranks of a grid are drawn, and where: two inner dims make a block, the outer ones lay blocks out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

Facts = dict[str, Any]
Lines = npt.NDArray[np.bool_]

# Okabe and Ito's palette (Color Universal Design, 2008), a grey in place of its black: colours that tell eight
# groups apart, also for people who do not see all colours; with the colour of text that has the higher contrast.
PALETTE: Final = (
    ("#56b4e9", "#000000"),
    ("#e69f00", "#000000"),
    ("#009e73", "#000000"),
    ("#cc79a7", "#000000"),
    ("#f0e442", "#000000"),
    ("#0072b2", "#ffffff"),
    ("#d55e00", "#000000"),
    ("#b3b3b3", "#000000"),
)
_OUTSIDE, _LEFT_OUT = -1, -2


class Units(NamedTuple):
    """How much room things take in one direction, in columns, lines or pixels.

    total: all there is. cell: one rank. inner, outer: between ranks of a block, between blocks.
    gap: the mark of what is left out. most: coords of a dim that are drawn at most.
    """

    total: int
    cell: int
    inner: int
    outer: int
    gap: int
    most: int


class Slot(NamedTuple):
    """One row or column of the picture: coords of its block and inside it, None: left out there; its place."""

    outer: int | None
    inner: int | None
    starts_block: bool
    at: int
    size: int


@dataclass(frozen=True, slots=True)
class Axis:
    """One direction of the picture: a dim, several merged ones, or none (size 1).

    sizes: its dims, outermost first. coords: those that are drawn: all, or the first ones and the last.
    """

    sizes: dict[str, int]
    coords: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of coords."""
        return prod(self.sizes.values())

    @property
    def name(self) -> str:
        """The dims' names."""
        return " ".join(self.sizes)

    def slots(self) -> list[int | None]:
        """The drawn coords in order; None is a gap."""
        found: list[int | None] = []
        for before, coord in pairwise([-1, *self.coords, self.size]):
            found += [coord] if coord == before + 1 else [None, coord]
        return found[:-1]

    def label(self, coord: int) -> str:
        """Its dims' coords, as in `pp=1`."""
        parts: list[str] = []
        for name, size in reversed(self.sizes.items()):
            coord, digit = divmod(coord, size)
            parts.append(f"{name}={digit}")
        return " ".join(reversed(parts))

    def labels(self) -> list[str]:
        """Those of all drawn coords; none for an axis of size 1."""
        return [self.label(coord) for coord in self.coords] if self.size > 1 else []

    def told(self) -> str | None:
        """What is not drawn, or None."""
        ranges = []
        for before, after in pairwise([-1, *self.coords, self.size]):
            first, last = before + 1, after - 1
            if first <= last:
                ranges.append(self.label(first) + (f" to {self.label(last)}" if first < last else ""))
        return f"{', '.join(ranges)} ({self.size - len(self.coords):,} of {self.size:,})" if ranges else None


@dataclass(frozen=True, slots=True)
class Frame:
    """The picture's four directions, outermost first: blocks downwards, blocks across, rows, columns."""

    down: Axis
    across: Axis
    rows: Axis
    columns: Axis

    def y(self, units: Units, start: int = 0) -> list[Slot]:
        """Every row of the picture."""
        return _slots(self.down, self.rows, units, start)

    def x(self, units: Units, start: int = 0) -> list[Slot]:
        """Every column of the picture."""
        return _slots(self.across, self.columns, units, start)

    def place(self, row: Slot, column: Slot) -> int | None:
        """Index into the facts' lists; None where something is left out."""
        if row.outer is None or row.inner is None or column.outer is None or column.inner is None:
            return None
        # Row-major over the dims: down is outermost, columns innermost.
        outer = row.outer * self.across.size + column.outer
        return (outer * self.rows.size + row.inner) * self.columns.size + column.inner

    def places(self) -> Iterator[int]:
        """Every place that is drawn."""
        sizes = self.down.size, self.across.size, self.rows.size, self.columns.size
        drawn = np.ix_(self.down.coords, self.across.coords, self.rows.coords, self.columns.coords)
        yield from np.ravel_multi_index(drawn, sizes).ravel().tolist()

    def notes(self) -> list[str]:
        """What is not drawn, and which dims share a direction."""
        merged = [f"more than four dims: {self.down.name} go downwards as one"] * (len(self.down.sizes) > 1)
        told = [axis.told() for axis in (self.down, self.across, self.rows, self.columns)]
        left_out = "; ".join(text for text in told if text is not None)
        return [*merged, f"not drawn: {left_out}"] if left_out else merged

    def borders(self, facts: Facts) -> tuple[Lines, Lines]:
        """Whether a line stands left of [row + 1, column], and whether one lies above [row, column + 1].

        Lines part ranks of different nodes, and are around all of them; none where nodes are not known.
        Rows and columns count slots. Beside something that is left out a line is only at the picture's edge.
        """
        units = Units(0, 0, 0, 0, 0, 0)
        rows, columns = self.y(units), self.x(units)
        left = np.zeros((len(rows) + 2, len(columns) + 1), dtype=bool)
        above = np.zeros((len(rows) + 1, len(columns) + 2), dtype=bool)
        if facts["node"] is not None:
            nodes = np.full((len(rows) + 2, len(columns) + 2), _OUTSIDE)
            for (i, row), (j, column) in ((r, c) for r in enumerate(rows, 1) for c in enumerate(columns, 1)):
                place = self.place(row, column)
                nodes[i, j] = _LEFT_OUT if place is None else facts["node"][place]
            left[1:-1] = _parted(nodes[1:-1, :-1], nodes[1:-1, 1:])
            above[:, 1:-1] = _parted(nodes[:-1, 1:-1], nodes[1:, 1:-1])
        return left, above


def _parted(a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]) -> Lines:
    left_out, outside = (a == _LEFT_OUT) | (b == _LEFT_OUT), (a == _OUTSIDE) | (b == _OUTSIDE)
    parted: Lines = np.where(left_out, outside, a != b)
    return parted


def frame(facts: Facts, width: Units, height: Units) -> Frame:
    """What of a grid fits: as many ranks as there is room for, of every folded dim the first and the last."""
    dims = [{name: size} for name, size in facts["dims"].items() if size > 1]
    columns, rows, across = ([*reversed(dims), {}, {}, {}])[:3]
    down = {name: size for each in dims[:-3] for name, size in each.items()}
    if not down and not _fits(columns, across, width):
        down, across = across, down
    # In any case the coords of the marked rank are drawn.
    kept = None if facts["rank"] is None else facts["ranks"].index(facts["rank"])
    gaps = 1 if kept is None else 2
    keep: list[int | None] = []
    for sizes in (columns, rows, across, down):
        kept, coord = (None, None) if kept is None else divmod(kept, prod(sizes.values()))
        keep.append(coord)
    drawn_columns, drawn_across = _most(prod(columns.values()), prod(across.values()), width, gaps)
    drawn_rows, drawn_down = _most(prod(rows.values()), prod(down.values()), height, gaps)
    return Frame(
        _axis(down, drawn_down, keep[3]),
        _axis(across, drawn_across, keep[2]),
        _axis(rows, drawn_rows, keep[1]),
        _axis(columns, drawn_columns, keep[0]),
    )


def _axis(sizes: dict[str, int], drawn: int, keep: int | None) -> Axis:
    size = prod(sizes.values())
    chosen = [*range(drawn - 1), size - 1] if drawn > 1 else [0]
    if keep is not None and keep not in chosen and drawn < size:
        chosen[max(drawn - 2, 0)] = keep
    return Axis(sizes, tuple(sorted(chosen)))


def _slots(blocks: Axis, inside: Axis, units: Units, at: int) -> list[Slot]:
    found: list[Slot] = []
    for outer in blocks.slots():
        for index, inner in enumerate([None] if outer is None else inside.slots()):
            at += 0 if not found else units.inner if index else units.outer
            found.append(Slot(outer, inner, index == 0, at, units.gap if inner is None else units.cell))
            at += found[-1].size
    return found


def middles(slots: list[Slot], edge: int) -> list[int]:
    """Where lines between slots go: one in the middle of each gap, one `edge` away at both ends."""
    between = [after.at - (after.at - before.at - before.size + 1) // 2 for before, after in pairwise(slots)]
    return [slots[0].at - edge, *between, slots[-1].at + slots[-1].size + edge]


def _length(cells: int, all_cells: int, cell: int, between: int, gap: int, gaps: int = 1) -> int:
    gaps = min(gaps, all_cells - cells)
    return cells * cell + (cells - 1 + gaps) * between + gaps * gap


def _fits(inside: dict[str, int], blocks: dict[str, int], units: Units) -> bool:
    count, outer = prod(inside.values()), prod(blocks.values())
    block = _length(count, count, units.cell, units.inner, units.gap)
    length = _length(outer, outer, block, units.outer, units.gap)
    return max(count, outer) <= units.most and length <= units.total


def _most(inside: int, blocks: int, units: Units, gaps: int) -> tuple[int, int]:
    """How many coords inside a block and how many blocks to draw. At least one of each."""
    best, score = (1, 1), (0, 0, 0)
    for inner in range(1, min(inside, units.most) + 1):
        block = _length(inner, inside, units.cell, units.inner, units.gap, gaps)
        outer = blocks
        if blocks > units.most or _length(blocks, blocks, block, units.outer, units.gap) > units.total:
            room = units.total + units.outer - gaps * (units.gap + units.outer)
            outer = min(room // (block + units.outer), blocks - 1, units.most)
        if outer < 1:
            break
        # First and last of each before more of one.
        found = (min(inner, 2) + min(outer, 2), inner * outer, inner)
        if found > score:
            best, score = (inner, outer), found
    return best
