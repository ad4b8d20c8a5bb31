"""The second stage of a collective: compare the call between ranks, and fetch sizes that only the other ranks know."""

from __future__ import annotations

from math import prod

import torch

from meshcomm.collectives import ALL_GATHER, ALL_TO_ALL, BROADCAST, SCATTER, Call
from meshcomm.comm.check_call import misfit
from meshcomm.comm.checks import check_answered
from meshcomm.comm.request import Request
from meshcomm.comm.shapes import blank_header, described_by, without
from meshcomm.errors import MeshcommError, ShapeError
from meshcomm.transport.support import name_of


def agree(request: Request) -> None:
    """Return when this rank may make the call, because no rank makes another, and can allocate its result.

    Raises CallMismatchError, see CallCheck.
    """
    recorder, x, facts = request.comm.recorder, request.common, request.facts
    if x is not None and recorder.check is not None:
        shape = without(x, request.axis).shape if request.differs else x.shape
        facts = {"shape": list(shape), "dtype": name_of(x.dtype), **facts}
    waits = not request.async_op and request.row.waits_for_all(1 if x is None else x.nbytes)
    try:
        compared = recorder.announce_call(request.comm.name, request.name, facts, waits)
    except MeshcommError:
        if request.problem is not None and request.row is SCATTER:
            raise request.problem from None
        raise
    if request.row is SCATTER:
        _agree_on_slice(request)
    elif request.differs:
        _agree_on_sizes(request, compared)


def _agree_on_slice(request: Request) -> None:
    """Send the slice's shape to the ranks that must allocate a slice. Raise on all ranks if the source cannot scatter."""
    comm, where = request.comm, request.where
    header = blank_header(comm.transport.device) if request.header is None else request.header
    if request.out is None:
        if request.problem is not None:
            header[0] = -1
        comm.run(Call(BROADCAST, header, root=request.root))
    if request.problem is not None:
        raise request.problem
    if header[0] < 0:
        raise ShapeError(
            f"{where()}: coord {request.root} has nothing to scatter",
            given=f"the arguments on coord {request.root}, the source",
            expected=f"a tensor on the source whose axis can be split into {comm.size}",
            hint=f"look at the error of coord {request.root}",
        )
    if request.out is None:
        if request.source is None:
            check_answered(comm.transport.name, "the slice's shape", where(), "out=torch.empty(...)")
            request.out = described_by(header)
        else:
            # In a dry run, even the source gets back a blank header.
            sizes = list(request.source.shape)
            sizes[request.axis] //= comm.size
            request.out = request.source.new_empty(sizes)
    comm.recorder.set_bytes(request.out.nbytes * comm.size)


def _agree_on_sizes(request: Request, compared: bool) -> None:
    """Exchange the sizes of the parts. Sizes that the caller gives are exchanged only while calls are compared."""
    comm, x, axis = request.comm, request.source, request.axis
    input_split_sizes, output_split_sizes = request.input_split_sizes, request.output_split_sizes
    assert x is not None
    # Sizes that the caller gives cannot be compared without waiting for the other ranks.
    compared = compared and not request.async_op
    if output_split_sizes is None or (compared and comm.transport.name != "fake"):
        hint = (
            "output_split_sizes=, the sizes to receive"
            if request.row is ALL_TO_ALL
            else "equal sizes: pad before the call, and trim after it"
        )
        check_answered(comm.transport.name, "the sizes of their parts", request.where(), hint)
        own = [x.shape[axis]] if input_split_sizes is None else input_split_sizes
        told = torch.tensor(own, dtype=torch.int64, device=x.device)
        answer = told.new_empty(comm.size)
        comm.run(Call(ALL_GATHER if input_split_sizes is None else ALL_TO_ALL, told, answer))
        request.sizes = answer.tolist()
    else:
        request.sizes = list(output_split_sizes)
    if input_split_sizes is None:
        rest = prod([*x.shape[:axis], *x.shape[axis + 1 :]])
        comm.recorder.set_bytes(sum(request.sizes) * rest * x.element_size())
    request.problem = _misjoined(request, request.sizes)


def _misjoined(request: Request, sizes: list[int]) -> MeshcommError | None:
    """Return the error if the received sizes are wrong on this rank only."""
    comm, axis, joined, x = request.comm, request.axis, request.joined, request.source
    if request.output_split_sizes not in (None, sizes):
        return ShapeError(
            f"{request.where()}: the other ranks send sizes that differ from those this rank expects",
            given=f"output_split_sizes={request.output_split_sizes}",
            expected=f"output_split_sizes={sizes}, as in the input_split_sizes of coords 0 to {comm.size - 1}",
            hint="omit output_split_sizes, at the cost of a small exchange before each call",
        )
    if joined != axis and len(set(sizes)) > 1:
        return ShapeError(
            f"{request.where()}: parts of unequal size cannot be joined along axis {joined}",
            given=f"sizes {sizes} of axis {axis} from coords 0 to {comm.size - 1}",
            expected=f"equal sizes, or concat_axis={axis}",
            hint=f"concat_axis={axis}",
        )
    if request.out is None or not request.gets:
        return None
    assert x is not None
    shape = list(x.shape)
    shape[axis] = sizes[0]
    shape[joined] = sum(sizes) if joined == axis else shape[joined] * comm.size
    return misfit(request, request.out, shape)
