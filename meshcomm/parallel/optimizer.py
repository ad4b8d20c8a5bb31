"""What makes a step of gradients: the optimiser that `[train]` names, and its groups of parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshcomm.config import TrainConfig
from meshcomm.errors import ConfigError, UnsupportedOp
from meshcomm.layout.names import did_you_mean
from meshcomm.parallel.tensor.parameters import fused_sizes

# Makes an optimiser of parameter groups, as those of torch.optim do.
MakeOptimizer: TypeAlias = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
# The classes of torch.optim by the names of train.optimizer.
KINDS: Final[Mapping[str, type[torch.optim.Optimizer]]] = {
    name.lower(): getattr(torch.optim, name)
    for name in (
        *("AdamW", "Adam", "NAdam", "RAdam", "Adamax"),
        *("SGD", "RMSprop", "Adagrad", "Adadelta"),
    )
}
_EXAMPLE: Final = "lambda groups: torch.optim.AdamW(groups, lr=1e-3)"
# What [train] says in settings of its own, or meshcomm decides.
_OWN: Final = ("params", "lr", "weight_decay", "betas", "eps", "differentiable", "capturable")


def decay_groups(
    module: nn.Module, patterns: Mapping[str, Mapping[str, float]] | None = None
) -> list[dict[str, Any]]:
    """The parameter groups of `module` for an optimiser, each parameter in one of them.

    Matrices decay, embeddings and experts' stacks of matrices among them; vectors (norms, biases)
    do not: theirs have `weight_decay` 0. Within a group all parameters are DTensors on one
    DeviceMesh, or all are plain: a fused step passes a whole group on as one call, and DTensor
    refuses a mixture. Experts' parameters, on other dims of the mesh, so have groups of their own.

    patterns: of names ("*" for any characters) to what `lr` and `weight_decay` are multiplied by; the first that
              matches counts. Such groups have `lr_factor` and `decay_factor`; see `scale`.

    Order: as first met in `module.parameters()`, matrices before vectors. Called after fully_shard,
    which puts other parameters into the module.
    """
    groups: dict[tuple[bool, Any, str], dict[str, Any]] = {}
    # What holds several parts, a bias of q, k and v say, has an axis more than the module gave it.
    fused = fused_sizes(module)
    vectors = {name: each.ndim - (name in fused) < 2 for name, each in module.named_parameters()}
    for name, parameter in sorted(module.named_parameters(), key=lambda pair: vectors[pair[0]]):
        # A ModuleList of stages puts a number before the name.
        names = (name, name.partition(".")[2])
        said = next((p for p in patterns or () if any(fnmatchcase(each, p) for each in names)), "")
        vector = vectors[name]
        where = parameter.device_mesh if isinstance(parameter, DTensor) else None
        made: dict[str, Any] = {"params": [], "weight_decay": 0.0} if vector else {"params": []}
        if patterns and said:
            factors = patterns[said]
            made |= {"lr_factor": factors.get("lr", 1.0), "decay_factor": factors.get("weight_decay", 1.0)}
        groups.setdefault((vector, where, said), made)["params"].append(parameter)
    return list(groups.values())


def check_patterns(patterns: Iterable[str], names: Sequence[str]) -> None:
    """Raise ConfigError where one of train.groups matches no parameter. names: of all stages."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"no parameter is called {pattern}",
                given=f"a pattern of train.groups, {len(names)} parameters: {', '.join(names[:4])}, ...",
                expected="a name, or a pattern that matches one",
                hint=did_you_mean(pattern, names) or "meshcomm.train.Trainer(...).engine.named_parameters()",
            )


def scale(optimizer: torch.optim.Optimizer) -> None:
    """Multiply each group's lr and weight_decay by what its pattern says."""
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * group.pop("lr_factor", 1.0)
        factor = group.pop("decay_factor", 1.0)
        if factor != 1.0 and "weight_decay" in group:
            group["weight_decay"] = group["weight_decay"] * factor


def optimizer_of(train: TrainConfig, device: torch.device) -> MakeOptimizer:
    """What makes the optimiser of `[train]`. On GPUs its step is fused, or else foreach, where torch has it.

    Raises ConfigError for a train.optimizer_args that it does not take.
    """
    kind = KINDS[train.optimizer]
    known = [name for name in inspect.signature(kind).parameters if name not in _OWN]
    for name in train.optimizer_args:
        if name not in known:
            raise ConfigError(
                f"torch.optim.{kind.__name__} takes no {name}"
                + (", which is a setting of its own" if name in _OWN else ""),
                given=f"train.optimizer_args = {dict(train.optimizer_args)}",
                expected="among " + ", ".join(known),
                hint=f"train.{name} = ..." if name in _OWN else did_you_mean(name, known),
            )
    given: dict[str, Any] = {"lr": train.lr}
    for name in ("betas", "eps", "weight_decay"):
        # Another optimiser's defaults are torch's.
        if train.optimizer == "adamw" or train.given(name):
            given[name] = getattr(train, name)
    if "fused" in known and issubclass(kind, torch.optim.Adam):
        given["fused"] = True
    elif "foreach" in known and device.type != "cpu":
        given["foreach"] = True
    return lambda groups: kind(groups, **{**given, **train.optimizer_args})


def made_of(make: MakeOptimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The optimizer of `groups`.

    Raises ConfigError where it cannot be made of them, or has others; UnsupportedOp for one, such as LBFGS, whose step asks for a
    closure that computes the loss anew.
    """
    try:
        optimizer = make(groups)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "the optimizer cannot be made",
            given=f"{type(error).__name__}: {error}",
            expected=f"a function of {len(groups)} parameter groups, as torch.optim.AdamW is one",
            hint=_EXAMPLE,
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            "the optimizer cannot be made",
            given=f"optimizer(groups) returned a {type(optimizer).__name__}",
            expected="a torch.optim.Optimizer",
            hint=_EXAMPLE,
        )
    known = {id(each) for group in groups for each in group["params"]}
    others = [each for group in optimizer.param_groups for each in group["params"] if id(each) not in known]
    if others:
        raise ConfigError(
            f"the {type(optimizer).__name__} would not train this model",
            given=f"{len(others)} parameters of shapes {', '.join(str(tuple(each.shape)) for each in others[:3])} that are none of the given ones",
            expected="parameters of the groups that the function is called with: sharding puts others into the module",
            hint=_EXAMPLE,
        )
    needed = [
        name
        for name, each in inspect.signature(optimizer.step).parameters.items()
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    if needed:
        raise UnsupportedOp(
            f"{type(optimizer).__name__} cannot make a step of gradients alone",
            given=f"step({', '.join(needed)})",
            expected="an optimizer whose step() takes no arguments",
            hint="another optimizer of torch.optim",
        )
    return optimizer


def takes_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step leaves out what is marked as not finite: torch's fused Adam and AdamW do, for DTensors too."""
    return bool(optimizer.defaults.get("fused")) and isinstance(optimizer, torch.optim.Adam)
