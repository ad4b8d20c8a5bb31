"""The fewest bytes that any plan of a transfer sends and receives, from who holds and who needs each element."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshcomm.layout.layout import Ranks
from meshcomm.transfer.placement import Block, Ints, Placement
from meshcomm.transfer.plan import Ends, Entry, Leg, elements_of, held_by_reader, located

Sums = NDArray[np.float64]


class SendBound(NamedTuple):
    """most: some rank of the source sends at least so many bytes. mean: all of them together, divided by their number."""

    most: float
    mean: float


def received(entries: Sequence[Entry], ends: Ends, units: Ranks | None = None) -> Sums:
    """Return the bytes that each rank needs and does not hold, by its number.

    units: a unit, such as a node, of each number. Then return the bytes that some rank of a unit needs and none holds, by unit.
    """
    of_rank = np.arange(ends.size) if units is None else units
    need: Sums = np.zeros(int(of_rank.max()) + 1)
    if not np.isin(of_rank[ends.target_ranks], of_rank[ends.source_ranks]).any():
        for (itemsize, target), count in Counter((entry.itemsize, entry.target) for entry in entries).items():
            for block in located(target, ends.target).blocks:
                offsets, elements = _parts(block)
                readers = of_rank[ends.target_ranks[offsets[:, None] + block.copies]]
                _add(need, _distinct(readers), elements * (itemsize * count))
        return need
    for leg, nbytes in _legs(entries, ends):
        for pairs in leg.pairs():
            readers = _distinct(of_rank[ends.target_ranks[pairs.target[:, None] + pairs.target_copies]])
            holders = of_rank[ends.source_ranks[pairs.source[:, None] + pairs.source_copies]]
            # Rows are told apart by adding a multiple of the number of units.
            row = np.arange(len(readers))[:, None] * len(need)
            readers[np.isin(readers + row, holders + row) & (readers >= 0)] = -1
            _add(need, readers, elements_of(pairs.begin, pairs.end) * nbytes)
    return need


def leaving(entries: Sequence[Entry], ends: Ends, units: Ranks) -> Sums:
    """Return the bytes that only ranks of one unit hold and a rank of another unit needs, by unit. units: as for `received`."""
    held: Sums = np.zeros(int(units.max()) + 1)
    if not np.isin(units[ends.target_ranks], units[ends.source_ranks]).any():
        for (itemsize, source), count in Counter((entry.itemsize, entry.source) for entry in entries).items():
            for block in located(source, ends.source).blocks:
                offsets, elements = _parts(block)
                holders = units[ends.source_ranks[offsets[:, None] + block.copies]]
                alone = (holders == holders[:, :1]).all(axis=1)
                _add(held, holders[alone, :1], elements[alone] * (itemsize * count))
        return held
    for leg, nbytes in _legs(entries, ends):
        for pairs in leg.pairs():
            holders = units[ends.source_ranks[pairs.source[:, None] + pairs.source_copies]]
            readers = units[ends.target_ranks[pairs.target[:, None] + pairs.target_copies]]
            alone = (holders == holders[:, :1]).all(axis=1) & (readers != holders[:, :1]).any(axis=1)
            elements = elements_of(pairs.begin, pairs.end)
            _add(held, holders[alone, :1], elements[alone] * nbytes)
    return held


def sent(entries: Sequence[Entry], ends: Ends) -> SendBound:
    """Return what ranks of the source have to send: each element that another rank needs, once.

    For any set of ranks, what only they hold is sent by them, so one of them sends at least its share. The sets are the holders of
    each part, and ranks that are connected by parts that they hold together. For regular layouts no set gives more: if the holders
    of each part send equal shares of it, no rank sends more than this.
    """
    world = ends.source.world_size
    # By what the coords of copies add to a position: the bytes of the parts, by the position of the part.
    held: dict[bytes, tuple[Ints, Sums]] = {}

    def add(copies: Ints, parts: Ints, nbytes: Ints) -> None:
        _, sums = held.setdefault(copies.tobytes(), (copies, np.zeros(world)))
        sums += np.bincount(parts, nbytes, world)

    if ends.overlap:
        for leg, nbytes in _legs(entries, ends):
            for pairs in leg.pairs():
                needed = ~held_by_reader(pairs, ends).all(axis=1)
                elements = elements_of(pairs.begin, pairs.end)
                add(pairs.source_copies, pairs.source, elements * needed * nbytes)
    else:
        for (itemsize, source), count in Counter((entry.itemsize, entry.source) for entry in entries).items():
            for block in located(source, ends.source).blocks:
                offsets, elements = _parts(block)
                add(block.copies, offsets, elements * (itemsize * count))
    groups = [
        (parts[:, None] + copies, sums[parts])
        for copies, sums in held.values()
        if len(parts := np.flatnonzero(sums))
    ]
    most = 0.0
    for members, _ in groups:
        most = max(most, float((_within(groups, members, world) / members.shape[1]).max()))
    connected = _connected([members for members, _ in groups], world)
    in_component = np.zeros(world)
    for members, sums in groups:
        np.add.at(in_component, connected[members[:, 0]], sums)
    most = max(most, float((in_component / np.maximum(np.bincount(connected, minlength=world), 1)).max()))
    return SendBound(most, float(in_component.sum()) / world)


def _within(groups: Sequence[tuple[Ints, Sums]], sets: Ints, world: int) -> Sums:
    """Return the bytes of all groups that lie within each set of positions. Sets do not overlap."""
    number = np.full(world, -1)
    number[sets] = np.arange(len(sets))[:, None]
    total = np.zeros(len(sets))
    for members, sums in groups:
        of_members = number[members]
        inside = (of_members[:, 0] >= 0) & (of_members == of_members[:, :1]).all(axis=1)
        np.add.at(total, of_members[inside, 0], sums[inside])
    return total


def _connected(groups: Sequence[Ints], world: int) -> Ints:
    """Return the lowest position that each position is connected with by groups."""
    lowest = np.arange(world)
    before = lowest[:0]
    while not np.array_equal(before, lowest):
        before = lowest.copy()
        for members in groups:
            lowest[members] = lowest[members].min(axis=1)[:, None]
    return lowest


def _legs(entries: Sequence[Entry], ends: Ends) -> Iterator[tuple[Leg, int]]:
    """Yield each pair of placements, and the bytes of an element of all its tensors."""
    kinds: Counter[tuple[Placement, Placement]] = Counter()
    for entry in entries:
        kinds[entry.source, entry.target] += entry.itemsize
    for (source, target), nbytes in kinds.items():
        yield Leg(located(source, ends.source), located(target, ends.target), ends), nbytes


def _parts(block: Block) -> tuple[Ints, Ints]:
    """Return what the coords of each part of a block add to a position, and its elements."""
    offsets, elements = np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64)
    for cuts in block.cuts:
        offsets = (offsets[:, None] + cuts.offsets).ravel()
        elements = (elements[:, None] * (cuts.ends - cuts.begins)).ravel()
    return offsets, elements


def _distinct(rows: Ints) -> Ints:
    """Return sorted rows in which a number that occurs again is replaced by -1."""
    rows = np.sort(rows, axis=1)
    rows[:, 1:][rows[:, 1:] == rows[:, :-1]] = -1
    return rows


def _add(sums: Sums, units: Ints, values: Ints) -> None:
    """Add each row's value to its units; -1 is none."""
    some = units >= 0
    sums += np.bincount(units[some], np.broadcast_to(values[:, None], units.shape)[some], len(sums))
