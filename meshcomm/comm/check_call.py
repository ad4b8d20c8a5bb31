"""The first stage of a collective: refuse an invalid call before any communication."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import index
from typing import Any

from torch import Tensor

from meshcomm.collectives import ALL_TO_ALL, BARRIER, REDUCE, SCATTER
from meshcomm.comm.caller import Caller
from meshcomm.comm.checks import (
    Where,
    check_coord,
    check_divisible,
    check_in_place,
    check_input,
    check_tensor,
    check_written,
    factor_of,
    normal_axis,
    value_of,
)
from meshcomm.comm.request import Checked, Options, Request
from meshcomm.errors import MeshcommError, ShapeError
from meshcomm.reductions import REDUCTIONS
from meshcomm.transport.support import check_reduce


def check(comm: Caller, request: Request) -> Checked:
    """Return the checked call. Raises errors that occur on every rank.

    An error on this rank only is stored in `problem`, because the other ranks must finish first.
    """
    row, root, where = request.row, request.root, partial(comm.where, request.row.name)
    if row.root is not None:
        check_coord(root, comm.size, row.root, where)
    if row is BARRIER:
        return Checked(request, False)
    if row is not SCATTER:
        return _check_x(comm, request, where)
    if request.out is not None:
        out = value_of(request.out)
        _check_out(out, comm.kinds, where)
        request = request._replace(out=out)
    if root != comm.coord:
        return Checked(request, True)
    try:
        return _check_x(comm, request, where)
    except MeshcommError as error:
        return Checked(request, True, problem=error)


def _check_x(comm: Caller, request: Request, where: Where) -> Checked:
    """Check this rank's input: whether it can be sent, reduced and split, and whether its result fits `out`."""
    row, x, options = request.row, request.x, request.options
    if x is None and row is SCATTER:
        raise ShapeError(
            f"{where()}: the source has nothing to scatter",
            given=f"x=None on coord {request.root}, which is src",
            expected="a tensor on src; None on other ranks",
            hint="x if mesh.coord(dims) == src else None",
        )
    x = check_input(x, comm.kinds, where, row.functional, row.in_place and row is not REDUCE)
    out = value_of(request.out)
    if x is not request.x or out is not request.out:
        request = request._replace(x=x, out=out)
    factor = None
    if row.reduces:
        check_reduce(comm.transport.name, request.op, x.dtype, where)
        if options.factor is not None or REDUCTIONS[request.op].factor:
            factor = factor_of(options.factor, request.op, x.dtype, where)
    gets = row.root != "dst" or request.root == comm.coord
    if row.in_place:
        return Checked(request, gets, x, factor)
    source = x.unsqueeze(0) if row.joins and not row.splits and x.ndim == 0 else x
    axis = normal_axis(source, request.axis, where)
    concat = normal_axis(source, request.concat, where) if row is ALL_TO_ALL else axis
    sends: list[int] | None = None
    expects: list[int] | None = None
    if options.output_split_sizes is not None:
        expects = _received_sizes(comm.size, options, where)
    if options.input_split_sizes is not None:
        sends = _split_sizes(x, axis, comm.size, options.input_split_sizes, where)
    if row.splits and sends is None:
        check_divisible(x, axis, comm.size, where, comm.who)
    differs = options.uneven or sends is not None
    checked = Checked(request, gets, source, factor, axis, concat, sends, expects, differs)
    if differs or out is None or not gets:
        return checked
    problem = misfit(checked, comm.kinds, row.shape(source.shape, axis, comm.size, concat), where)
    # Other ranks do not know the root's `out`.
    if problem is not None and row.root != "dst":
        raise problem
    return checked._replace(problem=problem)


def _check_out(out: Tensor, kinds: tuple[str, ...], where: Where) -> None:
    """Raise if `out` cannot be written, whatever the shape of the result."""

    def named() -> str:
        return f"{where()}: out"

    check_tensor(out, kinds, named)
    check_in_place(out, where, "")
    check_written(out, named)


def misfit(
    checked: Checked, kinds: tuple[str, ...], shape: Sequence[int], where: Where
) -> MeshcommError | None:
    """Return the error if a result of this shape cannot be written to `out`; None if it can, or there is no `out`."""
    out, like = checked.request.out, checked.request.x
    if out is None or not checked.gets:
        return None
    try:
        _check_out(out, kinds, where)
    except MeshcommError as error:
        return error
    shape = tuple(shape)
    if (tuple(out.shape), out.dtype, out.device) == (shape, like.dtype, like.device):
        return None
    return ShapeError(
        f"{where()}: out does not fit the result",
        given=f"out of shape {tuple(out.shape)}, {out.dtype}, {out.device}",
        expected=f"shape {shape}, {like.dtype}, {like.device}",
        hint=f"out=x.new_empty({shape}), or no out",
    )


def _received_sizes(size: int, options: Options, where: Where) -> list[int]:
    """Return `output_split_sizes` as plain ints, one per coord."""
    requested, splits = options.output_split_sizes, options.input_split_sizes
    sizes = _indices(requested)
    if splits is None or len(sizes) != size or min(sizes) < 0:
        raise ShapeError(
            f"{where()}: output_split_sizes does not give a size for each coord",
            given=f"output_split_sizes={requested}, input_split_sizes={splits}",
            expected=f"{size} sizes of 0 or more, together with input_split_sizes",
            hint="leave out output_split_sizes, or give both",
        )
    return sizes


def _split_sizes(x: Tensor, axis: int, size: int, asked: Sequence[int], where: Where) -> list[int]:
    """Return `input_split_sizes` as plain ints, which must split the axis into one part per coord."""
    sizes, length = _indices(asked), x.shape[axis]
    if len(sizes) != size or sum(sizes) != length or min(sizes) < 0:
        even = length % size == 0
        raise ShapeError(
            f"{where()}: input_split_sizes do not split axis {axis}",
            given=f"input_split_sizes={asked}, x of shape {tuple(x.shape)}",
            expected=f"{size} sizes of 0 or more whose sum is {length}",
            hint=f"input_split_sizes={[length // size] * size}" if even else "one size for each coord",
        )
    return sizes


def _indices(sizes: Any) -> list[int]:
    """Return integers as plain ints; [] for anything else."""
    try:
        return [index(size) for size in sizes]
    except TypeError:
        return []
