"""Collectives that return new tensors and have gradients; the caller states the ambiguous rules.

Why a rule must be stated: after an all_reduce every rank holds the same y, and autograd cannot see
whether the ranks go on to compute the same loss from it (then x's gradient is y's own, "identity")
or different losses that are meant to be added (then it is the sum of them all, "sum"). Guessing
wrong gives gradients that are off by the size of the dim and raises nothing.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshcomm.comm import traced
from meshcomm.comm.checks import check_divisible, check_tensor, normal_axis
from meshcomm.comm.communicator import Communicator
from meshcomm.comm.directory import Directory
from meshcomm.errors import AutogradError
from meshcomm.layout import Dims

ReduceGrad: TypeAlias = Literal["identity", "sum"]
GatherGrad: TypeAlias = Literal["slice", "reduce_scatter"]


@final
class Functional:
    """`mesh.functional`: out-of-place, differentiable, along dims by name.

    Every method is called by every rank along `dims`, in the same program order; its backward
    communicates too, so backward passes must run in the same order on these ranks as well.
    all_reduce, identity, all_gather, reduce_scatter, slice and all_to_all also work inside
    torch.compile(fullgraph=True).
    """

    def __init__(self, directory: Directory) -> None:
        self._at = directory

    def all_reduce(self, dims: Dims, x: Tensor, op: str = "sum", *, grad: ReduceGrad) -> Tensor:
        """The sum (or avg, min, max, product without gradient) of x over `dims`, in new memory.

        Shape:    any -> the same.
        Gradient: grad="identity": dx = dy. For ranks that compute one and the same loss from y;
                  Megatron-LM's reduce_from_tensor_model_parallel_region.
                  grad="sum": dx = all_reduce(dy). For ranks whose losses are added up.
                  For op="avg" both are divided by the size. Other ops have no gradient.
        Raises:   AutogradError for a gradient through min, max or product.
        """
        comm = self._at.along(dims)
        _check_rule("all_reduce", grad, ("identity", "sum"))
        _check_gradient(comm, x, "all_reduce", op)
        if torch.compiler.is_compiling():
            return traced.all_reduce(x, op, grad, comm.transport.group_name, comm.size)
        _check(comm, x, "all_reduce")
        result: Tensor = _AllReduce.apply(comm, x, op, grad)
        return result

    def identity(self, dims: Dims, x: Tensor, *, grad: Literal["sum"] = "sum") -> Tensor:
        """x itself; its gradient is summed over `dims`.

        For an x that is equal on all ranks and then used differently by each of them, as before a
        column-parallel layer; Megatron-LM's copy_to_tensor_model_parallel_region.
        """
        _check_rule("identity", grad, ("sum",))
        comm = self._at.along(dims)
        if torch.compiler.is_compiling():
            return traced.identity(x, comm.transport.group_name)
        _check(comm, x, "identity")
        result: Tensor = _Identity.apply(comm, x)
        return result

    def all_gather(self, dims: Dims, x: Tensor, axis: int = 0, *, grad: GatherGrad) -> Tensor:
        """Every rank's x joined along `axis`.

        Shape:    (.., s, ..) -> (.., n*s, ..).
        Gradient: grad="slice": dx = this rank's slice of dy, for ranks that go on alike.
                  grad="reduce_scatter": dx = this rank's slice of the sum of all dy, for ranks
                  that go on differently.
        """
        _check_rule("all_gather", grad, ("slice", "reduce_scatter"))
        comm = self._at.along(dims)
        if torch.compiler.is_compiling():
            return traced.all_gather(x, axis, grad, comm.transport.group_name, comm.size, comm.coord)
        _check(comm, x, "all_gather")
        result: Tensor = _AllGather.apply(comm, x, axis, grad)
        return result

    def reduce_scatter(self, dims: Dims, x: Tensor, axis: int = 0, op: str = "sum") -> Tensor:
        """This rank's slice of the sum (or avg) of all x.

        Shape:    (.., n*s, ..) -> (.., s, ..).
        Gradient: dx = all_gather(dy), divided by the size for op="avg".
        """
        comm = self._at.along(dims)
        _check_gradient(comm, x, "reduce_scatter", op)
        if torch.compiler.is_compiling():
            return traced.reduce_scatter(x, axis, op, comm.transport.group_name, comm.size)
        _check(comm, x, "reduce_scatter")
        result: Tensor = _ReduceScatter.apply(comm, x, axis, op)
        return result

    def slice(self, dims: Dims, x: Tensor, axis: int = 0) -> Tensor:
        """This rank's slice of an x that is equal on all ranks; nothing is sent.

        Shape:    (.., n*s, ..) -> (.., s, ..).
        Gradient: dx = all_gather(dy), so that it is equal on all ranks again.
        """
        comm = self._at.along(dims)
        if torch.compiler.is_compiling():
            return traced.slice_of(x, axis, comm.transport.group_name, comm.size, comm.coord)
        _check(comm, x, "slice")
        result: Tensor = _Slice.apply(comm, x, axis)
        return result

    def all_to_all(self, dims: Dims, x: Tensor, split_axis: int, concat_axis: int) -> Tensor:
        """Slice c of `split_axis` goes to coord c; what comes in is joined along `concat_axis`.

        Shape:    (.., n*a, .., b, ..) -> (.., a, .., n*b, ..).
        Gradient: the same exchange back.
        """
        comm = self._at.along(dims)
        if torch.compiler.is_compiling():
            return traced.all_to_all(x, split_axis, concat_axis, comm.transport.group_name, comm.size)
        _check(comm, x, "all_to_all")
        result: Tensor = _AllToAll.apply(comm, x, split_axis, concat_axis)
        return result

    def shift(self, dims: Dims, x: Tensor, offset: int = 1) -> Tensor:
        """The x of the rank `offset` coords behind, around the ring. Gradient: the shift back."""
        comm = self._at.along(dims)
        _check(comm, x, "shift")
        result: Tensor = _Shift.apply(comm, x, offset)
        return result


def _check_rule(call: str, rule: object, rules: tuple[str, ...]) -> None:
    if rule not in rules:
        raise AutogradError(
            f"functional.{call} has no gradient rule {rule!r}",
            given=f"grad={rule!r}",
            expected="grad=" + " or grad=".join(f'"{known}"' for known in rules),
            hint="help(mesh.functional." + call + ") says which is right when",
        )


def _check_gradient(comm: Communicator, x: object, call: str, op: str) -> None:
    """Only a sum, and so an average, has a gradient."""
    if op not in ("sum", "avg") and isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
        raise AutogradError(
            f'functional.{call} along "{comm.name}" has no gradient for op={op!r}',
            given=f"op={op!r}, a tensor that needs gradients",
            expected='op="sum" or op="avg"',
            hint="x.detach()",
        )


def _check(comm: Communicator, x: object, call: str) -> None:
    """What a call of torch would refuse in words of its own, or not at all."""
    check_tensor(x, comm.transport.kinds, lambda: f'functional.{call} along "{comm.name}" on {comm.who}')


def _axis(comm: Communicator, x: Tensor, axis: int, call: str) -> int:
    return normal_axis(x, axis, lambda: f'functional.{call} along "{comm.name}" on {comm.who}')


def _own(comm: Communicator, x: Tensor, axis: int) -> Tensor:
    length = x.shape[axis] // comm.size
    return x.narrow(axis, comm.coord * length, length)


def _value(result: Any) -> Tensor:
    assert isinstance(result, Tensor)
    return result


# autograd hands backward a gradient of any layout; the communicator copes with every one of them.
# Double backward through a collective is refused by once_differentiable instead of being wrong.


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, comm: Communicator, x: Tensor, op: str, grad: str) -> Tensor:
        ctx.comm, ctx.op, ctx.grad = comm, op, grad
        return _value(comm.checked_all_reduce(x.detach().clone(memory_format=torch.contiguous_format), op))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        if ctx.grad == "sum":
            dy = ctx.comm.checked_all_reduce(dy.clone(memory_format=torch.contiguous_format), ctx.op)
        elif ctx.op == "avg":
            dy = dy / ctx.comm.size
        return None, dy, None, None


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, comm: Communicator, x: Tensor) -> Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return None, ctx.comm.checked_all_reduce(dy.clone(memory_format=torch.contiguous_format))


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, comm: Communicator, x: Tensor, axis: int, grad: str) -> Tensor:
        ctx.comm, ctx.axis, ctx.grad = comm, _axis(comm, x, axis, "all_gather"), grad
        return _value(comm.all_gather(x.detach(), ctx.axis))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        if ctx.grad == "slice":
            return None, _own(ctx.comm, dy, ctx.axis), None, None
        return None, ctx.comm.reduce_scatter(dy, ctx.axis), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, comm: Communicator, x: Tensor, axis: int, op: str) -> Tensor:
        ctx.comm, ctx.axis, ctx.op = comm, _axis(comm, x, axis, "reduce_scatter"), op
        return _value(comm.reduce_scatter(x.detach(), ctx.axis, op))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        dx = ctx.comm.all_gather(dy, ctx.axis)
        return None, dx / ctx.comm.size if ctx.op == "avg" else dx, None, None


class _Slice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, comm: Communicator, x: Tensor, axis: int) -> Tensor:
        ctx.comm, ctx.axis = comm, _axis(comm, x, axis, "slice")
        check_divisible(
            x, ctx.axis, comm.size, lambda: f'functional.slice along "{comm.name}"', lambda: comm.who
        )
        return _own(comm, x.detach(), ctx.axis).clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return None, ctx.comm.all_gather(dy, ctx.axis), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, comm: Communicator, x: Tensor, split_axis: int, concat_axis: int) -> Tensor:
        ctx.comm = comm
        ctx.split_axis = _axis(comm, x, split_axis, "all_to_all")
        ctx.concat_axis = _axis(comm, x, concat_axis, "all_to_all")
        return _value(comm.all_to_all(x.detach(), ctx.split_axis, ctx.concat_axis))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return None, ctx.comm.all_to_all(dy, ctx.concat_axis, ctx.split_axis), None, None


class _Shift(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, comm: Communicator, x: Tensor, offset: int) -> Tensor:
        ctx.comm, ctx.offset = comm, offset
        result = comm.messages.shift(x.detach(), offset)
        assert result is not None
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return None, ctx.comm.messages.shift(dy, -ctx.offset), None
