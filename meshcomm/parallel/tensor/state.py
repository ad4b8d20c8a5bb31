"""The weights of a module that `tensor_parallel` split, as those of the module before: names, shapes, order."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from meshcomm.errors import ShapeError
from meshcomm.layout.names import did_you_mean
from meshcomm.parallel.tensor.fused import joined, kept
from meshcomm.parallel.tensor.modules import FUSED
from meshcomm.parallel.tensor.parameters import assign, whole, whole_shape


def fused_sizes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """The sizes of the parts of each weight that has some, by its name in the state dict."""
    return {
        f"{prefix}.{key}".lstrip("."): sizes
        for prefix, part in module.named_modules(remove_duplicate=False)
        for key, sizes in getattr(part, FUSED, {}).items()
    }


def unsplit_state(module: nn.Module) -> dict[str, Tensor]:
    """What `state_dict()` of the module before it was split would give: whole plain tensors, copied.

    Called by: every rank along the dim; each gets all of it.
    """
    fused = fused_sizes(module)
    found: dict[str, Tensor] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        tensor = whole(value)
        found[name] = joined(tensor, fused[name]) if name in fused else tensor.clone()
    return found


@torch.no_grad()
def load_unsplit_state(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Write such a state into a module that is split. Nothing is communicated.

    Raises ShapeError where names are missing, unknown, or have other shapes; nothing is written then.
    """
    fused = fused_sizes(module)
    own = module.state_dict(keep_vars=True)
    problems = [f"{name} is missing" for name in own if name not in state]
    values: dict[str, Tensor] = {}
    for name, value in state.items():
        if name not in own:
            guess = did_you_mean(name, own)
            problems.append(f"{name} is unknown" + (f"; {guess}" if guess else ""))
            continue
        sizes = fused.get(name)
        fits = value.shape[0] == sum(sizes) if sizes and value.ndim else not sizes
        values[name] = kept(value, sizes) if sizes and fits else value
        if not fits or (tuple(values[name].shape) != whole_shape(own[name])):
            problems.append(f"{name} has shape {tuple(value.shape)}")
    if problems:
        raise ShapeError(
            "this state is not one of the module before it was split",
            given="\n".join(problems[:12]),
            expected="the names and shapes of its state_dict() then",
            hint="unsplit_state(module) gives such a state",
        )
    for name, value in values.items():
        assign(own[name], value)
