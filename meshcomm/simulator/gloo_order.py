"""Reductions in Gloo's order, so that results are bit-identical to Gloo's, also for NaN and signed zeros in min and max."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from meshcomm.reductions import WIRE_OPS

_SEGMENT_BYTES: Final = 1024 * 1024


# C++'s std::min and std::max of a rank's own value and the result so far: they return the own value unless the other is
# less or greater, so that a later number replaces a NaN.
_COMBINE: Final[dict[str, Callable[..., Tensor]]] = {
    "min": lambda acc, own, out: torch.where(acc < own, acc, own, out=out),
    "max": lambda acc, own, out: torch.where(own < acc, acc, own, out=out),
}


def reduced(parts: Sequence[Tensor], op: str) -> Tensor:
    """Return `parts[0]` op `parts[1]` op ..., elementwise. The parts are flat tensors of equal length and dtype.

    Gloo reduces around a ring. It splits the elements into one chunk per rank. Chunk c starts with rank c-1's values.
    The values of ranks c-2, c-3 and so on are then added. all_reduce, reduce and reduce_scatter use the same order, and an average
    divides the sum. Tested with torch 2.15.
    """
    if parts[0].is_complex():
        return torch.view_as_complex(
            reduced([torch.view_as_real(part).view(-1) for part in parts], op).view(-1, 2)
        )
    row, size, length = WIRE_OPS[op], len(parts), parts[0].numel()
    combine = _COMBINE.get(op) or getattr(torch, row.combine)
    if not parts[0].is_floating_point() or length == 0:
        total = parts[0].clone()
        for part in parts[1:]:
            combine(total, part, out=total)
    else:
        chunk = _chunk(length, parts[0].element_size(), size)
        rows = pad(torch.stack(list(parts)), (0, size * chunk - length))
        order, column = _order(size)
        terms = rows.view(size, size, chunk)[order, column]
        acc = terms[0]
        for term in terms[1:]:
            combine(acc, term, out=acc)
        total = acc.reshape(-1)[:length]
    return total.div_(size) if row.divided else total


def reduced_apart(lengths: Sequence[int] | None, parts: Sequence[Tensor], op: str) -> Tensor:
    """Return the same for parts that a call has passed as lists of one tensor per rank: Gloo reduces each of these by itself.

    lengths: the elements of each rank's tensor; None if all have as many.
    """
    size = parts[0].numel() // len(parts) if lengths is None else list(lengths)
    apart = zip(*(part.split(size) for part in parts), strict=True)
    return torch.cat([reduced(each, op) for each in apart])


def _chunk(length: int, item_bytes: int, size: int) -> int:
    """Return the number of elements in one rank's chunk, which Gloo computes from the size in bytes."""
    bytes_ = length * item_bytes
    segments = _up(max(1, -(-bytes_ // _SEGMENT_BYTES)), 2 * size)
    segment_bytes = _up(-(-bytes_ // segments), item_bytes)
    return segments // size * segment_bytes // item_bytes


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


@cache
def _order(size: int) -> tuple[Tensor, Tensor]:
    """Return an array whose element (k, c) is the rank that contributes the k-th term of chunk c, and the chunk indices c."""
    # The result is cached for all ranks, so it must not be created on the device of a rank inside torch.device("meta").
    ranks = torch.arange(size, device="cpu")
    return (ranks - 1 - ranks[:, None]) % size, ranks
