"""The second stage of a collective: compare the call between ranks, and fetch sizes that only the other ranks know."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from meshcomm.collectives import ALL_GATHER, ALL_TO_ALL, BROADCAST, SCATTER, Call
from meshcomm.comm.check_call import misfit
from meshcomm.comm.checks import check_answered
from meshcomm.comm.facts import exchanged, facts_of, sent_as, shortened
from meshcomm.comm.request import Request
from meshcomm.comm.shapes import blank_header, described_by, without
from meshcomm.errors import MeshcommError, ShapeError
from meshcomm.reductions import REDUCTIONS


def agree(request: Request) -> None:
    """Return when this rank may make the call, because no rank makes another, and can allocate its result.

    Raises CallMismatchError, see CallCheck.
    """
    recorder = request.comm.recorder
    facts = {} if recorder.check is None else _facts(request)
    x = request.common
    waits = not request.async_op and request.row.waits_for_all(1 if x is None else x.nbytes)
    try:
        recorder.announce_call(request.comm.name, request.name, facts, waits)
    except MeshcommError:
        if request.problem is not None and request.row is SCATTER:
            raise request.problem from None
        raise
    if request.row is SCATTER:
        _agree_on_slice(request)
    elif request.differs:
        _agree_on_sizes(request)


def _facts(request: Request) -> dict[str, Any]:
    """Return the facts of a call of the mesh, which has been checked."""
    row, out, axis = request.row, request.out, request.axis
    x = out if row is SCATTER else request.common
    op: Any = request.op if row.reduces else None
    tensors = [] if x is None else [x]
    facts = facts_of(row, tensors, op, request.root)
    if x is not None:
        shape = (without(x, axis) if request.differs else x).shape
        facts = {"shape": list(shape), **facts}
    if request.differs:
        facts["elements"] = None
    if x is not None and row.reduces:
        facts["sent as"] = sent_as(x, REDUCTIONS[op].wire.name)
    if row is SCATTER:
        refused = request.problem is not None and out is not None
        facts |= {
            "out": None if out is not None else False,
            "x_is": "not to be scattered" if refused else None,
        }
    elif row is ALL_TO_ALL:
        facts |= {"split_axis": axis, "concat_axis": request.concat}
        facts["input_split_sizes"] = True if request.input_split_sizes is not None else None
        facts["output_split_sizes"] = True if request.output_split_sizes is not None else None
    elif row.joins or row.splits:
        facts["axis"] = axis
        facts |= {"uneven": True if request.uneven else None} if row.joins else {}
    # Each rank has its own factor, so factors are not compared.
    return shortened(facts | request.options | (request.packed or {})) | _given_sizes(request)


def _given_sizes(request: Request) -> dict[str, Any]:
    """Return the facts of the sizes of an all_to_all that its ranks do not exchange."""
    sends, expects, source = request.input_split_sizes, request.output_split_sizes, request.source
    if sends is None or expects is None or source is None:
        return {}
    rest = prod(source.shape) // max(source.shape[request.axis], 1)
    return exchanged(request.comm.coord, [n * rest for n in sends], [n * rest for n in expects])


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


def _agree_on_sizes(request: Request) -> None:
    """Exchange the sizes of the parts, unless the caller gives them."""
    comm, x, axis = request.comm, request.source, request.axis
    input_split_sizes, output_split_sizes = request.input_split_sizes, request.output_split_sizes
    assert x is not None
    if output_split_sizes is None:
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
