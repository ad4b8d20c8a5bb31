"""A small model of the same family, with fewer and narrower layers and otherwise the same configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from transformers import PreTrainedConfig

_LAYERS: Final = 4
SIZES: Final = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "dense_intermediate_size"), 96),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32
    ),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), 4),
    "num_key_value_heads": 2,
    **dict.fromkeys(("head_dim", "d_head"), 16),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 128),
    "hidden_size_per_layer_input": 16,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    "mamba_n_heads": 8,
    **dict.fromkeys(("mamba_d_head", "mamba_d_state"), 16),
    "mamba_d_ssm": 128,
    "rotary_dim": 8,
    "sliding_window": 8,
    "num_kv_shared_layers": 0,
}
"""The sizes that may be reduced, and their small values. A family uses only one of several names for the same size."""

_COUNTS: Final = ("num_hidden_layers", "n_layer", "num_layers")
_TOKENS: Final = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def tiny(config: Any) -> PreTrainedConfig:
    """Return the configuration of the small model. Raises transformers' error if the model family does not accept it."""
    settings = config.to_dict()
    layers = getattr(config, "num_hidden_layers", _LAYERS)
    kept = _kept(settings.get("layer_types"), layers)
    small: dict[str, Any] = {name: len(kept) for name in _COUNTS if name in settings}
    # The family's names for settings that other families name differently.
    called = {theirs: ours for ours, theirs in config.attribute_map.items()}
    sizes = {name: SIZES[called.get(name, name)] for name in settings if called.get(name, name) in SIZES}
    small |= _smaller({name: settings[name] for name in sizes}, sizes)
    heads, groups = getattr(config, "num_attention_heads", 0), getattr(config, "num_key_value_heads", None)
    if "kv_lora_rank" in settings:
        # Multi-head latent attention: the keys of all heads come from one vector, and head_dim is the rotary size.
        small |= {"num_key_value_heads": 4, "head_dim": 8}
    elif groups == heads:
        small |= {"num_key_value_heads": 4}
    for name, value in settings.items():
        # The setting has an entry for each layer, or for some layers.
        if isinstance(value, dict) and value and all(str(key).isdecimal() for key in value):
            of_layer = {int(key): _smaller(inner, sizes) for key, inner in value.items()}
            small[name] = {place: of_layer[layer] for place, layer in enumerate(kept) if layer in of_layer}
        elif isinstance(value, list) and len(value) == layers and not isinstance(value[0], dict):
            small[name] = [value[place] for place in kept]
    width = settings.get("head_dim") or settings.get("hidden_size", 0) // max(1, heads or 1)
    if width and settings.get("rope_parameters"):
        narrow = small.get("head_dim") or SIZES["hidden_size"] // SIZES["num_attention_heads"]
        small["rope_parameters"] = _fewer(settings["rope_parameters"], narrow, width)
    small |= {name: token for name, token in _TOKENS.items() if isinstance(settings.get(name), int)}
    small_config: PreTrainedConfig = type(config)(
        **{**settings, **{k: v for k, v in small.items() if k in settings}}
    )
    return small_config


def _smaller(settings: Any, sizes: Mapping[str, int]) -> Any:
    if not isinstance(settings, dict):
        return settings
    return {
        name: sizes[name] if name in sizes and isinstance(value, int) and value > 0 else value
        for name, value in settings.items()
    }


def _fewer(rope: Any, narrow: int, width: int) -> Any:
    """Return the rotary settings for heads of `narrow` features in place of `width`: factors are listed by frequency."""
    if not isinstance(rope, dict):
        return rope
    smaller = {name: _fewer(value, narrow, width) for name, value in rope.items()}
    for name, factors in rope.items():
        if name.endswith("_factor") and isinstance(factors, list):
            count = len(factors) * narrow // width
            smaller[name] = [factors[place * len(factors) // count] for place in range(count)]
    return smaller


def _kept(kinds: Sequence[str] | None, layers: int) -> list[int]:
    """Return the indices of the layers to keep, in order: at least one of each kind."""
    firsts = [kinds.index(kind) for kind in dict.fromkeys(kinds)] if kinds else []
    places = dict.fromkeys([*firsts, *range(layers)])
    return sorted(list(places)[: max(_LAYERS, len(firsts))])
