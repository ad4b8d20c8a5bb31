"""Two training steps of a small program: in plain torch on one process, and by an Engine on the simulated ranks of a mesh.

The plain program is written without the code that it judges: one forward pass over the whole global batch, one call of the
loss, `backward`, clipping, the optimizer.
"""

from __future__ import annotations

import copy
import math
import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from types import FunctionType
from typing import Any, Final, NamedTuple, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshcomm.config import Config
from meshcomm.mesh import Mesh
from meshcomm.models.family_code import wide
from meshcomm.models.outside import apart
from meshcomm.models.torch_private import named_arguments
from meshcomm.parallel.compose import Engine
from meshcomm.parallel.loss import IGNORED, logits_of, takes_inputs
from meshcomm.parallel.memory import to_train_mode
from meshcomm.parallel.model import LossOf, Model
from meshcomm.parallel.optimizer import MakeOptimizer, grouped, optimizer_of
from meshcomm.parallel.tensor import whole
from meshcomm.parallel.tree import called, in_parts, with_tensors
from meshcomm.simulator import simulate
from meshcomm.transfer.fused import unfused
from meshcomm.transport.torch_private import DispatchMode
from meshcomm.watching.callsite import users_frame

STEPS: Final = 2
_CPU: Final = torch.device("cpu")
# Gradients below this fraction of the largest one are rounding errors in float64.
ROUNDING: Final = 1e-12


@dataclass
class Outcome:
    """What the steps computed. In `results`, the losses, further terms and gradient norms, by name and step. gradients: of the
    first step, after clipping. after: weights and buffers after the last step. draws: whether random numbers were drawn. With
    `silent`, numbers that constants can replace do not count. noise: the names of the operators that constants replaced.
    narrow: whether the module or the loss casts float64 to a shorter dtype. unchanged: the parameters that kept their values.
    buffers: the names of the buffers. changed: whether the optimizer changed any parameter.
    """

    results: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)
    draws: bool = False
    narrow: bool = False
    unchanged: list[str] = field(default_factory=list)
    buffers: list[str] = field(default_factory=list)
    changed: bool = False
    noise: list[str] = field(default_factory=list)


class Program(NamedTuple):
    """A small copy of a training program.

    module:    returns a new copy of the unsplit module in float64, with its values. Each call returns equal ones.
    model:     returns a Model with the same values, for a configuration.
    batches:   inputs and targets of the global batch of each of the steps.
    train:     settings of [train].
    loss:      the own loss; None for the built-in cross-entropy.
    optimizer: see Trainer.
    named:     arguments for each call of the module.
    family:    whether the module belongs to a family of transformers, whose code casts to float32 in places.
    samples, tokens: of the global batch, and of a sample, at least 1.
    microbatches: per step and rank.
    layers:    the number of blocks that a pipeline divides.
    norms:     whether there are batch norms.
    tied:      see ModelSpec.
    """

    module: Callable[[], nn.Module]
    model: Callable[[Config], Model]
    batches: Sequence[tuple[Any, Any]]
    train: Mapping[str, Any]
    loss: LossOf | None = None
    optimizer: MakeOptimizer | None = None
    named: Mapping[str, Any] = {}
    family: bool = False
    samples: int = 4
    tokens: int = 16
    microbatches: int = 2
    layers: int = 2
    norms: bool = False
    tied: tuple[str, str] | None = None


class Communicates(Exception):
    """A model or a loss calls other ranks, which one process cannot do."""


@final
class _Alone(DispatchMode):  # type: ignore[misc]
    """In this context, collectives of torch raise `Communicates`. narrow: see Outcome."""

    narrow = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See TorchDispatchMode."""
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            raise Communicates(func.overloadpacket.__name__)
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].dtype == torch.float64:
            self.narrow = self.narrow or (result.is_floating_point() and result.itemsize < 8)
        return result


@final
class _WithoutDropout(TorchFunctionMode):
    """In this context, dropout returns its input: its random numbers depend on how samples are divided among calls."""

    _FUNCTIONS: Final = {
        *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
        *(torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout),
    }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See TorchFunctionMode."""
        kwargs = kwargs or {}
        if func in self._FUNCTIONS:
            return args[0] if args else kwargs["input"]
        if "dropout_p" in kwargs:
            kwargs = {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)


@final
class _Steady(DispatchMode):  # type: ignore[misc]
    """In this context, torch's random numbers are constants: they do not depend on how samples are divided among calls.

    The constant depends on the place in the program, so that two views of a sample differ. names: the operators that were
    replaced. unknown: those that draw other numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, None] = {}
        self.unknown: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See TorchDispatchMode."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        before = torch.get_rng_state()
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__.strip("_").removesuffix("_like").removesuffix("_functional")
        arguments = named_arguments(func, args, kwargs)
        value = _VALUES.get(name)
        if value is None or not isinstance(result, Tensor):
            # Such as attention, which may be without dropout.
            if not torch.equal(before, torch.get_rng_state()):
                self.unknown[name] = None
            return result
        with torch.no_grad():
            result.copy_(torch.as_tensor(value(arguments, result, _place())).expand_as(result))
        self.names[name] = None
        return result


def _place() -> float:
    """Return a number in [0, 1) that depends on the line of the program that draws random numbers, and on the call in it."""
    frame = users_frame(2)
    return zlib.crc32(f"{frame.f_code.co_name} {frame.f_lineno} {frame.f_lasti}".encode()) / 2**32


def _between(arguments: Mapping[str, Any], result: Tensor, place: float) -> float:
    low, high = arguments.get("from", 0.0), arguments.get("to", 1.0)
    return float(low + (high - low) * (0.4 + 0.05 * place))


def _normal(arguments: Mapping[str, Any], result: Tensor, place: float) -> Any:
    return arguments.get("mean", 0.0) + arguments.get("std", 1.0) * (0.5 + place)


def _integer(arguments: Mapping[str, Any], result: Tensor, place: float) -> int:
    low, high = arguments.get("low", arguments.get("from", 0)), arguments.get("high", arguments.get("to"))
    return int(low if high is None else low + (int(high) - low) * place)


def _choice(arguments: Mapping[str, Any], result: Tensor, place: float) -> Tensor:
    order = arguments["self"].sort(-1, descending=True).indices
    chosen: Tensor = order[..., torch.arange(result.shape[-1]) % order.shape[-1]]
    return chosen


def _leaky(arguments: Mapping[str, Any], result: Tensor, place: float) -> Tensor:
    slope = (arguments.get("lower", 1 / 8) + arguments.get("upper", 1 / 3)) / 2
    arguments["noise"].copy_(torch.where(arguments["self"] > 0, 1.0, slope))
    return torch.where(result > 0, result, arguments["self"] * slope)


# What stands for the numbers of an operator: of its arguments by name, its result and the place in the program.
_VALUES: Final[Mapping[str, Callable[[Mapping[str, Any], Tensor, float], Any]]] = {
    "rand": _between,
    "uniform": _between,
    "randn": _normal,
    "normal": _normal,
    "randint": _integer,
    "random": _integer,
    "randperm": lambda given, found, place: torch.arange(len(found)),
    "bernoulli": lambda given, found, place: (
        torch.as_tensor(given.get("p", given["self"] if given["self"].is_floating_point() else 0.5))
        > 0.4 + 0.05 * place
    ),
    "multinomial": _choice,
    "exponential": lambda given, found, place: (0.5 + place) / given.get("lambd", 1.0),
    "log_normal": lambda given, found, place: math.exp(
        given.get("mean", 1.0) + given.get("std", 2.0) * place
    ),
    "cauchy": lambda given, found, place: given.get("median", 0.0) + given.get("sigma", 1.0) * (0.5 + place),
    "geometric": lambda given, found, place: 1,
    "poisson": lambda given, found, place: (given["self"] + 0.5).floor(),
    "binomial": lambda given, found, place: (given["count"] * given["prob"]).round(),
    "standard_gamma": lambda given, found, place: given["self"],
    "sample_dirichlet": lambda given, found, place: given["self"] / given["self"].sum(-1, keepdim=True),
    "rrelu_with_noise": _leaky,
}


def _quiet(module: nn.Module) -> None:
    """Switch off the dropout of recurrent layers, which torch computes within one operator."""
    for part in module.modules():
        if isinstance(part, nn.RNNBase):
            part.dropout = 0.0


@contextmanager
def _settings(silent: bool, family: bool, noise: bool = True) -> Iterator[_Steady | None]:
    """silent: whether dropout is switched off. noise: whether constants then replace all other random numbers."""
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(wide(torch.float64) if family else nullcontext())
        stack.enter_context(_WithoutDropout() if silent else nullcontext())
        yield stack.enter_context(_Steady()) if silent and noise else None


def plain(program: Program, config: Config, *, silent: bool = True, pieces: int = 1) -> Outcome:
    """Return what a program in plain torch computes on one process.

    config: its [train] has the settings of the steps.
    silent: whether dropout is switched off, and constants replace all other random numbers.
    pieces: the number of equal parts in which the model and the loss get each batch. The loss is then the mean over the parts.
    """
    train, outcome = config.train, Outcome()
    assert train is not None
    module = program.module()
    to_train_mode(module)
    if silent:
        _quiet(module)
    named = dict(module.named_parameters())
    # The part of a stage that holds a tied weight may have another of its names.
    every = dict(module.named_parameters(remove_duplicate=False))
    # The names that patterns match on a mesh: torch may list a tied weight under the name of the head.
    embedding, head = program.tied or ("", "")
    names = [(embedding if name == head else name, parameter) for name, parameter in named.items()]
    for name, parameter in names:
        if any(fnmatchcase(name, pattern) for pattern in train.frozen):
            parameter.requires_grad_(False)
    first = {name: parameter.detach().clone() for name, parameter in named.items()}
    make = program.optimizer or optimizer_of(train, _CPU)
    optimizer = grouped(make, train, nn.ModuleList([module]), names)
    loss_of = copied(program.loss)
    with torch.random.fork_rng([]), _Alone() as alone, _settings(silent, program.family) as steady:
        torch.manual_seed(0)
        before = _generators(steady is not None)
        for number, (inputs, targets) in enumerate(program.batches, 1):
            optimizer.zero_grad()
            parts: dict[str, list[tuple[Tensor, Any]]] = {}
            # The program may change its inputs in place.
            inputs, targets = with_tensors(torch.clone, (inputs, targets))
            for x, y in zip(in_parts(inputs, pieces), in_parts(targets, pieces), strict=True):
                # A loss may differentiate outputs by the inputs.
                x = with_tensors(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), x)
                for name, pair in _pairs(loss_of, called(module, x, **program.named), x, y, config).items():
                    parts.setdefault(name, []).append(pair)
            means = {
                name: torch.stack([total for total, _ in pairs]).sum() / sum(count for _, count in pairs)
                for name, pairs in parts.items()
            }
            means["loss"].backward()
            for parameter in named.values() if train.on_unused == "zero" else ():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            results = {name: float(mean.detach()) for name, mean in means.items()}
            grads = {name: parameter.grad for name, parameter in named.items() if parameter.grad is not None}
            dense = [grad.to_dense() if grad.is_sparse else grad for grad in grads.values()]
            norm = torch.stack([gradient.norm() for gradient in dense]).norm()
            if train.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(list(named.values()), train.clip_norm)
            outcome.results |= {f"{name} of step {number}": value for name, value in results.items()}
            outcome.results[f"gradient norm of step {number}"] = float(norm)
            if number == 1:
                outcome.gradients = {
                    name: parameter.grad.to_dense().clone()
                    for name, parameter in every.items()
                    if parameter.grad is not None
                }
            states = _generators(steady is not None)
            outcome.draws = outcome.draws or states != before
            optimizer.step()
    if steady is not None:
        outcome.draws, outcome.noise = outcome.draws or bool(steady.unknown), list(steady.names)
    outcome.narrow = alone.narrow
    outcome.changed = any(not torch.equal(parameter, first[name]) for name, parameter in named.items())
    outcome.buffers = [name for name, _ in module.named_buffers()]
    sizes = {
        name: float(gradient.abs().max())
        for name, gradient in outcome.gradients.items()
        if name in named and gradient.numel()
    }
    most = max(sizes.values(), default=0.0)
    # A smaller gradient is the rounding error of one that is 0, as that of a bias of the keys before a softmax.
    outcome.unchanged = [
        name
        for name, size in sizes.items()
        if size > ROUNDING * most and torch.equal(named[name], first[name])
    ]
    if isinstance(loss_of, nn.Module):
        ids = {id(parameter) for parameter in named.values()}
        outcome.unchanged += [
            f"loss.{name}"
            for name, parameter in loss_of.named_parameters()
            if parameter.grad is not None and id(parameter) not in ids
        ]
    outcome.after = {name: tensor.detach() for name, tensor in (*every.items(), *module.named_buffers())}
    return outcome


def _pairs(
    loss_of: LossOf | None, outputs: Any, inputs: Any, targets: Any, config: Config
) -> dict[str, tuple[Tensor, Any]]:
    """Return the sum and the count of the loss, and of each term to log."""
    train = config.train
    assert train is not None
    if loss_of is None:
        logits, counts = logits_of(outputs).flatten(0, -2), targets.flatten() != IGNORED
        total = F.cross_entropy(
            logits, targets.flatten(), label_smoothing=train.label_smoothing, reduction="sum"
        )
        if train.z_loss:
            total = total + train.z_loss * logits.logsumexp(-1)[counts].square().sum()
        return {"loss": (total, counts.sum())}
    losses = loss_of(outputs, targets, inputs) if takes_inputs(loss_of) else loss_of(outputs, targets)
    terms = dict(losses) if isinstance(losses, Mapping) else {"loss": losses}
    return {name: pair if isinstance(pair, tuple) else (pair, 1) for name, pair in terms.items()}


def _generators(steady: bool) -> tuple[object, ...]:
    """Return the state of the random generators. steady: whether torch's numbers are replaced."""
    name, keys, *more = np.random.get_state()
    without_torch = (random.getstate(), name, bytes(keys), *more)  # type: ignore[arg-type]
    return without_torch if steady else (*without_torch, torch.get_rng_state().numpy().tobytes())


def on_a_mesh(
    program: Program,
    config: Config,
    *,
    silent: bool = True,
    noise: bool = False,
) -> list[Outcome]:
    """Return what an Engine computes on each simulated rank of the mesh of `config`.

    silent: whether dropout is switched off. noise: whether the program draws other random numbers, which constants then replace.
    """

    def body(mesh: Mesh) -> Outcome:
        with _settings(silent, False, noise):
            engine = Engine(mesh, config, program.model(config), program.optimizer)
            if silent:
                for module in engine.modules:
                    _quiet(module)
            engine.checked_steps = 0
            outcome = Outcome()

            def keep() -> None:
                grads = {name: parameter.grad for name, parameter in engine.named_parameters()}
                outcome.gradients = outcome.gradients or _whole(engine, grads)

            engine.before_update = keep
            for number, batch in enumerate(program.batches, 1):
                whole_batch = with_tensors(torch.clone, tuple(batch))
                mine = [in_parts(part, engine.data_size)[engine.data_coord] for part in whole_batch]
                engine.step(mine[0], mine[1], None, number)
            for done in engine.results():
                terms = {"loss": done.loss, **done.terms}
                outcome.results |= {f"{name} of step {done.number}": value for name, value in terms.items()}
                outcome.results[f"gradient norm of step {done.number}"] = done.gradient_norm
            outcome.after = _whole(engine, dict(engine.named_parameters()))
            for module in engine.modules:
                outcome.after |= {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
        return outcome

    return simulate(body, config)


def _whole(engine: Engine, parts: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Return the full tensors of which each rank has parts. A parameter without a gradient has none."""
    dense = {
        name: part.to_dense() if part.is_sparse else part for name, part in parts.items() if part is not None
    }
    return {name: whole(part).clone() for name, part in unfused(dense, *engine.modules).items()}


def copied(loss: LossOf | None) -> LossOf | None:
    """Return a copy of a loss, so that the state of the real one does not change, with the variables that a function encloses."""
    if isinstance(loss, (FunctionType, partial)):
        return apart(loss)  # type: ignore[no-any-return]
    try:
        copy_of_loss: Any = copy.deepcopy(loss)
    except Exception:
        return loss
    return copy_of_loss.double() if isinstance(copy_of_loss, nn.Module) else copy_of_loss
