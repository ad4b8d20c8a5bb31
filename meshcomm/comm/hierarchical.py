"""Reduce over several dims one inside the other: little crosses the outer dims."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from meshcomm.comm.checks import check_in_place
from meshcomm.comm.communicator import Communicator
from meshcomm.comm.shapes import into, materialised


def all_reduce(comms: Sequence[Communicator], x: Tensor, op: str, factor: float | None) -> Tensor:
    """Reduce `x` in place over the dims of `comms`, outermost first, and return it.

    Inside the innermost dim each rank gets the reduced slice number `coord`; the slices are reduced
    over the outer dims in the same way; then the innermost dim gathers them. Across the outer dims
    goes 1/n of the data, n the size of the innermost dim, where a flat ring sends all of it.
    Equal to the flat result up to rounding: the order of the sums is another.
    """
    inner = comms[-1]
    if len(comms) == 1 or x.numel() == 0:
        # An empty tensor still makes every rank meet, so that a skipped call is noticed.
        for comm in comms:
            _settled(comm.checked_all_reduce(x, op, False, factor))
        return x
    check_in_place(x, lambda: f'all_reduce along "{inner.name}" on {inner.who}', "all_reduce")
    flat = materialised(x).view(-1)
    length = flat.numel()
    padding = -length % inner.size
    padded = flat.new_zeros(length + padding)
    padded[:length] = flat
    piece = _settled(inner.reduce_scatter(padded, 0, op, False, None, factor))
    all_reduce(comms[:-1], piece, "sum" if op == "premul_sum" else op, None)
    whole = _settled(inner.all_gather(piece))
    return into(x, whole[:length].view(x.shape))


def _settled(result: object) -> Tensor:
    assert isinstance(result, Tensor)
    return result
