"""Which ranks of a grid are drawn, and where: two inner dims make a block, the outer ones lay blocks out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

Facts = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Axis:
    """One direction of the picture: a dim, several merged ones, or none (size 1).

    sizes: its dims, outermost first. drawn: how many of its coords are drawn; where that is not all,
    the first ones and the last one. keep: a coord that is drawn in any case.
    """

    sizes: dict[str, int]
    size: int
    drawn: int
    keep: int | None = None

    @property
    def name(self) -> str:
        """The dims' names."""
        return " ".join(self.sizes)

    def coords(self) -> list[int]:
        """The drawn coords."""
        if self.drawn == self.size:
            return list(range(self.size))
        chosen = [*range(self.drawn - 1), self.size - 1] if self.drawn > 1 else [0]
        if self.keep is not None and self.keep not in chosen:
            chosen[max(self.drawn - 2, 0)] = self.keep
        return sorted(chosen)

    def slots(self) -> list[int | None]:
        """The drawn coords in order; None is a gap."""
        found: list[int | None] = []
        after = 0
        for coord in self.coords():
            found += [coord] if coord == after else [None, coord]
            after = coord + 1
        return found if after == self.size else [*found, None]

    def label(self, coord: int) -> str:
        """Its dims' coords, as in `pp=1`."""
        parts: list[str] = []
        for name, size in reversed(self.sizes.items()):
            coord, digit = divmod(coord, size)
            parts.append(f"{name}={digit}")
        return " ".join(reversed(parts))

    def told(self) -> str | None:
        """What is not drawn, or None."""
        if self.drawn == self.size:
            return None
        ranges = []
        for before, after in pairwise([-1, *self.coords(), self.size]):
            first, last = before + 1, after - 1
            if first <= last:
                ranges.append(self.label(first) + (f" to {self.label(last)}" if first < last else ""))
        return f"{', '.join(ranges)} ({self.size - self.drawn:,} of {self.size:,})"


class Units(NamedTuple):
    """How much room things take in one direction, in columns, lines or pixels.

    total: all there is. cell: one rank. inner, outer: between ranks of a block, between blocks.
    gap: the mark of what is left out. most: coords of a dim that are drawn at most.
    """

    total: float
    cell: float
    inner: float
    outer: float
    gap: float
    most: int


class Slot(NamedTuple):
    """One row or column of the picture: coords of its block and inside it; None: left out there."""

    outer: int | None
    inner: int | None
    starts_block: bool


Slots: TypeAlias = list[Slot]


@dataclass(frozen=True, slots=True)
class Frame:
    """The picture's four directions, outermost first: blocks downwards, blocks across, rows, columns."""

    down: Axis
    across: Axis
    rows: Axis
    columns: Axis
    merged: bool

    def row_slots(self) -> Slots:
        """Every row of the picture."""
        return _slots(self.down, self.rows)

    def column_slots(self) -> Slots:
        """Every column of the picture."""
        return _slots(self.across, self.columns)

    def place(self, row: Slot, column: Slot) -> int | None:
        """Index into the facts' lists; None where something is left out."""
        if row.outer is None or row.inner is None or column.outer is None or column.inner is None:
            return None
        # Row-major over the dims: down is outermost, columns innermost.
        outer = row.outer * self.across.size + column.outer
        return (outer * self.rows.size + row.inner) * self.columns.size + column.inner

    def places(self) -> Iterator[int]:
        """Every place that is drawn, row by row."""
        for row in self.row_slots():
            for column in self.column_slots():
                place = self.place(row, column)
                if place is not None:
                    yield place

    def notes(self) -> list[str]:
        """What is not drawn, and which dims share a direction."""
        lines = []
        if self.merged:
            lines.append(f"more than four dims: {self.down.name} go downwards as one")
        told = [axis.told() for axis in (self.down, self.across, self.rows, self.columns)]
        left_out = "; ".join(text for text in told if text is not None)
        if left_out:
            lines.append(f"not drawn: {left_out}")
        return lines


def frame(facts: Facts, width: Units, height: Units) -> Frame:
    """What of a grid fits: as many ranks as there is room for, of every folded dim the first and the last."""
    dims = {name: size for name, size in facts["dims"].items() if size > 1}
    names = list(dims)
    columns = {name: dims[name] for name in names[-1:]}
    rows = {name: dims[name] for name in names[-2:-1]}
    outer = names[:-2]
    across = {name: dims[name] for name in outer[-1:]}
    down = {name: dims[name] for name in outer[:-1]}
    if not down and not _fits(columns, across, width):
        down, across = across, down
    kept = None if facts["rank"] is None else place_of(facts, facts["rank"])
    axes = []
    for sizes in (columns, rows, across, down):
        keep = None
        if kept is not None:
            kept, keep = divmod(kept, _size(sizes))
        axes.append(Axis(sizes, _size(sizes), 1, keep))
    gaps = 1 if facts["rank"] is None else 2
    drawn_columns, drawn_across = _most(axes[0].size, axes[2].size, width, gaps)
    drawn_rows, drawn_down = _most(axes[1].size, axes[3].size, height, gaps)
    return Frame(
        replace(axes[3], drawn=drawn_down),
        replace(axes[2], drawn=drawn_across),
        replace(axes[1], drawn=drawn_rows),
        replace(axes[0], drawn=drawn_columns),
        merged=len(down) > 1,
    )


def place_of(facts: Facts, rank: int) -> int:
    """Where a rank is in the facts' lists."""
    return int(facts["ranks"].index(rank))


def _slots(blocks: Axis, inside: Axis) -> Slots:
    found: Slots = []
    for outer in blocks.slots():
        if outer is None:
            found.append(Slot(None, None, True))
            continue
        for index, inner in enumerate(inside.slots()):
            found.append(Slot(outer, inner, index == 0))
    return found


def _size(dims: Mapping[str, int]) -> int:
    product = 1
    for size in dims.values():
        product *= size
    return product


def _length(cells: int, all_cells: int, cell: float, between: float, gap: float, gaps: int = 1) -> float:
    gaps = min(gaps, all_cells - cells)
    return cells * cell + (cells - 1 + gaps) * between + gaps * gap


def _fits(inside: Mapping[str, int], blocks: Mapping[str, int], units: Units) -> bool:
    count, outer = _size(inside), _size(blocks)
    if count > units.most or outer > units.most:
        return False
    block = _length(count, count, units.cell, units.inner, units.gap)
    return _length(outer, outer, block, units.outer, units.gap) <= units.total


def _most(inside: int, blocks: int, units: Units, gaps: int) -> tuple[int, int]:
    """How many coords inside a block and how many blocks to draw. At least one of each."""
    best = (1, 1)
    score = (0, 0, 0)
    for inner in range(1, min(inside, units.most) + 1):
        block = _length(inner, inside, units.cell, units.inner, units.gap, gaps)
        if _length(blocks, blocks, block, units.outer, units.gap) <= units.total and blocks <= units.most:
            outer = blocks
        else:
            room = units.total + units.outer - gaps * (units.gap + units.outer)
            outer = min(int(room // (block + units.outer)), blocks - 1, units.most)
        if outer < 1:
            break
        # First and last of each before more of one.
        found = (min(inner, inside, 2) + min(outer, blocks, 2), inner * outer, inner)
        if found > score:
            best, score = (inner, outer), found
    return best
