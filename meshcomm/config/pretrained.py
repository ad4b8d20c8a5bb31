"""Reads the config.json of a transformers model. transformers itself parses the file, so its defaults apply."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from meshcomm.config.problems import Problem

# Setting of [model] -> the corresponding attributes of a transformers configuration. Families may lack some of them.
_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "num_layers": ("num_hidden_layers",),
    "hidden_size": ("hidden_size",),
    "num_heads": ("num_attention_heads",),
    "num_kv_heads": ("num_key_value_heads",),
    "intermediate_size": ("moe_intermediate_size", "intermediate_size", "ffn_dim", "n_inner"),
    "vocab_size": ("vocab_size",),
    # For latent attention, the size of the keys.
    "head_dim": ("qk_head_dim", "head_dim"),
    "tied_embeddings": ("tie_word_embeddings",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "experts_per_token": ("num_experts_per_tok", "moe_topk"),
    "experts_every": ("decoder_sparse_step",),
}
UNPUBLISHED: Final = ("gpt2",)
"""Model types for which transformers publishes no tensor-parallel plan, but meshcomm has one."""
# Suffixes of attribute names that hold dropout probabilities.
DROPPED: Final = ("drop", "dropout", "pdrop", "dropout_prob")
# Prefixes of parts that a text decoder does not have.
_OTHER_SENSES: Final = ("vision", "audio", "image", "speech", "video")
_A_SPEC: Final = 'model.build = "module:function", which returns a meshcomm.models.ModelSpec'


def sizes_of(folder: str | Path) -> dict[str, Any]:
    """Return the settings of `[model]` that `folder`/config.json determines, or none if the file cannot be read."""
    sizes: dict[str, Any] = {}
    with suppress(Exception):
        config = understood(folder)
        for ours, theirs in _NAMES.items():
            values = [getattr(config, name, None) for name in theirs]
            if numbers := [value for value in values if isinstance(value, int)]:
                sizes[ours] = numbers[0]
    if not sizes:
        return sizes
    if "num_heads" in sizes:
        sizes.setdefault("num_kv_heads", sizes["num_heads"])
    if "hidden_size" in sizes:
        sizes.setdefault("intermediate_size", 4 * sizes["hidden_size"])
    if not sizes.get("experts"):
        sizes = {name: value for name, value in sizes.items() if not name.startswith("experts")}
    return sizes


def misunderstood(folder: str | Path, settings: Mapping[str, Any], reads_weights: bool) -> Iterator[Problem]:
    """Yield the reasons why no causal language model can be created from `folder`/config.json, whose content is `settings`."""
    try:
        config = understood(folder)
    except ImportError as error:
        what, expected = f"transformers reads a model's config.json: {error}", "transformers installed"
        yield Problem("pretrained", what, expected, ["pip install 'meshcomm[hf]'"], f"{folder}")
        return
    except Exception as error:
        text = " ".join(str(error).split())
        what = f"transformers does not understand its config.json: {text}"
        ways = ["repair config.json, or pip install -U transformers", _A_SPEC]
        yield Problem("pretrained", what, "a config.json that save_pretrained wrote", ways, f"{folder}")
        return
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as names

    kind = config.model_type
    senses = [name for name in config.sub_configs if name.partition("_")[0] in _OTHER_SENSES]
    given = f'model_type = "{kind}" in {folder}'
    if senses:
        what = f"a {kind} has parts that do not belong to a language model: {', '.join(senses)}"
        ways = [
            f'a folder with only its text model, "{kind}_text"' if f"{kind}_text" in names else "",
            _A_SPEC,
        ]
        yield Problem("pretrained", what, "a text decoder", [way for way in ways if way], given)
    elif config.is_encoder_decoder:
        yield Problem(
            "pretrained", f"this {kind} has an encoder and a decoder", "only a decoder", [_A_SPEC], given
        )
    elif reads_weights and settings.get("quantization_config"):
        what, expected = (
            "its weights are quantized, which meshcomm does not train",
            "weights of a floating-point dtype",
        )
        ways = ["model.random_weights = true", "a folder of weights in bfloat16"]
        yield Problem("pretrained", what, expected, ways, f"quantization_config in {folder}")
    elif kind not in names:
        what = f"a {kind} is not a causal language model of transformers"
        yield Problem("pretrained", what, "a model that AutoModelForCausalLM supports", [_A_SPEC], given)


def dropouts_of(folder: str | None) -> dict[str, float]:
    """Return the dropout probabilities above 0 in `folder`/config.json, by name."""
    if folder is None:
        return {}
    with suppress(Exception):
        settings = understood(folder).to_dict()
        # Causal language models have no summary head and no classifier.
        dropped = [
            name for name in settings if name.endswith(DROPPED) and not name.startswith(("summary", "class"))
        ]
        return {
            name: settings[name] for name in dropped if isinstance(settings[name], float) and settings[name]
        }
    return {}


def windows_of(folder: str | Path | None) -> tuple[int | None, ...]:
    """Return each layer's attention window, the maximum number of keys per query, according to `folder`/config.json.

    None means that a query attends to all earlier keys. The result is empty if no layer has a window.
    """
    if folder is not None:
        with suppress(Exception):
            config = understood(folder)
            kinds = getattr(config, "layer_types", None)
            # transformers keeps a key that the family does not define, but the model ignores it.
            window = hasattr(type(config), "sliding_window") and config.sliding_window
            if getattr(config, "use_sliding_window", True) and window:
                kinds = kinds or ["sliding_attention"] * config.num_hidden_layers
                return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return ()


def has_gate(folder: str | Path | None) -> bool:
    """Return whether a feed-forward block has three matrices (gate, up and down), according to the family's
    published plan.
    """
    if folder is not None:
        with suppress(Exception):
            config = understood(folder)
            return any("gate" in name for name in config.base_model_tp_plan or ())
    return True


def publishes_plan(folder: str | Path | None) -> bool:
    """Return whether there is a plan for splitting the model along a tensor dim.

    Returns True if `folder` is None or cannot be read.
    """
    if folder is not None:
        with suppress(Exception):
            config = understood(folder)
            return config.model_type in UNPUBLISHED or bool(config.base_model_tp_plan)
    return True


def understood(folder: str | Path) -> Any:
    """Return the configuration that transformers creates from `folder`/config.json. Raises transformers' own errors."""
    path = Path(folder) / "config.json"
    read(path)
    return _understood(str(folder), path.stat().st_mtime_ns)


@lru_cache(maxsize=16)
def _understood(folder: str, changed: int) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder)


def read(path: Path) -> dict[str, Any]:
    """Return the content of the config.json at `path`. Raises OSError if there is no such file, ValueError if it is not
    a JSON object.
    """
    changed = path.stat().st_mtime_ns
    if path.is_fifo():
        raise ValueError(f"{path} is a pipe, not a file")
    return _read(path, changed)


@lru_cache(maxsize=16)
def _read(path: Path, changed: int) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path} is not an object")
    return settings
