"""What does the config.json of a model of transformers say about its sizes? Read without transformers."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

# Our name -> theirs, the first that is there.
_NAMES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer"),
    "width": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads", "num_attention_heads", "n_head"),
    "ff": ("moe_intermediate_size", "intermediate_size", "n_inner"),
    "vocabulary": ("vocab_size",),
    "head": ("head_dim",),
    "tied_embeddings": ("tie_word_embeddings",),
    "experts": ("num_local_experts", "num_experts"),
    "experts_per_token": ("num_experts_per_tok",),
    "experts_every": ("decoder_sparse_step",),
}

# The layers of these have a window each by `use_sliding_window`; of the first two those from `max_window_layers` on.
_SWITCHED = ("qwen2", "qwen3", "qwen3_moe")
_LATER_LAYERS = 28


def sizes_of(folder: Path) -> dict[str, Any]:
    """The settings of `[model]` that follow from `folder`/config.json.

    Raises OSError where there is none, ValueError where it says no sizes.
    """
    path, said = _said(folder)
    found = {}
    for ours, theirs in _NAMES.items():
        value = next((said[name] for name in theirs if said.get(name) is not None), None)
        if value is not None:
            found[ours] = value
    if "ff" not in found and said.get("model_type") == "gpt2":
        found["ff"] = 4 * found.get("width", 0)
    if said.get("model_type") == "gpt2":
        found.setdefault("tied_embeddings", True)
    if missing := [name for name in ("layers", "width", "heads", "kv_heads", "ff") if name not in found]:
        raise ValueError(f"{path} says nothing of {', '.join(missing)}")
    if not found.get("experts"):
        found.pop("experts", None)
        found.pop("experts_per_token", None)
        found.pop("experts_every", None)
    return found


def dropouts_of(folder: Path) -> dict[str, float]:
    """The shares above 0 that `folder`/config.json says are dropped in training, by their names. Raises as `sizes_of`."""
    _, said = _said(folder)
    # A summary is what no causal language model computes.
    return {
        name: value
        for name, value in said.items()
        if name.endswith(("dropout", "_pdrop")) and not name.startswith("summary") and value
    }


def windows_of(folder: Path, layers: int) -> tuple[int | None, ...]:
    """Of each layer, the sliding window that `folder`/config.json says, as transformers reads it. Raises as `sizes_of`."""
    _, said = _said(folder)
    kind, window = said.get("model_type"), said.get("sliding_window")
    if kind == "mistral":
        window = said.get("sliding_window", 4096)
    if kind in _SWITCHED:
        window = said.get("sliding_window", 4096) if said.get("use_sliding_window") else None
    elif kind not in ("mistral", "mixtral"):
        window = None
    if kind not in _SWITCHED[:2]:
        return (window,) * layers
    first = said.get("max_window_layers", _LATER_LAYERS)
    named = said.get("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(layers)
    ]
    return tuple(window if each == "sliding_attention" else None for each in named)


def is_gated(folder: Path) -> bool:
    """Whether a feed-forward block has a gate beside up and down. Raises as `sizes_of`."""
    return _said(folder)[1].get("model_type") != "gpt2"


def _said(folder: Path) -> tuple[Path, dict[str, Any]]:
    path = folder / "config.json"
    return path, _read(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=16)
def _read(path: Path, changed: int) -> dict[str, Any]:
    try:
        said = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(said, dict):
        raise ValueError(f"{path} is no object")
    return said
