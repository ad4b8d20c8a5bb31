"""Refuses steps of an optimizer that was created before the split: its parameters get no gradients, and nothing would be trained."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from meshcomm.errors import TrainingError

# The parameters that were replaced and are still alive, with their names.
_REPLACED: Any = WeakTensorKeyDictionary()


def note_replaced(parameter: nn.Parameter, name: str) -> None:
    """Refuse later steps of an optimizer that holds this parameter and has no gradient for it."""
    _REPLACED[parameter] = name
    _watch()


@cache
def _watch() -> None:
    # For good: a hook cannot remove itself while torch runs the hooks.
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not _REPLACED:
        return
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    stale = [each for each in parameters if each.grad is None and each in _REPLACED]
    if stale:
        raise TrainingError(
            "the optimizer holds parameters that tensor_parallel has replaced",
            given=f"{len(stale)} of {len(parameters)} parameters, the first {_REPLACED[stale[0]]} {tuple(stale[0].shape)}",
            expected="an optimizer of the module's parameters as they are now",
            hint="create the optimizer after tensor_parallel and fully_shard",
        )
