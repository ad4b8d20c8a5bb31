"""The experts themselves: the ones that this rank holds, each on the rows that came for it."""

from __future__ import annotations

from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshcomm.parallel.expert.placement import split_parameter
from meshcomm.parallel.tensor import TensorSplit, local


@final
class ExpertWeights(nn.Module):
    """w2_e(silu(w1_e x) * w3_e x) for the experts e of this rank.

    A module of its own, because its parameters go other ways than the rest of a model: their
    gradients are summed along other dims, and they are sharded along other dims too.

    Args:
        tensor: splits the inner axis of each expert.
        dim: along which experts are spread, or None.
        width, ff, experts: of the whole layer.

    Parameters: w1, w3 (experts, ff, width), w2 (experts, width, ff), their memory not yet written.
    """

    def __init__(self, tensor: TensorSplit, dim: str | None, width: int, ff: int, experts: int) -> None:
        super().__init__()
        spread = {} if dim is None else {dim: 0}

        def parameter(*shape: int, inner: int) -> nn.Parameter:
            axes = spread | ({tensor.dim: inner} if tensor.size > 1 else {})
            return split_parameter(tensor.mesh, shape, axes, tensor.dtype)

        self.w1 = parameter(experts, ff, width, inner=1)
        self.w3 = parameter(experts, ff, width, inner=1)
        self.w2 = parameter(experts, width, ff, inner=2)

    def forward(self, rows: Tensor, often: list[int]) -> Tensor:
        """(n, width), the first often[0] rows for this rank's first expert, ... -> (n, width).

        Along the tensor's dim a part of the sum. An expert without rows takes part with none, so that
        its gradient is zeros and not missing.
        """
        weights: Any = (local(w).unbind() for w in (self.w1, self.w3, self.w2))
        made = [
            F.linear(F.silu(F.linear(part, w1)) * F.linear(part, w3), w2)
            for part, w1, w3, w2 in zip(rows.split(often), *weights, strict=True)
        ]
        return torch.cat(made)
