"""A causal language model of the transformers library: made from its configuration, attended by the mesh, initialised."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
)
from transformers.utils import logging

from meshcomm.errors import ConfigError, UnsupportedOp
from meshcomm.models.spec import Attend, normal

ATTENTION = "meshcomm"
# Arguments of an attention layer that say nothing about what it computes.
_UNUSED = ("cache_position", "output_attentions", "past_key_values", "position_ids", "use_cache")


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: q, k and v (batch, heads, s, head) -> (batch, s, heads, head).

    Raises UnsupportedOp for arguments that would change the result and that no mesh honours, such as a softcap.
    """
    more |= {"attention_mask": attention_mask, "dropout": more.get("dropout") or None}
    if wrong := [
        name for name, x in more.items() if x is not None and x is not False and name not in _UNUSED
    ]:
        raise UnsupportedOp(
            f"attention of a {type(module).__name__} takes what meshcomm's does not",
            given=", ".join(wrong),
            expected="causal attention with a scale and a sliding window",
            hint="ModelSpec.attention, with an attention of this model",
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    attend: Attend = module.meshcomm_attend
    found = attend(query, key, value, causal=causal, scale=scaling, window=sliding_window)
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
    """The model of a configuration, whose attention layers call what `attended` gives them.

    Raises ConfigError where transformers cannot make it.
    """
    try:
        made: nn.Module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, attn_implementation=ATTENTION
        )
    except Exception as error:
        raise not_made(config.name_or_path or "a configuration", error) from error
    kinds: dict[type, type] = {}
    for part in made.modules():
        own = type(part)
        if own.__name__.endswith("RMSNorm"):
            kinds.setdefault(own, type(own.__name__, (_WideNorm, own), {"__module__": __name__}))
            part.__class__ = kinds[own]
    return made


def not_made(folder: Path | str, error: Exception) -> ConfigError:
    """The error of a config.json that transformers refuses."""
    return ConfigError(
        "transformers cannot make the model that a config.json describes",
        given=f"{type(error).__name__}: {error}".strip() + f"\nof {folder}",
        expected="a config.json that AutoModelForCausalLM.from_config takes",
        hint="mend config.json; or pip install -U transformers, for a folder of a later version",
    )


def unmodified(folder: Path, weights: Mapping[str, Tensor] | None) -> nn.Module:
    """The model as transformers computes it, in float64, nothing of it replaced.

    weights: by the names of a folder of safetensors. None: those of `folder`.
    """
    shows = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        options: dict[str, Any] = {"dtype": torch.float64, "experts_implementation": "eager"}
        if weights is None:
            return AutoModelForCausalLM.from_pretrained(folder, **options)
        config = AutoConfig.from_pretrained(folder)
        kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        return kind.from_pretrained(None, config=config, state_dict=dict(weights), **options)  # type: ignore[no-any-return]
    finally:
        if shows:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


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
