"""Who sends which piece of a tensor to whom, computed from two placements. Requires neither processes nor tensors.

Both sides are cut along each axis by itself, so the pieces that a part of the source and a part of the target have in common
follow from the intervals of each axis. A piece that a rank holds already is copied. The other readers of a piece take turns at
its holders, so that each holder sends the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, groupby, pairwise, product, zip_longest
from typing import Final, NamedTuple, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from meshcomm.errors import UnknownDim
from meshcomm.layout import Layout
from meshcomm.transfer.placement import Block, Cuts, Ints, Located, Placement, Split

# Splits along which copies of the target receive different stripes: among copies of a node, then among copies on several nodes.
# Copies gather them in the opposite order.
Levels: TypeAlias = tuple[tuple[Split, ...], ...]


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
        return elements_of(self.begin, self.end)

    def of(self, chosen: NDArray[np.bool_]) -> Pieces:
        """Return some of the pieces."""
        return Pieces(*(values[chosen] for values in self))

    @property
    def is_local(self) -> NDArray[np.bool_]:
        """Whether a piece stays on its rank."""
        local: NDArray[np.bool_] = self.source == self.target
        return local


def joined(parts: Sequence[Pieces]) -> Pieces:
    """Return all pieces of some arrays of pieces, in order."""
    return Pieces(*map(np.concatenate, zip(*parts, strict=True)))


def elements_of(begin: Ints, end: Ints) -> Ints:
    """Return the number of elements of each box. begin, end: of shape (boxes, axes)."""
    # Reducing over a short axis of an array is slow.
    elements = np.ones(len(begin), dtype=np.int64)
    for axis in range(begin.shape[1]):
        elements *= end[:, axis] - begin[:, axis]
    return elements


def _longest(begin: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Return the longest axis of each box, the first of several, and its length. Boxes have axes."""
    axis, length = np.zeros(len(begin), dtype=np.int64), end[:, 0] - begin[:, 0]
    for other in range(1, begin.shape[1]):
        lengths = end[:, other] - begin[:, other]
        axis[lengths > length] = other
        length = np.maximum(length, lengths)
    return axis, length


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

    @classmethod
    def of(cls, source: Layout, target: Layout, nodes: Callable[[Ints], Ints | None] | None = None) -> Ends:
        """Return the ends of a transfer within one job, where equal ranks are one rank. nodes: from ranks to their nodes."""
        ranks = np.union1d(source.ranks, target.ranks)
        numbers = [np.searchsorted(ranks, layout.ranks) for layout in (source, target)]
        return cls(source, target, numbers[0], numbers[1], None if nodes is None else nodes(ranks))

    @cached_property
    def size(self) -> int:
        """How many ranks take part."""
        return int(max(self.source_ranks.max(), self.target_ranks.max())) + 1

    @cached_property
    def source_positions(self) -> Ints:
        """The position on the source of each number, or -1."""
        positions = np.full(self.size, -1, dtype=np.int64)
        positions[self.source_ranks] = np.arange(len(self.source_ranks))
        return positions

    @cached_property
    def overlap(self) -> bool:
        """Whether a rank is on both sides."""
        return bool((self.source_positions[self.target_ranks] >= 0).any())

    @property
    def within_target(self) -> Ends:
        """The ends of a transfer from the target to itself."""
        ends = Ends(self.target, self.target, self.target_ranks, self.target_ranks, self.nodes)
        ends.__dict__["size"] = self.size
        return ends

    def levels(self, dims: Sequence[str] | None = None) -> Levels:
        """Return the levels along dims of the target; without dims, those that `meshcomm.link` chooses.

        If copies share a node, a node receives each element once. If the target has more ranks than the source, the ports of the
        source are the limit, so copies on several nodes receive different elements, too.
        """
        nodes, layout = self.nodes, self.target
        if dims is None and (nodes is None or len(np.unique(nodes)) == 1 or self.overlap):
            return ()
        within, across = [], []
        for dim in dict.fromkeys(layout.expand(tuple(layout.dims if dims is None else dims))):
            near, size = self._neighbors(dim), layout.size(dim)
            if near > 1:
                within.append(Split(dim, near, inner=True) if near < size else Split(dim))
            if near < size:
                across.append(Split(dim, size // near) if near > 1 else Split(dim))
        if dims is None and self.source.world_size >= layout.world_size:
            across = []
        return tuple(tuple(splits) for splits in (within, across) if splits)

    def _neighbors(self, dim: str) -> int:
        """Return how many neighbors along a dim of the target share a node everywhere."""
        layout, size = self.target, self.target.size(dim)
        if self.nodes is None:
            return size
        positions = layout.others(dim).offsets()[:, None] + layout.digits(dim).offsets()
        nodes = self.nodes[self.target_ranks[positions]]
        runs = (nodes.reshape(-1, count) for count in range(size, 0, -1) if size % count == 0)
        return next(int(run.shape[1]) for run in runs if (run == run[:, :1]).all())


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


class Pairs(NamedTuple):
    """What the parts of a block of the source and a block of the target have in common.

    source, target: what the coords of both parts add to a rank's position. begin, end: of shape (pairs, axes).
    source_copies, target_copies: see Block.copies.
    """

    source: Ints
    target: Ints
    begin: Ints
    end: Ints
    source_copies: Ints
    target_copies: Ints


def pairs_of(a: Block, b: Block) -> Pairs:
    overlaps = [_overlaps(*cuts) for cuts in zip(a.cuts, b.cuts, strict=True)]
    counts = [len(i) for i, _, _, _ in overlaps]
    grid = np.indices(counts).reshape(len(counts), math.prod(counts))
    source, target = np.zeros((2, grid.shape[1]), dtype=np.int64)
    begin, end = np.zeros((2, *grid.shape[::-1]), dtype=np.int64)
    for axis, ((i, j, begins, ends), at) in enumerate(zip(overlaps, grid, strict=True)):
        source += a.cuts[axis].offsets[i][at]
        target += b.cuts[axis].offsets[j][at]
        begin[:, axis], end[:, axis] = begins[at], ends[at]
    return Pairs(source, target, begin, end, a.copies, b.copies)


def pieces(
    source: Located, target: Located, ends: Ends, *, sender: int | None = None, receiver: int | None = None
) -> Pieces:
    """Return the pieces of a tensor: each element of each rank's part of the target arrives there once.

    sender, receiver: positions in the source's and in the target's layout. Only the pieces that the rank there sends or receives
    are computed. A piece that a rank of both sides holds already stays local.
    """
    blocks = product(source.blocks, target.blocks)
    every = joined([pieces_of(pairs_of(a.of(sender), b.of(receiver)), ends) for a, b in blocks])
    if sender is not None:
        every = every.of(every.source == ends.source_ranks[sender])
    if receiver is not None:
        every = every.of(every.target == ends.target_ranks[receiver])
    return every


def held_by_reader(pairs: Pairs, ends: Ends) -> NDArray[np.bool_]:
    """Return whether a reader holds what it reads, of shape (pairs, target copies)."""
    readers = ends.target_ranks[pairs.target[:, None] + pairs.target_copies]
    if not ends.overlap:
        return np.zeros(readers.shape, dtype=bool)
    # Each position is the sum of the position of a part and the position of a copy, and no two such sums are equal.
    is_copy = np.zeros(ends.source.world_size, dtype=bool)
    is_copy[pairs.source_copies] = True
    positions = ends.source_positions[readers]
    within = positions - pairs.source[:, None]
    held: NDArray[np.bool_] = (positions >= 0) & (within >= 0) & is_copy[np.maximum(within, 0)]
    return held


def pieces_of(pairs: Pairs, ends: Ends) -> Pieces:
    """Decide which holder of each pair sends which part of it to which reader."""
    holders = ends.source_ranks[pairs.source[:, None] + pairs.source_copies]
    readers = ends.target_ranks[pairs.target[:, None] + pairs.target_copies]
    nodes = ends.nodes if ends.overlap else None
    return assigned(holders, readers, held_by_reader(pairs, ends), pairs.begin, pairs.end, nodes)


def assigned(
    holders: Ints, readers: Ints, local: NDArray[np.bool_], begin: Ints, end: Ints, nodes: Ints | None
) -> Pieces:
    """Decide which holder of each box sends which part of it to which reader.

    holders, readers: the ranks, of shape (boxes, most ranks of a box). Without `nodes`, a row may end in -1, for no rank, but not
    begin with it. local: whether a reader holds what it reads.
    """
    row, reader = np.nonzero(local)
    ranks = readers[row, reader]
    every = [Pieces(ranks, ranks, begin[row], end[row])]
    near = np.zeros_like(local)
    if nodes is not None:
        same = nodes[holders][:, None, :] == nodes[readers][:, :, None]
        near = same.any(axis=2) & ~local
        row, reader = np.nonzero(near)
        beside = same[row, reader]
        turn = (near.cumsum(axis=1) - 1)[row, reader] % beside.sum(axis=1)
        nearest = np.argsort(~beside, axis=1, kind="stable")[np.arange(len(row)), turn]
        every.append(Pieces(holders[row, nearest], readers[row, reader], begin[row], end[row]))
    # Reader i of n takes piece j of m from holder i * m + j, counted around. With m = h / gcd(h, n), the h holders send the same.
    far = ~(local | near) & (readers >= 0)
    row, reader = np.nonzero(far)
    if holders.shape[1] == 1:
        sent = Pieces(holders[row, 0], readers[row, reader], begin[row], end[row])
    else:
        turn, count = (far.cumsum(axis=1) - 1)[row, reader], (holders >= 0).sum(axis=1)
        parts = (count // np.gcd(count, far.sum(axis=1)))[row] if begin.shape[1] else np.ones_like(row)
        again = np.repeat(np.arange(len(row)), parts)
        j = np.arange(len(again)) - np.repeat(np.cumsum(parts) - parts, parts)
        row, reader, turn, parts = row[again], reader[again], turn[again], parts[again]
        first, last = sliced(begin[row], end[row], j, parts)
        sent = Pieces(holders[row, (turn * parts + j) % count[row]], readers[row, reader], first, last)
        sent = sent.of(sent.elements > 0)
    return joined([*every, sent])


def sliced(begin: Ints, end: Ints, number: Ints | int, count: Ints | int) -> tuple[Ints, Ints]:
    """Return slice `number` of `count` of each box, along its longest axis. Slices may be empty. A box without axes has one."""
    if not begin.shape[1]:
        return begin, end
    begin, end, rows = begin.copy(), end.copy(), np.arange(len(begin))
    axis, _ = _longest(begin, end)
    first, last = begin[rows, axis], end[rows, axis]
    begin[rows, axis], end[rows, axis] = (first + (last - first) * at // count for at in (number, number + 1))
    return begin, end


# -- all tensors of a transfer ------------------------------------------------------------------------


class Entry(NamedTuple):
    """A tensor to transfer. itemsize: the bytes of an element on its way."""

    name: str
    itemsize: int
    source: Placement
    target: Placement


@final
@dataclass(frozen=True, eq=False)
class Leg:
    """The way of a tensor from one placement to another. If copies of the target receive stripes, gathering them at each level is
    one more leg.
    """

    source: Located
    target: Located
    ends: Ends

    def pairs(self) -> Iterator[Pairs]:
        """Yield what parts of both sides have in common, in arrays of a bounded size."""
        for a, b in product(self.source.blocks, self.target.blocks):
            pairs = pairs_of(a, b)
            rows = max(1, _MOST_ROWS // (len(a.copies) * len(b.copies)))
            for at in range(0, len(pairs.source), rows):
                source, target, begin, end = (values[at : at + rows] for values in pairs[:4])
                yield Pairs(source, target, begin, end, a.copies, b.copies)

    def chunks(self, itemsize: int, bucket_bytes: int) -> int:
        """Return in how many chunks the pieces are sent, so that a rank sends and receives at most `bucket_bytes` at once.

        If one row of each piece is more than that, the pieces are sent row by row.
        """
        elements, rows, length = self._sizes
        if elements * itemsize <= bucket_bytes:
            return 1
        # Chunks of a piece differ by one row.
        room = bucket_bytes // itemsize - rows
        return min(length, -(-elements // room)) if room > 0 else length

    def most(self, itemsize: int, chunks: int) -> int:
        """Return the largest number of bytes that a rank sends or receives of one of `chunks` chunks, or a bound of it."""
        elements, rows, _ = self._sizes
        return (elements if chunks == 1 else min(elements, -(-elements // chunks) + rows)) * itemsize

    @cached_property
    def loaded(self) -> Loaded:
        """How many elements each rank sends and receives."""
        loads = Loads(self.ends.size)
        loads.add(self, 1)
        elements = np.append(loads.sent, loads.received).astype(np.int64)
        places = np.flatnonzero(elements)
        return places, elements[places]

    @cached_property
    def _sizes(self) -> tuple[int, int, int]:
        """The most elements that a rank sends or receives, the most in one row of each of its pieces, and the longest piece.

        A row is what lies at one index of a piece's longest axis.
        """
        rows = Loads(self.ends.size)
        rows.add(self, 1, rows=True)
        most = [
            int(elements.max(initial=0)) for elements in (self.loaded[1], np.append(rows.sent, rows.received))
        ]
        length = max((int((pairs.end - pairs.begin).max(initial=1)) for pairs in self.pairs()), default=1)
        return most[0], most[1], length


def _stripe_axis(source: Located, target: Located, splits: Sequence[Split]) -> int:
    """Return the axis along which stripes have the fewest pieces, of those along which they are about equally long."""
    stripes = math.prod(split.digits(target.layout).size for split in splits)
    lengths = [
        max(int((cut.ends - cut.begins).max()) for cut in cuts)
        for cuts in zip(*(block.cuts for block in target.blocks), strict=True)
    ]
    even = [axis for axis, length in enumerate(lengths) if -(-length // stripes) * stripes <= 1.05 * length]

    def count(axis: int) -> int:
        striped = located(target.placement.split_further(axis, splits), target.layout)
        return sum(
            math.prod(len(_overlaps(*cuts)[0]) for cuts in zip(a.cuts, b.cuts, strict=True))
            for a, b in product(source.blocks, striped.blocks)
        )

    return min(even, key=count) if even else lengths.index(max(lengths))


class Slice(NamedTuple):
    """A slice of one leg of an entry: number `chunk` of `chunks`."""

    entry: int
    leg: int
    chunk: int
    chunks: int


# The places of ranks that send or receive a tensor, and how much: a rank sends at its number, and receives at `size` and its number.
Loaded: TypeAlias = tuple[Ints, Ints]


def packed(entries: Iterable[tuple[int, Loaded]], size: int, bucket_bytes: int) -> list[list[Slice]]:
    """Divide entries into rounds in which no rank sends or receives more than a bucket, if it can be.

    entries: the number of chunks of each, and the bytes of an entry that is not divided. size: the number of ranks.
    """
    rounds: list[list[Slice]] = []
    used: Ints | None = None
    for number, (chunks, (places, nbytes)) in enumerate(entries):
        if chunks > 1:
            rounds += [[Slice(number, 0, chunk, chunks)] for chunk in range(chunks)]
            used = None
            continue
        if used is None or (used[places] + nbytes > bucket_bytes).any():
            rounds.append([])
            used = np.zeros(2 * size, dtype=np.int64)
        rounds[-1].append(Slice(number, 0, 0, 1))
        used[places] += nbytes
    return rounds


# How many bytes a rank sends, and receives, at once by default.
BUCKET_BYTES: Final = 64 << 20
# A larger piece is a message of its own.
PACKED_BYTES: Final = 128 << 10
# How many rows of an array are computed at once.
_MOST_ROWS: Final = 1 << 22
# A smaller part is not worth a second message.
_LEAST_STRIPED_BYTES: Final = 64 << 10

located = lru_cache(maxsize=4096)(Located)


@final
class Plan:
    """A transfer of tensors between the ranks of two layouts. Equal on all ranks.

    entries:      in the order in which they are sent.
    stripes:      where copies of the target receive different stripes, which they then gather from each other.
    bucket_bytes: how much a rank sends, and receives, at once. A rank uses two such buckets for each.
    """

    def __init__(
        self,
        ends: Ends,
        entries: Sequence[Entry],
        *,
        stripes: Levels = (),
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.ends, self.entries, self.stripes = ends, tuple(entries), stripes
        self.itemsizes = [entry.itemsize for entry in entries]
        self.bucket_bytes = bucket_bytes
        self._own: dict[tuple[Leg, int, bool], Pieces] = {}

    @cached_property
    def legs(self) -> list[tuple[Leg, ...]]:
        """The legs of each entry, in order. Entries with equal placements share them."""
        within, layouts = self.ends.within_target, (self.ends.source, self.ends.target)
        gathers: dict[tuple[Placement, int], list[Leg]] = {}

        def legs_of(itemsize: int, *placements: Placement) -> tuple[Leg, ...]:
            source, target = map(located, placements, layouts)
            levels = self._free(target.placement)
            if not levels or not target.placement.axes or target.most * itemsize < _LEAST_STRIPED_BYTES:
                return (Leg(source, target, self.ends),)
            axis = _stripe_axis(source, target, [*chain(*levels)])
            if (target.placement, axis) not in gathers:
                places = [target]
                for splits in levels:
                    places.insert(0, located(places[0].placement.split_further(axis, splits), layouts[1]))
                legs = [Leg(*pair, within) for pair in pairwise(places)]
                gathers[target.placement, axis] = legs
            legs = gathers[target.placement, axis]
            return (Leg(source, legs[0].source, self.ends), *legs)

        kinds = [entry[1:] for entry in self.entries]
        known = {kind: legs_of(*kind) for kind in dict.fromkeys(kinds)}
        return [known[kind] for kind in kinds]

    def _free(self, target: Placement) -> Levels:
        """Return `stripes` along the dims along which ranks have copies, if the target can be split along them as well."""
        layout = self.ends.target
        used = {*layout.expand(target.dims)}
        levels = [[split for split in splits if split.dim not in used] for splits in self.stripes]
        try:
            layout.home((*used, *(split.dim for splits in levels for split in splits)))
        except UnknownDim:
            return ()
        return tuple(tuple(splits) for splits in levels if splits)

    def rounds(self) -> list[list[Slice]]:
        """Return what is sent at once, in order. A round needs what the one before it sends only if nothing else is left."""
        return self._rounds

    @cached_property
    def _rounds(self) -> list[list[Slice]]:
        kinds, sizes = [*zip(self.legs, self.itemsizes, strict=True)], {}
        for legs, itemsize in {*kinds}:
            chunks = max(leg.chunks(itemsize, self.bucket_bytes) for leg in legs)
            # Legs of an entry that is not divided are sent one after another.
            most = np.zeros(2 * self.ends.size, dtype=np.int64)
            for places, elements in (leg.loaded for leg in legs if chunks == 1):
                most[places] = np.maximum(most[places], elements * itemsize)
            places = np.flatnonzero(most)
            sizes[legs, itemsize] = chunks, (places, most[places])
        firsts = packed((sizes[kind] for kind in kinds), self.ends.size, self.bucket_bytes)
        batches = [[*batch] for _, batch in groupby(firsts, lambda first: first[0].entry)]
        most_legs = max(map(len, self.legs), default=1)
        rounds: list[list[Slice]] = []
        # One batch's leg is sent at the same time as the leg before it of the next batch.
        for number in range(len(batches) + most_legs - 1):
            at_once = [
                self._rounds_of(batches[number - leg], leg)
                for leg in range(most_legs)
                if 0 <= number - leg < len(batches)
            ]
            rounds += [one for turn in zip_longest(*at_once) for one in turn if one]
        return rounds

    def _rounds_of(self, batch: list[list[Slice]], leg: int) -> list[list[Slice]]:
        """Return the rounds of a leg of a batch: of entries that are sent together, or of a large entry.

        The legs of a large entry are cut at different elements, so each leg begins after the whole leg before it.
        """
        legs, (number, _, _, chunks) = self.legs, batch[0][0]
        if chunks > 1 and leg < len(legs[number]):
            chunks = legs[number][leg].chunks(self.itemsizes[number], self.bucket_bytes)
            return [[Slice(number, leg, chunk, chunks)] for chunk in range(chunks)]
        return [[part._replace(leg=leg) for part in one if leg < len(legs[part.entry])] for one in batch]

    def own(self, part: Slice, position: int, sends: bool) -> Pieces:
        """Return the pieces of a slice's leg that the rank at a position sends, or receives."""
        leg = self.legs[part.entry][part.leg]
        # The layers of a model have equal placements.
        key = leg, position, sends
        if key not in self._own:
            whose = {"sender" if sends else "receiver": position}
            self._own[key] = pieces(leg.source, leg.target, leg.ends, **whose)
        return self._own[key]

    def loads(self) -> Loads:
        """Return what each rank sends and receives."""
        total = Loads(self.ends.size)
        for leg, nbytes in self.weighted_legs().items():
            total.add(leg, nbytes)
        return total

    def weighted_legs(self) -> Counter[Leg]:
        """Return all legs, each with the bytes of an element of all its tensors together."""
        weights: Counter[Leg] = Counter()
        for legs, itemsize in zip(self.legs, self.itemsizes, strict=True):
            for leg in legs:
                weights[leg] += itemsize
        return weights


@final
class Loads:
    """Bytes of a transfer by the number of the rank, of `size` ranks. copied: what stays on its rank."""

    def __init__(self, size: int) -> None:
        self.sent, self.received, self.copied = np.zeros((3, size))

    def add(self, leg: Leg, nbytes: int, *, rows: bool = False) -> None:
        """Add the pieces of tensors.

        nbytes: of an element of all tensors together. rows: count only what lies at one index of each piece's longest axis.
        """
        for pairs in leg.pairs():
            self._add(pairs, leg.ends, nbytes, rows)

    def _add(self, pairs: Pairs, ends: Ends, nbytes: int, rows: bool) -> None:
        holders, readers = len(pairs.source_copies), len(pairs.target_copies)
        if ends.overlap and holders > 1:
            # Readers have what they need themselves, or choose the nearest of several holders.
            every = pieces_of(pairs, ends)
            values, local = _values(every.begin, every.end, rows) * nbytes, every.is_local
            self.sent += np.bincount(every.source[~local], values[~local], ends.size)
            self.received += np.bincount(every.target[~local], values[~local], ends.size)
            self.copied += np.bincount(every.target[local], values[local], ends.size)
            return
        values = _values(pairs.begin, pairs.end, rows) * nbytes
        takers: Ints | int = readers
        if ends.overlap:
            local = held_by_reader(pairs, ends)
            ranks = ends.target_ranks[pairs.target[:, None] + pairs.target_copies]
            every_value = np.broadcast_to(values[:, None], ranks.shape)
            self.received += np.bincount(ranks[~local], every_value[~local], ends.size)
            self.copied += np.bincount(ranks[local], every_value[local], ends.size)
            takers = readers - local.sum(axis=1)
        else:
            _spread(self.received, ends.target_ranks, pairs.target, pairs.target_copies, values)
        # As in `assigned`, slice number q % slices goes out from holder q % holders.
        slices = holders // math.gcd(holders, readers) if pairs.begin.shape[1] else 1
        cycle = slices if pairs.begin.shape[1] else holders
        for number in range(cycle):
            times = -((number - takers * slices) // holders)
            values = _values(*sliced(pairs.begin, pairs.end, number % slices, slices), rows) * nbytes * times
            _spread(self.sent, ends.source_ranks, pairs.source, pairs.source_copies[number::cycle], values)


def _values(begin: Ints, end: Ints, rows: bool) -> Ints:
    """Return the elements of each box, or of one row of it."""
    elements = elements_of(begin, end)
    return elements // np.maximum(_longest(begin, end)[1], 1) if rows and begin.shape[1] else elements


def _spread(sums: NDArray[np.float64], ranks: Ints, parts: Ints, copies: Ints, values: Ints) -> None:
    """Add values of parts to the ranks at all their copies."""
    by_part = np.bincount(parts, values, minlength=1)
    held = np.flatnonzero(by_part)
    sums[ranks[held[:, None] + copies]] += by_part[held, None]
