"""Which models of the transformers library are known, by the type that their config.json names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from meshcomm.config import ModelConfig
from meshcomm.models import gpt2, llama
from meshcomm.models.hf import not_made, unmodified
from meshcomm.models.spec import ModelSpec
from meshcomm.predict.stages import part_costs

Family = Callable[[Any, Path | None, int, int], ModelSpec]
FAMILIES: dict[str, Family] = {
    "gpt2": gpt2.spec,
    "llama": llama.spec,
    "mistral": llama.spec,
    "mixtral": llama.spec,
    "qwen2": llama.spec,
    "qwen3": llama.spec,
    "qwen3_moe": llama.spec,
}
# What writes to the residual stream, by the name of one family or another.
_DROPPED = ("attn", "self_attn", "mlp")


def hugging_face(model: ModelConfig, sequence: int, seed: int) -> ModelSpec:
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
    spec = FAMILIES[config.model_type](config, None if model.random_weights else folder, seed, sequence)
    # So that stages are those that `plan --schedule` draws.
    costs = partial(part_costs, model)
    dropped = {f"{spec.layers}.*.{part}": model.dropout for part in _DROPPED}
    return replace(spec, costs=costs, dropped=dropped, original=partial(unmodified, folder))
