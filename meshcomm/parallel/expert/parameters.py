"""Which parameters of a model are those of experts."""

from __future__ import annotations

from torch import nn

from meshcomm.parallel.expert.weights import ExpertWeights


def separate(module: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """The parameters of `module` by name, in order of registration: dense ones, and those of experts.

    Gradients of the first are summed along the data's and the context's dims, of the second along
    `expert_gradient_dims`. Routers are dense.
    """
    held = {
        id(parameter)
        for part in module.modules()
        if isinstance(part, ExpertWeights)
        for parameter in part.parameters()
    }
    named = list(module.named_parameters())
    return (
        {name: parameter for name, parameter in named if id(parameter) not in held},
        {name: parameter for name, parameter in named if id(parameter) in held},
    )
