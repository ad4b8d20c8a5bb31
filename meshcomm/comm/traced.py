"""The functional collectives as torch.compile sees them: operators with a meaning before they run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshcomm.comm.checks import check_divisible, normal_axis
from meshcomm.comm.shapes import join
from meshcomm.transport.torch_private import operators

# Each takes a group's name, size and this rank's coord: plain values, which a traced graph may hold.
# A group of one rank has no name; nothing is sent then.


def all_reduce(x: Tensor, op: str, grad: str, group: str, size: int) -> Tensor:
    """See `Functional.all_reduce`."""
    result: Tensor = _AllReduce.apply(x, op, grad, group, size)
    return result


def identity(x: Tensor, group: str) -> Tensor:
    """See `Functional.identity`."""
    result: Tensor = _Identity.apply(x, group)
    return result


def all_gather(x: Tensor, axis: int, grad: str, group: str, size: int, coord: int) -> Tensor:
    """See `Functional.all_gather`."""
    result: Tensor = _AllGather.apply(x, _axis(x, axis), grad, group, size, coord)
    return result


def reduce_scatter(x: Tensor, axis: int, op: str, group: str, size: int) -> Tensor:
    """See `Functional.reduce_scatter`."""
    axis = _axis(x, axis)
    _divisible(x, axis, size)
    result: Tensor = _ReduceScatter.apply(x, axis, op, group, size)
    return result


def slice_of(x: Tensor, axis: int, group: str, size: int, coord: int) -> Tensor:
    """See `Functional.slice`."""
    axis = _axis(x, axis)
    _divisible(x, axis, size)
    result: Tensor = _Slice.apply(x, axis, group, size, coord)
    return result


def all_to_all(x: Tensor, split_axis: int, concat_axis: int, group: str, size: int) -> Tensor:
    """See `Functional.all_to_all`."""
    split_axis = _axis(x, split_axis)
    _divisible(x, split_axis, size)
    result: Tensor = _AllToAll.apply(x, split_axis, _axis(x, concat_axis), group, size)
    return result


def _axis(x: Tensor, axis: int) -> int:
    return normal_axis(x, axis, lambda: "a compiled collective")


def _divisible(x: Tensor, axis: int, size: int) -> None:
    check_divisible(x, axis, size, lambda: "a compiled collective", lambda: "every rank")


def _reduced(x: Tensor, op: str, group: str) -> Tensor:
    result: Tensor = operators().wait_tensor(operators().all_reduce(x.contiguous(), op, group))
    return result


def _gathered(x: Tensor, axis: int, group: str, size: int) -> Tensor:
    flat = operators().all_gather_into_tensor(x.contiguous(), size, group)
    parts = operators().wait_tensor(flat).reshape(size, *x.shape)
    return join(parts, axis).contiguous()


def _parts(x: Tensor, axis: int, size: int) -> Tensor:
    shape = (*x.shape[:axis], size, x.shape[axis] // size, *x.shape[axis + 1 :])
    return x.reshape(shape).movedim(axis, 0).contiguous()


def _scattered(x: Tensor, axis: int, op: str, group: str, size: int) -> Tensor:
    parts = _parts(x, axis, size)
    flat = operators().reduce_scatter_tensor(parts.flatten(0, 1), op, size, group)
    result: Tensor = operators().wait_tensor(flat).reshape(parts.shape[1:])
    return result


def _exchanged(x: Tensor, split_axis: int, concat_axis: int, group: str, size: int) -> Tensor:
    parts = _parts(x, split_axis, size)
    ones = [parts.shape[1]] * size if parts.ndim > 1 else [1] * size
    flat = operators().all_to_all_single(parts.flatten(0, 1) if parts.ndim > 1 else parts, ones, ones, group)
    return join(operators().wait_tensor(flat).reshape(parts.shape), concat_axis).contiguous()


def _own(x: Tensor, axis: int, size: int, coord: int) -> Tensor:
    length = x.shape[axis] // size
    return x.narrow(axis, coord * length, length).clone(memory_format=torch.contiguous_format)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, op: str, grad: str, group: str, size: int) -> Tensor:
        ctx.op, ctx.grad, ctx.group, ctx.size = op, grad, group, size
        return _reduced(x, op, group) if group else x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        if ctx.grad == "sum" and ctx.group:
            dy = _reduced(dy, ctx.op, ctx.group)
        elif ctx.op == "avg":
            dy = dy / ctx.size
        return dy, None, None, None, None


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return _reduced(dy, "sum", ctx.group) if ctx.group else dy, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int, grad: str, group: str, size: int, coord: int) -> Tensor:
        ctx.axis, ctx.grad, ctx.group, ctx.size, ctx.coord = axis, grad, group, size, coord
        return _gathered(x, axis, group, size) if group else x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        if not ctx.group:
            dx = dy
        elif ctx.grad == "slice":
            dx = _own(dy, ctx.axis, ctx.size, ctx.coord)
        else:
            dx = _scattered(dy, ctx.axis, "sum", ctx.group, ctx.size)
        return dx, None, None, None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int, op: str, group: str, size: int) -> Tensor:
        ctx.axis, ctx.op, ctx.group, ctx.size = axis, op, group, size
        return _scattered(x, axis, op, group, size) if group else x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        dx = _gathered(dy, ctx.axis, ctx.group, ctx.size) if ctx.group else dy
        return dx / ctx.size if ctx.op == "avg" else dx, None, None, None, None


class _Slice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int, group: str, size: int, coord: int) -> Tensor:
        ctx.axis, ctx.group, ctx.size = axis, group, size
        return _own(x, axis, size, coord)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return _gathered(dy, ctx.axis, ctx.group, ctx.size) if ctx.group else dy, None, None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split_axis: int, concat_axis: int, group: str, size: int) -> Tensor:
        ctx.split_axis, ctx.concat_axis, ctx.group, ctx.size = split_axis, concat_axis, group, size
        return _exchanged(x, split_axis, concat_axis, group, size) if group else x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        dx = _exchanged(dy, ctx.concat_axis, ctx.split_axis, ctx.group, ctx.size) if ctx.group else dy
        return dx, None, None, None, None
