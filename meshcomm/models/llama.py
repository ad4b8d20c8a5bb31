"""Llama, Mistral, Qwen2, Qwen3, and with experts Qwen3-MoE and Mixtral: how each is cut, split and filled.

All have rotary positions, grouped-query attention and SwiGLU; what differs are biases, norms of queries and keys,
sliding windows, and how experts are called in a folder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from meshcomm.errors import UnsupportedOp
from meshcomm.models.hf import attended, initialise, make
from meshcomm.models.spec import Here, ModelSpec, blocks_of
from meshcomm.models.weights import Names

_SPLIT: Mapping[str, Any] = {
    "model.embed_tokens": "vocab",
    "model.layers.*.self_attn.[qkv]_proj": "column",
    "model.layers.*.self_attn.[qk]_norm": "heads",
    "model.layers.*.self_attn.o_proj": "row",
    "model.layers.*.mlp.gate_proj": "column",
    "model.layers.*.mlp.up_proj": "column",
    "model.layers.*.mlp.down_proj": "row",
    "lm_head": "column",
}
_SEQUENCE: Mapping[str, Any] = {
    "model.layers.*.self_attn": {"style": "enter", "args": ["hidden_states"]},
    "model.layers.*.*norm": "sequence",
    "model.norm": "sequence",
}
_UNDIVIDED: Mapping[str, Any] = {
    "model.embed_tokens": {"style": "replicate", "input": "whole"},
    "lm_head": {"style": "replicate", "output": "whole"},
}

# What the experts of a layer are called in a folder: the layer's module, then gate, up and down of each.
_EXPERTS: Mapping[str, tuple[str, tuple[str, str, str]]] = {
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
}


def spec(config: Any, weights: Path | None, seed: int, sequence: int) -> ModelSpec:
    """The spec of a configuration of one of them. Raises UnsupportedOp for what none of them can be trained with."""
    cannot: dict[str, str] = {}
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind in ("dynamic", "longrope"):
        cannot["context"] = f'rope_type = "{kind}" follows from the longest position that a rank holds'
    experts = config.model_type in _EXPERTS
    if experts:
        _check_experts(config)
    return ModelSpec(
        module=partial(make, config),
        width=config.hidden_size,
        vocabulary=config.vocab_size,
        layers="model.layers",
        first=("model.embed_tokens",),
        last=("model.norm", "lm_head"),
        forward=_forward,
        split=_SPLIT,
        sequence=_SEQUENCE,
        undivided=_UNDIVIDED,
        attention=attended,
        experts=partial(_with_experts, config) if experts else None,
        tied=("model.embed_tokens.weight", "lm_head.weight") if config.tie_word_embeddings else None,
        initialise=partial(initialise, config.initializer_range, seed),
        weights=weights,
        stored=partial(_stored, config.model_type, config.num_local_experts) if experts else None,
        cannot=cannot,
    )


def _forward(module: Any, x: Tensor, here: Here) -> Tensor:
    inner = module.model
    if here.stage.is_first:
        x = inner.embed_tokens(x).to(here.dtype)
    positions = here.positions.unsqueeze(0)
    rotary = inner.rotary_emb(x, positions)
    for block in here.layers:
        x = here.through(block, x, position_ids=positions, position_embeddings=rotary)
    if here.stage.is_last:
        x = module.lm_head(inner.norm(x))
    return x


def _check_experts(config: Any) -> None:
    jitter = getattr(config, "router_jitter_noise", 0.0)
    given = ""
    if config.hidden_act not in ("silu", "swish"):
        given = f'hidden_act = "{config.hidden_act}"'
    elif jitter:
        given = f"router_jitter_noise = {jitter}"
    if given:
        raise UnsupportedOp(
            f"the experts of this {config.model_type} cannot be spread over ranks",
            given=f"{given} in its config.json",
            expected='hidden_act = "silu" and no jitter, which would differ between ranks',
            hint="router_jitter_noise = 0.0" if jitter else "a model whose experts are SwiGLU",
        )


def _with_experts(config: Any, module: nn.Module) -> Mapping[str, Mapping[str, Any]]:
    settings = {
        "width": config.hidden_size,
        "ff": getattr(config, "moe_intermediate_size", None) or config.intermediate_size,
        "experts": config.num_local_experts,
        "experts_per_token": config.num_experts_per_tok,
        "normalised": getattr(config, "norm_topk_prob", True),
    }
    blocks = blocks_of(module, "model.layers").items()
    return {f"model.layers.{key}.mlp": settings for key, block in blocks if hasattr(block.mlp, "experts")}


def _stored(kind: str, experts: int, name: str) -> tuple[Names, bool]:
    where, (gate, up, down) = _EXPERTS[kind]
    match = re.fullmatch(r"(model\.layers\.\d+\.)mlp\.(router\.weight|experts\.w[123])", name)
    if match is None:
        return name, False
    layer, what = match.groups()
    if what == "router.weight":
        return f"{layer}{where}.gate.weight", False
    part = {"w1": gate, "w3": up, "w2": down}[what.rpartition(".")[2]]
    return tuple((f"{layer}{where}.experts.{each}.{part}.weight",) for each in range(experts)), False
