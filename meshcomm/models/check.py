"""Checks that a model computes the same when it is cut and split: before training, on a small copy, in one process.

The small copy runs in one piece, then cut into stages, then split along a tensor dim, and so on: each kind of
parallelism alone, in float64, on ranks of the simulator. Outputs and all gradients are compared. An incomplete
specification, or an incomplete published plan, is refused with the difference and the name of the kind.
"""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from meshcomm.config import ParallelConfig, TrainConfig
from meshcomm.errors import MeshcommError, RankFailed, TrainingError, UnsupportedOp
from meshcomm.mesh import Mesh
from meshcomm.models.family_code import wide
from meshcomm.models.spec import ModelSpec, default_values
from meshcomm.models.spec_model import SpecModel, logits_of
from meshcomm.models.weights import write
from meshcomm.parallel.batch_norm import batch_norms
from meshcomm.parallel.build import Splits, cast, materialise, on_meta
from meshcomm.parallel.context import ContextSplit
from meshcomm.parallel.context.split import AttentionKind
from meshcomm.parallel.expert import separate
from meshcomm.parallel.pipeline import Stage
from meshcomm.parallel.tensor import TensorSplit, local, whole
from meshcomm.parallel.tensor.parameters import fused_parts, joined
from meshcomm.predict.stages import split_layers
from meshcomm.simulator import simulate

# Relative to the largest output, or to the largest element of a gradient.
_ROOM: Final = 1e-9
# Gradients that are smaller than this share of the largest one have rounding errors above _ROOM.
_SMALL: Final = 1e-6
_SAMPLES, _TOKENS = 2, 16
# In parameters. A larger model is compared if ModelSpec.small creates a small one.
_LARGEST: Final = 4_000_000


@final
@dataclass(frozen=True)
class Use:
    """The kinds of parallelism that a model is to be trained with. attention: the kind, for context."""

    pipeline: bool = False
    tensor: bool = False
    sequence_parallel: bool = False
    context: bool = False
    attention: AttentionKind = "ring"
    expert: bool = False

    @property
    def kinds(self) -> dict[str, Use]:
        """Each kind alone, by the setting that enables it."""
        found = {
            "parallel.pipeline": (self.pipeline, Use(pipeline=True)),
            "parallel.tensor": (self.tensor, Use(tensor=True, sequence_parallel=self.sequence_parallel)),
            "parallel.context": (self.context, Use(context=True, attention=self.attention)),
            "parallel.expert": (self.expert, Use(expert=True)),
        }
        return {name: use for name, (used, use) in found.items() if used}


class _SaidByItself(Exception):
    """An error that a model raises without being run."""

    def __init__(self, error: UnsupportedOp) -> None:
        super().__init__(str(error))
        self.error = error


def check_model(
    spec: ModelSpec, use: Use, *, family: bool = False, name: str = "the model", said_later: bool = False
) -> None:
    """Compare a small model with itself, cut and split.

    spec:   its model must fit into one process. Models with other inputs than tokens, or with batch norms, are not compared.
    family: whether the model belongs to a model family of the transformers library.
    said_later: whether errors that the model raises without being run are left to the training.
    Raises: TrainingError that names the kind of parallelism and the difference of outputs or gradients; UnsupportedOp for
            a part that the specification lacks.
    """
    if not spec.vocab_size or not use.kinds:
        return
    train = TrainConfig(steps=1, global_batch_size=1, micro_batch_size=1, dtype="float64")
    model = SpecModel(spec, train, _TOKENS, family=family)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(spec.vocab_size, (_SAMPLES, _TOKENS), generator=generator)
    factors = torch.randn(_SAMPLES, _TOKENS, spec.vocab_size, generator=generator, dtype=torch.float64)
    original, values = _original(spec)
    if spec.tied is not None:
        values[spec.tied[1]] = values[spec.tied[0]]
    with torch.enable_grad(), wide(torch.float64) if family else nullcontext():
        positions = {spec.positions: torch.arange(_TOKENS).unsqueeze(0)} if spec.positions else {}
        expected = logits_of(original(tokens, **positions))
        (expected * factors).sum().backward()
    most = max(float(each.grad.abs().max()) for each in original.parameters() if each.grad is not None)
    gradients = {key: each.grad for key, each in original.named_parameters() if each.grad is not None}
    for setting, each in use.kinds.items():
        body = partial(_on_a_mesh, model, each, values, tokens, factors)
        dims = {"dp": 2} if each.expert else {"tp": 2 if each.tensor else 1, "cp": 2 if each.context else 1}
        views: dict[str, Any] = {"views": {"expert": {"ep": 2}}} if each.expert else {}
        try:
            found = simulate(body, dims=dims, **views)
        except Exception as error:
            cause = _cause(error)
            if isinstance(cause, _SaidByItself) and said_later:
                return
            if isinstance(cause, _SaidByItself):
                cause = cause.error
            if isinstance(cause, MeshcommError):
                raise cause from error
            raise UnsupportedOp(
                f"{name} cannot be trained with {setting}",
                given=f"a small model fails with {type(cause).__name__}: {cause}",
                expected="a model that runs in parts as it does in one piece",
                hint=f"remove {setting}, or use your own ModelSpec",
            ) from error
        for outputs, own in found:
            _compare(setting, name, "outputs", outputs, expected.detach())
            for key, value in own.items():
                if key in gradients:
                    _compare(setting, name, f"the gradient of {key}", value, gradients[key], most)


def _cause(error: BaseException) -> BaseException:
    """Return the exception of a rank of the simulator."""
    while isinstance(error, RankFailed) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _original(spec: ModelSpec) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the module itself in float64, and its parameters.

    Norms and biases are not ones and zeros, so that each has an effect.
    """
    module = spec.module().eval()
    cast(module, torch.float64)
    generator = torch.Generator().manual_seed(1)
    drawn = default_values(spec, 0) if spec.initialise is None else {}
    values: dict[str, Tensor] = {}
    seen: dict[int, str] = {}
    with torch.no_grad():
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if id(parameter) in seen:
                values[name] = values[seen[id(parameter)]]
                continue
            seen[id(parameter)] = name
            value = drawn[name] if spec.initialise is None else spec.initialise(name, tuple(parameter.shape))
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            values[name] = value.double() + noise * 0.05
            parameter.copy_(values[name])
    return module, values


def _on_a_mesh(
    model: SpecModel, use: Use, values: Mapping[str, Tensor], tokens: Tensor, factors: Tensor, mesh: Mesh
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the full outputs, and the gradients of all parameters, as before the model was split."""
    tensor = TensorSplit(mesh, "tp" if use.tensor else None, torch.float64, use.sequence_parallel)
    context = ContextSplit(mesh, "cp" if use.context else None, use.attention)
    splits = Splits(tensor, context, "ep" if use.expert else None)
    count = min(2, model.num_layers) if use.pipeline else 1
    try:
        model.check(splits, count)
    except UnsupportedOp as error:
        raise _SaidByItself(error) from error
    modules = nn.ModuleList()
    for index, layers in enumerate(split_layers(model.num_layers, count)):
        module = model.stage(splits, Stage(index, count, layers)).eval()
        materialise(module, mesh.device)
        write(module, lambda name, shape: values[name])
        modules.append(module)
    mine = slice(mesh.coord("dp"), mesh.coord("dp") + 1) if use.expert else slice(None)
    x = context.split(tokens[mine], 1)
    for module in modules:
        x = module(x)
    weights = context.split(factors[mine], 1)
    divided = x.shape[-1] != weights.shape[-1]
    if divided:
        weights = weights.chunk(tensor.size, -1)[tensor.coord]
    with torch.enable_grad():
        (x * weights).sum().backward()
    outputs = x.detach()
    if divided:
        outputs = mesh.all_gather("tp", outputs, -1)
    outputs = context.gather(outputs, 1)
    if use.expert:
        outputs = mesh.all_gather("dp", outputs, 0)
    return outputs, _gradients(modules, splits, model.spec.tied)


def _gradients(modules: nn.ModuleList, splits: Splits, tied: tuple[str, str] | None) -> dict[str, Tensor]:
    mesh, found = splits.mesh, dict[str, Tensor]()
    for module in modules:
        splits.tensor.finish_gradients(module)
        fused, (_, experts) = fused_parts(module), separate(module)
        for name, parameter in module.named_parameters():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if splits.expert is not None and name not in experts:
                grad = mesh.all_reduce("dp", grad.clone())
            if splits.context.size > 1:
                grad = mesh.all_reduce("cp", local(grad).clone())
            value = whole(grad, of=parameter)
            value = joined(value, fused[name]) if name in fused else value
            if tied and name == tied[1]:
                name = tied[0]
            found[name] = found[name] + value if name in found else value
    return found


def _compare(setting: str, name: str, what: str, ours: Tensor, theirs: Tensor, largest: float = 0.0) -> None:
    """largest: the largest element of all gradients."""
    given = f"shape {tuple(ours.shape)}, but {tuple(theirs.shape)} in one piece"
    if ours.shape == theirs.shape:
        most = max(float(theirs.abs().max()), largest * _SMALL) or 1.0
        off = float((ours - theirs).abs().max())
        if off <= _ROOM * most:
            return
        given = f"{what} off by {off:.2g}, where the largest is {most:.2g}, of a small model in float64"
    raise TrainingError(
        f"{name} computes different results with {setting}",
        given=given,
        expected=f"the same results as in one piece, up to {_ROOM:g} of the largest",
        hint=f"remove {setting}; for a ModelSpec: add the missing parts to its forward, split, attention and so on, such as a "
        "multiplier, a soft cap, or positions of another stage",
    )


# -- once ----------------------------------------------------------------------------------------------


def check_once(model: SpecModel, parallel: ParallelConfig, sizes: Mapping[str, int]) -> None:
    """`check_model` for the kinds of parallelism of a configuration, unless it has passed before on this host.

    sizes: those of all dims and views. A model without `ModelSpec.small` is compared itself if it is no larger than a small
        one. Passed checks are recorded in $XDG_CACHE_HOME/meshcomm/checked, or in ~/.cache, with the sources of all code
        involved.
    Raises as `check_model`.
    """
    use = _use_of(parallel, sizes)
    if not use.kinds or not model.spec.vocab_size:
        return
    spec = model.spec.small() if model.spec.small is not None else model.spec
    with on_meta():
        module = spec.module()
    large = model.spec.small is None and sum(each.numel() for each in module.parameters()) > _LARGEST
    if large or batch_norms(module):
        return
    name = type(module).__name__
    text = repr((use, _described(spec, module), _versions(), _sources(spec, module)))
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    mark = home / "meshcomm" / "checked" / hashlib.sha256(text.encode()).hexdigest()
    if mark.is_file():
        return
    check_model(replace(spec, weights=None), use, family=model.family, name=name, said_later=True)
    with suppress(OSError):
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def _use_of(parallel: ParallelConfig, sizes: Mapping[str, int]) -> Use:
    used = {
        part: (dim := getattr(parallel, part)) is not None and sizes.get(dim, 1) > 1
        for part in ("pipeline", "tensor", "context", "expert")
    }
    options = parallel.options
    sequence = used["tensor"] and options.sequence_parallel
    attention = options.attention if used["context"] else "ring"
    return Use(**used, sequence_parallel=sequence, attention=attention)


def _described(spec: ModelSpec, module: nn.Module) -> list[object]:
    """Return a description of a model without its code."""
    plain = (str, int, float, tuple, dict, type(None))
    said = [(key, value) for key, value in vars(spec).items() if isinstance(value, plain)]
    numbers = [
        (name, sorted((k, v) for k, v in vars(part).items() if isinstance(v, int | float | str)))
        for name, part in module.named_modules()
    ]
    config: Any = getattr(module, "config", None)
    return [said, repr(module), numbers, config.to_dict() if hasattr(config, "to_dict") else None]


def _versions() -> list[str]:
    return [f"{name} {version(name)}" for name in ("torch", "transformers") if find_spec(name) is not None]


def _sources(spec: ModelSpec, module: nn.Module) -> list[tuple[str, str]]:
    """Return the files of the module's classes, the specification's functions and meshcomm, with digests."""
    functions = [getattr(each, "func", each) for each in vars(spec).values() if callable(each)]
    found: dict[str, str] = {}
    for kind in {*map(type, module.modules()), *functions}:
        with suppress(TypeError, OSError):
            if (file := inspect.getsourcefile(kind)) is not None:
                found[file] = ""
    found |= {str(path): "" for path in Path(__file__).parent.parent.rglob("*.py")}
    return [(file, hashlib.sha256(Path(file).read_bytes()).hexdigest()) for file in sorted(found)]
