"""The cost of each algorithm as a function of ranks, bytes and chunks, for models that need no schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from meshcomm.algorithms.schedule import check_counts, check_inner


class Cost(NamedTuple):
    """Step and byte counts of one all-reduce, exact if the bytes divide evenly into chunks.

    steps: length of the longest chain of dependent messages (the latency term). path_bytes: bytes sent along that chain.
    busiest_bytes: bytes sent by the busiest rank (the bandwidth term). total_bytes: bytes sent by all ranks.
    """

    steps: int
    path_bytes: float
    busiest_bytes: float
    total_bytes: float

    def seconds(self, alpha_s: float, beta_s_per_byte: float) -> float:
        """Return the time in the alpha-beta model: alpha per step, plus beta per byte sent along the chain or by
        the busiest rank, whichever sends more.

        This is the textbook time for ring, two_level and the recursive algorithms over a power of two. For trees, it is
        a lower bound. Source: Hockney, "The communication challenge for MPP", 1994.
        """
        return self.steps * alpha_s + max(self.path_bytes, self.busiest_bytes) * beta_s_per_byte


def ring(n: int, size_bytes: float) -> Cost:
    """Return the cost of 2 (n - 1) steps of size/n bytes, which meets the lower bound in Patarasuk and Yuan 2009."""
    check_counts("ring", n)
    moved = 2 * (n - 1) * size_bytes / n
    return Cost(2 * (n - 1), moved, moved, 2 * (n - 1) * size_bytes)


def two_level(n: int, size_bytes: float, inner: int) -> Cost:
    """Return the cost of a ring with all data inside groups of `inner`, and a ring with 1/inner of the data across groups.

    Source: Mikami et al. 2018. For different links and more levels, see `lines` in meshcomm.predict.times.
    """
    check_inner(n, inner)
    inside, across = ring(inner, size_bytes), ring(n // inner, size_bytes / inner)
    moved = inside.path_bytes + across.path_bytes
    return Cost(inside.steps + across.steps, moved, moved, 2 * (n - 1) * size_bytes)


def tree(n: int, size_bytes: float, chunks: int = 1) -> Cost:
    """Return the cost of 2 floor(log2 n) steps up and down the tree, plus one step for each chunk after the first.

    An inner rank with two children sends its data once up and twice down. A rank uses all its connections at
    the same time. For pipelined trees, see Sanders, Speck, Träff 2009.
    """
    check_counts("tree", n, chunks)
    steps = 2 * (n.bit_length() - 1) + chunks - 1 if n > 1 else 0
    # With five ranks or more, coord 1 has a parent and two children.
    times = {1: 0, 2: 1, 3: 2, 4: 2}.get(n, 3)
    return Cost(steps, steps * size_bytes / chunks, times * size_bytes, 2 * (n - 1) * size_bytes)


def double_tree(n: int, size_bytes: float, chunks: int = 1) -> Cost:
    """Return the cost of 2 ceil(log2 n) steps, plus one step for each additional chunk per half.

    An inner rank of one tree sends half the data three times. As a leaf of the other tree, it sends the other half
    once. In total, it sends at most twice the data. Source: Sanders, Speck, Träff 2009; NCCL since 2.4.
    """
    check_counts("double_tree", n, chunks)
    steps = 2 * (n - 1).bit_length() + chunks - 1 if n > 1 else 0
    busiest = min(n, 4) * size_bytes / 2 if n > 1 else 0
    return Cost(steps, steps * size_bytes / (2 * chunks), busiest, 2 * (n - 1) * size_bytes)


def recursive_doubling(n: int, size_bytes: float) -> Cost:
    """Return the cost of log2 p steps with all data, plus 2 steps to fold and unfold (Thakur, Rabenseifner, Gropp 2005)."""
    levels, extra, fold = _folded("recursive_doubling", n)
    steps = levels + 2 * fold
    total = ((1 << levels) * levels + 2 * extra) * size_bytes
    return Cost(steps, steps * size_bytes, (levels + fold) * size_bytes, total)


def halving_doubling(n: int, size_bytes: float) -> Cost:
    """Return the cost of 2 log2 p steps that send 1/2, 1/4, ... of the data and back, plus 2 to fold (Rabenseifner 2004)."""
    levels, _, fold = _folded("halving_doubling", n)
    moved = 2 * ((1 << levels) - 1) * size_bytes / (1 << levels)
    path, busiest = moved + 2 * fold * size_bytes, moved + fold * size_bytes
    return Cost(2 * levels + 2 * fold, path, busiest, 2 * (n - 1) * size_bytes)


def _folded(name: str, n: int) -> tuple[int, int, int]:
    """Return log2 of the largest power of two up to n, the number of remaining ranks, and 1 if any remain, otherwise 0."""
    check_counts(name, n)
    levels = n.bit_length() - 1
    extra = n - (1 << levels)
    return levels, extra, int(extra > 0)


# (ranks, bytes, chunks) -> Cost. two_level is missing because it needs the group size.
ALL_REDUCE: Final[Mapping[str, Callable[[int, float, int], Cost]]] = {
    "ring": lambda n, size_bytes, chunks: ring(n, size_bytes),
    "recursive_doubling": lambda n, size_bytes, chunks: recursive_doubling(n, size_bytes),
    "halving_doubling": lambda n, size_bytes, chunks: halving_doubling(n, size_bytes),
    "tree": tree,
    "double_tree": double_tree,
}
