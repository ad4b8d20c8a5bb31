"""What a trainer must know of a model, along which dims it is split, and how it gets memory."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshcomm.mesh import Mesh
from meshcomm.parallel.context import ContextSplit
from meshcomm.parallel.dropout import Draws
from meshcomm.parallel.pipeline import Stage
from meshcomm.parallel.tensor import TensorSplit, cross_entropy
from meshcomm.predict.stages import PartCosts

_ALONE = threading.RLock()


@final
@dataclass(frozen=True)
class Splits:
    """Along which dims of the mesh weights, the sequence and the experts are split.

    tensor:         weights, and with sequence_parallel activations between layers.
    context:        the sequence.
    expert:         the dim of a view along which experts are spread; None: every rank has all.
    balance_weight: the factor of the balance loss of a microbatch.
    data:           the dims whose ranks have other samples.
    draws:          sets the default generators, if given.
    """

    tensor: TensorSplit
    context: ContextSplit
    expert: str | None = None
    balance_weight: float = 0.0
    data: tuple[str, ...] = ()
    draws: Draws | None = None

    @property
    def mesh(self) -> Mesh:
        """The mesh of all of them."""
        return self.tensor.mesh

    @classmethod
    def of(cls, tensor: TensorSplit) -> Splits:
        """Only weights are split."""
        return cls(tensor, ContextSplit(tensor.mesh, None))


class Model(ABC):
    """A model that can be built stage by stage, without memory, and filled when it has some.

    layers:     blocks that a pipeline divides; 1 where it cannot be cut.
    width:      elements of a token's vector between stages.
    vocabulary: token ids are below it, and the last stage gives as many logits.
    tied:       the name of the weight that embedding and head share, which is a stage's `tied_weight`; "": none.
    draws:      whether its modules may draw from torch's default generators.
    drops:      whether its stages drop by the samples' numbers, which they are given then, and the attribute `step`.
    """

    num_layers: int
    hidden_size: int
    vocab_size: int
    tied: str = ""
    draws: bool = True
    drops: bool = False

    @abstractmethod
    def stage(self, splits: Splits, stage: Stage) -> nn.Module:
        """A stage's module, split, its parameters on the meta device: see `on_meta`.

        It maps int64 tokens or hidden states of one microbatch to hidden states, or on the last stage to this rank's
        slice of the logits, both in train.compute_dtype, or else in train.dtype. Its `layers`, a ModuleDict or
        ModuleList, are what shard gathers one at a time. Where something is dropped it also gets `samples`, int64
        (microbatch,), the samples' numbers in the global batch. A parameter has one name in all stages of all meshes.
        """

    @abstractmethod
    def fill(self, module: nn.Module, stage: Stage) -> None:
        """Write the values of this rank's parts of all parameters of a stage. Nothing is communicated."""

    def check(self, splits: Splits, stages: int) -> None:  # noqa: B027
        """Called before any stage is built. Raises UnsupportedOp for what it cannot be trained with, and why."""

    def outputs(self, splits: Splits) -> int:
        """How many logits of each token the last stage gives on a rank."""
        return self.vocab_size // splits.tensor.size

    def costs(self, seq_len: int) -> PartCosts:
        """The relative costs of the parts, by which layers are divided among stages."""
        return PartCosts(0, (1,) * self.num_layers, 0)

    def loss(self, splits: Splits, logits: Tensor, targets: Tensor) -> Tensor:
        """The sum of the cross-entropy over those targets of a microbatch that are not -100."""
        return cross_entropy(splits.tensor, logits, targets, reduction="sum")

    def count(self, targets: Tensor, microbatches: int) -> Tensor:
        """This rank's share of the number that the sum of all losses is divided by: (), of any dtype."""
        return (targets != -100).sum()


# -- memory: modules are built, split and sharded before any of their values exists ----------------


@contextmanager
def on_meta() -> Iterator[None]:
    """Parameters of modules that are made here go to the meta device as they are registered; buffers keep their values.

    A constructor's initial values are discarded, and at most one parameter of this thread has memory at a time,
    which is never touched. One thread at a time.
    """
    register = nn.Module.register_parameter
    thread = threading.get_ident()

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta and threading.get_ident() == thread:
            module._parameters[name] = _like(parameter, parameter.detach().to("meta"))

    with _ALONE, patch.object(nn.Module, "register_parameter", registered):
        yield


def materialise(module: nn.Module, device: torch.device) -> None:
    """Give the parameters of `module` that are on the meta device memory on `device`, not yet written.

    A parameter that fully_shard has sharded gets memory for this rank's shard. Shared parameters stay shared.
    """
    made: dict[int, nn.Parameter] = {}
    plain: dict[tuple[nn.Module, str], nn.Parameter | None] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if not isinstance(parameter, DTensor):
                if parameter is not None and parameter.is_meta and id(parameter) not in made:
                    made[id(parameter)] = _like(parameter, torch.empty_like(parameter, device=device))
                plain[part, name] = made.get(id(parameter), parameter)
    # Removed meanwhile: torch would swap these too, which fails for a parameter that others refer to.
    for part, name in plain:
        part._parameters[name] = None
    try:
        # torch swaps the contents of DTensors in place, and informs FSDP.
        module._apply(lambda x: torch.empty_like(x, device=device) if x.is_meta else x)
    finally:
        for (part, name), parameter in plain.items():
            part._parameters[name] = parameter


def cast(module: nn.Module, dtype: torch.dtype, device: torch.device | None = None) -> None:
    """Have all parameters and buffers of a floating type in `dtype`, in place.

    Complex ones, such as rotary tables, keep their type: `module.to(dtype)` would drop their imaginary parts.
    """
    module._apply(lambda x: x.to(device=device, dtype=dtype if x.is_floating_point() else x.dtype))


def _like(parameter: nn.Parameter, data: Tensor) -> nn.Parameter:
    made = nn.Parameter(data, parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    return made
