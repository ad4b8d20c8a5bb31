"""Wraps a module that the user has already built, with its weights, as a model that can be trained on a mesh."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from meshcomm.config import ParallelConfig, TrainConfig
from meshcomm.errors import ConfigError, UnsupportedOp
from meshcomm.layout.names import listed
from meshcomm.parallel.batch_norm import synchronise
from meshcomm.parallel.data import broadcast_values
from meshcomm.parallel.dropout import check_dropouts
from meshcomm.parallel.loss import check_loss
from meshcomm.parallel.memory import cast, check_cast
from meshcomm.parallel.model import LossOf, Model, OwnLoss
from meshcomm.parallel.pipeline import Stage
from meshcomm.parallel.splits import Splits, along
from meshcomm.parallel.tensor.parameters import split_dims
from meshcomm.parallel.tree import called

_SPEC = "meshcomm.models.ModelSpec(module=..., ...), which describes how to build it in parts"


@final
class WrappedModule(Model):
    """A module that already has weights. The first rank along the data and shard dims broadcasts its weights to the other
    ranks.

    loss: see `meshcomm.parallel.loss.OwnLoss`. If None, cross-entropy of logits (batch, ..., classes), over all
          targets in the full batch that are not -100.

    If there is a tensor dim, `tensor_parallel` must have split the module along it. `check` raises UnsupportedOp for
    features that require more information about the module.
    """

    num_layers, hidden_size, vocab_size = 1, 0, 0

    def __init__(
        self,
        module: nn.Module,
        parallel: ParallelConfig,
        train: TrainConfig,
        loss: LossOf | None = None,
    ) -> None:
        lazy = [
            name
            for name, parameter in module.named_parameters()
            if isinstance(parameter, UninitializedParameter)
        ]
        if lazy:
            raise ConfigError(
                "lazy layers have no weights yet",
                given=listed(lazy),
                expected="a module whose parameters have shapes",
                hint="call the module once with a sample before it is given to the Trainer",
            )
        tensors = (*module.named_parameters(), *module.named_buffers())
        if inference := [name for name, tensor in tensors if tensor.is_inference()]:
            raise UnsupportedOp(
                "the module's tensors were made in inference mode, so they cannot be trained",
                given=listed(inference),
                expected="a module that is made or copied outside torch.inference_mode",
                hint="move its construction out of the block",
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedOp(
                "a scripted module cannot be trained on a mesh",
                given=f"a {type(module).__name__} of torch.jit",
                expected="the nn.Module that it was made from",
                hint="train.compile = true with a ModelSpec, in place of torch.jit",
            )
        self.module, self._parallel, self._train = module, parallel, train
        self.own_loss = None if loss is None else OwnLoss(loss)

    def stage(self, splits: Splits, stage: Stage) -> nn.Module:
        """See Model. Called by every rank, because the method broadcasts the weights."""
        module, train = self.module, self._train
        cast(module, getattr(torch, train.dtype), splits.mesh.device)
        broadcast_values(splits.mesh, splits.data, (*module.parameters(), *module.buffers()))
        synchronise(module, splits.mesh, along(splits.mesh, splits.data))
        if train.compute_dtype is not None:
            compute = getattr(torch, train.compute_dtype)
            module.forward = _mixed(module.forward, compute, splits.mesh.device.type)
        return module

    def call(self, module: nn.Module) -> Callable[..., Any]:
        """See Model."""
        return partial(called, module)

    def fill(self, module: nn.Module, stage: Stage) -> None:
        """See Model. The module already has its weights."""

    def check(self, splits: Splits, stages: int) -> None:
        """See Model."""
        module, parallel, train = self.module, self._parallel, self._train
        check_loss(None if self.own_loss is None else self.own_loss.function, module)
        check_cast(module, train)
        split = {dim for parameter in module.parameters() for dim in split_dims(parameter)}
        asked = {
            "parallel.pipeline": stages > 1,
            "parallel.context": splits.context.size > 1,
            "parallel.expert": splits.expert is not None,
            "train.activation_checkpointing": bool(train.activation_checkpointing),
            "train.compile": train.compile,
            "train.float8": train.float8 is not None,
        }
        for setting in (setting for setting, wanted in asked.items() if wanted):
            raise UnsupportedOp(
                f"a module that is already built cannot be trained with {setting}",
                given=f"{setting}, and a {type(module).__name__} as the model",
                expected="a model whose layers are known",
                hint=f"{_SPEC}, or remove {setting}",
            )
        check_dropouts(module.named_modules(), splits.tensor)
        if splits.tensor.size > 1 and splits.tensor.dim not in split:
            dim = splits.tensor.dim
            raise UnsupportedOp(
                f"no parameter of the module is split along {dim}, the dim of parallel.tensor",
                given=f"a {type(module).__name__}, parallel.tensor = {parallel.tensor!r}",
                expected="a module that tensor_parallel has split",
                hint=f'meshcomm.parallel.tensor_parallel(module, mesh, "{dim}", {{"up": "column", "down": "row"}})',
            )


def _mixed(forward: Callable[..., Any], compute: torch.dtype, kind: str) -> Callable[..., Any]:
    def mixed(*args: Any, **named: Any) -> Any:
        with torch.autocast(kind, compute):
            return forward(*args, **named)

    return mixed
