"""Any causal language model of the transformers library as a ModelSpec, from the metadata that its family publishes.

The family's own code computes everything. A stage of a pipeline runs the same forward with its blocks only: see
`own_forward`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from torch import nn
from transformers import AutoConfig

from meshcomm.config import ModelConfig, TrainConfig
from meshcomm.config.model import FACTS
from meshcomm.config.pretrained import DROPPED
from meshcomm.errors import UnsupportedOp
from meshcomm.models.conversion import Conversion
from meshcomm.models.hf import Whole, attended, make, not_made, unmodified
from meshcomm.models.plans import (
    WHOLE,
    UnknownStyle,
    is_norm,
    is_split_linear,
    names_of,
    packed_experts,
    sequence_plan,
    tensor_plan,
)
from meshcomm.models.spec import ModelSpec
from meshcomm.models.tiny import tiny
from meshcomm.models.torch_private import has_attention_interface
from meshcomm.parallel.tensor.plan import Entry
from meshcomm.predict.stages import part_costs

# Layers for which context parallelism has an attention.
_ATTENTION: Final = ("full_attention", "sliding_attention", "attention")


def hugging_face(model: ModelConfig, seq_len: int, train: TrainConfig) -> ModelSpec:
    """Return the spec of the causal language model with config.json in the folder `model.pretrained`.

    With model.random_weights, weights are drawn by name from train.seed; otherwise they are read from the folder.
    Raises: ConfigError if transformers refuses config.json, UnsupportedOp for a model that no mesh trains exactly.
    """
    assert model.pretrained is not None
    folder = Path(model.pretrained)
    try:
        config: Any = AutoConfig.from_pretrained(folder)
    except Exception as error:
        raise not_made(folder, error) from error
    _check(config, seq_len)
    # Drawn from torch's generator, they would differ from mesh to mesh. [model] dropout replaces them.
    for name, value in config.to_dict().items():
        if name.endswith(DROPPED) and isinstance(value, float):
            setattr(config, name, 0.0)
    config.use_cache, config.return_dict = False, True
    whole = Whole(config, (train.compute_dtype or train.dtype) == "float64")
    spec = spec_of(whole)
    dropped = (
        {f"{spec.layers}.{part}": model.dropout for part in _dropped(whole.module, spec.layers)}
        if model.dropout
        else {}
    )
    return replace(
        spec,
        initialise=partial(whole.initialise, train.seed),
        weights=None if model.random_weights else folder,
        # So that the stages match those that `plan --schedule` draws. Models with one kind of layer may have no heads.
        costs=partial(part_costs, model)
        if spec.layers and all(getattr(model, name) is not None for name in FACTS)
        else None,
        dropped=dropped,
        original=partial(unmodified, folder),
        small=partial(_small, config),
    )


def _small(config: Any) -> ModelSpec:
    whole = Whole(tiny(config), exact=True)
    return replace(spec_of(whole), initialise=partial(whole.initialise, 0))


def spec_of(of: Whole) -> ModelSpec:
    """Return the spec of the causal language model of a configuration, without weights."""
    config: Any = of.config
    whole = of.module
    layers = _layers(whole)
    embedding, head = whole.get_input_embeddings(), whole.get_output_embeddings()
    cannot: dict[str, str] = {}
    split: dict[str, Entry] = {}
    experts: dict[str, Any] = {}
    try:
        experts = packed_experts(whole)
        split = tensor_plan(whole)
    except UnknownStyle as error:
        cannot["tensor"] = f"its published plan has {error}"
    if not experts:
        cannot["expert"] = "it has no packed experts"
    if not split and not any(experts.values()) and "tensor" not in cannot:
        cannot["tensor"] = f"transformers publishes no tensor-parallel plan of a {config.model_type}"
    undivided: dict[str, Entry] = {}
    ends: dict[str, Entry] = {}
    tied = None
    if embedding is not None and head is not None:
        embedding_name, head_name = names_of(whole, (embedding, head))
        # If the family publishes what follows its blocks, that works on slices. Otherwise sequences are gathered there.
        behind: Entry = {"style": "replicate", "output": "whole"} if config.base_model_pp_plan else WHOLE
        undivided = {embedding_name: WHOLE, head_name: behind}
        ends = undivided
        if type(embedding).forward is nn.Embedding.forward and is_split_linear(head):
            ends = {embedding_name: {"style": "vocab", "sequence": "whole"}, head_name: "column"}
        if head.weight is embedding.weight:
            tied = (f"{embedding_name}.weight", f"{head_name}.weight")
    split |= ends
    sequence: dict[str, Entry] | None = None
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    if layers:
        sequence = sequence_plan(whole, layers, split)
        if not config.base_model_pp_plan:
            sequence = {**sequence, **_whole_behind(whole, layers, split)}
        first, last = _around(whole, layers)
    else:
        cannot["pipeline"] = "its blocks are not a single list of modules"
    cannot |= _without_context(whole, config)
    return ModelSpec(
        module=partial(make, config, of.exact),
        hidden_size=getattr(config, "hidden_size", 0),
        vocab_size=config.vocab_size,
        layers=layers,
        first=first,
        last=last,
        positions="position_ids" if _takes(whole, "position_ids") else "",
        split=split,
        sequence=sequence,
        undivided=undivided,
        attention=attended,
        experts=experts,
        tied=tied,
        stored=Conversion(of),
        cannot=cannot,
    )


def _check(config: Any, seq_len: int) -> None:
    most = getattr(config, "n_positions", None)
    if config.model_type == "gpt2" and most and seq_len > most:
        raise UnsupportedOp(
            "samples are longer than the number of positions of this GPT-2",
            given=f"data.seq_len = {seq_len}, n_positions = {most} in its config.json",
            expected=f"at most {most}",
            hint=f"data.seq_len = {most}",
        )
    if getattr(config, "add_cross_attention", False):
        raise UnsupportedOp(
            f"a {config.model_type} with cross attention has a second input, which is not supported",
            given="add_cross_attention = true in its config.json",
            expected="a decoder alone",
            hint="add_cross_attention = false",
        )
    for name, value in config.to_dict().items():
        if "jitter" in name and value:
            raise UnsupportedOp(
                f"the router of this {config.model_type} draws random numbers, which would differ from mesh to mesh",
                given=f"{name} = {value} in its config.json",
                expected="no jitter",
                hint=f"{name} = 0.0",
            )


def _layers(whole: Any) -> str:
    """Return the dotted name of the list of blocks; "" if there is none."""
    count = getattr(whole.config, "num_hidden_layers", 0)
    lists = [
        (sum(each.numel() for each in part.parameters()), name)
        for name, part in whole.named_modules()
        if isinstance(part, nn.ModuleList) and len(part) == count
    ]
    return max(lists, default=(0, ""))[1]


def _around(whole: nn.Module, layers: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the modules with parameters that are registered before the blocks, and after them, by name."""
    before: list[str] = []
    behind: list[str] = []
    found = before
    outer = [layers[: at.start()] for at in re.finditer(r"\.", layers)]
    for name, part in whole.named_modules():
        if name == layers:
            found = behind
        parent = name.rpartition(".")[0]
        beside = name and parent in ("", *outer) and name not in outer and name != layers
        if beside and any(True for _ in part.parameters()):
            found.append(name)
    return tuple(before), tuple(behind)


def _whole_behind(whole: nn.Module, layers: str, split: Mapping[str, Entry]) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for name in _around(whole, layers)[1]:
        entry = split.get(name, "")
        found[name] = {"style": "column", "sequence": "whole"} if entry == "column" else WHOLE
    return found


def _dropped(whole: nn.Module, layers: str) -> list[str]:
    """Return the modules that write to the residual stream: parts of blocks with parameters that are not norms."""
    blocks = whole.get_submodule(layers).children() if layers else ()
    found = {
        f"*.{key}": None
        for block in blocks
        for key, part in block.named_children()
        if not is_norm(part) and any(True for _ in part.parameters())
    }
    return list(found)


def _without_context(whole: Any, config: Any) -> Mapping[str, str]:
    if not has_attention_interface(whole):
        return {"context": "its attention is not computed by transformers' attention interface"}
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind in ("dynamic", "longrope"):
        return {"context": f'rope_type = "{kind}" depends on the longest position that a rank holds'}
    others = [each for each in getattr(config, "layer_types", None) or () if each not in _ATTENTION]
    if others:
        return {"context": f"layers of the type {others[0]}"}
    return {}


def _takes(whole: nn.Module, name: str) -> bool:
    kind: Any = next(
        each for each in type(whole).__mro__ if each.__name__ != "_Logits" and "forward" in vars(each)
    )
    return name in inspect.signature(kind.forward).parameters
