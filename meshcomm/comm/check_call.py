"""The first stage of a collective: refuse an invalid call before any communication."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

from torch import Tensor

from meshcomm.collectives import BARRIER, REDUCE, SCATTER
from meshcomm.comm.checks import (
    check_coord,
    check_divisible,
    check_factor,
    check_in_place,
    check_tensor,
    check_written,
    normal_axis,
)
from meshcomm.comm.request import Request
from meshcomm.comm.shapes import header_of
from meshcomm.errors import MeshcommError, ShapeError
from meshcomm.transport.support import check_reduce


def check(request: Request) -> None:
    """Raise errors that occur on every rank.

    An error on this rank only is stored in `problem`, because the other ranks must finish first.
    """
    row, comm = request.row, request.comm
    if row.root is not None:
        check_coord(request.root, comm.size, row.root, request.where)
    if row is SCATTER:
        if request.out is not None:
            check_out(request, request.out)
        if request.root == comm.coord:
            try:
                _check_x(request)
            except MeshcommError as error:
                request.problem = error
    elif row is not BARRIER:
        _check_x(request)


def _check_x(request: Request) -> None:
    """Check this rank's input: whether it can be sent, reduced and split, and whether its result fits `out`."""
    row, comm, where, x = request.row, request.comm, request.where, request.x
    if x is None and row is SCATTER:
        raise ShapeError(
            f"{where()}: the source has nothing to scatter",
            given=f"x=None on coord {request.root}, which is src",
            expected="a tensor on src; None on other ranks",
            hint="x if mesh.coord(dims) == src else None",
        )
    check_tensor(x, comm.kinds, where)
    check_in_place(x, where, row.with_gradient)
    if row.in_place and row is not REDUCE:
        check_written(x, where)
    if row.reduces:
        check_reduce(comm.transport.name, request.op, x.dtype, where)
        check_factor(request.factor, request.op, x.dtype, where)
    request.source = source = x.unsqueeze(0) if row.joins and not row.splits and x.ndim == 0 else x
    if row.in_place:
        return
    request.concat = normal_axis(source, request.concat, where)
    request.axis = axis = normal_axis(source, request.axis, where)
    if request.output_split_sizes is not None:
        request.output_split_sizes = _plain_received(request, request.output_split_sizes)
    if request.input_split_sizes is not None:
        request.input_split_sizes = _plain_splits(request, request.input_split_sizes)
    elif row.splits:
        check_divisible(x, axis, comm.size, where, comm.who)
    if request.out is not None and request.gets and not request.differs:
        shape = row.shape(source.shape, axis, comm.size, request.concat)
        request.problem = misfit(request, request.out, shape)
        # Other ranks do not know the root's `out`.
        if request.problem is not None and row.root != "dst":
            raise request.problem
    if row is SCATTER and request.out is None:
        request.header = header_of(x.narrow(axis, 0, x.shape[axis] // comm.size), where())


def check_out(request: Request, out: Tensor) -> None:
    """Raise if `out` cannot be written, whatever the shape of the result."""

    def where() -> str:
        return f"{request.where()}: out"

    check_tensor(out, request.comm.kinds, where)
    check_in_place(out, request.where, "")
    check_written(out, where)


def misfit(request: Request, out: Tensor, shape: Sequence[int]) -> MeshcommError | None:
    """Return the error if a result of this shape cannot be written to `out`; None if it can."""
    try:
        check_out(request, out)
    except MeshcommError as error:
        return error
    shape, like = tuple(shape), request.x
    if (tuple(out.shape), out.dtype, out.device) == (shape, like.dtype, like.device):
        return None
    return ShapeError(
        f"{request.where()}: out does not fit the result",
        given=f"out of shape {tuple(out.shape)}, {out.dtype}, {out.device}",
        expected=f"shape {shape}, {like.dtype}, {like.device}",
        hint=f"out=x.new_empty({shape}), or no out",
    )


def _plain_received(request: Request, output_split_sizes: Sequence[int]) -> list[int]:
    """Return `output_split_sizes` as plain ints, one per coord."""
    sizes = _indices(output_split_sizes)
    if request.input_split_sizes is None or len(sizes) != request.comm.size or min(sizes) < 0:
        raise ShapeError(
            f"{request.where()}: output_split_sizes does not give a size for each coord",
            given=f"output_split_sizes={output_split_sizes}, input_split_sizes={request.input_split_sizes}",
            expected=f"{request.comm.size} sizes of 0 or more, together with input_split_sizes",
            hint="leave out output_split_sizes, or give both",
        )
    return sizes


def _plain_splits(request: Request, input_split_sizes: Sequence[int]) -> list[int]:
    """Return `input_split_sizes` as plain ints, which must split the axis into one part per coord."""
    x, axis, size, sizes = request.x, request.axis, request.comm.size, _indices(input_split_sizes)
    length = x.shape[axis]
    if len(sizes) != size or sum(sizes) != length or min(sizes) < 0:
        even = length % size == 0
        raise ShapeError(
            f"{request.where()}: input_split_sizes do not split axis {axis}",
            given=f"input_split_sizes={input_split_sizes}, x of shape {tuple(x.shape)}",
            expected=f"{size} sizes of 0 or more whose sum is {length}",
            hint=f"input_split_sizes={[length // size] * size}" if even else "one size for each coord",
        )
    return sizes


def _indices(sizes: Sequence[int]) -> list[int]:
    """Return integers as plain ints; [] for anything else."""
    try:
        return [index(size) for size in sizes]
    except TypeError:
        return []
