"""Models of the transformers library, by the type that their config.json names: how each is cut, split and attended."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from meshcomm.errors import UnsupportedOp
from meshcomm.models.spec import Attend, Here, ModelSpec

ATTENTION = "meshcomm"


def hugging_face(folder: Path, *, random: bool, seed: int) -> ModelSpec:
    """The spec of the causal language model whose config.json lies in `folder`.

    random: draw the weights by their names from the seed; else they are read from the folder.
    Raises: UnsupportedOp for a type that is none of FAMILIES.
    """
    config = AutoConfig.from_pretrained(folder)
    if config.model_type not in FAMILIES:
        raise UnsupportedOp(
            f"meshcomm does not know how to split a {config.model_type}",
            given=f'model_type = "{config.model_type}" in {folder}/config.json',
            expected=f"one of {', '.join(FAMILIES)}",
            hint='[model] build = "module:function", which returns a meshcomm.models.ModelSpec',
        )
    return FAMILIES[config.model_type](config, None if random else folder, seed)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: q (batch, heads, s, head), k and v alike -> (batch, s, heads, head)."""
    attend: Attend = module.meshcomm_attend
    return attend(query, key, value, causal=True, scale=scaling).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, _attention)


def _with(config: PreTrainedConfig) -> nn.Module:
    made: nn.Module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, attn_implementation=ATTENTION
    )
    return made


def _initialise(std: float, seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """Norms are 1, biases 0, the rest normal with the configuration's standard deviation."""
    if name.endswith("bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    key = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:16])
    return torch.from_numpy(
        np.random.default_rng(key).standard_normal(shape, dtype=np.float32) * np.float32(std)
    )


def _attend(kind: str, module: nn.Module, attend: Attend) -> None:
    for part in module.modules():
        if type(part).__name__.endswith(kind):
            part.meshcomm_attend = attend  # type: ignore[assignment]


def _llama_forward(module: Any, x: Tensor, here: Here) -> Tensor:
    inner = module.model
    if here.stage.is_first:
        x = inner.embed_tokens(x)
    positions = here.positions.unsqueeze(0)
    rotary = inner.rotary_emb(x, positions)
    for block in here.layers:
        x = here.through(block, x, position_ids=positions, position_embeddings=rotary)
    if here.stage.is_last:
        x = module.lm_head(inner.norm(x))
    return x


def _llama(config: Any, weights: Path | None, seed: int) -> ModelSpec:
    """Llama, Mistral, Qwen2, Qwen3: rotary positions, grouped-query attention, SwiGLU."""
    split: dict[str, Any] = {
        "model.embed_tokens": "vocab",
        "model.layers.*.self_attn.[qkv]_proj": "column",
        "model.layers.*.self_attn.o_proj": "row",
        "model.layers.*.mlp.gate_proj": "column",
        "model.layers.*.mlp.up_proj": "column",
        "model.layers.*.mlp.down_proj": "row",
        "lm_head": "column",
    }
    sequence: dict[str, Any] = {
        "model.layers.*.self_attn": {"style": "enter", "args": ["hidden_states"]},
        "model.layers.*.*norm": "sequence",
        "model.norm": "sequence",
    }
    return ModelSpec(
        module=partial(_with, config),
        width=config.hidden_size,
        vocabulary=config.vocab_size,
        layers="model.layers",
        first=("model.embed_tokens",),
        last=("model.norm", "lm_head"),
        forward=_llama_forward,
        split=split,
        sequence=sequence,
        attention=partial(_attend, "Attention"),
        tied=("model.embed_tokens.weight", "lm_head.weight") if config.tie_word_embeddings else None,
        initialise=partial(_initialise, config.initializer_range, seed),
        weights=weights,
    )


FAMILIES: dict[str, Callable[[Any, Path | None, int], ModelSpec]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
}
