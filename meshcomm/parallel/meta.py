"""Parameters without memory: modules are built, split and sharded before any of their values is anywhere."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_ALONE = threading.RLock()


@contextmanager
def on_meta() -> Iterator[None]:
    """Parameters of modules that are made here go to the meta device as they are registered; buffers keep their values.

    So what a constructor writes into its weights goes nowhere, and no more than one parameter of this thread has
    memory, of which nothing is touched. One thread at a time.
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

    What fully_shard has sharded gets memory for this rank's shard. Shared parameters stay shared.
    """
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.is_meta and not isinstance(parameter, DTensor):
                if id(parameter) not in made:
                    made[id(parameter)] = _like(parameter, torch.empty_like(parameter, device=device))
                part._parameters[name] = made[id(parameter)]

    def fresh(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor

    plain = {
        (part, name): parameter
        for part in module.modules()
        for name, parameter in part._parameters.items()
        if not isinstance(parameter, DTensor)
    }
    # Out of the way, as torch also swaps what stays as it is where tensors have no values, and cannot if it is referred to.
    for part, name in plain:
        part._parameters[name] = None
    try:
        # torch swaps the contents of DTensors in place, and tells FSDP.
        module._apply(fresh)
    finally:
        for (part, name), parameter in plain.items():
            part._parameters[name] = parameter


def _like(parameter: nn.Parameter, data: Tensor) -> nn.Parameter:
    made = nn.Parameter(data, parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    return made
