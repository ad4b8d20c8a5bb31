"""The last stages of a collective: the tensors to send, the start, and the result."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from math import prod

import torch
from torch import Tensor

from meshcomm.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BARRIER, REDUCE, Call
from meshcomm.comm.checks import OWN_TAGS, apart, number_of
from meshcomm.comm.request import Request
from meshcomm.comm.shapes import (
    as_ordered,
    buffer_for,
    from_ordered,
    into,
    is_ordered,
    join,
    materialised,
    split,
    unwatched,
    wire,
)
from meshcomm.reductions import REDUCTIONS
from meshcomm.transport import P2P, Work
from meshcomm.transport.support import WIDENED


def load(request: Request) -> None:
    """Build the call for the transport, with dense tensors of dtypes that backends support."""
    if request.sizes is None:
        _load_even(request)
    elif request.input_split_sizes is None and request.root < 0 and request.comm.size > 1:
        _load_uneven_gather(request, request.sizes)
    else:
        _load_uneven(request, request.sizes)


def _load_even(request: Request) -> None:
    row, comm, x, source, op = request.row, request.comm, request.x, request.source, request.op
    sent: Tensor | None = None
    if source is not None:
        sent = dense = split(source, request.axis, comm.size) if row.splits else materialised(source)
        if row.reduces:
            sent, op = _prepared(request, dense)
        # The fast path sends x unchanged and nothing before x. A scatter first sends the shape of its slices.
        unchanged = (
            request.common is x
            and sent is dense
            and (not row.reduces or REDUCTIONS[request.op].prepare is None)
        )
        along_0 = request.axis == request.concat == 0
        request.repeatable = unchanged and along_0 and request.algorithm is None and materialised(x) is x
        # Backends leave partial results in the tensors of the other ranks, but x must stay unchanged.
        if row is REDUCE and sent is x:
            sent = x.clone()
    request.arrived = room = sent if row.in_place else _room(request, sent)
    request.call = Call(
        row,
        None if sent is None else wire(sent, row.reduces),
        None if row.in_place or room is None else wire(room, row.reduces),
        op,
        request.root,
        blocking=not request.async_op,
    )


def _prepared(request: Request, dense: Tensor) -> tuple[Tensor, str]:
    """Return the tensor to send in a reduction of a dense tensor, and the backend's operation. The two tensors share
    memory if possible.
    """
    reduction, x = REDUCTIONS[request.op], request.x
    op = reduction.wire.name
    if reduction.prepare is not None:
        factor = number_of(request.factor, x.dtype, request.where) if reduction.factor else None
        if request.row is not ALL_REDUCE and dense.untyped_storage() is x.untyped_storage():
            dense = dense.clone()
        with unwatched(dense):
            reduction.prepare(dense, factor)
    if is_ordered(dense.dtype, op):
        return as_ordered(dense, op), op
    return dense.to(WIDENED[dense.dtype]) if dense.dtype in WIDENED else dense, op


def _room(request: Request, sent: Tensor | None) -> Tensor | None:
    """Return the result buffer: `out` if the parts arrive in its order, otherwise new memory; None if there is no
    result.
    """
    row, comm, out = request.row, request.comm, request.out
    if row is BARRIER or not request.gets:
        return None
    # The parts of a join along axis 0, and of a split, arrive in the result's order.
    straight = row.splits != row.joins and not (row.joins and request.axis)
    if out is not None and request.problem is None and straight and (sent is None or sent.dtype == out.dtype):
        request.direct = True
        return buffer_for(out) if sent is None or apart(out, sent, comm.coord) else out.new_empty(out.shape)
    assert sent is not None
    part = sent.shape[1:] if row.splits else sent.shape
    return sent.new_empty((comm.size, *part) if row.joins else part)


# -- sizes that differ from rank to rank -----------------------------------------------------------


def _flat(request: Request) -> tuple[Tensor, int]:
    """Return this rank's input flattened with the uneven axis in front, and the number of elements per index of that
    axis.
    """
    source = request.source
    assert source is not None
    return materialised(source.movedim(request.axis, 0)).view(-1), prod(
        [*source.shape[: request.axis], *source.shape[request.axis + 1 :]]
    )


def _load_uneven_gather(request: Request, sizes: list[int]) -> None:
    """Build an all_gather that does not copy the input once per rank.

    If the backend queues its calls, all parts are padded to the longest and gathered by one kernel, which delivers one
    row per coord. Otherwise, each part is sent directly to its place as a message.
    """
    comm, transport = request.comm, request.comm.transport
    sent, count = _flat(request)
    coming = [size * count for size in sizes]
    if transport.ordered or sent.device.type not in transport.message_kinds:
        longest = max(coming)
        if sent.numel() < longest:
            sent = torch.cat([sent, sent.new_zeros(longest - sent.numel())])
        room = sent.new_empty(comm.size, longest)
        request.call = Call(ALL_GATHER, wire(sent), wire(room), blocking=not request.async_op)
        request.arrived = room if len(set(coming)) > 1 else room.view(-1)
        return
    request.arrived = sent.new_empty(sum(coming))
    parts = request.arrived.split(coming)
    parts[comm.coord].copy_(sent)
    others = [coord for coord in range(comm.size) if coord != comm.coord]
    request.call = [P2P("recv", wire(parts[coord]), coord, OWN_TAGS) for coord in others if coming[coord]]
    request.call += [P2P("send", wire(sent), coord, OWN_TAGS) for coord in others if sent.numel()]


def _load_uneven(request: Request, sizes: list[int]) -> None:
    """Build an all_to_all with a length for each coord. For a gather, only the root receives."""
    comm, input_split_sizes = request.comm, request.input_split_sizes
    sent, count = _flat(request)
    coming = [size * count if request.gets else 0 for size in sizes]
    leaving = [sent.numel() if request.root in (-1, coord) else 0 for coord in range(comm.size)]
    if input_split_sizes is not None:
        leaving = [size * count for size in input_split_sizes]
    request.arrived, source = sent.new_empty(sum(coming)), wire(sent)
    # Lengths are in units of the sent dtype: bytes if the tensor is sent as bytes.
    unit = 1 if source.dtype == sent.dtype else sent.element_size()
    lengths = ([n * unit for n in coming], [n * unit for n in leaving])
    request.call = Call(
        ALL_TO_ALL, source, wire(request.arrived), lengths=lengths, blocking=not request.async_op
    )


# -- the last stages: start the loaded call, and make the result of the received data ---------------


def start(request: Request) -> Sequence[Work]:
    """Start the call, or run its algorithm."""
    call = request.call
    if isinstance(call, list):
        works = request.comm.transport.start_p2p(call)
        request.comm.recorder.issued(works)
        return works
    assert call is not None
    if request.algorithm is None:
        # Gloo divides in place by an operator, in the mode of the start.
        with unwatched(call.x) if call.x is not None and call.row.in_place else nullcontext():
            return request.comm.start(call)
    assert call.x is not None and call.op is not None
    request.algorithm.run(request.comm, call.x.detach(), call.op)
    return ()


def carry_out(request: Request) -> Tensor | None:
    """Start the call, wait for it, and compute its result.

    This is a separate function, so that a stored error does not keep its Works alive.
    """
    for work in start(request):
        work.wait()
    if request.row is BARRIER:
        request.comm.confirm("barrier")
    return finish(request)


def finish(request: Request) -> Tensor | None:
    """Return the result after the Work objects have completed. Raises an error that occurred only on this rank."""
    row, came, target, call = request.row, request.arrived, request.target, request.call
    if request.problem is not None:
        raise request.problem
    if came is None or not request.gets:
        return None
    if request.sizes is not None:
        joined = _joined_uneven(request, came, request.sizes)
        return joined.contiguous() if target is None else into(target, joined)
    if row.reduces:
        assert isinstance(call, Call) and call.op is not None
        came = from_ordered(came, request.x.dtype, call.op)
    if target is None:
        came = came.to(request.x.dtype)
    if row.joins and not request.direct:
        came = join(came, request.joined)
    return came if target is None else into(target, came)


def _joined_uneven(request: Request, came: Tensor, sizes: list[int]) -> Tensor:
    source, axis, joined = request.source, request.axis, request.joined
    assert source is not None
    rest = [*source.shape[:axis], *source.shape[axis + 1 :]]
    if came.ndim > 1:
        # Remove the padding of the parts.
        came = torch.cat([row[: size * prod(rest)] for row, size in zip(came, sizes, strict=True)])
    if joined == axis:
        return came.view(sum(sizes), *rest).movedim(0, axis)
    return join(came.view(request.comm.size, sizes[0], *rest).movedim(1, axis + 1), joined)
