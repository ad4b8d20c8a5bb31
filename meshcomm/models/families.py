"""The models of the transformers library that are known, by the `model_type` of their config.json: how each is cut,
split and filled.

GPT-2's Conv1D is a Linear whose weight lies transposed in a folder. Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE and Mixtral
have rotary positions, grouped-query attention and SwiGLU; they differ in biases, norms of queries and keys, sliding
windows, and the names of experts in a folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig
from transformers.pytorch_utils import Conv1D

from meshcomm.config import ModelConfig
from meshcomm.errors import UnsupportedOp
from meshcomm.models.hf import attended, initialise, make, not_made, unmodified
from meshcomm.models.spec import ModelSpec, StageContext, blocks_of
from meshcomm.models.weights import Names
from meshcomm.predict.stages import part_costs

_GPT2_SPLIT: dict[str, Any] = {
    "transformer.wte": "vocab",
    "transformer.h.*.attn.c_attn": "column:3",
    "transformer.h.*.attn": {"set": {"split_size": "split"}},
    "transformer.h.*.attn.c_proj": "row",
    "transformer.h.*.mlp.c_fc": "column",
    "transformer.h.*.mlp.c_proj": "row",
    "lm_head": "column",
}
_GPT2_SEQUENCE: dict[str, Any] = {
    "transformer.h.*.attn": {"style": "enter", "args": [0], "set": {"split_size": "split"}},
    "transformer.wpe": {"style": "replicate", "input": "whole", "axis": 0},
    "transformer.h.*.ln_[12]": "sequence",
    "transformer.ln_f": "sequence",
}
_GPT2_UNDIVIDED: dict[str, Any] = {
    "transformer.wte": {"style": "replicate", "input": "whole"},
    "lm_head": {"style": "replicate", "output": "whole"},
}


def gpt2(config: Any, weights: Path | None, seed: int, seq_len: int) -> ModelSpec:
    """The spec of a GPT-2. Raises UnsupportedOp for longer samples than it has positions, and cross attention."""
    if seq_len > config.n_positions:
        raise UnsupportedOp(
            "samples are longer than this GPT-2 has positions",
            given=f"data.seq_len = {seq_len}, n_positions = {config.n_positions} in its config.json",
            expected=f"at most {config.n_positions}",
            hint=f"data.seq_len = {config.n_positions}",
        )
    if config.add_cross_attention:
        raise UnsupportedOp(
            "a GPT-2 with cross attention has a second input, which is not trained here",
            given="add_cross_attention = true in its config.json",
            expected="a decoder alone",
            hint="add_cross_attention = false",
        )
    return ModelSpec(
        module=partial(_with_linear, config),
        hidden_size=config.n_embd,
        vocab_size=config.vocab_size,
        layers="transformer.h",
        first=("transformer.wte", "transformer.wpe"),
        last=("transformer.ln_f", "lm_head"),
        forward=_gpt2_forward,
        split=_GPT2_SPLIT,
        sequence=_GPT2_SEQUENCE,
        undivided=_GPT2_UNDIVIDED,
        attention=attended,
        tied=("transformer.wte.weight", "lm_head.weight") if config.tie_word_embeddings else None,
        initialise=partial(initialise, config.initializer_range, seed),
        weights=weights,
        stored=_gpt2_stored,
    )


def _with_linear(config: Any) -> nn.Module:
    made = make(config)
    for part in list(made.modules()):
        for name, inner in part.named_children():
            if isinstance(inner, Conv1D):
                setattr(part, name, nn.Linear(inner.nx, inner.nf))
    return made


def _gpt2_forward(module: Any, x: Tensor, here: StageContext) -> Tensor:
    inner = module.transformer
    if here.stage.is_first:
        x = (inner.wte(x) + inner.wpe(here.positions)).to(here.dtype)
    for block in here.layers:
        x = here.through(block, x)
    if here.stage.is_last:
        x = module.lm_head(inner.ln_f(x))
    return x


def _gpt2_stored(name: str) -> tuple[str, bool]:
    return name, bool(re.search(r"\.c_\w+\.weight$", name))


_LLAMA_SPLIT: Mapping[str, Any] = {
    "model.embed_tokens": "vocab",
    "model.layers.*.self_attn.[qkv]_proj": "column",
    "model.layers.*.self_attn.[qk]_norm": "heads",
    "model.layers.*.self_attn.o_proj": "row",
    "model.layers.*.mlp.gate_proj": "column",
    "model.layers.*.mlp.up_proj": "column",
    "model.layers.*.mlp.down_proj": "row",
    "lm_head": "column",
}
_LLAMA_SEQUENCE: Mapping[str, Any] = {
    "model.layers.*.self_attn": {"style": "enter", "args": ["hidden_states"]},
    "model.layers.*.*norm": "sequence",
    "model.norm": "sequence",
}
_LLAMA_UNDIVIDED: Mapping[str, Any] = {
    "model.embed_tokens": {"style": "replicate", "input": "whole"},
    "lm_head": {"style": "replicate", "output": "whole"},
}

# What the experts of a layer are called in a folder: the layer's module, then gate, up and down of each.
_EXPERTS: Mapping[str, tuple[str, tuple[str, str, str]]] = {
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
}


def llama(config: Any, weights: Path | None, seed: int, seq_len: int) -> ModelSpec:
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
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        layers="model.layers",
        first=("model.embed_tokens",),
        last=("model.norm", "lm_head"),
        forward=_llama_forward,
        split=_LLAMA_SPLIT,
        sequence=_LLAMA_SEQUENCE,
        undivided=_LLAMA_UNDIVIDED,
        attention=attended,
        experts=partial(_with_experts, config) if experts else None,
        tied=("model.embed_tokens.weight", "lm_head.weight") if config.tie_word_embeddings else None,
        initialise=partial(initialise, config.initializer_range, seed),
        weights=weights,
        stored=partial(_llama_stored, config.model_type, config.num_local_experts) if experts else None,
        cannot=cannot,
    )


def _llama_forward(module: Any, x: Tensor, here: StageContext) -> Tensor:
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
        "hidden_size": config.hidden_size,
        "intermediate_size": getattr(config, "moe_intermediate_size", None) or config.intermediate_size,
        "experts": config.num_local_experts,
        "experts_per_token": config.num_experts_per_tok,
        "normalised": getattr(config, "norm_topk_prob", True),
    }
    blocks = blocks_of(module, "model.layers").items()
    return {f"model.layers.{key}.mlp": settings for key, block in blocks if hasattr(block.mlp, "experts")}


def _llama_stored(kind: str, experts: int, name: str) -> tuple[Names, bool]:
    where, (gate, up, down) = _EXPERTS[kind]
    match = re.fullmatch(r"(model\.layers\.\d+\.)mlp\.(router\.weight|experts\.w[123])", name)
    if match is None:
        return name, False
    layer, what = match.groups()
    if what == "router.weight":
        return f"{layer}{where}.gate.weight", False
    part = {"w1": gate, "w3": up, "w2": down}[what.rpartition(".")[2]]
    return tuple((f"{layer}{where}.experts.{each}.{part}.weight",) for each in range(experts)), False


Family = Callable[[Any, Path | None, int, int], ModelSpec]
FAMILIES: dict[str, Family] = {
    "gpt2": gpt2,
    "llama": llama,
    "mistral": llama,
    "mixtral": llama,
    "qwen2": llama,
    "qwen3": llama,
    "qwen3_moe": llama,
}
# What writes to the residual stream, by the name of one family or another.
_DROPPED = ("attn", "self_attn", "mlp")


def hugging_face(model: ModelConfig, seq_len: int, seed: int) -> ModelSpec:
    """The spec of the causal language model whose config.json lies in `model.pretrained`.

    With model.random_weights they are drawn by their names from the seed; else they are read from the folder.
    Raises: ConfigError where transformers refuses config.json, UnsupportedOp for what a family cannot do. Other types are refused when the configuration is read.
    """
    assert model.pretrained is not None
    folder = Path(model.pretrained)
    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception as error:
        raise not_made(folder, error) from error
    # Drawn from torch's generator they would differ from mesh to mesh: [model] dropout takes their place.
    for name, value in config.to_dict().items():
        if name.endswith(("dropout", "pdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)
    config.use_cache = False
    spec = FAMILIES[config.model_type](config, None if model.random_weights else folder, seed, seq_len)
    # So that stages are those that `plan --schedule` draws.
    costs = partial(part_costs, model)
    dropped = {f"{spec.layers}.*.{part}": model.dropout for part in _DROPPED}
    return replace(spec, costs=costs, dropped=dropped, original=partial(unmodified, folder))
