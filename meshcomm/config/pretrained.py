"""What does the config.json of a model of transformers say, and is all of it understood? Read without transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from meshcomm.config.problems import Problem

# Our name -> theirs, the first that is there.
_NAMES: dict[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers", "n_layer"),
    "hidden_size": ("hidden_size", "n_embd"),
    "num_heads": ("num_attention_heads", "n_head"),
    "num_kv_heads": ("num_key_value_heads",),
    "intermediate_size": ("intermediate_size", "n_inner"),
    "vocab_size": ("vocab_size",),
    "head_dim": ("head_dim",),
    "tied_embeddings": ("tie_word_embeddings",),
    "experts": ("num_local_experts", "num_experts"),
    "experts_per_token": ("num_experts_per_tok",),
    "experts_every": ("decoder_sparse_step",),
}
_NAMES_WITH_EXPERTS = {**_NAMES, "intermediate_size": ("moe_intermediate_size",)}


class _Type(NamedTuple):
    """A `model_type`. keys: all that its forward depends on. left_out: the sizes of a config.json that does not say them."""

    keys: frozenset[str]
    left_out: Mapping[str, Any]
    names: Mapping[str, tuple[str, ...]] = _NAMES


def _keys(*names: str) -> frozenset[str]:
    return frozenset(key for some in names for key in some.split())


_DECODER = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "hidden_act max_position_embeddings rms_norm_eps rope_parameters rope_scaling rope_theta tie_word_embeddings"
)
_WINDOWS = "use_sliding_window sliding_window max_window_layers layer_types"
_EXPERTS = "num_experts num_local_experts num_experts_per_tok"
_GPT2 = (
    "vocab_size n_positions n_embd n_layer n_head n_inner activation_function layer_norm_epsilon scale_attn_weights "
    "scale_attn_by_inverse_layer_idx add_cross_attention tie_word_embeddings"
)
_LLAMA: Final = {
    "num_layers": 32,
    "hidden_size": 4096,
    "num_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
}
_MISTRAL: Final = {**_LLAMA, "num_kv_heads": 8, "intermediate_size": 14336}
_QWEN: Final = {**_LLAMA, "num_kv_heads": 32, "intermediate_size": 22016, "vocab_size": 151936}
_QWEN_MOE: Final = {
    "num_layers": 24,
    "hidden_size": 2048,
    "num_kv_heads": 4,
    "intermediate_size": 768,
    "experts": 128,
    "experts_per_token": 8,
}

# As transformers 5.23 has them. Its own code computes the layers, so that a key of these is honoured as it does.
TYPES: Final[dict[str, _Type]] = {
    "gpt2": _Type(
        _keys(_GPT2),
        {"num_layers": 12, "hidden_size": 768, "num_heads": 12, "vocab_size": 50257, "tied_embeddings": True},
    ),
    "llama": _Type(_keys(_DECODER, "attention_bias mlp_bias"), _LLAMA),
    "mistral": _Type(_keys(_DECODER, "sliding_window"), _MISTRAL),
    "mixtral": _Type(
        _keys(_DECODER, "sliding_window router_jitter_noise", _EXPERTS),
        {**_MISTRAL, "experts": 8, "experts_per_token": 2},
    ),
    "qwen2": _Type(_keys(_DECODER, _WINDOWS), _QWEN),
    "qwen3": _Type(_keys(_DECODER, _WINDOWS, "attention_bias"), {**_QWEN, "head_dim": 128}),
    "qwen3_moe": _Type(
        _keys(
            _DECODER,
            "attention_bias use_sliding_window sliding_window max_window_layers",
            _EXPERTS,
            "moe_intermediate_size decoder_sparse_step mlp_only_layers norm_topk_prob",
        ),
        {**_QWEN, **_QWEN_MOE},
        _NAMES_WITH_EXPERTS,
    ),
}

# What no type's forward depends on: generation, tokens with a meaning, drawn weights, outputs, dropout (model.dropout
# takes its place), the loss of routers (model.balance_loss does), where a folder comes from.
_HARMLESS: Final = _keys(
    "architectures bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward decoder_start_token_id "
    "diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token_id "
    "exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing id2label "
    "initializer_range is_decoder is_llama_config label2id length_penalty max_length max_sequence_length min_length "
    "model_max_length model_type n_ctx no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions "
    "output_hidden_states output_past output_router_logits output_scores pad_token_id prefix pretraining_tp problem_type "
    "remove_invalid_values reorder_and_upcast_attn repetition_penalty return_dict return_dict_in_generate "
    "router_aux_loss_coef sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss tokenizer_class top_k "
    "top_p torch_dtype torchscript transformers_version typical_p unk_token_id use_bfloat16 use_cache"
)
_HARMLESS_STARTS: Final = ("_", "summary_", "transformers.js", "unsloth")
_HARMLESS_ENDS: Final = ("dropout", "_pdrop")
# Of these one value changes nothing.
_OFF: Final[dict[str, Any]] = {
    "add_cross_attention": False,
    "is_encoder_decoder": False,
    "partial_rotary_factor": 1.0,
    "pruned_heads": {},
    "rope_interleaved": False,
    "tie_encoder_decoder": False,
    "use_mrope": False,
}
_ROPE: Final = _keys(
    "attention_factor beta_fast beta_slow factor high_freq_factor long_factor low_freq_factor mscale mscale_all_dim "
    "original_max_position_embeddings rope_theta rope_type short_factor truncate type"
)
_ROPE_TYPES: Final = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
_SHOWN: Final = 60
_A_SPEC: Final = 'model.build = "module:function", which returns a meshcomm.models.ModelSpec'

# Sizes that no model is without.
_NEEDED: Final = ("num_layers", "hidden_size", "num_heads", "vocab_size")
# The layers of these have a window each by `use_sliding_window`; of the first two those from `max_window_layers` on.
_SWITCHED = ("qwen2", "qwen3", "qwen3_moe")
_LATER_LAYERS = 28


def sizes_of(said: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `[model]` that follow from a config.json; none where its type is none of TYPES."""
    kind = TYPES.get(said.get("model_type", ""))
    if kind is None:
        return {}
    found: dict[str, Any] = {}
    for ours, theirs in kind.names.items():
        values = [said[name] for name in theirs if name in said] or [kind.left_out.get(ours)]
        if known := [value for value in values if value is not None]:
            found[ours] = known[0]
    if "num_heads" in found:
        found.setdefault("num_kv_heads", found["num_heads"])
    if said["model_type"] == "gpt2" and "hidden_size" in found:
        found.setdefault("intermediate_size", 4 * found["hidden_size"])
    if not found.get("experts"):
        found = {name: value for name, value in found.items() if not name.startswith("experts")}
    return found


def misunderstood(path: Path, said: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of the config.json at `path`: an unknown model type, or keys that meshcomm does not honour."""
    name = said.get("model_type")
    kind = TYPES.get(name or "")
    if kind is None:
        of_others = frozenset().union(*(each.keys for each in TYPES.values()))
        given = ", ".join([_written("model_type", name), *_unknown(said, of_others)]) + f" in {path}"
        what = f"meshcomm does not know how to split a {name}"
        yield Problem("pretrained", what, f"model_type one of {', '.join(TYPES)}", [_A_SPEC], given)
        return
    for name in (
        name for ours in _NEEDED for name in kind.names[ours] if name in said and said[name] is None
    ):
        yield Problem(
            "pretrained",
            f"config.json has no {name}",
            "a number of 1 or more",
            [f"{name} in {path}"],
            f"{name} = null",
        )
    windows = [said.get("use_sliding_window", False), said.get("sliding_window", 4096)]
    switched = "layer_types" in kind.keys and "use_sliding_window" in kind.keys
    for layer_type in dict.fromkeys(said.get("layer_types") or ()) if switched else ():
        if layer_type != "full_attention" and (layer_type != "sliding_attention" or not all(windows)):
            what = f"transformers has no attention for layers of the type {layer_type}"
            expected = "full_attention, or with use_sliding_window and a sliding_window sliding_attention"
            ways = ['"use_sliding_window": true in config.json, or other layer_types']
            keys = ("layer_types", "use_sliding_window", "sliding_window")
            given = ", ".join(_written(key, said.get(key)) for key in keys)
            yield Problem("pretrained", what, expected, ways, given)
    if unknown := list(_unknown(said, kind.keys)):
        count = f"{len(unknown)} key{'s' * (len(unknown) > 1)}"
        what = f"config.json has {count} that meshcomm does not know of a {name}, and that may change what is computed"
        ways = ["remove them from config.json if transformers ignores them", _A_SPEC]
        yield Problem("pretrained", what, f"the keys of transformers' {name}", ways, ", ".join(unknown))


def _unknown(said: Mapping[str, Any], known: frozenset[str]) -> Iterator[str]:
    for key, value in said.items():
        off = key in _OFF and value == _OFF[key]
        if value is None or off or key in _HARMLESS:
            continue
        if key.startswith(_HARMLESS_STARTS) or key.endswith(_HARMLESS_ENDS):
            continue
        if key not in known:
            yield _written(key, value)
        elif key.startswith("rope_") and isinstance(value, dict):
            for inner, each in value.items():
                one_of = _ROPE_TYPES if inner in ("type", "rope_type") else (each,)
                if (inner not in _ROPE and each != _OFF.get(inner, None)) or each not in one_of:
                    yield _written(f"{key}.{inner}", each)


def _written(key: str, value: Any) -> str:
    text = json.dumps(value)
    return f"{key} = {text if len(text) <= _SHOWN else text[:_SHOWN] + '...'}"


def dropouts_of(folder: str | None) -> dict[str, float]:
    """The shares above 0 that `folder`/config.json says are dropped in training, by their names."""
    said = said_in(folder)
    # A summary is what no causal language model computes.
    dropped = [name for name in said if name.endswith(_HARMLESS_ENDS) and not name.startswith("summary")]
    return {name: said[name] for name in dropped if said[name]}


def windows_of(folder: str | Path | None, num_layers: int) -> tuple[int | None, ...]:
    """Of each layer, the sliding window that `folder`/config.json says, as transformers reads it."""
    said = said_in(folder)
    kind = said.get("model_type")
    window = said.get("sliding_window", None if kind == "mixtral" else 4096)
    if kind not in ("mistral", "mixtral") and not (kind in _SWITCHED and said.get("use_sliding_window")):
        window = None
    if kind not in _SWITCHED[:2]:
        return (window,) * num_layers
    first = said.get("max_window_layers", _LATER_LAYERS)
    named = said.get("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)
    ]
    return tuple(window if each == "sliding_attention" else None for each in named)


def said_in(folder: str | Path | None) -> dict[str, Any]:
    """What `folder`/config.json says; nothing without a folder, or where it cannot be read."""
    with suppress(ValueError, OSError):
        return {} if folder is None else read(Path(folder) / "config.json")
    return {}


def read(path: Path) -> dict[str, Any]:
    """The config.json at `path`. Raises OSError where there is none, ValueError where it is no object of JSON."""
    return _read(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=16)
def _read(path: Path, changed: int) -> dict[str, Any]:
    try:
        said = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(said, dict):
        raise ValueError(f"{path} is no object")
    return said
