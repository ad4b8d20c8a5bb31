"""A causal language model of the transformers library: made from its configuration, attended by the mesh, initialised."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig

from meshcomm.models.drawn import normal
from meshcomm.models.spec import Attend

ATTENTION = "meshcomm"


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: q (batch, heads, s, head), k and v alike -> (batch, s, heads, head)."""
    attend: Attend = module.meshcomm_attend
    found = attend(query, key, value, causal=True, scale=scaling, window=sliding_window)
    return found.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, _attention)


class _WideNorm(nn.Module):
    """transformers' RMSNorm, which rounds what is wider than float32: here it computes in float64 what is."""

    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> the same shape."""
        if x.dtype != torch.float64:
            y: Tensor = super().forward(x)
            return y
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


def make(config: PreTrainedConfig) -> nn.Module:
    """The model of a configuration, whose attention layers call what `attended` gives them."""
    made: nn.Module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, attn_implementation=ATTENTION
    )
    kinds: dict[type, type] = {}
    for part in made.modules():
        own = type(part)
        if own.__name__.endswith("RMSNorm"):
            kinds.setdefault(own, type(own.__name__, (_WideNorm, own), {"__module__": __name__}))
            part.__class__ = kinds[own]
    return made


def attended(module: nn.Module, attend: Attend) -> None:
    """Have every attention layer of `module` call `attend`."""
    for part in module.modules():
        if type(part).__name__.endswith("Attention"):
            part.meshcomm_attend = attend  # type: ignore[assignment]


def initialise(std: float, seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """Norms are 1, biases 0, the rest normal with the configuration's standard deviation."""
    if name.endswith("bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    return normal(seed, name, shape, std)
