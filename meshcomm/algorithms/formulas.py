"""What the algorithms cost, as functions of ranks, bytes and chunks: for models, without a schedule."""

from __future__ import annotations

import math
from typing import NamedTuple

from meshcomm.algorithms.schedule import check_counts, check_inner


class Cost(NamedTuple):
    """Counts of one all-reduce; what `interpret` counts where the bytes divide evenly into the chunks.

    steps:         messages in the longest chain of messages that wait for each other: the latency term.
    path_bytes:    bytes along that chain.
    busiest_bytes: bytes that the busiest rank sends: the bandwidth term.
    total_bytes:   bytes that all ranks send.
    """

    steps: int
    path_bytes: float
    busiest_bytes: float
    total_bytes: float

    def seconds(self, alpha_s: float, beta_s_per_byte: float) -> float:
        """The alpha-beta time: alpha for each step, beta for each byte of the chain or the busiest rank.

        Of the two the larger: a chain cannot be faster than its messages, nor a rank than its port.
        For ring, two_level and the recursive ones over a power of two both are equal, and this is
        the textbook time; for trees it is a lower bound.
        Source: Hockney, "The communication challenge for MPP", 1994.
        """
        return self.steps * alpha_s + max(self.path_bytes, self.busiest_bytes) * beta_s_per_byte

    def then(self, after: Cost) -> Cost:
        """This, and `after` it, on the same ranks."""
        return Cost(*(a + b for a, b in zip(self, after, strict=True)))  # type: ignore[arg-type]


NOTHING = Cost(0, 0, 0, 0)


def ring(n: int, size_bytes: float) -> Cost:
    """2 (n - 1) steps of size/n: Patarasuk and Yuan 2009, whose lower bound of bytes it meets."""
    check_counts("ring", n)
    moved = 2 * (n - 1) * size_bytes / n
    return Cost(2 * (n - 1), moved, moved, 2 * (n - 1) * size_bytes)


def two_level(n: int, size_bytes: float, inner: int) -> Cost:
    """Both of `two_level_parts`, one after the other."""
    inside, across = two_level_parts(n, size_bytes, inner)
    return inside.then(across)


def two_level_parts(n: int, size_bytes: float, inner: int) -> tuple[Cost, Cost]:
    """Inside the groups of `inner`, and across the n / inner groups: for levels with their own alpha and beta.

    Inside a ring of all data, across a ring of 1/inner of it: Mikami et al. 2018.
    """
    check_inner(n, inner)
    steps, moved, _, total = ring(inner, size_bytes)
    inside = Cost(steps, moved, moved, total * (n // inner))
    steps, moved, _, total = ring(n // inner, size_bytes / inner)
    return inside, Cost(steps, moved, moved, total * inner)


def tree(n: int, size_bytes: float, chunks: int = 1) -> Cost:
    """2 floor(log2 n) steps to go up and down, and one more for every further chunk behind the first.

    An inner rank with two children sends its data once up and twice down. (Pipelined trees: Sanders,
    Speck, Träff 2009; here all connections of a rank work at the same time.)
    """
    check_counts("tree", n, chunks)
    if n == 1:
        return NOTHING
    steps = 2 * (n.bit_length() - 1) + chunks - 1
    # Coord 1 is the first with a parent and two children, from five ranks on.
    times = {2: 1, 3: 2, 4: 2}.get(n, 3)
    return Cost(steps, steps * size_bytes / chunks, times * size_bytes, 2 * (n - 1) * size_bytes)


def double_tree(n: int, size_bytes: float, chunks: int = 1) -> Cost:
    """2 ceil(log2 n) steps, and one more for every further chunk of a half.

    An inner rank of one tree sends half the data three times and, as a leaf of the other, half of it
    once: at most twice the data. Sanders, Speck, Träff 2009; NCCL since 2.4.
    """
    check_counts("double_tree", n, chunks)
    if n == 1:
        return NOTHING
    steps = 2 * (n - 1).bit_length() + chunks - 1
    return Cost(
        steps, steps * size_bytes / (2 * chunks), min(n, 4) * size_bytes / 2, 2 * (n - 1) * size_bytes
    )


def recursive_doubling(n: int, size_bytes: float) -> Cost:
    """log2 p steps with all data, and 2 more to fold and unfold: Thakur, Rabenseifner, Gropp 2005."""
    check_counts("recursive_doubling", n)
    levels, extra = _folded(n)
    fold = 1 if extra else 0
    return Cost(
        levels + 2 * fold,
        (levels + 2 * fold) * size_bytes,
        (levels + fold) * size_bytes,
        ((1 << levels) * levels + 2 * extra) * size_bytes,
    )


def halving_doubling(n: int, size_bytes: float) -> Cost:
    """2 log2 p steps that carry 1/2, 1/4, ... and back, and 2 more to fold: Rabenseifner 2004."""
    check_counts("halving_doubling", n)
    levels, extra = _folded(n)
    fold, power = 1 if extra else 0, 1 << levels
    moved = 2 * (power - 1) * size_bytes / power
    return Cost(
        2 * levels + 2 * fold,
        moved + 2 * fold * size_bytes,
        moved + fold * size_bytes,
        2 * (n - 1) * size_bytes,
    )


def best_chunks(cost: Cost, alpha_s: float, beta_s_per_byte: float) -> int:
    """How many chunks are fastest along a chain of a tree, given its Cost with one chunk.

    (steps - 1 + k) (alpha + beta b / k) with b the bytes of one message is least for
    k = sqrt((steps - 1) beta b / alpha). Source: as for any pipeline, Sanders, Speck, Träff 2009.
    """
    if cost.steps == 0 or alpha_s <= 0:
        return 1
    one = cost.path_bytes / cost.steps
    return max(1, round(math.sqrt((cost.steps - 1) * beta_s_per_byte * one / alpha_s)))


def _folded(n: int) -> tuple[int, int]:
    """log2 of the largest power of two up to n, and how many ranks are left over."""
    levels = n.bit_length() - 1
    return levels, n - (1 << levels)
