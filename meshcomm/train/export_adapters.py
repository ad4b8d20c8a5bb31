"""Export a checkpoint's low-rank adapters to a folder for peft, or merge them into the model they were trained on."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from meshcomm.config.model import LoraConfig
from meshcomm.models.lora import ADAPTER, adapter_options, with_adapters
from meshcomm.train.checkpoint.parts import Kind
from meshcomm.train.checkpoint.reader import Saved
from meshcomm.train.safetensors_writer import Piece

ADAPTER_FILE: Final = "adapter_model.safetensors"
# The prefix that peft puts before the names of a transformers model.
_PREFIX: Final = "base_model.model."


def targets_in(names: Mapping[str, Any]) -> list[str]:
    """Return the layers that adapters with these names belong to."""
    return [name.partition(".lora_A.")[0] for name in names if ".lora_A." in name]


def adapter_pieces(kinds: Mapping[str, Kind]) -> list[Piece]:
    """Return the tensors of peft's adapter file."""
    return [
        Piece(_PREFIX + name.replace(f".{ADAPTER}.", "."), kind, name, partial(_as, kind.dtype))
        for name, kind in kinds.items()
    ]


def _as(dtype: torch.dtype, value: Tensor) -> Tensor:
    return value.to(dtype).contiguous()


def write_adapter_config(folder: Path, base: str, lora: Mapping[str, Any], kinds: Mapping[str, Kind]) -> None:
    """Write adapter_config.json. base: the folder of the model without adapters."""
    settings = LoraConfig(**lora)
    options = adapter_options(settings, settings.targets or targets_in(kinds))
    options.lora_dropout = settings.dropout
    options.base_model_name_or_path, options.task_type, options.inference_mode = base, "CAUSAL_LM", True
    options.save_pretrained(folder)


@torch.no_grad()
def write_merged(
    folder: Path,
    base: Path,
    lora: Mapping[str, Any],
    saved: Saved,
    dtype: torch.dtype | None,
    shard_bytes: int,
) -> list[Tensor]:
    """Write the transformers model in `base` with each adapted weight W replaced by W + (alpha / rank) B A.

    Return the tensors of the merged model.
    """
    from transformers import AutoModelForCausalLM

    from meshcomm.models.hf import without_bars

    with without_bars():
        model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype or "auto")
        _merge(model, lora, saved)
        model.save_pretrained(folder, max_shard_size=shard_bytes)
    return list(model.state_dict().values())


def _merge(model: Any, lora: Mapping[str, Any], saved: Saved) -> None:
    names = {name.removeprefix("model."): name for name in saved.kinds if name.startswith("model.")}
    targets = targets_in(names)
    with_adapters(model, LoraConfig(**lora), targets)
    for name, parameter in model.named_parameters():
        if name in names:
            parameter.copy_(saved.load(names[name]))
    for name in targets:
        layer: Any = model.get_submodule(name)
        layer.merge()
        model.set_submodule(name, layer.base_layer)
