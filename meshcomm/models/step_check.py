"""Decides which small copy of a trainer's program is checked before its first step, and remembers checks that have passed."""

from __future__ import annotations

import copy
import hashlib
import inspect
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from meshcomm.config import Config, ParallelConfig
from meshcomm.errors import UnsupportedOp
from meshcomm.models.assumptions import check_family, check_named
from meshcomm.models.check import Use, check_steps, is_of_tokens, small_of
from meshcomm.models.one_step import STEPS, Program, copied
from meshcomm.models.outside import functions_of, held_by, keeps_samples, kept, undisturbed
from meshcomm.models.spec import ModelSpec, reduced
from meshcomm.models.spec_model import SpecModel
from meshcomm.models.wrapped import WrappedModule
from meshcomm.parallel.batch_norm import batch_norms
from meshcomm.parallel.memory import cast, on_meta
from meshcomm.parallel.model import Model
from meshcomm.parallel.optimizer import MakeOptimizer, first_match
from meshcomm.parallel.splits import Sections
from meshcomm.parallel.tensor.parameters import split_dims
from meshcomm.parallel.tree import called, first_tensor, samples_of, with_tensors

# Maximum number of parameters. A larger model is compared only if ModelSpec.small creates a small one.
_LARGEST: Final = 4_000_000
# Tokens of a sample, if samples can be cut.
_TOKENS: Final = 16
# The settings of [train] that determine what a step computes.
_SETTINGS: Final = (
    *("optimizer", "optimizer_args", "lr", "weight_decay", "betas", "eps", "groups", "frozen"),
    *("label_smoothing", "z_loss", "clip_norm", "on_unused"),
)


def needs_batch(model: Model) -> bool:
    """Return whether a model can be checked only with its first batch."""
    if isinstance(model, SpecModel):
        return not model.family and (not model.vocab_size or model.own_loss is not None)
    return isinstance(model, WrappedModule)


@final
class StepCheck:
    """The check of a trainer's model, loss and optimizer, on one rank.

    A model of tokens with a built-in loss is compared on random tokens, before it is built. Any other program is compared on
    its first batch. A program is not compared if train.check is false, or if no small copy of it can be made: see `why`.
    What a program's own code changes outside of its module is put back. Passed checks of models of transformers are recorded in
    $XDG_CACHE_HOME/meshcomm/checked (default: ~/.cache/meshcomm/checked), with a digest of all code involved.

    sizes: the sizes of all dims, including those of views.
    why:   why the program is not compared; "" if it is, or if that is not known yet.
    """

    def __init__(
        self, model: Model, known: Sections, sizes: Mapping[str, int], optimizer: MakeOptimizer | None
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._parallel, self._train = known.parallel, known.train
        self._copies = known.parallel.copies(sizes)
        self._use = _use_of(known.parallel, sizes, self._copies)
        self._module: nn.Module | None = None
        self._done = False
        self.why = ""
        if isinstance(model, WrappedModule):
            self._module = self._copy_of(model.module)
        elif not isinstance(model, SpecModel):
            self._done = True
        elif model.packed:
            self._leave("samples are packed documents")

    def _leave(self, why: str) -> None:
        self._done, self.why = True, why

    def _copy_of(self, module: nn.Module) -> nn.Module | None:
        count = sum(parameter.numel() for parameter in module.parameters())
        if count > _LARGEST:
            self._leave(f"the module has {count:,} parameters")
        elif any(split_dims(parameter) for parameter in module.parameters()):
            self._leave("the module is split already")
        else:
            try:
                return copy.deepcopy(module).cpu()
            except Exception as error:
                self._leave(f"the module cannot be copied: {type(error).__name__}: {error}")
        return None

    def before_building(self) -> None:
        """Check a model of tokens with a built-in loss. Raises the errors of `check_model`."""
        model = self._model
        if not isinstance(model, SpecModel):
            return
        use = self._use
        if not use.kinds and not model.family:
            return
        try:
            spec, module, count = _small_model(model)
        except Exception as error:
            self._leave("it has no small copy")
            if not use.kinds or use == Use(data=True):
                return
            raise UnsupportedOp(
                f"this model cannot be trained with {', '.join(use.kinds)}: it is compared as a small model first",
                given=f"no small model: {type(error).__name__}: {error}",
                expected="a model whose sizes can be reduced",
                hint=f"remove {', '.join(use.kinds)}; or use a ModelSpec with small=",
            ) from error
        name = type(module).__name__
        if not is_of_tokens(spec, use, lambda: module, name):
            return
        # A family whose sizes `small` cannot reduce may not fit into memory.
        alone = model.family and count <= 5 * _LARGEST
        if self._done or (model.spec.small is None and count > _LARGEST):
            self._leave(self.why or f"the model has {count:,} parameters, and no small=")
            return
        if needs_batch(model):
            return
        self._done = True
        norms = bool(batch_norms(module))
        # A batch norm averages over a microbatch.
        sizes: dict[str, Any] = {
            "layers": model.num_layers,
            "norms": norms,
            "microbatches": 1 if norms else 2,
        }

        def check() -> str:
            if alone:
                check_family(spec, lambda: small_of(spec).module(), name)
            if not use.kinds:
                return ""
            program = small_of(
                spec,
                family=model.family,
                train=self._settings(module),
                optimizer=self._optimizer,
                **sizes,
            )
            return check_steps(program, use, name, said_later=True)

        if model.family and self._optimizer is None:
            self._once(check, spec, module, sizes)
        else:
            self._run(check, module)

    def before_first_step(self, inputs: Any, targets: Any) -> None:
        """Check a program with its first batch, unless it is checked already. Raises the errors of `check_model`.

        Shape: as for `Trainer.step`: this rank's share of a global batch.
        """
        if self._done or (not self._use.kinds and self._microbatches() == 1):
            return
        self._done = True
        model, use = self._model, self._use
        batch = with_tensors(
            lambda x: _wide(x.detach().cpu()).requires_grad_(x.requires_grad), (inputs, targets)
        )
        first = first_tensor(inputs)
        if isinstance(model, SpecModel):
            spec, module, count = _small_model(model)
            spec = replace(spec, loss=model.spec.loss, loss_takes_slices=False)
            if model.spec.loss_takes_slices:
                self.why = "the loss is given slices"
                return
            if count > _LARGEST:
                self.why = "the model is large, and its ModelSpec has no small="
                return
            if spec.vocab_size and isinstance(inputs, Tensor) and inputs.ndim > 1:
                batch = _cut(batch, spec.vocab_size if model.spec.small is not None else 0)
                first = batch[0]
            # Axis 1 of inputs that are not tokens may be the channels of an image, for example.
            length = None if spec.vocab_size else model.seq_len
            layers = model.num_layers
            make: Callable[..., Program] = partial(small_of, spec)
        else:
            assert self._module is not None
            module, length, layers, make = self._module, None, 1, self._given
        # A batch norm averages over a microbatch, so there is one per step.
        microbatches = 1 if batch_norms(module) else min(2, self._microbatches())
        samples = 2 * microbatches * min(2, self._train.micro_batch_size)
        tokens = first.shape[1] if first.ndim > 1 else 1

        def check() -> str:
            program = make(
                sizes_of(batch, samples),
                train=self._settings(module),
                optimizer=self._optimizer,
                samples=samples,
                tokens=tokens if length is None else length,
                microbatches=microbatches,
                layers=layers,
                norms=bool(batch_norms(module)),
            )
            if keeps_samples(program.loss):
                # Each rank is given samples of which the other one has kept something.
                one = program.batches[0]
                turned = with_tensors(lambda x: x.flip(0) if x.ndim else x, one)
                program = program._replace(batches=[one, turned])
            return check_steps(program, use, type(module).__name__)

        self._run(check, module)
        self._module = None

    def before_first_dictionary(
        self, batch: Mapping[str, Tensor], read: Callable[..., tuple[Any, ...]]
    ) -> None:
        """Check how a ModelSpec's module reads a dictionary of transformers' names. Arguments and errors: see `check_named`."""
        model = self._model
        assert isinstance(model, SpecModel)
        spec, _, count = _small_model(model)
        if count > _LARGEST:
            return
        tensors = {name: tensor.cpu() for name, tensor in batch.items()}
        if model.spec.small is not None and spec.vocab_size:
            tensors = {
                name: tensor % spec.vocab_size if name == "input_ids" else tensor
                for name, tensor in tensors.items()
            }
            # Classes may be fewer, too.
            tensors.pop("labels", None)
        program = small_of(spec, [read(tensors)[:2]])
        module = program.module()

        def call(inputs: Any) -> Any:
            return called(module, inputs, **program.named)

        try:
            with undisturbed(), torch.no_grad():
                call(tensors["input_ids"])
        except Exception:
            return  # It may need another device.
        compares = model.own_loss is None
        check_named(module, call, tensors, read, compares=compares, dtype=torch.float64)

    # -- inside -----------------------------------------------------------------------------------

    def _run(self, check: Callable[[], str], module: nn.Module) -> None:
        """Run a check that calls the program's own code."""
        own_loss = self._model.own_loss
        functions = functions_of(module, None if own_loss is None else own_loss.function, self._optimizer)
        trained = getattr(self._model, "module", None)
        mine = set() if trained is None else {id(parameter) for parameter in trained.parameters()}
        reached = [value for value, _ in held_by(functions)]
        reached.append(getattr(None if own_loss is None else own_loss.function, "__self__", None))
        if any(
            isinstance(candidate, nn.Module) and any(id(p) in mine for p in candidate.parameters())
            for candidate in reached
        ):
            self.why = "the loss or the optimizer uses the module itself, and not a copy"
            return
        with undisturbed(), kept(functions, list({type(part) for part in module.modules()})):
            self.why = check()

    def _given(self, batches: list[tuple[Any, Any]], **more: Any) -> Program:
        """Return the small program of a module that is already built."""
        module, own_loss = self._module, self._model.own_loss
        assert module is not None
        cast(module, torch.float64)
        loss = None if own_loss is None else own_loss.function

        def model(config: Config) -> Model:
            assert config.parallel is not None and config.train is not None
            return WrappedModule(copy.deepcopy(module), config.parallel, config.train, copied(loss))

        return Program(lambda: copy.deepcopy(module), model, batches, loss=loss, **more)

    def _microbatches(self) -> int:
        train = self._train
        return train.global_batch_size // (self._copies * train.micro_batch_size)

    def _settings(self, module: nn.Module) -> dict[str, Any]:
        """Return the settings of [train] for a small program, without patterns that apply to none of its parameters."""
        train = self._train
        settings = {name: getattr(train, name) for name in _SETTINGS if train.given(name)}
        frozen = {name: first_match(train.frozen, name) for name, _ in module.named_parameters()}
        learning = [
            name for name, each in module.named_parameters() if each.requires_grad and not frozen[name]
        ]
        applied = {first_match(train.groups, name) for name in learning}
        if "groups" in settings:
            settings["groups"] = {
                pattern: group.model_dump() for pattern, group in train.groups.items() if pattern in applied
            }
        if "frozen" in settings:
            settings["frozen"] = [p for p in train.frozen if any(fnmatchcase(name, p) for name in frozen)]
        if "optimizer_args" in settings:
            settings["optimizer_args"] = dict(train.optimizer_args)
        return settings

    def _once(
        self, check: Callable[[], str], spec: ModelSpec, module: nn.Module, sizes: Mapping[str, int]
    ) -> None:
        """Run the check of a model of transformers, unless the same one has already passed on this host."""
        settings = [(name, getattr(self._train, name)) for name in _SETTINGS]
        described, sources = _described(spec, module), _sources(spec, module)
        text = repr(
            (self._use, sizes, settings, self._train.micro_batch_size, described, _versions(), sources)
        )
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        mark = home / "meshcomm" / "checked" / hashlib.sha256(text.encode()).hexdigest()
        with suppress(OSError):
            if mark.is_file():
                self.why = mark.read_text()
                return
        with undisturbed():
            self.why = check()
        with suppress(OSError):
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.write_text(self.why)


def _small_model(model: SpecModel) -> tuple[ModelSpec, nn.Module, int]:
    """Return the spec of the small model, its unsplit module without values, and the number of its parameters."""
    spec = replace(reduced(model.spec), weights=None)
    with on_meta():
        module = spec.module()
    return spec, module, sum(parameter.numel() for parameter in module.parameters())


def _wide(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def _cut(batch: tuple[Any, Any], vocab_size: int) -> tuple[Any, Any]:
    """Return a batch of tokens with short samples, for a small vocabulary. vocab_size: 0 if ids are unchanged."""
    length = batch[0].shape[1]

    def short(x: Tensor) -> Tensor:
        if x.ndim < 2 or x.shape[1] != length:
            return x
        x = x[:, :_TOKENS]
        return x if not vocab_size or x.is_floating_point() else x.where(x < 0, x % vocab_size)

    shortened: tuple[Any, Any] = with_tensors(short, batch)
    return shortened


def sizes_of(batch: tuple[Any, Any], samples: int) -> list[tuple[Any, Any]]:
    """Return the batches of all steps, with `samples` samples each, made of those of `batch`."""
    have = samples_of(batch)
    generator = torch.Generator().manual_seed(0)
    batches = []
    for step in range(STEPS):
        places = torch.arange(step * samples, (step + 1) * samples)
        others = torch.randint(have, (samples,), generator=generator)
        mix = partial(_mixed, places=places, others=others, have=have, seed=step)
        batches.append(with_tensors(mix, batch))
    return batches


def _mixed(x: Tensor, places: Tensor, others: Tensor, have: int, seed: int) -> Tensor:
    """Return the samples at `places`. Where there are no more samples, two are mixed into a new one.

    Of tensors of equal shape, such as tokens and their labels, the same elements are mixed. The result needs gradients if `x`
    does, and is in no graph.
    """
    if x.requires_grad:
        return _mixed(x.detach(), places, others, have, seed).requires_grad_()
    if not x.ndim:
        return x
    mine, other = x[places % have], x[others]
    new = (places >= have).view(-1, *[1] * (x.ndim - 1)).expand_as(mine)
    if x.is_floating_point() or x.is_complex():
        return mine.where(~new, 0.7 * mine + 0.3 * other)
    chosen = torch.rand(x.shape[1:], generator=torch.Generator().manual_seed(seed)).expand(mine.shape) < 0.5
    return mine.where(~new | chosen, other)


def _use_of(parallel: ParallelConfig, sizes: Mapping[str, int], copies: int) -> Use:
    used = {
        part: (dim := getattr(parallel, part)) is not None and sizes.get(dim, 1) > 1
        for part in ("pipeline", "tensor", "context", "expert")
    }
    options = parallel.options
    sequence = used["tensor"] and options.sequence_parallel
    attention = options.attention if used["context"] else "ring"
    return Use(**used, data=copies > 1, sequence_parallel=sequence, attention=attention)


def _described(spec: Any, module: nn.Module) -> list[object]:
    """Return a description of a model, excluding its code."""
    plain = (str, int, float, tuple, dict, type(None))
    settings = [
        (key, value) for key, value in getattr(spec, "__dict__", {}).items() if isinstance(value, plain)
    ]
    numbers = [
        (name, sorted((k, v) for k, v in vars(part).items() if isinstance(v, int | float | str)))
        for name, part in module.named_modules()
    ]
    config: Any = getattr(module, "config", None)
    return [settings, repr(module), numbers, config.to_dict() if hasattr(config, "to_dict") else None]


def _versions() -> list[str]:
    return [f"{name} {version(name)}" for name in ("torch", "transformers") if find_spec(name) is not None]


def _sources(spec: ModelSpec, module: nn.Module) -> list[tuple[str, str]]:
    """Return the source files of the module's classes, the specification's functions and meshcomm, with their digests."""
    functions = [getattr(value, "func", value) for value in vars(spec).values() if callable(value)]
    files: dict[str, str] = {}
    for kind in {*map(type, module.modules()), *functions}:
        with suppress(TypeError, OSError):
            if (file := inspect.getsourcefile(kind)) is not None:
                files[file] = ""
    files |= {str(path): "" for path in Path(__file__).parent.parent.rglob("*.py")}
    return [(file, hashlib.sha256(Path(file).read_bytes()).hexdigest()) for file in sorted(files)]
