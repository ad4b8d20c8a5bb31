"""nccl-tests' convention for bandwidths that can be compared with what the hardware has.

Source: nccl-tests, doc/PERFORMANCE.md (github.com/NVIDIA/nccl-tests).
"""

from __future__ import annotations

from fractions import Fraction
from typing import assert_never

from meshcomm.costs.operations import Operation


def bus_factor(operation: Operation, ranks: int) -> Fraction:
    """busbw / algbw. algbw is size / time; the size is the whole data for all_gather and reduce_scatter.

    One for a single rank, where nothing moves.

    >>> bus_factor("all_reduce", 8), bus_factor("all_gather", 8)
    (Fraction(7, 4), Fraction(7, 8))
    """
    if ranks == 1:
        return Fraction(1)
    match operation:
        case "all_reduce":
            return Fraction(2 * (ranks - 1), ranks)
        case "all_gather" | "reduce_scatter" | "all_to_all":
            return Fraction(ranks - 1, ranks)
        case "broadcast" | "reduce" | "sendrecv":
            return Fraction(1)
    assert_never(operation)
