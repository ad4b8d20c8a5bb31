"""The last stages of a collective: start what was loaded, and make the result of what has arrived."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from meshcomm.collectives import Call
from meshcomm.comm.request import Request
from meshcomm.comm.shapes import from_ordered, into, join
from meshcomm.transport import Work


def start(request: Request) -> Sequence[Work]:
    """Start the call, or carry it out by its algorithm."""
    call = request.call
    if isinstance(call, list):
        return request.comm.transport.start_p2p(call)
    assert call is not None
    if request.algorithm is None:
        return request.comm.start(call)
    assert call.x is not None and call.op is not None
    request.algorithm.run(request.comm, call.x.detach(), call.op)
    return ()


def carry_out(request: Request) -> Tensor | None:
    """Start the call, wait for it, and make its result. Apart, as an error that is kept must not keep the Works."""
    for work in start(request):
        work.wait()
    return finish(request)


def finish(request: Request) -> Tensor | None:
    """The result, once the Works are over. Raises what is wrong for this rank alone."""
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
        # Padded parts are cut to what they are.
        came = torch.cat([row[: size * prod(rest)] for row, size in zip(came, sizes, strict=True)])
    if joined == axis:
        return came.view(sum(sizes), *rest).movedim(0, axis)
    return join(came.view(request.comm.size, sizes[0], *rest).movedim(1, axis + 1), joined)
