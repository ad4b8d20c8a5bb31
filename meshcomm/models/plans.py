"""Creates the plan for splitting a transformers causal language model along a dim from the plan that its family publishes.

`base_model_tp_plan` in a family's configuration assigns styles to modules and parameters. These styles are converted to a
plan for `tensor_parallel`. No family publishes a plan for sequence parallelism, so meshcomm derives that plan from the
contents of the blocks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from torch import nn

from meshcomm.errors import UnsupportedOp
from meshcomm.models.torch_private import published_styles
from meshcomm.parallel.expert.packed import Axes
from meshcomm.parallel.tensor.layers import is_conv1d
from meshcomm.parallel.tensor.plan import Entry, matches

# Styles that transformers uses for modules -> entries of a plan for tensor_parallel.
_STYLES: Final[Mapping[str, Entry]] = {
    "colwise": "column",
    "colwise_gather_output": "column:whole",
    "packed_colwise": "column:2",
    "rowwise": "row",
    "rowwise_split_input": {"style": "row", "input": "whole"},
    "embedding_rowwise": "vocab",
    "replicated_with_grad_allreduce": "heads",
}
# Styles that need no entry in a plan.
_PLAIN: Final = ("local_params", "replicate")
_EXPERTS: Final = "moe_tp_experts"
# Styles that transformers uses for packed parameters -> the split axis, counted from the end, and its number of parts.
_PACKED: Final = {
    "colwise": (-2, 1),
    "packed_colwise": (-2, 2),
    "rowwise": (-1, 1),
    "packed_rowwise": (-1, 2),
}
# Missing from published plans: parameters used after column-parallel layers, on this rank's part of the features. Norms
# of queries and keys exist only with some settings, such as qk_layernorm.
_LEFT_OUT: Final[Mapping[str, Mapping[str, Entry]]] = {
    "apertus": {"model.layers.*.mlp.act_fn": "heads"},
    "cohere": {f"model.layers.*.self_attn.{each}_norm.weight": "split" for each in "qk"},
    "glm4_moe": {f"model.layers.*.self_attn.{each}_norm": "heads" for each in "qk"},
    "phi": {f"model.layers.*.self_attn.{each}_layernorm": "heads" for each in "qk"},
}
# Plans for families that do not publish one.
_UNPUBLISHED: Final[Mapping[str, Mapping[str, Entry]]] = {
    "gpt2": {
        "transformer.h.*.attn.c_attn": "column:3",
        "transformer.h.*.attn": {"set": {"split_size": "split"}},
        "transformer.h.*.attn.c_proj": "row",
        "transformer.h.*.mlp.c_fc": "column",
        "transformer.h.*.mlp.c_proj": "row",
    }
}
# The layers of an attention module that compute keys and values, and the parts of an adapter around them.
_OF_KEYS: Final = re.compile(r"(.*)\.([kv]_proj)(?:\..*)?")
# Not split: every rank computes this part on full sequences.
WHOLE: Final[Entry] = {"style": "replicate", "input": "whole", "output": "whole"}


class UnknownStyle(Exception):
    """A style of a published plan that meshcomm does not support."""


def tensor_plan(module: Any) -> dict[str, Entry]:
    """Return the plan for all parts except experts, embedding and head, or {} if the family publishes no plan.

    Raises UnknownStyle, whose text names the part that cannot be split.
    """
    kind = module.config.model_type
    if kind in _UNPUBLISHED:
        return dict(_UNPUBLISHED[kind])
    styles: Mapping[str, str] = published_styles(module)
    parts = [name for name, _ in module.named_modules()]
    ends = (module.get_input_embeddings(), module.get_output_embeddings())
    entry_of: dict[str, Entry] = {}
    for pattern, style in styles.items():
        matching = [name for name in parts if matches(pattern, name)]
        if any(module.get_submodule(name) in ends for name in matching) or style in (_EXPERTS, *_PLAIN):
            continue
        if matching:
            if style == "mla_kv_a_proj":
                entry_of[pattern] = {"style": "latent", "size": module.config.qk_rope_head_dim}
            elif style in _STYLES:
                entry_of[pattern] = _STYLES[style]
            else:
                raise UnknownStyle(f"{pattern}: {style}")
        elif styles.get(pattern.rpartition(".")[0]) != _EXPERTS and (
            parameters := [
                parameter for name, parameter in module.named_parameters() if matches(pattern, name)
            ]
        ):
            if style != "colwise" or any(parameter.ndim != 1 for parameter in parameters):
                raise UnknownStyle(f"{pattern}: {style}, for a parameter")
            entry_of[pattern] = "split"
    return {**entry_of, **_LEFT_OUT.get(kind, {})}


def with_shared_heads(plan: Mapping[str, Entry], module: Any, ranks: int) -> dict[str, Entry]:
    """Return the plan for a number of ranks, some of which share key and value heads if these are fewer.

    Raises UnsupportedOp for attention whose heads are not known.
    """
    changed: dict[str, Entry] = {}
    for pattern, entry in plan.items():
        names = [name for name, _ in module.named_modules() if entry == "column" and matches(pattern, name)]
        found = [match for name in names if (match := _OF_KEYS.fullmatch(name))]
        heads = [_heads(module, match, ranks) for match in found]
        if all(number % ranks == 0 for number in heads):
            changed[pattern] = entry
            continue
        for match, number in zip(found, heads, strict=True):
            changed[match[0]] = {"style": "column", "heads": number}
            if number % ranks:
                owner = module.get_submodule(match[1])
                groups = {"num_key_value_groups": owner.num_key_value_groups * number // ranks}
                changed[match[1]] = _with_set(changed.get(match[1], plan.get(match[1], {})), {"set": groups})
    return changed


def _heads(module: Any, match: re.Match[str], ranks: int) -> int:
    """Return the number of heads of a layer that computes keys or values."""
    owner = module.get_submodule(match[1])
    if hasattr(owner, "head_dim") and hasattr(owner, "num_key_value_groups"):
        return int(getattr(owner, match[2]).out_features // owner.head_dim)
    if (number := getattr(module.config, "num_key_value_heads", ranks)) % ranks:
        raise UnsupportedOp(
            f"ranks cannot share the key and value heads of a {type(owner).__name__}",
            given=f"{number} heads, {ranks} ranks along parallel.tensor",
            expected="attention with the attributes head_dim and num_key_value_groups",
            hint=f"a number of ranks that divides {number}",
        )
    return ranks


def packed_experts(module: Any) -> dict[str, Axes]:
    """Return the modules of packed experts by name, and how each of their parameters is split along the tensor dim.

    Raises UnknownStyle.
    """
    styles: Mapping[str, str] = published_styles(module)
    axes_of: dict[str, Axes] = {}
    for name, part in module.named_modules():
        # transformers.integrations.use_experts_implementation sets these attributes.
        if not (hasattr(part, "is_transposed") and hasattr(part, "has_gate")):
            continue
        axes: dict[str, tuple[int, int]] = {}
        for key, parameter in part.named_parameters():
            style = next((s for pattern, s in styles.items() if matches(pattern, f"{name}.{key}")), None)
            if style is None:
                continue
            if style not in _PACKED or "." in key:
                raise UnknownStyle(f"{name}.{key}: {style}")
            axis, count = _PACKED[style]
            axes[key] = parameter.ndim + axis, count
        axes_of[name] = axes
    return axes_of


def sequence_plan(module: nn.Module, layers: str, plan: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return the entries that sequence_parallel adds to the plan of a model that consists of blocks.

    Sequences are full-length before the first block, and split across ranks from there to the head. In a block, norms operate
    on slices of the sequence. A part that contains only column-parallel and row-parallel layers gathers its input. Every other
    part computes on full sequences, and identically on all ranks except in the layers that the plan splits.
    """
    styled = {name: _style(name, plan) for name, _ in module.named_modules()}
    for name, part in module.named_modules():
        if (
            styled[name] == ""
            and part._parameters
            and all(
                _style(f"{name}.{key}", plan) == "split"
                for key, parameter in part._parameters.items()
                if parameter is not None
            )
        ):
            styled[name] = "split"
    blocks = [f"{layers}.{key}" for key, _ in module.get_submodule(layers).named_children()]
    entry_of: dict[str, Entry] = {}
    entries_of_child: dict[str, dict[str, Entry]] = {}
    for block in blocks:
        submodule = module.get_submodule(block)
        if submodule._parameters:
            entry_of[block] = "sequence"
        for key, child in submodule.named_children():
            if any(True for _ in child.parameters()) and styled[f"{block}.{key}"] in ("", "split"):
                entries_of_child.setdefault(key, {})[block] = _of_part(f"{block}.{key}", child, styled)
    for key, entries in entries_of_child.items():
        first = next(iter(entries.values()))
        if all(entry == first for entry in entries.values()):
            entry_of[f"{layers}.*.{key}"] = first
        else:
            entry_of |= {f"{block}.{key}": entry for block, entry in entries.items()}
    # Norms after the blocks work on slices. Modules before the blocks work on full sequences.
    behind = False
    for name, part in module.named_modules():
        if not (part._parameters and name):
            continue
        if name.startswith(f"{layers}."):
            behind = True
        elif styled[name] == "":
            entry_of[name] = "sequence" if behind and is_norm(part) else WHOLE
    return {name: _with_set(entry, plan.get(name)) for name, entry in entry_of.items()}


def _with_set(entry: Entry, before: Entry | None) -> Entry:
    """Return `entry` with the attributes that `before`, the entry it replaces, sets."""
    if not isinstance(before, Mapping) or "set" not in before:
        return entry
    entry_facts = {"style": entry} if isinstance(entry, str) else entry
    return {**entry_facts, "set": before["set"]}


def _of_part(name: str, part: nn.Module, styled: Mapping[str, str]) -> Entry:
    owners = [
        (f"{name}.{inner}".rstrip("."), submodule)
        for inner, submodule in part.named_modules()
        if submodule._parameters
    ]
    if all(styled[owner] == "" and is_norm(part) for owner, part in owners):
        return "sequence"
    if all(styled[owner] in ("column", "row", "heads", "split") for owner, _ in owners):
        return "enter"
    return "replicate"


def _style(name: str, plan: Mapping[str, Entry]) -> str:
    """Return the style that the plan gives a part: "" if none, "other" if the entry has options."""
    for pattern, entry in plan.items():
        if matches(pattern, name):
            if isinstance(entry, str):
                return entry.partition(":")[0] if not entry.endswith(":whole") else "other"
            if "style" in entry:
                return "other"
    return ""


def is_norm(part: nn.Module) -> bool:
    """Return whether `part` operates on each token separately, judged by the name of its class."""
    return "Norm" in type(part).__name__


def is_split_linear(part: nn.Module | None) -> bool:
    """Return whether "column" and "row" can split `part`."""
    return (isinstance(part, nn.Linear) and type(part).forward is nn.Linear.forward) or is_conv1d(
        part or nn.Module()
    )
