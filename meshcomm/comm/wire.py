"""The last stages of a collective: the tensors to send, and the result."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from meshcomm.collectives import ALL_REDUCE, BARRIER, BROADCAST, REDUCE, SCATTER, Call
from meshcomm.comm.caller import Caller
from meshcomm.comm.checks import apart, check_answered
from meshcomm.comm.request import Checked, Loaded
from meshcomm.comm.shapes import (
    as_reduced,
    blank_header,
    buffer_for,
    described_by,
    from_reduced,
    header_of,
    into,
    join,
    materialised,
    split,
    unwatched,
    wire,
)
from meshcomm.comm.uneven import load_uneven
from meshcomm.errors import MeshcommError, ShapeError
from meshcomm.reductions import REDUCTIONS


def load(comm: Caller, checked: Checked) -> Loaded:
    """Return the call for the transport, with dense tensors of dtypes that backends support.

    First fetches what only other ranks know: sizes that differ, or the shape of a scatter's slices.
    """
    if checked.differs:
        return load_uneven(comm, checked)
    request, source = checked.request, checked.source
    row, x, op = request.row, request.x, request.op
    out = _slice_of(comm, checked) if row is SCATTER else request.out
    sent: Tensor | None = None
    unchanged = False
    if source is not None:
        sent, op, unchanged = _sent(comm, checked, source)
    repeatable = (
        # The fast path sends x as it is and nothing before x. A scatter first sends the shape of its slices.
        unchanged
        and source is x
        and row is not SCATTER
        and checked.axis == checked.concat == 0
        and request.options.algorithm is None
    )
    # The parts of a join along axis 0, and of a split, arrive in the result's order.
    direct = (
        out is not None
        and checked.problem is None
        and row.splits != row.joins
        and not (row.joins and checked.axis)
        and (sent is None or sent.dtype == out.dtype)
    )
    if row.in_place:
        arrived = sent
    elif row is BARRIER or not checked.gets:
        arrived = None
    elif out is not None and direct:
        free = sent is None or apart(out, sent, comm.coord)
        arrived = buffer_for(out) if free else out.new_empty(out.shape)
    else:
        assert sent is not None
        part = sent.shape[1:] if row.splits else sent.shape
        arrived = sent.new_empty((comm.size, *part) if row.joins else part)
    call = Call(
        row,
        None if sent is None else wire(sent, row.reduces),
        None if row.in_place or arrived is None else wire(arrived, row.reduces),
        op,
        request.root,
        blocking=not request.async_op,
    )
    target = x if row.in_place and row.root != "dst" else out
    result = partial(_result, checked, op, target is None, direct)
    nbytes = out.nbytes * comm.size if out is not None and row is SCATTER else None
    return Loaded(checked, call, arrived, result, target, checked.problem, repeatable, nbytes)


def _sent(comm: Caller, checked: Checked, source: Tensor) -> tuple[Tensor, str | None, bool]:
    """Return the tensor to send, the backend's operation, and whether the tensor has the values of `source` in its memory.

    A reduction prepares its values in the memory of x if it may overwrite x.
    """
    request = checked.request
    row, x, op = request.row, request.x, request.op
    sent = split(source, checked.axis, comm.size) if row.splits else materialised(source)
    unchanged = source.is_contiguous() and not (source.is_neg() or source.is_conj())
    if row.reduces:
        dense, reduction = sent, REDUCTIONS[op]
        op = reduction.wire.name
        if reduction.prepare is not None:
            if row is not ALL_REDUCE and dense.untyped_storage() is x.untyped_storage():
                dense = dense.clone()
            with unwatched(dense):
                reduction.prepare(dense, checked.factor)
        sent = as_reduced(dense, op)
        unchanged = unchanged and sent is dense and reduction.prepare is None
    # Backends leave partial results in the tensors of the other ranks, but x must stay unchanged.
    return x.clone() if row is REDUCE and sent is x else sent, op, unchanged


def _slice_of(comm: Caller, checked: Checked) -> Tensor:
    """Return this rank's memory for a scatter. Without `out`, the source sends the shape of a slice to the other ranks.

    Raises on all ranks if the source cannot scatter.
    """
    request, source, problem = checked.request, checked.source, checked.problem
    where, header = comm.where(request.row.name), blank_header(comm.transport.device)
    if request.out is None:
        if source is not None:
            part = source.narrow(checked.axis, 0, source.shape[checked.axis] // comm.size)
            try:
                header = header_of(part, where)
            except MeshcommError as error:
                problem = error
        if problem is not None:
            header[0] = -1
        comm.run(Call(BROADCAST, header, root=request.root))
    if problem is not None:
        raise problem
    if request.out is not None:
        return request.out
    if header[0] < 0:
        raise ShapeError(
            f"{where}: coord {request.root} has nothing to scatter",
            given=f"the arguments on coord {request.root}, the source",
            expected=f"a tensor on the source whose axis can be split into {comm.size}",
            hint=f"look at the error of coord {request.root}",
        )
    if source is not None:
        # In a dry run, even the source gets back a blank header.
        return part.new_empty(part.shape)
    check_answered(comm.transport.name, "the slice's shape", where, "out=torch.empty(...)")
    return described_by(header)


def finish(loaded: Loaded) -> Tensor | None:
    """Return the result after the Work objects have completed. Raises an error that occurred only on this rank."""
    if loaded.problem is not None:
        raise loaded.problem
    if loaded.arrived is None or not loaded.checked.gets:
        return None
    result = loaded.result(loaded.arrived)
    return result if loaded.target is None else into(loaded.target, result)


def _result(checked: Checked, op: str, is_new: bool, direct: bool, came: Tensor) -> Tensor:
    """Return the result of a call whose parts have equal sizes. op: the backend's operation.

    is_new: whether the result is new memory. direct: whether the parts have arrived in the result's order.
    """
    row, x = checked.request.row, checked.request.x
    if row.reduces:
        came = from_reduced(came, x.dtype, op)
    if is_new:
        came = came.to(x.dtype)
    if row.joins and not direct:
        came = join(came, checked.concat)
    return came
