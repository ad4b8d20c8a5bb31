"""What a trainer must know of a model, whoever wrote it."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from meshcomm.parallel.pipeline import Stage
from meshcomm.parallel.splits import Splits
from meshcomm.parallel.tensor import cross_entropy
from meshcomm.predict.stages import PartCosts


def cast(module: nn.Module, dtype: torch.dtype, device: torch.device | None = None) -> None:
    """Have all parameters and buffers of a floating type in `dtype`, in place.

    Complex ones, such as rotary tables, keep their type: `module.to(dtype)` would drop their imaginary parts.
    """
    module._apply(lambda x: x.to(device=device, dtype=dtype if x.is_floating_point() else x.dtype))


class Model(ABC):
    """A model that can be built stage by stage, without memory, and filled when it has some.

    layers:     blocks that a pipeline divides; 1 where it cannot be cut.
    width:      elements of a token's vector between stages.
    vocabulary: token ids are below it, and the last stage gives as many logits.
    tied:       the name of the weight that embedding and head share, which is a stage's `tied_weight`; "": none.
    draws:      whether its modules may draw from torch's default generators.
    drops:      whether its stages drop by the samples' numbers, which they are given then, and the attribute `step`.
    """

    layers: int
    width: int
    vocabulary: int
    tied: str = ""
    draws: bool = True
    drops: bool = False

    @abstractmethod
    def stage(self, splits: Splits, stage: Stage) -> nn.Module:
        """A stage's module, split, its parameters on the meta device: see `meta.on_meta`.

        It takes int64 tokens or hidden states of one microbatch and gives hidden states, or on the last stage this
        rank's slice of the logits, both in train.compute_dtype, or else in train.dtype. Its `layers`, a ModuleDict
        or ModuleList, are what shard gathers one at a time. Where something is dropped it is also given `samples`, int64 (microbatch,), the samples' numbers in
        the global batch. Parameters have one name in all stages of all meshes.
        """

    @abstractmethod
    def fill(self, module: nn.Module, stage: Stage) -> None:
        """Write the values of this rank's parts of all parameters of a stage. Nothing is communicated."""

    def check(self, splits: Splits, stages: int) -> None:  # noqa: B027
        """Called before any stage is built. Raises UnsupportedOp for what it cannot be trained with, and why."""

    def outputs(self, splits: Splits) -> int:
        """How many logits of each token the last stage gives on a rank."""
        return self.vocabulary // splits.tensor.size

    def costs(self, sequence: int) -> PartCosts:
        """What the parts cost beside each other, by which layers are divided among stages."""
        return PartCosts(0, (1,) * self.layers, 0)

    def loss(self, splits: Splits, logits: Tensor, targets: Tensor) -> Tensor:
        """The sum over the targets of a microbatch that count, not -100: of each token's cross-entropy."""
        return cross_entropy(splits.tensor, logits, targets, reduction="sum")

    def count(self, targets: Tensor, microbatches: int) -> Tensor:
        """What the sum of this rank's losses is divided by, beside those of other ranks: (), of any dtype."""
        return (targets != -100).sum()
