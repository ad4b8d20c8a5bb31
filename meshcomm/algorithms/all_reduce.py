"""The schedules of six all-reduces: around rings, up and down trees, and with partners at distances 1, 2, 4, ..."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from meshcomm.algorithms.schedule import (
    IDLE,
    Receive,
    Schedule,
    ScheduleStep,
    Send,
    check_counts,
    check_inner,
)

Span = tuple[int, int]


class Place(NamedTuple):
    """A rank's place in a tree. The root's depth is 0 and it is its own parent."""

    parent: int
    children: tuple[int, ...]
    depth: int


def ring(n: int) -> Schedule:
    """Return the ring: reduce-scatter, then all-gather.

    Steps:    2 (n - 1), each with 1/n of the data on every link; optimal in bytes, linear in latency.
    Order:    chunk c is summed from coord c + 1 upwards, round the end, and finished by coord c.
    Source:   Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
              workstations", 2009.
    """
    check_counts("ring", n)

    def program(me: int) -> tuple[ScheduleStep, ...]:
        return tuple(s for way in (True, False) for s in _around(n, me, int, lambda c: (c, c + 1), way))

    return Schedule("ring", n, n, 2 * (n - 1), program)


def two_level(n: int, inner: int) -> Schedule:
    """Return the groups of `inner` consecutive coords, and a ring across the groups for each position in a group.

    A ring inside each group leaves each rank one slice of the group's sum. Rings across the groups
    all-reduce the slices, and the inner rings gather them. 1/inner of the data crosses between groups.

    Steps:    2 (inner - 1) inside and 2 (n / inner - 1) across.
    Order:    as `ring`, first inside the groups, then across them.
    Source:   Mikami et al., "Massively distributed SGD: ImageNet/ResNet-50 training in a flash", 2018,
              as 2D-torus all-reduce.
    Raises:   LayoutError if `inner` does not divide n.
    """
    check_inner(n, inner)
    outer = n // inner

    def program(me: int) -> tuple[ScheduleStep, ...]:
        group, place = divmod(me, inner)

        # Slice i of the group is chunks i * outer to (i + 1) * outer - 1, one for each group.
        def inside(reduce: bool) -> list[ScheduleStep]:
            return _around(
                inner, place, lambda p: group * inner + p, lambda i: (i * outer, (i + 1) * outer), reduce
            )

        def across(reduce: bool) -> list[ScheduleStep]:
            first = place * outer
            return _around(
                outer, group, lambda g: g * inner + place, lambda g: (first + g, first + g + 1), reduce
            )

        return (*inside(True), *across(True), *across(False), *inside(False))

    return Schedule("two_level", n, n, 2 * (inner - 1) + 2 * (outer - 1), program)


def tree(n: int, chunks: int = 1) -> Schedule:
    """Reduce up one binary tree with root 0, and broadcast down it, with `chunks` pieces pipelined.

    The children of r are 2r + 1 and 2r + 2. Data going up and data going down share no link direction.

    Steps:    2 floor(log2 n) + chunks - 1.
    Order:    each rank adds its children's sums to its own, the lower child first.
    """
    check_counts("tree", n, chunks)
    height = n.bit_length() - 1

    def program(me: int) -> tuple[ScheduleStep, ...]:
        return _merged([_through(heap_place(n, me), height, chunks, 0)])

    return Schedule("tree", n, chunks, 2 * height + chunks - 1 if n > 1 else 0, program)


def double_tree(n: int, chunks: int = 1) -> Schedule:
    """Return two binary trees that run at once, each with half the data in `chunks` pieces.

    A rank that has children in one tree is a leaf of the other (for odd n, coord 0 has one child in
    each). So no rank sends more than twice the data, whereas an inner rank of a single tree sends it three times.

    Steps:    2 ceil(log2 n) + chunks - 1.
    Order:    as `tree`: the first half of the data along the first tree, the second along the second.
    Source:   Sanders, Speck, Träff, "Two-tree algorithms for full bandwidth broadcast, reduction
              and scan", 2009. Here the connections of a rank work at the same time, as in NCCL
              since 2.4; their schedule sends one message at a time.
    """
    check_counts("double_tree", n, chunks)
    height = (n - 1).bit_length()

    def program(me: int) -> tuple[ScheduleStep, ...]:
        first = in_order_place(n, me)
        second = twin_place(n, me)
        return _merged([_through(first, height, chunks, 0), _through(second, height, chunks, chunks)])

    return Schedule("double_tree", n, 2 * chunks, 2 * height + chunks - 1 if n > 1 else 0, program)


def recursive_doubling(n: int) -> Schedule:
    """Exchange all data with a partner and add, at distances 1, 2, 4, ...

    If n is not a power of two, n - p ranks first send their data to a neighbor, which represents both, and receive
    the result at the end. p is the largest power of two up to n.

    Steps:    log2 p, and 2 more if n is not a power of two; each carries all data.
    Order:    pairs, pairs of pairs, ...; partners compute the same sums, with the same operand left.
    Source:   Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in
              MPICH", 2005.
    """
    check_counts("recursive_doubling", n)

    def core(at: int, coord: Callable[[int], int]) -> list[ScheduleStep]:
        peers = [coord(at ^ (1 << level)) for level in range(n.bit_length() - 1)]
        return [ScheduleStep((Send(peer, 0, 1),), (Receive(peer, 0, 1, True),)) for peer in peers]

    return _folded("recursive_doubling", n, 1, core)


def halving_doubling(n: int) -> Schedule:
    """Return a reduce-scatter by halves with partners at distances p/2, ..., 2, 1, then all-gather back.

    Folds as `recursive_doubling` does if n is not a power of two.

    Steps:    2 log2 p, and 2 more if n is not a power of two; for powers of two as few bytes as a ring.
    Order:    pairs at distance p/2, then pairs of those, ...; each chunk is finished by one rank.
    Source:   Rabenseifner, "Optimization of collective reduction operations", 2004; Thakur,
              Rabenseifner, Gropp, 2005.
    """
    check_counts("halving_doubling", n)
    distances = [1 << level for level in range(n.bit_length() - 1)]

    def core(at: int, coord: Callable[[int], int]) -> list[ScheduleStep]:
        steps = []
        for distance, reduce in [*((d, True) for d in reversed(distances)), *((d, False) for d in distances)]:
            # The partners share 2 * distance chunks; each keeps the half that contains its own.
            mine, theirs = (who & ~(distance - 1) for who in (at, at ^ distance))
            out, into = (theirs, mine) if reduce else (mine, theirs)
            peer = coord(at ^ distance)
            send, receive = Send(peer, out, out + distance), Receive(peer, into, into + distance, reduce)
            steps.append(ScheduleStep((send,), (receive,)))
        return steps

    return _folded("halving_doubling", n, 1 << (n.bit_length() - 1), core)


def _around(
    size: int, place: int, coord: Callable[[int], int], span: Callable[[int], Span], reduce: bool
) -> list[ScheduleStep]:
    """Return the steps of position `place` in a ring of `size` positions. `coord` and `span` give the coord and chunks of one.

    reduce: each position ends with the sum of its span. Otherwise each starts with its span and ends with all chunks.
    """
    after, before = coord((place + 1) % size), coord((place - 1) % size)
    leaving = [(place - step - reduce) % size for step in range(size - 1)]
    return [
        ScheduleStep((Send(after, *span(at)),), (Receive(before, *span((at - 1) % size), reduce),))
        for at in leaving
    ]


def _folded(
    name: str, n: int, chunks: int, core: Callable[[int, Callable[[int], int]], list[ScheduleStep]]
) -> Schedule:
    """Return a schedule over the largest power of two of n ranks. Of the first 2 * extra ranks, the odd ones
    represent two.

    core: the steps of index `at` in the power of two; its second argument maps an index to a coord.
    """
    extra = n - (1 << (n.bit_length() - 1))

    def coord(at: int) -> int:
        return 2 * at + 1 if at < extra else at + extra

    def program(me: int) -> tuple[ScheduleStep, ...]:
        steps = core(me // 2 if me < 2 * extra else me - extra, coord)
        if not extra:
            return tuple(steps)
        if me >= 2 * extra:
            return (IDLE, *steps, IDLE)
        if me % 2:
            first, last = Receive(me - 1, 0, chunks, True), Send(me - 1, 0, chunks)
            return (ScheduleStep((), (first,)), *steps, ScheduleStep((last,)))
        there, back = Send(me + 1, 0, chunks), Receive(me + 1, 0, chunks, False)
        return (ScheduleStep((there,)), *[IDLE] * len(steps), ScheduleStep((), (back,)))

    return Schedule(name, n, chunks, len(core(0, coord)) + 2 * (extra > 0), program)


def heap_place(n: int, rank: int) -> Place:
    """Return the place of `rank` in the binary tree of n ranks that is filled level by level."""
    children = tuple(c for c in (2 * rank + 1, 2 * rank + 2) if c < n)
    return Place((rank - 1) // 2 if rank else 0, children, (rank + 1).bit_length() - 1)


def in_order_place(n: int, rank: int) -> Place:
    """Return the place of `rank` in the tree whose root is 0, above a binary tree of 1 to n - 1 in order.

    The top of a range is its number with the most trailing zero bits, so odd ranks are leaves.
    """
    if rank == 0:
        return Place(0, (_top(1, n),) if n > 1 else (), 0)
    low, high, parent, depth = 1, n, 0, 1
    while (top := _top(low, high)) != rank:
        low, high = (low, top) if rank < top else (top + 1, high)
        parent, depth = top, depth + 1
    below = [span for span in ((low, rank), (rank + 1, high)) if span[0] < span[1]]
    return Place(parent, tuple(_top(*span) for span in below), depth)


def twin_place(n: int, rank: int) -> Place:
    """Return the place of `rank` in the second of two trees: the first tree with even and odd ranks exchanged.

    The tree is mirrored for even n and shifted by one for odd n, where mirroring would keep even ranks even.
    """
    role = n - 1 - rank if n % 2 == 0 else (rank - 1) % n
    parent, children, depth = in_order_place(n, role)

    def coord(other: int) -> int:
        return n - 1 - other if n % 2 == 0 else (other + 1) % n

    return Place(coord(parent), tuple(sorted(map(coord, children))), depth)


def _top(low: int, high: int) -> int:
    """Return the number in [low, high) with the most trailing zero bits."""
    top = high - 1
    while (lower := top & (top - 1)) >= low:
        top = lower
    return top


def _through(place: Place, height: int, chunks: int, offset: int) -> list[ScheduleStep]:
    """Return one rank's steps: chunk `offset` + j leaves the deepest leaves in step j, and the root `height` steps later."""
    parent, children, depth = place
    if height == 0:
        return []
    sends: list[list[Send]] = [[] for _ in range(2 * height + chunks - 1)]
    receives: list[list[Receive]] = [[] for _ in sends]
    for j in range(chunks):
        chunk = (offset + j, offset + j + 1)
        for child in children:
            receives[height - depth - 1 + j].append(Receive(child, *chunk, True))
            sends[height + depth + j].append(Send(child, *chunk))
        if depth > 0:
            sends[height - depth + j].append(Send(parent, *chunk))
            receives[height + depth - 1 + j].append(Receive(parent, *chunk, False))
    return [ScheduleStep(tuple(s), tuple(r)) for s, r in zip(sends, receives, strict=True)]


def _merged(programs: list[list[ScheduleStep]]) -> tuple[ScheduleStep, ...]:
    """Merge several programs into the same steps. Between two ranks, the first program is listed first on both."""
    return tuple(
        ScheduleStep(
            tuple(s for each in steps for s in each.sends), tuple(r for each in steps for r in each.receives)
        )
        for steps in zip(*programs, strict=True)
    )
