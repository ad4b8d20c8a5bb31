"""Cross-entropy of logits that are split over the vocabulary, which are never gathered."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from meshcomm.errors import UnsupportedOp
from meshcomm.parallel.tensor.layers import outside_of, owned
from meshcomm.parallel.tensor.split import TensorSplit

Reduction: TypeAlias = Literal["mean", "sum"]


def cross_entropy(
    split: TensorSplit,
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Tensor:
    """-log softmax(logits)[target] with logits split over the vocabulary, mean or sum over targets.

    Shape:      logits (..., vocab / ranks) of the whole sequence, what `enter` and a ColumnParallel
                give; targets (...) int64 in 0 .. vocab - 1, or ignore_index -> ().
    ignore_index: targets that do not count: they add nothing to the sum, to the number that the
                mean divides by, or to any gradient. As in torch, a mean over none is nan.
    reduction:  "sum" for callers that divide by a number of tokens of their own, such as that of
                all ranks and microbatches.
    Called by:  every rank along the dim, with equal targets; each gets the same value.
    Gradient:   exact, for this rank's logits. Two small all_reduces in forward (the maximum; the
                sum and the target's logit together), none in backward; logits are never gathered.
                Half-precision logits are computed with in float32.
    Raises:     ShapeError for other targets; where a look would wait for the device, their loss is nan.
    """
    if reduction not in ("mean", "sum"):
        raise UnsupportedOp(
            f"cross_entropy has no reduction {reduction!r}",
            given=f"reduction={reduction!r}",
            expected='reduction="mean" or reduction="sum"',
            hint='reduction="sum", and divide by what you count',
        )
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    counted = targets != ignore_index
    outside = None
    if split.size > 1 or split.mesh.asynchronous:
        outside = outside_of(split, targets.where(counted, 0), logits.shape[-1] * split.size, "targets")
    if split.size == 1:
        held = targets if outside is None else targets.where(~outside, ignore_index)
        found = F.cross_entropy(
            logits.flatten(0, -2), held.flatten(), ignore_index=ignore_index, reduction=reduction
        )
        return found if outside is None else torch.where(outside.any(), torch.nan, found)
    total: Tensor = _CrossEntropy.apply(logits, targets, counted, split)
    return total / counted.sum() if reduction == "mean" else total


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, counted: Tensor, split: TensorSplit) -> Tensor:
        highest = split.mesh.all_reduce(split.dim, logits.detach().amax(-1), op="max")
        shifted = logits - highest.unsqueeze(-1)
        row, mine = owned(targets, logits.shape[-1], split.coord)
        mine = mine & counted
        target = shifted.gather(-1, row.unsqueeze(-1)).squeeze(-1).where(mine, 0)
        exp = shifted.exp_()
        both = split.mesh.all_reduce(split.dim, torch.stack([exp.sum(-1), target]), op="sum")
        total, target = both.unbind()
        vocab = logits.shape[-1] * split.size
        loss = total.log() - target.where((targets >= 0) & (targets < vocab), torch.nan)
        ctx.save_for_backward(exp.div_(total.unsqueeze(-1)), row, mine, counted)
        return loss.where(counted, 0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, row, mine, counted = ctx.saved_tensors
        # The saved softmax is not written to: backward may run twice over a retained graph.
        part = softmax.scatter_add(-1, row.unsqueeze(-1), -mine.unsqueeze(-1).to(softmax.dtype))
        return part.mul_((grad * counted).unsqueeze(-1)), None, None, None
