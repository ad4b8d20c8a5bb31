"""Collectives whose parts differ in size: the sizes are exchanged, parts are sent with their own lengths, and joined."""

from __future__ import annotations

from functools import partial
from math import prod

import torch
from torch import Tensor

from meshcomm.collectives import ALL_GATHER, ALL_TO_ALL, Call
from meshcomm.comm.caller import Caller
from meshcomm.comm.check_call import misfit
from meshcomm.comm.checks import OWN_TAGS, check_answered
from meshcomm.comm.request import Checked, Loaded
from meshcomm.comm.shapes import join, materialised, rest_of, wire
from meshcomm.errors import MeshcommError, ShapeError
from meshcomm.transport import P2P


def load_uneven(comm: Caller, checked: Checked) -> Loaded:
    """Return the call for the transport, after the ranks have exchanged the sizes, unless the caller gives them."""
    request, x, axis, sends = checked.request, checked.source, checked.axis, checked.sends
    assert x is not None
    sizes = _exchanged(comm, checked, x) if checked.expects is None else checked.expects
    # The input with the uneven axis in front; `count` elements for each index of this axis.
    sent, other_axes = materialised(x.movedim(axis, 0)).view(-1), rest_of(x, axis)
    count = prod(other_axes)
    coming = [size * count if checked.gets else 0 for size in sizes]
    if sends is None and request.root < 0 and comm.size > 1:
        call, arrived = _gather(comm, sent, coming, not request.async_op)
    else:
        # For a gather, only the root receives.
        leaving = [sent.numel() if request.root in (-1, coord) else 0 for coord in range(comm.size)]
        if sends is not None:
            leaving = [size * count for size in sends]
        arrived, flat = sent.new_empty(sum(coming)), wire(sent)
        # Lengths are in units of the sent dtype: bytes if the tensor is sent as bytes.
        unit = 1 if flat.dtype == sent.dtype else sent.element_size()
        lengths = ([n * unit for n in coming], [n * unit for n in leaving])
        call = Call(ALL_TO_ALL, flat, wire(arrived), lengths=lengths, blocking=not request.async_op)
    return Loaded(
        checked,
        call,
        arrived,
        partial(_result, checked, sizes, other_axes),
        request.out,
        _misjoined(comm, checked, sizes, x),
        nbytes=sum(sizes) * count * x.element_size() if sends is None else None,
    )


def _exchanged(comm: Caller, checked: Checked, x: Tensor) -> list[int]:
    """Return the size that each coord sends to this rank."""
    row, my_sizes = ALL_GATHER, [x.shape[checked.axis]]
    hint = "equal sizes: pad before the call, and trim after it"
    if checked.sends is not None:
        row, my_sizes = ALL_TO_ALL, checked.sends
        hint = "output_split_sizes=, the sizes to receive"
    where = comm.where(checked.request.row.name)
    check_answered(comm.transport.name, "the sizes of their parts", where, hint)
    sizes_sent = torch.tensor(my_sizes, dtype=torch.int64, device=x.device)
    answer = sizes_sent.new_empty(comm.size)
    comm.run(Call(row, sizes_sent, answer))
    sizes: list[int] = answer.tolist()
    return sizes


def _misjoined(comm: Caller, checked: Checked, sizes: list[int], x: Tensor) -> MeshcommError | None:
    """Return the error if the received sizes are wrong on this rank only."""
    where, axis, joined = partial(comm.where, checked.request.row.name), checked.axis, checked.concat
    if joined != axis and len(set(sizes)) > 1:
        return ShapeError(
            f"{where()}: parts of unequal size cannot be joined along axis {joined}",
            given=f"sizes {sizes} of axis {axis} from coords 0 to {comm.size - 1}",
            expected=f"equal sizes, or concat_axis={axis}",
            hint=f"concat_axis={axis}",
        )
    shape = list(x.shape)
    shape[axis] = sizes[0]
    shape[joined] = sum(sizes) if joined == axis else shape[joined] * comm.size
    return misfit(checked, comm.kinds, shape, where)


def _gather(comm: Caller, sent: Tensor, coming: list[int], blocking: bool) -> tuple[Call | list[P2P], Tensor]:
    """Return an all_gather that does not copy the input once per rank, and the buffer that it fills.

    If the backend queues its calls, all parts are padded to the longest and gathered by one kernel, which delivers one
    row per coord. Otherwise, each part is sent directly to its place as a message.
    """
    if comm.transport.ordered or sent.device.type not in comm.transport.message_kinds:
        longest = max(coming)
        if sent.numel() < longest:
            sent = torch.cat([sent, sent.new_zeros(longest - sent.numel())])
        room = sent.new_empty(comm.size, longest)
        call = Call(ALL_GATHER, wire(sent), wire(room), blocking=blocking)
        return call, room if len(set(coming)) > 1 else room.view(-1)
    arrived = sent.new_empty(sum(coming))
    parts = arrived.split(coming)
    parts[comm.coord].copy_(sent)
    others = [coord for coord in range(comm.size) if coord != comm.coord]
    messages = [P2P("recv", wire(parts[coord]), coord, OWN_TAGS) for coord in others if coming[coord]]
    messages += [P2P("send", wire(sent), coord, OWN_TAGS) for coord in others if sent.numel()]
    return messages, arrived


def _result(checked: Checked, sizes: list[int], other_axes: list[int], came: Tensor) -> Tensor:
    """Return the received parts, joined. other_axes: the sizes of the other axes."""
    axis, joined = checked.axis, checked.concat
    if came.ndim > 1:
        # Remove the padding of the parts.
        came = torch.cat([row[: size * prod(other_axes)] for row, size in zip(came, sizes, strict=True)])
    if joined == axis:
        result = came.view(sum(sizes), *other_axes).movedim(0, axis)
    else:
        result = join(came.view(len(sizes), sizes[0], *other_axes).movedim(1, axis + 1), joined)
    return result if checked.request.out is not None else result.contiguous()
