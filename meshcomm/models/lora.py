"""Low-rank adapters for a model's linear layers (LoRA, Hu et al. 2021), created by peft: W x + (alpha / rank) B A x.

W and the rest of the model are frozen. W, A and B are split together. In a column-parallel layer, A is unsplit and B has
this rank's outputs. In a row-parallel layer, A has this rank's inputs and B is unsplit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor, nn

from meshcomm.config.model import LoraConfig
from meshcomm.errors import ConfigError, UnsupportedOp
from meshcomm.layout.names import did_you_mean, listed
from meshcomm.models.plans import WHOLE, is_split_linear
from meshcomm.models.spec import ModelSpec, generator_of, reduced
from meshcomm.models.weights import Conversions, Names, Source
from meshcomm.parallel.memory import on_meta
from meshcomm.parallel.tensor.layers import is_conv1d
from meshcomm.parallel.tensor.plan import Entry, matches

ADAPTER: Final = "default"
BASE: Final = ".base_layer."
# Patterns of the parameters that adapters add.
ADDED: Final = ("**.lora_A.*.weight", "**.lora_B.*.weight")
# An entry without effect. It replaces an entry of the plan that is used without sequence_parallel.
_NONE: Final[Entry] = {"set": {}}


def adapted(spec: ModelSpec, lora: LoraConfig, seed: int) -> ModelSpec:
    """Return the same model with adapters. Only the adapters are trained. seed: determines the initial A; B starts at 0.

    Raises: ConfigError if peft is not installed, or `lora.targets` names no linear layer; UnsupportedOp for layers that
            cannot have an adapter.
    """
    if find_spec("peft") is None:
        raise ConfigError(
            "low-rank adapters need peft, which is not installed",
            given="[model.lora]",
            expected="peft 0.18 or later",
            hint="pip install 'meshcomm[lora]'",
        )
    with on_meta():
        whole = spec.module()
    targets = targets_of(whole, spec, lora.targets)
    sequence = None if spec.sequence is None else _plan_of({**spec.split, **spec.sequence}, whole, targets)
    dropped = {f"{name}.lora_dropout.{ADAPTER}": lora.dropout for name in targets} if lora.dropout else {}
    return replace(
        spec,
        module=lambda: with_adapters(spec.module(), lora, targets),
        split=_plan_of(spec.split, whole, targets),
        sequence=sequence,
        dropped={**spec.dropped, **dropped},
        added=ADDED,
        stored=_stored(spec.stored, targets),
        # Otherwise, the module initializes all parameters.
        initialise=partial(_value, spec.initialise, seed) if spec.initialise or spec.weights else None,
        small=None if spec.small is None else lambda: adapted(reduced(spec), lora, 0),
    )


def targets_of(module: nn.Module, spec: ModelSpec, named: Sequence[str]) -> list[str]:
    """Return the names of the linear layers to adapt. named: the value of LoraConfig.targets; if empty, all linear
    layers in the blocks are adapted.
    """
    linear = [name for name, part in module.named_modules() if is_split_linear(part)]
    tied = {name.rpartition(".")[0] for name in spec.tied or ()}
    outside = {*spec.first, *spec.last, *tied}
    ends = {name for name in linear if any(name == owner or _within(owner, name) for owner in outside)}
    inside = [
        name
        for name, part in module.named_modules()
        if any(matches(pattern, name) for pattern in spec.experts)
    ]
    free = [name for name in linear if not any(name.startswith(f"{prefix}.") for prefix in inside)]
    if not named:
        chosen = [name for name in free if name.startswith(f"{spec.layers}." if spec.layers else "")]
        chosen = [name for name in chosen if name not in ends]
    else:
        chosen = [name for name in free if any(f".{name}".endswith(f".{suffix}") for suffix in named)]
        last_components = sorted({name.rpartition(".")[2] for name in free if name not in ends})
        missing = [
            suffix for suffix in named if not any(f".{name}".endswith(f".{suffix}") for name in chosen)
        ]
        if missing:
            raise ConfigError(
                f"model.lora.targets names no linear layer of a {type(module).__name__}",
                given=listed(missing),
                expected=f"names of linear layers, or their last components: {listed(last_components)}",
                hint=did_you_mean(missing[0], last_components)
                or "remove model.lora.targets to adapt all linear layers of the blocks",
            )
    if wrong := [name for name in chosen if name in ends]:
        raise UnsupportedOp(
            "the head of a model cannot have an adapter",
            given=f"model.lora.targets: {listed(wrong)}",
            expected="linear layers of the blocks",
            hint="remove it",
        )
    return chosen


def adapter_options(lora: LoraConfig, targets: Sequence[str], *, transposed: bool = False) -> Any:
    """Return the options for peft. transposed: whether the layers are transformers' Conv1D layers."""
    from peft import LoraConfig as Options

    scale: Any = lora.alpha
    return Options(r=lora.rank, lora_alpha=scale, target_modules=list(targets), fan_in_fan_out=transposed)


def with_adapters(module: nn.Module, lora: LoraConfig, targets: Sequence[str]) -> nn.Module:
    """Add adapters to the layers `targets` in place, freeze everything else, and return the module."""
    from peft import inject_adapter_in_model

    for parameter in module.parameters():
        parameter.requires_grad_(False)
    transposed = all(is_conv1d(module.get_submodule(name)) for name in targets)
    # The module is inside another one, because peft would treat a transformers model's names as older names.
    options = adapter_options(lora, [f"model.{name}" for name in targets], transposed=transposed)
    inject_adapter_in_model(options, nn.ModuleDict({"model": module}), ADAPTER)
    for name in targets:
        # The number of features of x before the module is split.
        layer: Any = module.get_submodule(name)
        layer.lora_dropout[ADAPTER].meshcomm_features = layer.in_features
    return module


def hold_frozen(module: nn.Module, dtype: torch.dtype, but: Collection[str]) -> None:
    """Store the frozen weights and biases of linear layers in `dtype`, to which autocast would cast them.

    but: the names of parameters that are not converted.
    """
    for name, part in module.named_modules():
        for key, parameter in part.named_parameters(recurse=False) if is_split_linear(part) else ():
            if not parameter.requires_grad and f"{name}.{key}" not in but:
                parameter.data = parameter.data.to(dtype)


def _plan_of(plan: Mapping[str, Entry], module: nn.Module, targets: Sequence[str]) -> dict[str, Entry]:
    """Return the plan for the same module with adapters."""
    changed: dict[str, Entry] = {}
    names = [name for name, _ in module.named_modules()]
    entering = [pattern for pattern, entry in plan.items() if _style(entry) == "enter"]
    around = {name for name in names if any(matches(pattern, name) for pattern in entering)}
    for pattern, entry in plan.items():
        matching = [name for name in names if matches(pattern, name)]
        if not any(name in targets for name in matching):
            changed[pattern] = entry
            continue
        for name in matching:
            if name in targets:
                entered = any(_within(outer, name) for outer in around)
                changed |= {f"{name}{key}": value for key, value in _with_adapter(entry, entered).items()}
            else:
                changed[name] = entry
    return changed


def _within(outer: str, name: str) -> bool:
    return not outer or name.startswith(f"{outer}.")


def _style(entry: Entry) -> str:
    return entry.partition(":")[0] if isinstance(entry, str) else str(entry.get("style", ""))


def _with_adapter(entry: Entry, entered: bool) -> dict[str, Entry]:
    """Return the entries for a layer and its adapter, by name suffix. entered: whether an enclosing module has style enter."""
    style = _style(entry)
    whole = isinstance(entry, Mapping) and entry.get("sequence") == "whole"
    a, b = f".lora_A.{ADAPTER}", f".lora_B.{ADAPTER}"
    if style == "column":
        around: Entry = _NONE if entered else {"style": "enter", "shared": True}
        return {"": around, ".base_layer": entry, a: "heads", b: entry}
    if style == "row":
        return {"": _NONE, ".base_layer": entry, a: entry, b: WHOLE if whole else "sequence"}
    return {"": entry}


def _plain(name: str) -> str:
    """Return a parameter's name in the model without adapters."""
    return name.replace(BASE, ".")


@final
class _Stored:
    """The conversions for a model in which adapters wrap some layers."""

    def __init__(self, own: Conversions, targets: Iterable[str]) -> None:
        self._own, self._targets = own, frozenset(targets)

    def sources(self, names: Iterable[str]) -> dict[str, Source]:
        """See Conversions."""
        sources = {}
        for name, source in self._own.sources(names).items():
            owner, _, key = name.rpartition(".")
            sources[f"{owner}{BASE}{key}" if owner in self._targets else name] = source
        return sources

    def stored(self, name: str, value: Tensor) -> Mapping[str, Tensor]:
        """See Conversions."""
        return self._own.stored(_plain(name), value)


def _stored(own: Any, targets: Iterable[str]) -> Callable[[str], tuple[Names, bool]] | Conversions:
    if own is not None and not callable(own):
        return _Stored(own, targets)
    return lambda name: (_plain(name), False) if own is None else own(_plain(name))


def _value(
    own: Callable[[str, tuple[int, ...]], Tensor] | None, seed: int, name: str, shape: tuple[int, ...]
) -> Tensor:
    """Return the initial value of an adapter, or of a weight that is not read from a folder."""
    if re.search(r"\.lora_B\.[^.]+\.weight$", name):
        return torch.zeros(shape)
    if re.search(r"\.lora_A\.[^.]+\.weight$", name):
        # The distribution that torch's nn.Linear and peft use.
        most = shape[1] ** -0.5
        return torch.from_numpy(generator_of(seed, name).uniform(-most, most, shape).astype(np.float32))
    assert own is not None
    return own(_plain(name), shape)
