"""Reduce over several dims one inside the other: little crosses the outer dims."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from torch import Tensor

from meshcomm.comm.checks import check_in_place, check_tensor, check_written
from meshcomm.comm.communicator import Communicator
from meshcomm.comm.handle import Handle
from meshcomm.comm.shapes import into, materialised

# Of larger tensors pieces of this size follow each other through the dims.
_PIECE_BYTES: Final = 4 << 20


def all_reduce(comms: Sequence[Communicator], x: Tensor, op: str, factor: float | None) -> Tensor:
    """Reduce `x` in place over the dims of `comms`, outermost first, and return it.

    Inside the innermost dim each rank gets the reduced slice number `coord`; the slices are reduced
    over the outer dims in the same way; then the innermost dim gathers them. Across the outer dims
    goes 1/n of the data, n the size of the innermost dim, where a flat ring sends all of it.
    Equal to the flat result up to rounding: the order of the sums is another.
    """
    inner = comms[-1]
    check_tensor(x, inner.transport.kinds, lambda: inner.where("all_reduce"))
    if len(comms) == 1 or x.numel() == 0:
        # An empty tensor still makes every rank meet, so that a skipped call is noticed.
        for comm in comms:
            _settled(comm.all_reduce(x, op, False, factor))
        return x
    check_in_place(x, lambda: inner.where("all_reduce"), "all_reduce")
    check_written(x, lambda: inner.where("all_reduce"))
    flat = materialised(x).view(-1)
    length = flat.numel()
    padding = -length % inner.size
    padded = flat.new_zeros(length + padding)
    padded[:length] = flat
    most = max(1, _PIECE_BYTES // (inner.size * flat.element_size())) * inner.size
    pieces = padded.split(most)
    further = "sum" if op == "premul_sum" else op
    # While two pieces cross the outer dims, which are the slow ones, the one behind them is being reduced
    # inside and the one before them gathered.
    reducing = _begun(inner.reduce_scatter(pieces[0], 0, op, True, None, factor))
    crossing: deque[tuple[Handle[Tensor] | None, Tensor, Tensor]] = deque()
    gathering = []

    def gather() -> None:
        across, mine, piece = crossing.popleft()
        if across is not None:
            across.wait()
        # Into where the piece came from: what was there has been reduced.
        gathering.append(_begun(inner.all_gather(mine, 0, True, piece)))

    for number, piece in enumerate(pieces):
        mine = reducing.wait()
        if number + 1 < len(pieces):
            reducing = _begun(inner.reduce_scatter(pieces[number + 1], 0, op, True, None, factor))
        if len(comms) == 2:
            crossing.append((_begun(comms[0].all_reduce(mine, further, True, None)), mine, piece))
        else:
            all_reduce(comms[:-1], mine, further, None)
            crossing.append((None, mine, piece))
        if len(crossing) == 2:
            gather()
    while crossing:
        gather()
    for handle in gathering:
        handle.wait()
    return into(x, padded[:length].view(x.shape))


def _begun(result: object) -> Handle[Tensor]:
    assert isinstance(result, Handle)
    return result


def _settled(result: object) -> Tensor:
    assert isinstance(result, Tensor)
    return result
