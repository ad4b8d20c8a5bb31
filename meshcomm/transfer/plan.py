"""Who sends which piece of a tensor to whom, computed from two placements. Requires neither processes nor tensors.

Both sides are cut along each axis by itself, so the pieces that a part of the source and a part of the target have in common
follow from the intervals of each axis. A piece that a rank holds already is copied. The other readers of a piece take turns at
its holders, so that each holder sends the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from meshcomm.layout import Layout
from meshcomm.transfer.placement import Block, Cuts, Ints, Located, Placement


class Pieces(NamedTuple):
    """Boxes of the full tensor, each on its way from one rank to another, or to the same.

    source, target: the ranks, of shape (pieces,). begin, end: of shape (pieces, axes). All in an order that depends on the
    tensor alone.
    """

    source: Ints
    target: Ints
    begin: Ints
    end: Ints

    @property
    def elements(self) -> Ints:
        """The number of elements of each piece."""
        sizes: Ints = (self.end - self.begin).prod(axis=1, dtype=np.int64)
        return sizes

    def of(self, chosen: NDArray[np.bool_]) -> Pieces:
        """Return some of the pieces."""
        return Pieces(*(values[chosen] for values in self))

    @property
    def is_local(self) -> NDArray[np.bool_]:
        """Whether a piece stays on its rank."""
        local: NDArray[np.bool_] = self.source == self.target
        return local


@final
@dataclass(frozen=True, eq=False)
class Ends:
    """The ranks of a transfer.

    source, target:             the layouts of both sides.
    source_ranks, target_ranks: the number of each rank in the transfer, by its position in its layout. A rank of both sides has
                                one number.
    nodes:                      the node of each number; None if nodes do not matter.
    """

    source: Layout
    target: Layout
    source_ranks: Ints
    target_ranks: Ints
    nodes: Ints | None = None

    @property
    def size(self) -> int:
        """How many ranks take part."""
        return int(max(self.source_ranks.max(), self.target_ranks.max())) + 1

    @property
    def overlap(self) -> bool:
        """Whether a rank is on both sides."""
        return bool(np.isin(self.source_ranks, self.target_ranks).any())

    @property
    def within_target(self) -> Ends:
        """The ends of a transfer from the target to itself."""
        return Ends(self.target, self.target, self.target_ranks, self.target_ranks, self.nodes)


def _overlaps(a: Cuts, b: Cuts) -> tuple[Ints, Ints, Ints, Ints]:
    """Return what the parts of two lists have in common: (number in a, number in b, begin, end) for each pair."""
    first = np.searchsorted(b.ends, a.begins, side="right")
    last = np.searchsorted(b.begins, a.ends, side="left")
    counts = np.maximum(last - first, 0)
    counts[a.begins == a.ends] = 0
    i = np.repeat(np.arange(len(counts)), counts)
    j = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts)
    begins, ends = np.maximum(a.begins[i], b.begins[j]), np.minimum(a.ends[i], b.ends[j])
    some = begins < ends
    return i[some], j[some], begins[some], ends[some]


class _Pairs(NamedTuple):
    """What the parts of a block of the source and a block of the target have in common.

    source, target: what the coords of both parts add to a rank's position. begin, end: of shape (pairs, axes).
    """

    source: Ints
    target: Ints
    begin: Ints
    end: Ints


def _pairs(a: Block, b: Block) -> _Pairs:
    overlaps = [_overlaps(*cuts) for cuts in zip(a.cuts, b.cuts, strict=True)]
    counts = [len(i) for i, _, _, _ in overlaps]
    count = math.prod(counts)
    grid = np.indices(counts).reshape(len(counts), count)
    source, target = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    begin, end = (
        np.zeros((count, len(overlaps)), dtype=np.int64),
        np.zeros((count, len(overlaps)), dtype=np.int64),
    )
    for axis, ((i, j, begins, ends), at) in enumerate(zip(overlaps, grid, strict=True)):
        source += a.cuts[axis].offsets[i][at]
        target += b.cuts[axis].offsets[j][at]
        begin[:, axis], end[:, axis] = begins[at], ends[at]
    return _Pairs(source, target, begin, end)


def _of_position(block: Block, position: int | None) -> Block:
    """Return the part of a block that the rank at a position holds, if it holds any."""
    if position is None:
        return block
    return block._replace(cuts=tuple(cut.only(cut.number(position)) for cut in block.cuts))


def pieces(
    source: Located,
    target: Located,
    ends: Ends,
    *,
    sender: int | None = None,
    receiver: int | None = None,
    align: int = 1,
) -> Pieces:
    """Return the pieces of a tensor: each element of each rank's part of the target arrives there once.

    sender, receiver: positions in the source's and in the target's layout. Only the pieces that the rank there sends or receives
    are computed. A piece that a rank of both sides holds already stays local.
    align: pieces are divided among holders at multiples of this index only.
    """
    parts = []
    for a, b in product(source.blocks, target.blocks):
        pairs = _pairs(_of_position(a, sender), _of_position(b, receiver))
        if len(pairs.begin):
            holders = ends.source_ranks[pairs.source[:, None] + a.copies]
            readers = ends.target_ranks[pairs.target[:, None] + b.copies]
            parts.append(assigned(holders, readers, pairs.begin, pairs.end, ends, align))
    axes = len(source.placement.axes)
    none = np.zeros(0, dtype=np.int64)
    every = (
        Pieces(*map(np.concatenate, zip(*parts, strict=True)))
        if parts
        else Pieces(none, none, *(none.reshape(0, axes),) * 2)
    )
    if sender is not None:
        every = every.of(every.source == ends.source_ranks[sender])
    if receiver is not None:
        every = every.of(every.target == ends.target_ranks[receiver])
    return every


def assigned(
    holders: Ints, readers: Ints, begin: Ints, end: Ints, ends: Ends | None = None, align: int = 1
) -> Pieces:
    """Decide which holder of each box sends which part of it to which reader.

    holders, readers: the ranks, of shape (boxes, most ranks of a box). Without `ends`, a row may end in -1, for no rank, but not
    begin with it.
    """
    local = np.zeros(readers.shape, dtype=bool)
    near = local
    if ends is None or ends.overlap:
        local = (holders[:, None, :] == readers[:, :, None]).any(axis=2) & (readers >= 0)
        if ends is not None and ends.nodes is not None:
            same = ends.nodes[holders][:, None, :] == ends.nodes[readers][:, :, None]
            near = same.any(axis=2) & ~local
    row, reader = np.nonzero(local)
    ranks = readers[row, reader]
    kept = Pieces(ranks, ranks, begin[row], end[row])
    if near.any():
        row, reader = np.nonzero(near)
        beside = same[row, reader]
        turn = (near.cumsum(axis=1) - 1)[row, reader] % beside.sum(axis=1)
        nearest = np.argsort(~beside, axis=1, kind="stable")[np.arange(len(row)), turn]
        neighbors = Pieces(holders[row, nearest], readers[row, reader], begin[row], end[row])
    else:
        neighbors = Pieces(*(values[:0] for values in kept))
    # Reader i of n takes piece j of m from holder i * m + j, counted around. With m = h / gcd(h, n), the h holders send the same.
    far = ~(local | near) & (readers >= 0)
    row, reader = np.nonzero(far)
    turn, count = (far.cumsum(axis=1) - 1)[row, reader], (holders >= 0).sum(axis=1)
    parts = (count // np.gcd(count, far.sum(axis=1)))[row] if begin.shape[1] else np.ones_like(row)
    again = np.repeat(np.arange(len(row)), parts)
    j = np.arange(len(again)) - np.repeat(np.cumsum(parts) - parts, parts)
    row, reader, turn, parts = row[again], reader[again], turn[again], parts[again]
    first, last = sliced(begin[row], end[row], j, parts, align)
    sent = Pieces(holders[row, (turn * parts + j) % count[row]], readers[row, reader], first, last)
    sent = sent.of(np.all(last > first, axis=1))
    return Pieces(*map(np.concatenate, zip(kept, neighbors, sent, strict=True)))


def sliced(
    begin: Ints, end: Ints, number: Ints | int, count: Ints | int, align: int = 1
) -> tuple[Ints, Ints]:
    """Return slice `number` of `count` of each box, along its longest axis. Slices may be empty. A box without axes has one."""
    if not begin.shape[1]:
        return begin, end
    begin, end, rows = begin.copy(), end.copy(), np.arange(len(begin))
    axis = (end - begin).argmax(axis=1)
    first, last = begin[rows, axis], end[rows, axis]
    cuts = [first + (last - first) * at // count for at in (number, number + 1)]
    if align > 1:
        cuts = [
            np.where((cut > first) & (cut < last), np.clip(cut // align * align, first, last), cut)
            for cut in cuts
        ]
    begin[rows, axis], end[rows, axis] = cuts
    return begin, end


# -- all tensors of a transfer ------------------------------------------------------------------------


class Entry(NamedTuple):
    """A tensor to transfer. itemsize: the bytes of an element on its way."""

    name: str
    itemsize: int
    source: Placement
    target: Placement


class Leg(NamedTuple):
    """The way of a tensor from one placement to another. A tensor has two legs if copies of the target gather it from stripes."""

    source: Located
    target: Located
    ends: Ends

    def most(self, itemsize: int) -> int:
        """Return the largest number of bytes that a rank sends or receives, rounded up; local pieces count as well."""
        sent = 0.0
        for a, b in product(self.source.blocks, self.target.blocks):
            pairs = _pairs(a, b)
            elements = (pairs.end - pairs.begin).prod(axis=1)
            shares = np.bincount(pairs.source, elements, minlength=1)
            sent += float(shares.max()) * max(1.0, len(b.copies) / len(a.copies))
        return math.ceil(max(sent, self.target.most)) * itemsize


class Slice(NamedTuple):
    """A slice of one leg of an entry: number `chunk` of `chunks`."""

    entry: int
    leg: int
    chunk: int
    chunks: int


def packed(most: Sequence[int], bucket_bytes: int) -> list[list[Slice]]:
    """Divide entries into rounds, none of which fills more than a bucket. most: the bytes that an entry takes up in one."""
    rounds: list[list[Slice]] = []
    used = 0
    for number, nbytes in enumerate(most):
        chunks = max(1, -(-nbytes // bucket_bytes))
        if chunks > 1:
            rounds += [[Slice(number, 0, chunk, chunks)] for chunk in range(chunks)]
            used = bucket_bytes
            continue
        if not rounds or used + nbytes > bucket_bytes:
            rounds.append([])
            used = 0
        rounds[-1].append(Slice(number, 0, 0, 1))
        used += nbytes
    return rounds


# A smaller part is not worth a second message.
_LEAST_STRIPED_BYTES: Final = 64 << 10

located = lru_cache(maxsize=4096)(Located)


@final
class Plan:
    """A transfer of tensors between the ranks of two layouts. Equal on all ranks.

    entries:      in the order in which they are sent.
    stripes:      dims of the target along which copies receive different stripes and then gather them from each other.
    bucket_bytes: how much a rank sends, and receives, at once. A rank uses two such buckets for each.
    align:        see `pieces`.
    """

    def __init__(
        self,
        ends: Ends,
        entries: Sequence[Entry],
        *,
        stripes: Sequence[str] = (),
        bucket_bytes: int = 64 << 20,
        align: int = 1,
    ) -> None:
        self.ends, self.entries, self.stripes = ends, tuple(entries), tuple(stripes)
        self.bucket_bytes, self.align = bucket_bytes, align
        self._within_target = ends.within_target
        self._legs: dict[tuple[int, Placement, Placement], tuple[Leg, ...]] = {}
        self._most: dict[tuple[int, Placement, Placement], int] = {}

    def legs(self, entry: Entry) -> tuple[Leg, ...]:
        """Return the legs of an entry, in order. Entries with equal placements share them."""
        key = entry.itemsize, entry.source, entry.target
        legs = self._legs.get(key)
        if legs is None:
            legs = self._legs[key] = self._legs_of(entry)
        return legs

    def _legs_of(self, entry: Entry) -> tuple[Leg, ...]:
        source, target = located(entry.source, self.ends.source), located(entry.target, self.ends.target)
        used = entry.target.dims
        free = [dim for dim in self.stripes if not used or dim in self.ends.target.rest(used)]
        if not free or not entry.target.axes or target.most * entry.itemsize < _LEAST_STRIPED_BYTES:
            return (Leg(source, target, self.ends),)
        lengths = [
            max(int((cut.ends - cut.begins).max()) for cut in cuts)
            for cuts in zip(*(b.cuts for b in target.blocks), strict=True)
        ]
        striped = located(entry.target.split_further(lengths.index(max(lengths)), free), self.ends.target)
        return (Leg(source, striped, self.ends), Leg(striped, target, self._within_target))

    def rounds(self) -> list[list[Slice]]:
        """Return what is sent at once, in order. A round needs what the one before it sends only if nothing else is left."""
        for entry in self.entries:
            if entry[1:] not in self._most:
                self._most[entry[1:]] = max(leg.most(entry.itemsize) for leg in self.legs(entry))
        firsts = packed([self._most[entry[1:]] for entry in self.entries], self.bucket_bytes)
        # A round's second leg comes after the first leg of the next round. The legs of a large tensor are cut at different
        # elements, so its second leg begins after the whole first leg.
        rounds: list[list[Slice]] = []
        waiting: list[list[Slice]] = []
        for first in firsts:
            rounds += [first, *waiting]
            seconds = [part._replace(leg=1) for part in first if len(self.legs(self.entries[part.entry])) > 1]
            if seconds and first[0].chunks > 1:
                last = first[0].chunk == first[0].chunks - 1
                waiting = (
                    [[seconds[0]._replace(chunk=chunk)] for chunk in range(first[0].chunks)] if last else []
                )
            else:
                waiting = [seconds] if seconds else []
        return rounds + waiting

    def own(self, part: Slice, position: int, sends: bool) -> Pieces:
        """Return the pieces of a slice's leg that the rank at a position sends, or receives."""
        leg = self.legs(self.entries[part.entry])[part.leg]
        whose = {"sender" if sends else "receiver": position}
        return pieces(leg.source, leg.target, leg.ends, align=self.align, **whose)

    def loads(self) -> Loads:
        """Return what each rank sends and receives."""
        total = Loads.none(self.ends.size)
        for (itemsize, source, target), count in Counter(entry[1:] for entry in self.entries).items():
            for leg in self.legs(Entry("", itemsize, source, target)):
                total.add(leg, itemsize * count, count)
        return total


@final
@dataclass
class Loads:
    """Bytes by rank of a transfer. sent, received, copied: by number; `copied` stays on its rank. pieces: of all ranks."""

    sent: NDArray[np.float64]
    received: NDArray[np.float64]
    copied: NDArray[np.float64]
    pieces: int = 0

    @classmethod
    def none(cls, size: int) -> Loads:
        return cls(np.zeros(size), np.zeros(size), np.zeros(size))

    def add(self, leg: Leg, nbytes: int, count: int) -> None:
        """Add the pieces of `count` tensors. nbytes: of an element of all of them together."""
        ends = leg.ends
        if ends.overlap:
            every = pieces(leg.source, leg.target, ends)
            local, elements = every.is_local, every.elements * nbytes
            self.sent += np.bincount(every.source[~local], elements[~local], ends.size)
            self.received += np.bincount(every.target[~local], elements[~local], ends.size)
            self.copied += np.bincount(every.target[local], elements[local], ends.size)
            self.pieces += count * int((~local).sum())
            return
        for a in leg.source.blocks:
            for b in leg.target.blocks:
                pairs = _pairs(a, b)
                elements = (pairs.end - pairs.begin).prod(axis=1, dtype=np.int64) * nbytes
                holders, readers = len(a.copies), len(b.copies)
                for copies, ranks, positions, sums, share in (
                    (a.copies, ends.source_ranks, pairs.source, self.sent, readers / holders),
                    (b.copies, ends.target_ranks, pairs.target, self.received, 1.0),
                ):
                    by_part = np.bincount(positions, elements * share, minlength=1)
                    parts = np.flatnonzero(by_part)
                    np.add.at(sums, ranks[parts[:, None] + copies], by_part[parts, None])
                self.pieces += count * len(elements) * readers * (holders // math.gcd(holders, readers))
