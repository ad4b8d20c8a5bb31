"""The optimizer that `[train]` names or that a user creates, its parameter groups, and its step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from fnmatch import fnmatchcase
from os.path import dirname
from traceback import extract_tb
from typing import Any, Final, TypeAlias, final, get_type_hints

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshcomm.config import TrainConfig
from meshcomm.config.train import WITH_BETAS, WITH_EPS, WITH_MOMENTS
from meshcomm.config.write import key_path, toml
from meshcomm.errors import ConfigError, TrainingError, UnsupportedOp
from meshcomm.layout import Dims
from meshcomm.layout.names import did_you_mean, listed
from meshcomm.mesh import Mesh
from meshcomm.parallel.dropout import Draws
from meshcomm.parallel.muon import Muon
from meshcomm.parallel.narrow_state import narrowed
from meshcomm.parallel.sparse import SparseRows, optimizers_in
from meshcomm.parallel.split_update import check_apart, check_fused, check_kept, check_split
from meshcomm.transfer.fused import fused_parts

# Creates an optimizer from parameter groups, like the classes of torch.optim.
MakeOptimizer: TypeAlias = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
# The classes of torch.optim by the names of train.optimizer and train.groups.
KINDS: Final[Mapping[str, type[torch.optim.Optimizer]]] = {
    name.lower(): getattr(torch.optim, name)
    for name in (
        *("AdamW", "Adam", "NAdam", "RAdam", "Adamax", "SGD", "RMSprop"),
        *("Adagrad", "Adadelta", "ASGD", "Rprop", "Muon"),
    )
}
_TORCH: Final = dirname(torch.__file__)
_EXAMPLE: Final = "lambda groups: torch.optim.AdamW(groups, lr=1e-3)"
# Arguments that have separate settings, in train.groups and in [train], and arguments that meshcomm chooses.
_FACTORS: Final = ("lr", "weight_decay")
_SETTINGS: Final = (*_FACTORS, "betas", "eps")
_CHOSEN: Final = ("params", "differentiable", "capturable")
# torch's annotations contain Tensor.
_STRICT: Final = ConfigDict(strict=True, arbitrary_types_allowed=True)


def decay_groups(
    module: nn.Module,
    patterns: Mapping[str, Mapping[str, Any]] | None = None,
    named: Iterable[tuple[str, nn.Parameter]] | None = None,
) -> list[dict[str, Any]]:
    """Return the parameter groups of `module` for an optimizer, with each parameter in one group.

    Weight decay applies to matrices, including embeddings and experts' stacks of matrices. The groups
    of vectors (norms, biases) have `weight_decay` 0. Within a group, either all parameters are DTensors
    on one DeviceMesh, or all are plain tensors, because a fused step handles a group in one call, and DTensor does not allow a
    call to mix the two. Experts' parameters, which are on other mesh dims, therefore have separate groups.

    patterns: maps name patterns ("*" matches any characters) to multipliers for `lr` and `weight_decay`. The first
              pattern that matches a name applies. Groups of matched parameters have `lr_factor`, `decay_factor` and `pattern`, which
              `grouped` applies and removes.
    named:    all parameters with the names that patterns match. If None, the names in `module`, also without their first component.

    Order: the order of `module.parameters()`, with matrices before vectors. Call this after fully_shard,
    which replaces the module's parameters.
    Parameters that need no gradient are in no group. If no parameter needs a gradient, there is one empty group.
    """
    groups: dict[tuple[bool, Any, str], dict[str, Any]] = {}
    # A multi-part parameter, such as a bias of q, k and v, has one more axis than in the original module.
    fused = fused_parts(module)
    vectors = {name: parameter.ndim - (name in fused) < 2 for name, parameter in module.named_parameters()}
    learning = [pair for pair in module.named_parameters() if pair[1].requires_grad]
    if named is None:
        # A ModuleList of stages puts a number in front of the name.
        named = [
            (alias, parameter)
            for name, parameter in module.named_parameters()
            for alias in (name, name.partition(".")[2])
        ]
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in named:
        names.setdefault(parameter, []).append(name)
    for name, parameter in sorted(learning, key=lambda pair: vectors[pair[0]]):
        matching = first_match(patterns or (), *names[parameter])
        vector = vectors[name]
        where = parameter.device_mesh if isinstance(parameter, DTensor) else None
        group: dict[str, Any] = {"params": [], "weight_decay": 0.0} if vector else {"params": []}
        if patterns and matching:
            factors = patterns[matching]
            group |= {"lr_factor": factors.get("lr", 1.0), "decay_factor": factors.get("weight_decay", 1.0)}
            group["pattern"] = matching
        groups.setdefault((vector, where, matching), group)["params"].append(parameter)
    return list(groups.values()) or [{"params": []}]


def first_match(patterns: Iterable[str], *names: str) -> str:
    """Return the first pattern that matches one of the names of a parameter, or ""."""
    return next((p for p in patterns if any(fnmatchcase(name, p) for name in names)), "")


def check_patterns(train: TrainConfig, learns: Mapping[str, bool]) -> None:
    """Raise ConfigError if a pattern of train.groups or train.frozen matches no parameter, or if one of train.groups applies to
    none. learns: the parameters of all stages, and whether each needs a gradient.
    """
    applied = {first_match(train.groups, name) for name, each in learns.items() if each}
    for setting, pattern in [("groups", p) for p in train.groups] + [("frozen", p) for p in train.frozen]:
        matched = [name for name in learns if fnmatchcase(name, pattern)]
        if not matched:
            raise ConfigError(
                f"no parameter matches {pattern}",
                given=f"a pattern of train.{setting}, {len(learns)} parameters: {', '.join(list(learns)[:4])}, ...",
                expected="a name, or a pattern that matches one",
                hint=did_you_mean(pattern, learns) or "meshcomm.train.Trainer(...).engine.named_parameters()",
            )
        if setting == "groups" and pattern not in applied:
            earlier = {first_match(train.groups, name) for name in matched if learns[name]}
            why = (
                f"an earlier pattern matches the same ones: {listed([*earlier])}"
                if earlier
                else "all are frozen"
            )
            raise ConfigError(
                f"train.groups applies {pattern} to no parameter: {why}",
                given=f"train.groups with {listed([*train.groups])}; {pattern} matches {listed(matched)}",
                expected="patterns that each apply to a parameter: the first pattern that matches applies",
                hint=f"move {pattern} to the top" if earlier else f"remove {pattern} from train.groups",
            )


def check_some_learn(frozen: Sequence[str], names: Sequence[str]) -> None:
    """Raise ConfigError if all parameters are frozen. names: the trainable parameters of all stages."""
    if not names:
        raise ConfigError(
            "all parameters of the model are frozen",
            given=f"train.frozen = {list(frozen)}, which matches all of them",
            expected="patterns that do not match all parameters",
            hint="meshcomm.train.Trainer(...).engine.named_parameters()",
        )


class Several(torch.optim.Optimizer):
    """Optimizers that take a step together. Its groups are theirs, and they have the state of their parameters."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = list(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Run a step of each optimizer."""
        for part in self.parts:
            part.step()


def optimizer_of(train: TrainConfig, device: torch.device) -> MakeOptimizer:
    """Return a function that creates the optimizer of `[train]`, or those of `[train]` and its groups as one. If torch supports it,
    Adam and AdamW use fused steps; on a GPU, any other optimizer uses foreach steps. Arguments fused and foreach replace this.

    Raises ConfigError, also the returned function, for arguments that the class does not take.
    """
    first = _one_of(train, train.optimizer, train.optimizer_args, "train", device)
    others = {
        pattern: _one_of(
            train, group.optimizer, group.optimizer_args, key_path(["train", "groups", pattern]), device
        )
        for pattern, group in train.groups.items()
        if group.optimizer is not None
    }
    if not others:
        return first
    names = [train.optimizer, *(train.groups[pattern].optimizer or "" for pattern in others)]
    title = "+".join(KINDS[name].__name__ for name in dict.fromkeys(names))
    several: type[Several] = type(title, (Several,), {})

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        # Every stage has each optimizer, because its state names them.
        own: dict[str, list[dict[str, Any]]] = {pattern: [] for pattern in ("", *others)}
        for group in groups:
            pattern = group.get("pattern", "")
            own[pattern if pattern in others else ""].append(group)
        makers = {"": first, **others}
        return several([makers[pattern](of_one or [{"params": []}]) for pattern, of_one in own.items()])

    return make


def _one_of(
    train: TrainConfig, name: str, arguments: Mapping[str, Any], place: str, device: torch.device
) -> MakeOptimizer:
    """Return a function that creates one of the optimizers of `[train]`, with its arguments from the table `place`."""
    kind, setting = KINDS[name], f"{place}.optimizer_args"
    own = _SETTINGS if place == "train" else _FACTORS
    types = get_type_hints(kind.__init__)
    given = f"{setting} = {toml(arguments)}, for torch.optim.{kind.__name__}"
    accepted = [each for each in inspect.signature(kind).parameters if each not in (*own, *_CHOSEN)]
    for argument, value in arguments.items():
        if argument not in accepted:
            what, hint = (
                f"torch.optim.{kind.__name__} has no argument {argument}",
                did_you_mean(argument, accepted),
            )
            if argument in types:
                what = f"{setting} cannot set {argument}"
                hint = f"{place}.{argument} = ..." + ", a factor" * (place != "train")
                hint = hint if argument in own else f"remove it: meshcomm chooses {argument}"
            raise ConfigError(what, given=given, expected="among " + ", ".join(accepted), hint=hint)
        try:
            TypeAdapter(types[argument], config=_STRICT).validate_python(value)
        except ValidationError as error:
            default = inspect.signature(kind).parameters[argument].default
            raise ConfigError(
                f"{setting}.{argument} has another type",
                given=given,
                expected=f"{argument} of type {inspect.formatannotation(types[argument])}",
                hint=f"remove {argument}; torch's default is {default}",
            ) from error
    # Unless a setting is given, optimizers other than AdamW use torch's defaults.
    has = {"betas": name in WITH_BETAS, "eps": name in WITH_EPS, "weight_decay": name != "rprop"}
    settings: dict[str, Any] = {"lr": train.lr} | {
        key: getattr(train, key) for key in has if has[key] and (name == "adamw" or train.given(key))
    }
    chosen = not arguments.keys() & {"fused", "foreach"}
    fused = chosen and "fused" in accepted and issubclass(kind, torch.optim.Adam)
    foreach = chosen and "foreach" in accepted and device.type != "cpu"
    if kind is torch.optim.Muon:
        kind = Muon
    if train.state_dtype is not None and name in WITH_MOMENTS:
        kind = narrowed(kind, getattr(torch, train.state_dtype))

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        # Fused steps do not take complex parameters.
        if fused and not any(parameter.is_complex() for group in groups for parameter in group["params"]):
            how = {"fused": True}
        else:
            how = {"foreach": True} if foreach else {}
        try:
            return kind(groups, **{**settings, **how, **arguments})
        except (TypeError, ValueError, RuntimeError) as error:
            if not arguments:
                raise
            raise ConfigError(
                f"torch.optim.{KINDS[name].__name__} does not take {setting}: {error}",
                given=given,
                expected="values that torch.optim documents",
                hint=f"other values, or remove {setting} for torch's defaults",
            ) from error

    return make


def made_of(make: MakeOptimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return the optimizer that `make` creates for `groups`.

    Raises ConfigError if the optimizer cannot be created from these groups, or contains other parameters. Raises UnsupportedOp
    for an optimizer such as LBFGS, whose step needs a closure that recomputes the loss.
    """
    failed: Exception | None = None
    optimizer: Any = None
    try:
        optimizer = make(groups)
    except (TypeError, ValueError) as error:
        failed = error
    if "LBFGS" in str(failed):
        raise _needs_closure("LBFGS", f"{type(failed).__name__}: {failed}") from failed
    if not isinstance(optimizer, torch.optim.Optimizer):
        returned = f"optimizer(groups) returned a {type(optimizer).__name__}"
        raise ConfigError(
            "the optimizer cannot be created",
            given=returned if failed is None else f"{type(failed).__name__}: {failed}",
            expected=f"a function that takes {len(groups)} parameter groups and returns a torch.optim.Optimizer",
            hint=_EXAMPLE,
        ) from failed
    kind = type(optimizer).__name__
    _complete(optimizer)
    given_ids = {id(parameter) for group in groups for parameter in group["params"]}
    others = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) not in given_ids
    ]
    if others:
        shapes = ", ".join(str(tuple(other.shape)) for other in others[:3])
        raise ConfigError(
            f"the {kind} would not train this model",
            given=f"{len(others)} parameters of shapes {shapes} that are not in the given groups",
            expected="the parameters in the groups that the function receives: sharding replaces the module's parameters",
            hint=_EXAMPLE,
        )
    arguments = inspect.signature(optimizer.step).parameters.values()
    any_number = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [
        argument
        for argument in arguments
        if argument.default is argument.empty and argument.kind not in any_number
    ]
    if needed:
        raise _needs_closure(kind, f"step({', '.join(argument.name for argument in needed)})")
    return optimizer


def _needs_closure(kind: str, given: str) -> UnsupportedOp:
    return UnsupportedOp(
        f"{kind} cannot take a step from gradients only",
        given=given,
        expected="an optimizer whose step() takes no arguments: a step computes the gradients once",
        hint="use another optimizer of torch.optim",
    )


def _misses_closure(error: Exception) -> bool:
    """Return whether `step()` failed because it has no closure, in the last line of the program's that ran."""
    is_none = isinstance(error, AssertionError) or "NoneType" in str(error)
    outside_torch = [
        frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith(_TORCH)
    ]
    return "closure" in str(error) or (
        is_none and bool(outside_torch) and "closure" in (outside_torch[-1].line or "")
    )


def grouped(
    make: MakeOptimizer,
    train: TrainConfig,
    modules: nn.Module,
    named: Iterable[tuple[str, nn.Parameter]],
) -> torch.optim.Optimizer:
    """Return the optimizer that `make` creates for the parameters of `modules`, with the factors of train.groups applied.

    named: see `decay_groups`. A weight that the embedding and the head share has one name, also on the head's stage.

    Raises the errors of `made_of`, and ConfigError if a parameter that needs a gradient is in no group of the optimizer.
    """
    patterns = {pattern: dict(factors) for pattern, factors in train.groups.items()}
    optimizer = made_of(make, decay_groups(modules, patterns, named))
    _check_held(optimizer, modules)
    for part in optimizers_in(optimizer):
        if isinstance(part, Muon):
            part.know(modules)
    for group in optimizer.param_groups:
        if "lr" not in group:
            raise ConfigError(
                f"the {type(optimizer).__name__} has no learning rate",
                given=f"groups with {listed([name for name in group if name != 'params']) or 'only params'}",
                expected='"lr" in each group, as in torch.optim, which the schedule scales',
                hint='super().__init__(params, {"lr": lr})',
            )
        group.pop("pattern", None)
        group["lr"] = group["lr"] * group.pop("lr_factor", 1.0)
        factor = group.pop("decay_factor", 1.0)
        if factor != 1.0 and "weight_decay" in group:
            group["weight_decay"] = group["weight_decay"] * factor
    return optimizer


def _check_held(optimizer: torch.optim.Optimizer, modules: nn.Module) -> None:
    """Raise ConfigError if a parameter that needs a gradient is in no optimizer: it would never be trained."""
    every = [group for inner in optimizers_in(optimizer) for group in inner.param_groups]
    held = {id(parameter) for group in every for parameter in group["params"]}
    named = modules.named_parameters()
    missing = [
        name.partition(".")[2]
        for name, parameter in named
        if parameter.requires_grad and id(parameter) not in held
    ]
    if missing:
        raise ConfigError(
            f"the {type(optimizer).__name__} would not train the whole model",
            given=f"no group has {listed(missing)}",
            expected="every parameter of the given groups in a group of the optimizer",
            hint=f"train.frozen = [{missing[0]!r}], if a parameter is not to learn",
        )


def _complete(optimizer: Any) -> None:
    """Add what Optimizer.__init__ would have set to an optimizer that contains others and did not call it.

    Raises ConfigError if it has no parameter groups.
    """
    if not hasattr(optimizer, "param_groups"):
        raise ConfigError(
            f"the {type(optimizer).__name__} has no parameter groups",
            given="an optimizer without param_groups, whose __init__ does not call Optimizer.__init__",
            expected="param_groups: the groups of all optimizers that it consists of",
            hint="self.param_groups = [*a.param_groups, *b.param_groups], in its __init__",
        )
    if hasattr(optimizer, "_optimizer_step_pre_hooks"):
        return
    for name in ("defaults", "state"):
        if not hasattr(optimizer, name):
            setattr(optimizer, name, {})
    torch.optim.Optimizer.__setstate__(optimizer, {})


@final
class Update:
    """Creates the optimizer for this rank's parameters, and runs its steps.

    named: the parameters of `modules`, with the names that train.groups matches.
    make:  creates the optimizer. If None, the optimizer of `[train]` is created.
    pipeline: the dim along which ranks have different parameters. A user's optimizer draws other random numbers on each.
    dims:  dims along which ranks have different samples, for sparse gradients.
    reuses: whether a parameter's gradient is the same tensor in each step.
    rows:  the rows of a step for which `make` is given sparse gradients.
    """

    def __init__(
        self,
        mesh: Mesh,
        train: TrainConfig,
        modules: nn.Module,
        named: Iterable[tuple[str, nn.Parameter]],
        make: MakeOptimizer | None,
        pipeline: str | None,
        dims: Dims | None = None,
        *,
        reuses: bool = True,
    ) -> None:
        named_ones = [pattern for pattern, group in train.groups.items() if group.optimizer is not None]
        if make is not None and named_ones:
            raise ConfigError(
                "two optimizers are given for the same parameters",
                given=f"Trainer(optimizer=...), and train.groups with an optimizer for {listed(named_ones)}",
                expected="one of them",
                hint="remove optimizer from train.groups; or from Trainer(...)",
            )
        made = optimizer_of(train, mesh.device) if make is None else make
        self.optimizer = grouped(made, train, modules, named)
        self._seed = train.seed
        self._draws = (
            None if make is None else Draws(mesh, train.seed, [] if pipeline is None else [pipeline])
        )
        self.rows: SparseRows | None = None
        if make is not None:

            def build(module: nn.Module) -> torch.optim.Optimizer:
                return make(decay_groups(module))

            check_split(build, modules)
            check_fused(build, modules)
            if reuses:
                check_kept(build)
            self.rows = SparseRows(mesh, dims, modules, self.optimizer)
            if pipeline is not None:
                check_apart(build)
        self._rates = [float(group["lr"]) / train.lr for group in self.optimizer.param_groups]
        # The rates that the schedule has set.
        self._set: list[float] | None = None
        # torch's fused Adam and AdamW can skip a step and its state update themselves, also for DTensors.
        fused = bool(self.optimizer.defaults.get("fused"))
        self._takes_found_inf = fused and isinstance(self.optimizer, torch.optim.Adam)

    def set_rate(self, lr: float | None) -> float:
        """Set each group's rate for a train.lr of `lr`. If None, rates do not change. Return the step's rate."""
        groups = self.optimizer.param_groups
        if lr is None:
            return float(groups[0]["lr"])
        if self._set is not None and (rates := [float(group["lr"]) for group in groups]) != self._set:
            raise TrainingError(
                "a learning rate was changed between steps, and the schedule would change it back",
                given=f"lr {rates}, where the schedule had set {self._set}",
                expected="rates of train.schedule, or of a scheduler",
                hint="Trainer(..., scheduler=lambda optimizer: LambdaLR(optimizer, factor)), which sets the rates in each step",
            )
        for group, rate in zip(groups, self._rates, strict=True):
            # A compiled step reads its rate from a tensor.
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr * rate)
            else:
                group["lr"] = lr * rate
        self._set = [float(group["lr"]) for group in groups]
        return lr

    def step(self, number: int, spoilt: Tensor) -> None:
        """Run step `number`, unless the scalar `spoilt` is nonzero."""
        if self._draws is None:
            self._step(spoilt)
            return
        with self._draws.step(f"optimizer {number}", 0), self.rows.handed() if self.rows else nullcontext():
            self._draws.seed(self._seed, "optimizer", number)
            try:
                self._step(spoilt)
            except (AssertionError, TypeError, ValueError, RuntimeError) as error:
                if not _misses_closure(error):
                    raise
                why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                raise _needs_closure(
                    type(self.optimizer).__name__, f"step(), which fails without a closure: {why}"
                ) from error

    def _step(self, spoilt: Tensor) -> None:
        if self._takes_found_inf:
            self.optimizer.found_inf = spoilt  # type: ignore[attr-defined]
            self.optimizer.step()
        elif not spoilt.item():
            self.optimizer.step()
