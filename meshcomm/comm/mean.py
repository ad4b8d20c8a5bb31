"""A mean over ranks that have unequally many tokens: the sum of values over the sum of weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshcomm.errors import AutogradError, ShapeError


def message(values: Tensor, weights: Tensor | float, where: str) -> Tensor:
    """Values, then weights, flat, in float32 or float64. Raises ShapeError, AutogradError."""
    if not isinstance(values, Tensor) or not values.is_floating_point():
        raise ShapeError(
            f"mean on {where} takes a floating-point tensor of sums",
            given=f"{values.dtype} {tuple(values.shape)}" if isinstance(values, Tensor) else repr(values),
            expected="this rank's sum of losses, say, as a tensor",
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
    counts = torch.as_tensor(weights, device=values.device).detach().to(kind)
    if counts.shape not in (values.shape, ()):
        raise ShapeError(
            f"mean on {where}: values and weights do not fit",
            given=f"values {tuple(values.shape)}, weights {tuple(counts.shape)}",
            expected="a weight for all values, or one for each",
            hint="weights of shape () or of the values' shape",
        )
    return torch.cat([values.detach().to(kind).flatten(), counts.flatten()])


def divided(values: Tensor, sums: Tensor) -> Tensor:
    """The mean, from what `message` was over all ranks; with the gradient of this rank's own values."""
    total, weight = sums[: values.numel()].view_as(values), sums[values.numel() :]
    weight = weight.view_as(values) if weight.numel() == values.numel() else weight.view(())
    mean: Tensor = _Mean.apply(values, total / weight, weight)
    return mean


class _Mean(torch.autograd.Function):
    """A number that all ranks have, of which this rank's share is values / weight."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mean: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.dtype = values.dtype
        return mean

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return (grads[0] / weight).to(ctx.dtype), None, None
