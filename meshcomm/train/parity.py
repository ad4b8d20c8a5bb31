"""Record the first steps of training on a mesh, on one process, and with the original module, and compare the records."""

from __future__ import annotations

import math
import random
import runpy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import zip_longest
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, final

import numpy
import torch
from torch import Tensor, nn

from meshcomm.config import Config, load_config
from meshcomm.errors import ConfigError, TrainingError
from meshcomm.mesh import Mesh
from meshcomm.models.family_code import wide
from meshcomm.models.spec_model import SpecModel
from meshcomm.parallel.batch_norm import batch_norms
from meshcomm.parallel.compose import Engine
from meshcomm.parallel.memory import cast, eval_mode, seeded
from meshcomm.parallel.results import Done
from meshcomm.parallel.shard import Sharded
from meshcomm.parallel.tensor import whole
from meshcomm.parallel.tree import called, sliced
from meshcomm.train.trainer import RECORDER, EnoughSteps, StepRecorder, Trainer
from meshcomm.transfer.fused import unfused

Kind: TypeAlias = Literal["loss", "gradient norm", "weight", "gradient"]

# Outputs count as equal if they differ by at most this fraction of the largest output.
_ROOM: Final = 1e-9


@dataclass(frozen=True)
class Record:
    """The recorded steps of a run. Gradients are from the last step, after clipping.

    losses, norms: one value per step. Norms are computed before clipping.
    weights, gradients: unsharded float64 tensors on the CPU, by global name. A pipeline rank has only its own stages' tensors.
    batch_norms: whether the model has batch norms, whose results depend on which samples form a microbatch.
    original: one sentence that compares the outputs before the first step with the original module's outputs; "" if they
        were not compared.
    """

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    weights: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    batch_norms: bool = False
    original: str = ""

    def save(self, path: Path) -> None:
        """Write the record as one file."""
        torch.save(self.__dict__, path)

    @staticmethod
    def read(path: Path) -> Record:
        """Read a file that `save` wrote. Tensors are memory-mapped, so ranks on the same host share the memory."""
        return Record(**torch.load(path, mmap=True, weights_only=True))

    def steps(self) -> dict[tuple[Kind, str], Tensor]:
        """Return the loss and the gradient norm of each step, in order."""
        tensors: dict[tuple[Kind, str], Tensor] = {}
        kinds: tuple[Kind, ...] = ("loss", "gradient norm")
        for step, values in enumerate(zip_longest(self.losses, self.norms), 1):
            for kind, value in zip(kinds, values, strict=True):
                if value is not None:
                    tensors[kind, f"step {step}"] = torch.tensor(value, dtype=torch.float64)
        return tensors


def in_float64(config: Config) -> tuple[Config, tuple[str, ...]]:
    """Return `config` with float64 training, and a description of the required changes.

    Raises ConfigError if `config` does not describe a training run.
    """
    train, parallel = config.train, config.parallel
    if train is None:
        raise _no_training(config)
    narrow = {
        "train.compute_dtype": train.compute_dtype,
        "train.loss_scale": train.loss_scale,
        "train.float8": train.float8,
        "parallel.options.reduce_dtype": None if parallel is None else parallel.options.reduce_dtype,
        "train.float32_matmul_precision": train.float32_matmul_precision,
    }
    changes = [f"{key}=" for key, value in narrow.items() if value is not None]
    words = [f'{key} left out, was "{value}"' for key, value in narrow.items() if value is not None]
    if train.dtype != "float64":
        changes.append('train.dtype="float64"')
        words.append(f'train.dtype = "float64", was "{train.dtype}"')
    return (load_config(config, changes) if changes else config), tuple(words)


def reference(config: Config) -> Config:
    """Return `config` for training on one process, where nothing is split or replicated.

    Raises ConfigError if `config` does not describe a training run.
    """
    if config.parallel is None or config.train is None:
        raise _no_training(config)
    facts = config.model_dump(
        include={"model", "data", "train"},
        exclude={"train": {"compile", "activation_checkpointing"}},
        exclude_unset=True,
    )
    mesh = {"dims": {"one": 1}, "device": config.mesh.device, "timeout_s": config.mesh.timeout_s}
    return load_config({**facts, "mesh": mesh, "parallel": {}})


@final
class _ParityRecorder(StepRecorder):
    """Records the steps of a program. script: whether the program may end before the last step. original: see `record`."""

    def __init__(self, config: Config, steps: int, *, script: bool, original: bool) -> None:
        self.config, self._steps = load_config(config, ['train.on_nonfinite="skip"']), steps
        self._script, self._compares = script, original
        self._original = ""
        self._done: list[Done] = []
        self._found: Record | None = None
        self._error: TrainingError | None = None

    def begins(self, engine: Engine, inputs: Any) -> None:
        """See StepRecorder."""
        if self._compares and all(size == 1 for size in engine.mesh.dims.values()):
            some = sliced(inputs, slice(engine.sections.train.micro_batch_size))
            try:
                self._original = compare_forward(engine, some, from_folder=not self._script)
            except TrainingError as error:
                self._error = error
                raise EnoughSteps from error
        self._compares = False

    def stepped(self, engine: Engine) -> None:
        """See StepRecorder."""
        self._done += engine.results()
        if not self._script:
            engine.mesh.step(len(self._done))
        last = len(self._done) >= self._steps
        if last or self._script:
            self._found = replace(_recorded(engine, self._done), original=self._original)
        if last:
            raise EnoughSteps

    def run(self, program: Callable[[], object]) -> Record | None:
        """Run the program. Return the record of the last step of the program's Trainer, or None if there is none."""
        token = RECORDER.set(self)
        try:
            program()
        except EnoughSteps:
            pass
        finally:
            RECORDER.reset(token)
        if self._error is not None:
            raise self._error
        return self._found


def record_script(script: Path, arguments: Sequence[str], config: Config, steps: int) -> Record | None:
    """Run a script until its Trainer has completed `steps` steps. `config` replaces the script's own configuration.

    Called by: every rank. Python, NumPy and torch are seeded with train.seed. Returns the record of the last completed step,
               or None if the script creates no Trainer, for example on a rank that is not part of the mesh.
    Raises:    TrainingError if the script's ModelSpec and the original module compute different outputs on one process.
    """
    seed = 0 if config.train is None else config.train.seed
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)

    def program() -> None:
        sys.argv = [str(script), *arguments]
        sys.path.insert(0, str(script.resolve().parent))
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as ended:
            if ended.code:
                raise

    return _ParityRecorder(config, steps, script=True, original=True).run(program)


def record(mesh: Mesh, config: Config, steps: int, *, original: bool = False) -> Record:
    """Run the first `steps` steps of `config` on an open mesh. Called by: every rank.

    original: on a mesh of one rank, first compare the outputs with the original module's. Raises TrainingError if they differ.

    Every rank returns the same losses and norms, and the unsharded weights and gradients of its own stages.
    No files are written, and no checkpoint is read.
    """
    recorder = _ParityRecorder(config, steps, script=False, original=original)
    recorded = recorder.run(lambda: Trainer(mesh, config).run())
    assert recorded is not None
    return recorded


def _recorded(engine: Engine, done: Sequence[Done]) -> Record:
    named = dict(engine.named_parameters())
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named.items()}
    weights, gradients = (
        {name: whole(tensor).double().cpu() for name, tensor in unfused(tensors, *engine.modules).items()}
        for tensors in (named, grads)
    )
    losses, norms = tuple(step.loss for step in done), tuple(step.gradient_norm for step in done)
    return Record(losses, norms, weights, gradients, any(batch_norms(module) for module in engine.modules))


# -- the module itself ---------------------------------------------------------------------------


@torch.no_grad()
def compare_forward(engine: Engine, inputs: Any, *, from_folder: bool) -> str:
    """Compare, in eval mode, the outputs of the engine's model with those of the module that it was built from.

    engine:      an engine on one process, in float64, before its first step.
    inputs:      the inputs (samples, ...) of one microbatch.
    from_folder: whether transformers itself reads the weights from the folder of [model] pretrained.
    Returns:     one sentence with the difference, or why the outputs could not be compared; "" if the engine runs the
                 original module.
    Raises:      TrainingError if the outputs differ.
    """
    model = engine.model
    if not isinstance(model, SpecModel):
        return ""
    spec, name = model.spec, "transformers"
    if spec.original is not None:
        stored: dict[str, Tensor] | None = None
        if not from_folder or spec.weights is None:
            stored = {
                stored_name: part
                for name, value in _values(engine).items()
                for stored_name, part in spec.stored_tensors(name, value).items()
            }
        theirs = spec.original(stored)
    else:
        with seeded(model._train.seed):
            theirs = spec.module()
        name = f"{type(theirs).__name__}.forward"
        if missing := _fill(theirs, _values(engine), spec.tied):
            return f"not compared with {name}: the ModelSpec has no parameter that matches {missing}"
    # Buffers that are not saved may still be in float32.
    cast(theirs, torch.float64, engine.mesh.device)
    theirs.eval()
    try:
        with wide(torch.float64) if model.family else nullcontext():
            expected = _first(called(theirs, inputs))
    except Exception as error:
        if spec.original is not None:
            raise TrainingError(
                "transformers itself cannot run the model",
                given=f"{type(error).__name__}: {error}",
                expected="a config.json and weights that AutoModelForCausalLM can run",
                hint="fix config.json",
            ) from error
        return f"not compared with {name}, which fails when called with only the inputs: {type(error).__name__}: {error}"
    ours = _first(_outputs(engine, inputs))
    given = f"shape {tuple(ours.shape)}, but {tuple(expected.shape)} from {name}"
    if ours.shape == expected.shape:
        most = max(1.0, float(expected.abs().max()))
        off = float((ours.double() - expected.double()).abs().max())
        # Not "off > room", because nan must not pass.
        if off <= _ROOM * most:
            return f"equal to {name} on one process (outputs differ by {off:.1e})"
        given = f"outputs differ by {off:.2g}; the largest output of {name} is {most:.2g}"
    raise TrainingError(
        f"the model does not compute what {name} computes on one process",
        given=given,
        expected=f"equal outputs in float64, up to {_ROOM:g} of the largest",
        hint="make ModelSpec.forward and attention do all that the module's own forward does around its blocks: multipliers, "
        "a scaled embedding, soft caps, masks; check that no weight has a different dtype or place",
    )


def _outputs(engine: Engine, x: Tensor) -> Any:
    try:
        with eval_mode(engine.modules):
            for module in engine.modules:
                x = module(x)
        return x
    finally:
        for gradients in engine.gradients:
            if isinstance(gradients, Sharded):
                gradients.reshard()


def _values(engine: Engine) -> dict[str, Tensor]:
    """Return the unsharded parameters under the names that they had before the model was split."""
    named = unfused(dict(engine.own_parameters()), *engine.modules)
    return {name: whole(parameter) for name, parameter in named.items()}


def _fill(module: nn.Module, values: Mapping[str, Tensor], tied: tuple[str, str] | None) -> str:
    """Write the weights into an unsplit module, in float64. Return the name of the first parameter without a weight, or ""."""
    same = {tied[1]: tied[0]} if tied else {}
    for name, parameter in module.named_parameters():
        value = values.get(same.get(name, name))
        if value is None or value.shape != parameter.shape:
            return name
        parameter.data = value
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                part._buffers[name] = buffer.double()
    return ""


def _first(outputs: Any) -> Tensor:
    """Return the logits from an output of transformers, which may be a mapping, a tuple, or a tensor."""
    if isinstance(outputs, Mapping):
        outputs = outputs.get("logits", next(iter(outputs.values())))
    while isinstance(outputs, (tuple, list)):
        outputs = outputs[0]
    assert isinstance(outputs, Tensor)
    return outputs


# -- differences ----------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Difference:
    """The largest difference of one quantity between a rank's record and the reference.

    name:     "step 3" for a loss or a norm; the name of the parameter for a weight or a gradient.
    relative: the absolute difference divided by the larger of 1 and the quantity's largest value in the reference. Large
              quantities are therefore compared relatively, and small ones absolutely.
    rank:     the lowest rank that has the largest difference.
    note:     why the values cannot be subtracted, or "".

    Both differences are infinite if a value is not finite, or if the values cannot be subtracted.
    """

    kind: Kind
    name: str
    absolute: float
    relative: float
    rank: int = 0
    note: str = ""

    @property
    def words(self) -> str:
        """The quantity that differs: `loss of step 3`."""
        return f"{self.kind} of {self.name}"


def compare(ours: Record, theirs: Record, rank: int = 0) -> list[Difference]:
    """Return the differences between a rank's record `ours` and the reference, first for each step, then for each
    parameter.
    """
    mine, other = ours.steps(), theirs.steps()
    differences = [_difference(*key, mine.get(key), other.get(key), rank) for key in {**mine, **other}]
    for name in ours.weights:
        differences += [
            _difference("weight", name, ours.weights[name], theirs.weights.get(name), rank),
            _difference("gradient", name, ours.gradients.get(name), theirs.gradients.get(name), rank),
        ]
    return differences


def worst(of_ranks: Iterable[Sequence[Difference]], names: Iterable[str]) -> list[Difference]:
    """Return the largest difference of each quantity on any rank. A parameter in `names` that no rank has
    counts as a difference.

    names: the names of all parameters in the reference. The order is that of `compare`, with the parameters of all stages.
    """
    largest_of: dict[tuple[Kind, str], Difference] = {}
    for of_rank in of_ranks:
        for difference in of_rank:
            largest = largest_of.setdefault((difference.kind, difference.name), difference)
            if difference.relative > largest.relative:
                largest_of[difference.kind, difference.name] = difference
    kinds: tuple[Kind, ...] = ("weight", "gradient")
    for key in ((kind, name) for name in names for kind in kinds):
        if key not in largest_of:
            largest_of[key] = _difference(*key, None, None, 0)
    return list(largest_of.values())


def first(differences: Iterable[Difference], tolerance: float) -> Difference | None:
    """Return the first quantity that differs by more than `tolerance`, or None. The loss of a step comes first, then its
    gradient norm, then the next step. If no step differs, return the parameter with the largest difference.
    """
    over = [difference for difference in differences if difference.relative > tolerance]
    steps = [difference for difference in over if difference.kind in ("loss", "gradient norm")]
    if steps:
        return min(steps, key=lambda difference: (int(difference.name.split()[1]), difference.kind != "loss"))
    return max(over, key=attrgetter("relative"), default=None)


def _difference(kind: Kind, name: str, mine: Tensor | None, other: Tensor | None, rank: int) -> Difference:
    absolute, note = math.inf, ""
    if mine is None or other is None:
        note = "on one side only"
    elif mine.shape != other.shape:
        note = f"shape {tuple(mine.shape)}, on one process {tuple(other.shape)}"
    elif mine.numel():
        absolute = float((mine.double() - other.double()).abs().max())
        note = "" if math.isfinite(absolute) else "not finite"
    else:
        absolute = 0.0
    if note:
        return Difference(kind, name, math.inf, math.inf, rank, note)
    largest = float(other.abs().max()) if other is not None and other.numel() else 0.0
    return Difference(kind, name, absolute, absolute / max(1.0, largest), rank)


def _no_training(config: Config) -> ConfigError:
    return ConfigError(
        f"{config.source} describes no training",
        given="a mesh without [parallel], [model], [data] and [train]",
        expected="all four sections",
        hint="meshcomm new writes a config with all of them",
    )
