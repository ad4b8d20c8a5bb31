"""Up a tree and down again: few steps, and chunks follow one another through the tree."""

from __future__ import annotations

from typing import NamedTuple

from meshcomm.algorithms.schedule import Receive, Schedule, Send, Step, check_counts


class Place(NamedTuple):
    """A rank's place in a tree. The root's depth is 0 and it is its own parent."""

    parent: int
    children: tuple[int, ...]
    depth: int


def tree(n: int, chunks: int = 1) -> Schedule:
    """Reduce up one binary tree with root 0, and broadcast down it, `chunks` pieces one behind the other.

    The children of r are 2r + 1 and 2r + 2. What goes up and what goes down meet on no link.

    Steps:    2 floor(log2 n) + chunks - 1.
    Order:    each rank adds its children's sums to its own, the lower child first.
    """
    check_counts("tree", n, chunks)
    height = n.bit_length() - 1

    def program(me: int) -> tuple[Step, ...]:
        return _merged([_through(heap_place(n, me), height, chunks, 0)])

    return Schedule("tree", n, chunks, 2 * height + chunks - 1 if n > 1 else 0, program)


def double_tree(n: int, chunks: int = 1) -> Schedule:
    """Two binary trees at once, each with half the data in `chunks` pieces.

    A rank that has children in one tree is a leaf of the other (for odd n, coord 0 has one child in
    each), so no rank sends more than twice the data, where an inner rank of one tree sends it three times.

    Steps:    2 ceil(log2 n) + chunks - 1.
    Order:    as `tree`: the first half of the data along the first tree, the second along the second.
    Source:   Sanders, Speck, Träff, "Two-tree algorithms for full bandwidth broadcast, reduction
              and scan", 2009, with connections of a rank that work at the same time, as in NCCL
              since 2.4, in place of their schedule of one message at a time.
    """
    check_counts("double_tree", n, chunks)
    height = (n - 1).bit_length()

    def program(me: int) -> tuple[Step, ...]:
        first = in_order_place(n, me)
        second = twin_place(n, me)
        return _merged([_through(first, height, chunks, 0), _through(second, height, chunks, chunks)])

    return Schedule("double_tree", n, 2 * chunks, 2 * height + chunks - 1 if n > 1 else 0, program)


def heap_place(n: int, rank: int) -> Place:
    """`rank` in the binary tree of n ranks that is filled level by level."""
    children = tuple(c for c in (2 * rank + 1, 2 * rank + 2) if c < n)
    return Place((rank - 1) // 2 if rank else 0, children, (rank + 1).bit_length() - 1)


def in_order_place(n: int, rank: int) -> Place:
    """`rank` in the tree whose root is 0, above a binary tree of 1 to n - 1 in order.

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
    """`rank` in the second of two trees: the first with even and odd exchanged.

    Mirrored for even n, shifted by one for odd n, where mirroring would leave even ranks even.
    """
    role = n - 1 - rank if n % 2 == 0 else (rank - 1) % n
    parent, children, depth = in_order_place(n, role)

    def coord(other: int) -> int:
        return n - 1 - other if n % 2 == 0 else (other + 1) % n

    return Place(coord(parent), tuple(sorted(map(coord, children))), depth)


def _top(low: int, high: int) -> int:
    """The number in [low, high) with the most trailing zero bits."""
    top = high - 1
    while (lower := top & (top - 1)) >= low:
        top = lower
    return top


def _through(place: Place, height: int, chunks: int, offset: int) -> list[Step]:
    """One rank's steps: chunk `offset` + j leaves the deepest leaves in step j, the root `height` later."""
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
    return [Step(tuple(s), tuple(r)) for s, r in zip(sends, receives, strict=True)]


def _merged(programs: list[list[Step]]) -> tuple[Step, ...]:
    """Several programs in the same steps; between two ranks, the first program is listed first on both."""
    return tuple(
        Step(
            tuple(s for each in steps for s in each.sends), tuple(r for each in steps for r in each.receives)
        )
        for steps in zip(*programs, strict=True)
    )
