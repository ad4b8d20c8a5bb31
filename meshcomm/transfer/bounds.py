"""The fewest bytes that any plan of a transfer sends and receives, from who holds and who needs each element."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshcomm.layout import Layout
from meshcomm.layout.layout import Ranks
from meshcomm.transfer.placement import Ints, Placement
from meshcomm.transfer.plan import Ends, Entry, Leg, Pairs, elements_of, held_by_reader, located

Sums = NDArray[np.float64]

_ONE: Final = Layout({"one": 1})


class _Shared(NamedTuple):
    """What parts of both sides have in common, with its bytes, and the units of its holders and readers, of shape (pairs, copies)."""

    pairs: Pairs
    nbytes: Ints
    holders: Ranks
    readers: Ranks


def received(entries: Sequence[Entry], ends: Ends, units: Ranks | None = None) -> Sums:
    """Return the bytes that each rank needs and does not hold, by its number.

    units: a unit, such as a node, of each number. Then return the bytes that some rank of a unit needs and none holds, by unit.
    """
    units = np.arange(ends.size) if units is None else units
    need: Sums = np.zeros(int(units.max()) + 1)
    for _, nbytes, holders, readers in _shared(entries, ends, units, of_source=False):
        readers = np.sort(readers, axis=1)
        # Rows are told apart by adding a multiple of the number of units.
        row = np.arange(len(readers))[:, None] * len(need)
        wanted = ~np.isin(readers + row, holders + row)
        wanted[:, 1:] &= readers[:, 1:] != readers[:, :-1]
        need += np.bincount(
            readers[wanted], np.broadcast_to(nbytes[:, None], wanted.shape)[wanted], len(need)
        )
    return need


def leaving(entries: Sequence[Entry], ends: Ends, units: Ranks) -> Sums:
    """Return the bytes that only ranks of one unit hold and a rank of another unit needs, by unit. units: as for `received`."""
    held: Sums = np.zeros(int(units.max()) + 1)
    for _, nbytes, holders, readers in _shared(entries, ends, units, of_source=True):
        alone = (holders == holders[:, :1]).all(axis=1) & (readers != holders[:, :1]).any(axis=1)
        held += np.bincount(holders[alone, 0], nbytes[alone], len(held))
    return held


def sent(entries: Sequence[Entry], ends: Ends) -> float:
    """Return how many bytes some rank of the source has to send, if each element that another rank needs is sent once.

    For any set of ranks, what only they hold is sent by them, so one of them sends at least its share. The sets are the holders of
    each part, and ranks that are connected by parts that they hold together. For regular layouts no set gives more: if the holders
    of each part send equal shares of it, no rank sends more than this.
    """
    world = ends.source.world_size
    # By what the coords of copies add to a position: the bytes of the parts, by the position of the part.
    held: dict[bytes, tuple[Ints, Sums]] = {}
    for pairs, nbytes, _, _ in _shared(entries, ends, np.arange(ends.size), of_source=True):
        needed = ~held_by_reader(pairs, ends).all(axis=1)
        _, sums = held.setdefault(pairs.source_copies.tobytes(), (pairs.source_copies, np.zeros(world)))
        sums += np.bincount(pairs.source, nbytes * needed, world)
    groups = [
        (parts[:, None] + copies, sums[parts])
        for copies, sums in held.values()
        if len(parts := np.flatnonzero(sums))
    ]
    sets = [_connected([members for members, _ in groups], world)]
    for members, _ in groups:
        sets.append(np.full(world, -1))
        sets[-1][members] = np.arange(len(members))[:, None]
    return max(_share(groups, numbers) for numbers in sets)


def _share(groups: Sequence[tuple[Ints, Sums]], numbers: Ints) -> float:
    """Return the most bytes of groups that lie within a set of positions, divided by its size.

    numbers: of the set of each position; -1 for none.
    """
    total, sizes = np.zeros(len(numbers)), np.bincount(numbers[numbers >= 0], minlength=len(numbers))
    for members, sums in groups:
        of_members = numbers[members]
        inside = (of_members[:, 0] >= 0) & (of_members == of_members[:, :1]).all(axis=1)
        np.add.at(total, of_members[inside, 0], sums[inside])
    return float((total / np.maximum(sizes, 1)).max())


def _connected(groups: Sequence[Ints], world: int) -> Ints:
    """Return the lowest position that each position is connected with by groups."""
    lowest = np.arange(world)
    before = lowest[:0]
    while not np.array_equal(before, lowest):
        before = lowest.copy()
        for members in groups:
            lowest[members] = lowest[members].min(axis=1)[:, None]
    return lowest


def _shared(entries: Sequence[Entry], ends: Ends, units: Ranks, *, of_source: bool) -> Iterator[_Shared]:
    """Yield what both sides have in common.

    of_source: whether parts of the source matter, or those of the target. If no unit has ranks of both sides, all of the other
    side is taken as one rank, because it does not matter which of its ranks have what.
    """
    apart = not np.isin(units[ends.target_ranks], units[ends.source_ranks]).any()
    sides = ends.source if of_source or not apart else _ONE, _ONE if of_source and apart else ends.target
    kinds: Counter[tuple[Placement, Placement]] = Counter()
    for entry in entries:
        source = entry.source.whole if sides[0] is _ONE else entry.source
        target = entry.target.whole if sides[1] is _ONE else entry.target
        kinds[source, target] += entry.itemsize
    for (source, target), itemsize in kinds.items():
        for pairs in Leg(located(source, sides[0]), located(target, sides[1]), ends).pairs():
            yield _Shared(
                pairs,
                elements_of(pairs.begin, pairs.end) * itemsize,
                units[ends.source_ranks[pairs.source[:, None] + pairs.source_copies]],
                units[ends.target_ranks[pairs.target[:, None] + pairs.target_copies]],
            )
