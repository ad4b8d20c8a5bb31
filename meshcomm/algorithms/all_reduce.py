"""Schedules of six all-reduce algorithms: over rings, over trees, and between partners at distances 1, 2, 4, ..."""

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
    """A rank's place in a tree. The root has depth 0 and is its own parent."""

    parent: int
    children: tuple[int, ...]
    depth: int


def ring(n: int) -> Schedule:
    """Return the ring schedule: a reduce-scatter, then an all-gather.

    Steps:    2 (n - 1), each with 1/n of the data on every link; optimal in bytes, linear in latency.
    Order:    the sum of chunk c starts at coord c + 1, continues upwards with wraparound, and ends at coord c.
    Source:   Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
              workstations", 2009.
    """
    check_counts("ring", n)

    def program(me: int) -> tuple[ScheduleStep, ...]:
        return tuple(s for way in (True, False) for s in _around(n, me, int, lambda c: (c, c + 1), way))

    return Schedule("ring", n, n, 2 * (n - 1), program)


def two_level(n: int, inner: int) -> Schedule:
    """Return a two-level schedule: rings inside groups of `inner` consecutive coords, and rings across the groups.

    The ring inside each group leaves each rank with one slice of the group's sum. The rings across the groups
    all-reduce these slices, and the inner rings gather them. Only 1/inner of the data crosses between groups.

    Steps:    2 (inner - 1) inside and 2 (n / inner - 1) across.
    Order:    the order of `ring`, first inside the groups, then across the groups.
    Source:   Mikami et al., "Massively distributed SGD: ImageNet/ResNet-50 training in a flash", 2018,
              where it is called 2D-torus all-reduce.
    Raises:   LayoutError if `inner` does not divide n.
    """
    check_inner(n, inner)
    outer = n // inner

    def program(me: int) -> tuple[ScheduleStep, ...]:
        group, place = divmod(me, inner)

        # Slice i consists of chunks i * outer to (i + 1) * outer - 1, one chunk for each group.
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
    """Return a schedule that reduces up a binary tree with root 0 and broadcasts down it, pipelined in `chunks` pieces.

    The children of r are 2r + 1 and 2r + 2. Upward and downward data use opposite directions of each link.

    Steps:    2 floor(log2 n) + chunks - 1.
    Order:    each rank adds its children's sums to its own, the lower child first.
    """
    check_counts("tree", n, chunks)
    height = n.bit_length() - 1

    def program(me: int) -> tuple[ScheduleStep, ...]:
        return _merged([_through(heap_place(n, me), height, chunks, 0)])

    return Schedule("tree", n, chunks, 2 * height + chunks - 1 if n > 1 else 0, program)


def double_tree(n: int, chunks: int = 1) -> Schedule:
    """Return a schedule of two concurrent binary trees, each with half the data in `chunks` pieces.

    A rank that has children in one tree is a leaf of the other (for odd n, coord 0 has one child in
    each). Thus no rank sends more than twice the data, whereas an inner rank of a single tree sends three times the data.

    Steps:    2 ceil(log2 n) + chunks - 1.
    Order:    the order of `tree`, with the first half of the data on the first tree and the second half on the second.
    Source:   Sanders, Speck, Träff, "Two-tree algorithms for full bandwidth broadcast, reduction
              and scan", 2009. In this schedule a rank uses all its connections at the same time, as in
              NCCL since 2.4; in the paper's schedule a rank sends one message at a time.
    """
    check_counts("double_tree", n, chunks)
    height = (n - 1).bit_length()

    def program(me: int) -> tuple[ScheduleStep, ...]:
        first = in_order_place(n, me)
        second = twin_place(n, me)
        return _merged([_through(first, height, chunks, 0), _through(second, height, chunks, chunks)])

    return Schedule("double_tree", n, 2 * chunks, 2 * height + chunks - 1 if n > 1 else 0, program)


def recursive_doubling(n: int) -> Schedule:
    """Return a schedule in which partners at distances 1, 2, 4, ... exchange and add all data.

    p is the largest power of two up to n. If p is less than n, n - p ranks first send their data to a neighbor,
    which represents both ranks, and receive the result at the end.

    Steps:    log2 p, and 2 more if n is not a power of two; each step sends all data.
    Order:    pairs, then pairs of pairs, ...; partners compute the same sums, with the same operand on the left.
    Source:   Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in
              MPICH", 2005.
    """
    check_counts("recursive_doubling", n)

    def core(at: int, coord: Callable[[int], int]) -> list[ScheduleStep]:
        peers = [coord(at ^ (1 << level)) for level in range(n.bit_length() - 1)]
        return [ScheduleStep((Send(peer, 0, 1),), (Receive(peer, 0, 1, True),)) for peer in peers]

    return _folded("recursive_doubling", n, 1, core)


def halving_doubling(n: int) -> Schedule:
    """Return a schedule that halves the data with partners at distances p/2, ..., 2, 1, then gathers in reverse order.

    If n is not a power of two, n - p ranks are folded into neighbors as in `recursive_doubling`.

    Steps:    2 log2 p, and 2 more if n is not a power of two. For powers of two, each rank sends as few bytes as in a ring.
    Order:    pairs at distance p/2, then pairs of those pairs, ...; one rank completes each chunk.
    Source:   Rabenseifner, "Optimization of collective reduction operations", 2004; Thakur,
              Rabenseifner, Gropp, 2005.
    """
    check_counts("halving_doubling", n)
    distances = [1 << level for level in range(n.bit_length() - 1)]

    def core(at: int, coord: Callable[[int], int]) -> list[ScheduleStep]:
        steps = []
        for distance, reduce in [*((d, True) for d in reversed(distances)), *((d, False) for d in distances)]:
            # The partners share 2 * distance chunks; each partner keeps the half that contains its own chunk.
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
    """Return the steps of position `place` in a ring. `coord` and `span` map a position to its coord and its chunks.

    reduce: if True, each position ends with the sum of its span. If False, each starts with its span and ends with all chunks.
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
    """Return a schedule over the largest power of two up to n. Among the first 2 * extra ranks, each odd rank also
    represents its even neighbor.

    core: computes the steps of one index in the power of two; its second argument maps an index to a coord.
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
        to_partner, from_partner = Send(me + 1, 0, chunks), Receive(me + 1, 0, chunks, False)
        return (ScheduleStep((to_partner,)), *[IDLE] * len(steps), ScheduleStep((), (from_partner,)))

    return Schedule(name, n, chunks, len(core(0, coord)) + 2 * (extra > 0), program)


def heap_place(n: int, rank: int) -> Place:
    """Return the place of `rank` in a binary tree of n ranks that is filled level by level."""
    children = tuple(c for c in (2 * rank + 1, 2 * rank + 2) if c < n)
    return Place((rank - 1) // 2 if rank else 0, children, (rank + 1).bit_length() - 1)


def in_order_place(n: int, rank: int) -> Place:
    """Return the place of `rank` in a tree. Root 0 has one child: the top of an in-order binary tree of ranks 1 to n - 1.

    The top of a range of ranks is the rank with the most trailing zero bits, so odd ranks are leaves.
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
    """Return the place of `rank` in the second of two trees, which is the first tree with even and odd ranks exchanged.

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
    """Return one rank's steps: the deepest leaves send chunk `offset` + j in step j, the root `height` steps later."""
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
    """Merge several programs step by step. Both ranks of a pair list the first program's messages first."""
    return tuple(
        ScheduleStep(
            tuple(s for step in steps for s in step.sends), tuple(r for step in steps for r in step.receives)
        )
        for steps in zip(*programs, strict=True)
    )
