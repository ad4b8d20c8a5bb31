"""The gather of a sequence and the products with it at once, slice by slice around a ring."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshcomm.parallel.tensor.layers import ColumnParallel
from meshcomm.parallel.tensor.parameters import local
from meshcomm.parallel.tensor.split import TensorSplit


def columns(split: TensorSplit, x: Tensor, *layers: ColumnParallel) -> tuple[Tensor, ...]:
    """What each of `layers` makes of `x`, which has not come through `enter`: one entry for all of them.

    With `split.overlap` the slices of the sequence go around a ring: while one is multiplied with
    every layer's weight, the next travels; in backward the sum of the input's gradients travels
    while those of the weights are computed. Equal to the plain way up to rounding. Inside
    torch.compile it is the plain way.
    """
    if not (split.sequence_parallel and split.overlap) or torch.compiler.is_compiling():
        x = split.enter(x)
        return tuple(layer(x) for layer in layers)
    weights = [local(layer.weight) for layer in layers]
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        # Here, where autograd sees it: inside of a Function autocast does not reach the backward.
        dtype = torch.get_autocast_dtype(kind)
        x, weights = x.to(dtype), [weight.to(dtype) for weight in weights]
    ys: tuple[Tensor, ...] = _GatherLinears.apply(split, x, *weights)
    biases = [layer.bias for layer in layers]
    return tuple(
        y if bias is None else y + local(bias).to(y.dtype) for y, bias in zip(ys, biases, strict=True)
    )


class _GatherLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, split: TensorSplit, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        mesh, n, coord = split.mesh, split.size, split.coord
        held = x.detach().contiguous()
        slices: list[Tensor] = [held] * n
        made: list[list[Tensor]] = [[held] * n for _ in weights]
        for turn in range(n):
            source = (coord - turn) % n
            coming = None
            if turn < n - 1:
                sends = [(held, (coord + 1) % n)]
                recvs = [(torch.empty_like(held), (coord - 1) % n)]
                coming = mesh.exchange(split.dim, sends, recvs, async_op=True)
            slices[source] = held
            for blocks, weight in zip(made, weights, strict=True):
                blocks[source] = F.linear(held, weight)
            if coming is not None:
                (held,) = coming.wait()
        ctx.split = split
        ctx.save_for_backward(torch.cat(slices, split.axis), *weights)
        return tuple(torch.cat(blocks, split.axis) for blocks in made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Any, ...]:
        split: TensorSplit = ctx.split
        x, *weights = ctx.saved_tensors
        dx = dys[0] @ weights[0]
        for dy, weight in zip(dys[1:], weights[1:], strict=True):
            dx += dy @ weight
        leaving = split.mesh.reduce_scatter(split.dim, dx, split.axis, async_op=True)
        rows = x.flatten(0, -2)
        dws = [
            dy.flatten(0, -2).mT @ rows if needed else None
            for dy, needed in zip(dys, ctx.needs_input_grad[2:], strict=True)
        ]
        return None, leaving.wait(), *dws
