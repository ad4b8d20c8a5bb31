"""Which parameters decay, in groups that one fused optimiser call can take."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor


def decay_groups(module: nn.Module) -> list[dict[str, Any]]:
    """The parameter groups of `module` for an optimiser, each parameter in one of them.

    Matrices decay, embeddings and experts' stacks of matrices among them; vectors (norms, biases)
    do not: theirs have `weight_decay` 0. Within a group all parameters are DTensors on one
    DeviceMesh, or all are plain: a fused step passes a whole group on as one call, and DTensor
    refuses a mixture. Experts' parameters, on other dims of the mesh, so have groups of their own.

    Order: as first met in `module.parameters()`, matrices before vectors. Called after fully_shard,
    which puts other parameters into the module.
    """
    groups: dict[tuple[bool, Any], dict[str, Any]] = {}
    ordered = sorted(module.parameters(), key=lambda parameter: parameter.ndim < 2)
    for parameter in ordered:
        vector = parameter.ndim < 2
        where = parameter.device_mesh if isinstance(parameter, DTensor) else None
        made: dict[str, Any] = {"params": [], "weight_decay": 0.0} if vector else {"params": []}
        groups.setdefault((vector, where), made)["params"].append(parameter)
    return list(groups.values())
