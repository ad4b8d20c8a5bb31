"""Differentiable collectives that return new tensors. If a call has two possible gradient rules, you choose one.

After an all_reduce, every rank holds the same y. Autograd cannot tell whether the ranks then compute the same
loss from y or different losses that are summed. If the loss is the same, the gradient of x is the gradient of
y ("identity"). If losses are summed, the gradient of x is the sum of y's gradients over all ranks ("sum"). The wrong
rule scales gradients by the size of the dim and raises no error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeAlias, final

import torch
from torch import Tensor

from meshcomm.comm import operators
from meshcomm.comm.checks import axis_or_dim, check_divisible, check_offset, check_tensor, normal_axis
from meshcomm.comm.communicator import Communicator, CommunicatorCache
from meshcomm.errors import AutogradError, ShapeError
from meshcomm.layout import Dims

ReduceGrad: TypeAlias = Literal["identity", "sum"]
GatherGrad: TypeAlias = Literal["slice", "reduce_scatter"]


@final
class Functional:
    """`mesh.functional`: out-of-place, differentiable collectives along dims by name.

    Every rank along `dims` calls each method in the same program order. The backward pass communicates too, so
    those ranks must also run their backward passes in the same order. All methods work inside
    torch.compile(fullgraph=True), and under vmap, forward-mode AD and the other transforms of torch.func; see
    docs/guide/gradients.md.
    """

    def __init__(self, directory: CommunicatorCache, planner: Callable[[], Any]) -> None:
        self._at = directory
        self._groups = operators.Groups(directory, planner)

    def all_reduce(self, dims: Dims, x: Tensor, op: str = "sum", *, grad: ReduceGrad) -> Tensor:
        """Return the sum of x over `dims`, in new memory. op="avg" is also differentiable; other ops are not.

        Shape:    any -> the same.
        Gradient: grad="identity": dx = dy. Use it if all ranks compute the same loss from y, as in Megatron-LM's
                  reduce_from_tensor_model_parallel_region.
                  grad="sum": dx = all_reduce(dy). Use it if the losses of the ranks are summed.
                  For op="avg", both gradients are divided by the size. Other ops have no gradient.
        Raises:   AutogradError for a gradient through another op.
        """
        _check_rule("all_reduce", grad, ("identity", "sum"))
        comm = self._checked(dims, x, "all_reduce")
        return operators.call("all_reduce", x, self._groups.place(comm), op, grad)

    def identity(self, dims: Dims, x: Tensor, *, grad: Literal["sum"] = "sum") -> Tensor:
        """Return x itself; its gradient is summed over `dims`.

        Use it for an x that is equal on all ranks but used differently on each, such as the input of a column-parallel
        layer. Equivalent to Megatron-LM's copy_to_tensor_model_parallel_region.
        """
        _check_rule("identity", grad, ("sum",))
        comm = self._checked(dims, x, "identity")
        return operators.call("identity", x, self._groups.place(comm))

    def all_gather(
        self, dims: Dims, x: Tensor, axis: int | None = None, *, dim: int | None = None, grad: GatherGrad
    ) -> Tensor:
        """Return every rank's x concatenated along `axis`.

        Shape:    (.., s, ..) -> (.., n*s, ..).
        Gradient: grad="slice": dx = this rank's slice of dy, for ranks that compute the same values from y.
                  grad="reduce_scatter": dx = this rank's slice of the sum of all dy, for ranks that compute
                  different values from y.
        """
        if grad != operators.UNDETERMINED:
            _check_rule("all_gather", grad, ("slice", "reduce_scatter"))
        comm = self._checked(dims, x, "all_gather")
        axis = _axis(comm, x, axis, "all_gather", dim=dim)
        return operators.call("all_gather", x, self._groups.place(comm), axis, grad)

    def reduce_scatter(
        self, dims: Dims, x: Tensor, axis: int | None = None, op: str = "sum", *, dim: int | None = None
    ) -> Tensor:
        """Return this rank's slice of the sum (or avg) of all x.

        Shape:    (.., n*s, ..) -> (.., s, ..).
        Gradient: dx = all_gather(dy), divided by the size for op="avg".
        """
        comm = self._checked(dims, x, "reduce_scatter")
        axis = _axis(comm, x, axis, "reduce_scatter", split=True, dim=dim)
        return operators.call("reduce_scatter", x, self._groups.place(comm), axis, op)

    def slice(self, dims: Dims, x: Tensor, axis: int | None = None, *, dim: int | None = None) -> Tensor:
        """Return this rank's slice of an x that is equal on all ranks. Sends nothing.

        Shape:    (.., n*s, ..) -> (.., s, ..).
        Gradient: dx = all_gather(dy), so dx is again equal on all ranks.
        """
        comm = self._checked(dims, x, "slice")
        axis = _axis(comm, x, axis, "slice", split=True, dim=dim)
        return operators.call("slice", x, self._groups.place(comm), axis)

    def all_to_all(self, dims: Dims, x: Tensor, split_axis: int, concat_axis: int) -> Tensor:
        """Send slice c of `split_axis` to coord c, and concatenate the received slices along `concat_axis`.

        Shape:    (.., n*a, .., b, ..) -> (.., a, .., n*b, ..).
        Gradient: the reverse exchange.
        """
        comm = self._checked(dims, x, "all_to_all")
        split = _axis(comm, x, split_axis, "all_to_all", split=True)
        concat = _axis(comm, x, concat_axis, "all_to_all")
        return operators.call("all_to_all", x, self._groups.place(comm), split, concat)

    def shift(self, dims: Dims, x: Tensor, offset: int = 1) -> Tensor:
        """Return the x of the rank `offset` coords before this one, in a ring. The gradient is shifted back."""
        comm = self._checked(dims, x, "shift")
        check_offset(offset, partial(comm.where, "functional.shift"))
        return operators.call("shift", x, self._groups.place(comm), offset)

    def _checked(self, dims: Dims, x: Tensor, call: str) -> Communicator:
        """Return the communicator of a call, after checking that it can send the tensor."""
        comm = self._at.along(dims)
        check_tensor(x, comm.transport.kinds, partial(comm.where, f"functional.{call}"), plain=False)
        return comm


def _check_rule(call: str, rule: object, rules: tuple[str, ...]) -> None:
    if rule not in rules:
        raise AutogradError(
            f"functional.{call} has no gradient rule {rule!r}",
            given=f"grad={rule!r}",
            expected="grad=" + " or grad=".join(f'"{rule}"' for rule in rules),
            hint="help(mesh.functional." + call + ") explains which one to use",
        )


def _axis(
    comm: Communicator, x: Tensor, axis: int | None, call: str, split: bool = False, dim: int | None = None
) -> int:
    where = partial(comm.where, f"functional.{call}")
    axis = normal_axis(x, axis_or_dim(axis, dim, where), where)
    if split:
        check_divisible(x, axis, comm.size, where, comm.who)
    return axis


# -- a mean over ranks that have different numbers of tokens: the sum of values over the sum of weights -----


def mean_message(values: Tensor, weights: Tensor | float, where: str) -> tuple[Tensor, list[Tensor]]:
    """Return the values followed by the weights, in one flat float32 or float64 tensor, and as two tensors.

    Raises ShapeError, AutogradError.
    """
    for x in (values, weights):
        if isinstance(x, Tensor):
            check_tensor(x, (x.device.type,), lambda: f"mean on {where}")
    if not isinstance(values, Tensor) or not values.is_floating_point():
        raise ShapeError(
            f"mean on {where} takes a floating-point tensor of sums",
            given=f"{values.dtype} {tuple(values.shape)}" if isinstance(values, Tensor) else repr(values),
            expected="a tensor, such as this rank's sum of losses",
            hint="mesh.mean(dims, losses.sum(), tokens)",
        )
    if isinstance(weights, Tensor) and weights.requires_grad:
        raise AutogradError(
            f"mean on {where} has no gradient for its weights",
            given="weights with requires_grad",
            expected="numbers of tokens or samples",
            hint="weights.detach()",
        )
    kind = torch.float64 if values.dtype == torch.float64 else torch.float32
    try:
        counts = torch.as_tensor(weights, device=values.device).detach().to(kind)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ShapeError(
            f"mean on {where} was given a {type(weights).__name__} as weights",
            given=repr(weights),
            expected="a number, or a tensor of weights",
            hint="mesh.mean(dims, losses.sum(), tokens)",
        ) from error
    if counts.shape not in (values.shape, ()):
        raise ShapeError(
            f"mean on {where}: the shapes of values and weights do not match",
            given=f"values {tuple(values.shape)}, weights {tuple(counts.shape)}",
            expected="one weight for all values, or one for each",
            hint="weights of shape () or of the values' shape",
        )
    parts = [values.detach().to(kind), counts]
    return torch.cat([part.flatten() for part in parts]), parts


def mean_of(values: Tensor, sums: Tensor) -> Tensor:
    """Return the mean, given the sum of `mean_message` over all ranks. Only this rank's own values get a gradient."""
    total, weight = sums[: values.numel()].view_as(values), sums[values.numel() :]
    weight = weight.view_as(values) if weight.numel() == values.numel() else weight.view(())
    mean: Tensor = _Mean.apply(values, total / weight, weight)
    return mean


class _Mean(torch.autograd.Function):
    """A mean that is equal on all ranks, with the gradient of this rank's share, which is values / weight."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mean: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.dtype = values.dtype
        return mean

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return (grads[0] / weight).to(ctx.dtype), None, None
