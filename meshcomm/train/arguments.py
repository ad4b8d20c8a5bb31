"""Check and resolve the arguments of a Trainer: the configuration, the model and the scheduler."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from meshcomm.config import Config, load_config
from meshcomm.errors import ConfigError, UnsupportedOp
from meshcomm.mesh import Mesh
from meshcomm.mesh.all_ranks import is_first, on_all_ranks
from meshcomm.mesh.source import CONFIG_VARIABLE, OVERRIDES_VARIABLE
from meshcomm.models import ModelSpec, model_of
from meshcomm.models.build import no_adapters, with_lora
from meshcomm.models.named_batch import check_named
from meshcomm.models.spec_model import SpecModel
from meshcomm.models.step_check import StepCheck, needs_batch
from meshcomm.models.wrapped import WrappedModule
from meshcomm.parallel.build import Model, Sections, sections
from meshcomm.parallel.compose import Batch, Engine
from meshcomm.parallel.data import Sharded
from meshcomm.parallel.loss import LossOf, takes_inputs
from meshcomm.parallel.optimizer import MakeOptimizer
from meshcomm.train.callbacks import Callback

MakeScheduler: TypeAlias = Callable[[Optimizer], LRScheduler]
Named: TypeAlias = Mapping[str, Tensor]
Read: TypeAlias = Callable[[Named], tuple[Any, ...]]


def model_for(
    mesh: Mesh, config: Config, given: nn.Module | ModelSpec | Model | None, loss: LossOf | None
) -> Model:
    """Return the model to train. If the program does not provide one, build the model described in [model]."""
    known = sections(mesh, config)
    _check_model(given)
    check_function(loss)
    if isinstance(given, Model) or (given is None and loss is not None):
        if loss is not None:
            raise ConfigError(
                "the loss of this model is fixed",
                given=f"loss, and {'the model of [model]' if given is None else 'a Model'}",
                expected="a module, or a ModelSpec, whose loss can be replaced",
                hint="ModelSpec(module=..., loss=...)",
            )
        assert given is not None
        return given
    if given is None:
        return _configured(config, known)
    seq_len = 1 if known.data is None else known.data.seq_len
    packed = known.data is not None and known.data.document_mask
    if isinstance(given, ModelSpec):
        check_function(given.loss)
        spec = given if loss is None else replace(given, loss=loss)
        return SpecModel(with_lora(spec, known.model, known.train), known.train, seq_len, packed=packed)
    if known.model is not None and known.model.lora is not None:
        raise no_adapters(type(given).__name__)
    return WrappedModule(given, known.parallel, known.train, loss)


def _check_model(given: object) -> None:
    if given is not None and not isinstance(given, (nn.Module, ModelSpec, Model)):
        raise ConfigError(
            "this model cannot be trained",
            given=f"model = {_said(given)}",
            expected="an nn.Module that is built, a ModelSpec, or None with [model] in the configuration",
            hint="call it: model=Net()" if callable(given) else "model=module",
        )


def check_function(loss: object) -> None:
    """Raise ConfigError unless a loss can be called with (outputs, targets) or (outputs, targets, inputs)."""
    if loss is None:
        return
    expected = "a function (outputs, targets) or (outputs, targets, inputs), or a module like nn.MSELoss()"
    if not callable(loss) or isinstance(loss, type):
        raise ConfigError(
            "the loss is no function",
            given=f"loss = {_said(loss)}",
            expected=expected,
            hint=f"call it: loss={loss.__name__}()" if isinstance(loss, type) else "loss=F.mse_loss",
        )
    with suppress(ValueError, TypeError):
        signed = signature(loss.forward if isinstance(loss, nn.Module) else loss)
        try:
            signed.bind(*[None] * (3 if takes_inputs(loss) else 2))
        except TypeError as error:
            raise ConfigError(
                "the loss takes other arguments than a step gives it",
                given=f"{_said(loss)} with {signed}: {error}",
                expected=expected,
                hint="lambda outputs, targets: loss(outputs)"
                if len(signed.parameters) < 2
                else "functools.partial(loss, weight=...)",
            ) from error


def check_callbacks(callbacks: object) -> tuple[Callback, ...]:
    """Return the callbacks. Raises ConfigError if they are something else."""
    each = tuple(callbacks) if isinstance(callbacks, Iterable) else (callbacks,)
    wrong = [one for one in each if not isinstance(one, Callback)]
    if wrong or not isinstance(callbacks, Iterable):
        given = wrong[0] if wrong else callbacks
        raise ConfigError(
            "these callbacks cannot be called",
            given=f"callbacks = {_said(callbacks)}"
            if not isinstance(callbacks, Iterable)
            else f"{_said(given)} in callbacks",
            expected="a list of instances of meshcomm.train.Callback",
            hint="callbacks=[callback]"
            if isinstance(callbacks, Callback)
            else f"callbacks=[{given.__name__}()]"
            if isinstance(given, type)
            else "a class with on_step(self, step), derived from meshcomm.train.Callback",
        )
    return each


def _said(what: object) -> str:
    """Return a short description of an argument."""
    if isinstance(what, type):
        return f"the class {what.__name__}"
    return repr(what) if isinstance(what, (str, int, float)) else f"a {type(what).__name__}"


class Checked(NamedTuple):
    """The check of a trainer's program. check: on the first rank. look: checks the first batch; None if that is not needed.
    named: checks the first batch that is a dictionary of transformers' names, with the function that reads it; None if the
    model is causal in any case.
    """

    check: StepCheck | None = None
    look: Callable[[Batch], None] | None = None
    named: Callable[[Engine, Named, Read], None] | None = None


def checked(mesh: Mesh, config: Config, model: Model, optimizer: MakeOptimizer | None) -> Checked:
    """Compare a small copy of the program with plain torch on the first rank, if that is possible without a batch.

    All ranks call this and the result's `look`, and raise if results differ.
    """
    known = sections(mesh, config)
    if mesh.is_fake or not known.train.check:
        return Checked()
    sizes = {**mesh.layout.dims, **{name: mesh.size(name) for name in mesh.layout.names}}
    check = StepCheck(model, known, sizes, optimizer) if is_first(mesh) else None
    if isinstance(model, SpecModel):
        on_all_ranks(mesh, "check the model", check.before_building if check else lambda: None)
    named = None
    if isinstance(model, WrappedModule):
        named = partial(_check_module, model)
    elif isinstance(model, SpecModel) and not model.family:
        named = partial(_check_spec, check)
    if not needs_batch(model):
        return Checked(check, named=named)

    def look(batch: Batch) -> None:
        def compare() -> None:
            if check is not None:
                with mesh.debug.without_calls():
                    check.before_first_step(batch.inputs, batch.targets)

        on_all_ranks(mesh, "check the first step", compare)

    return Checked(check, look, named)


def _check_module(model: WrappedModule, engine: Engine, batch: Named, read: Read) -> None:
    """Check a module that is trained on a dictionary. Called by every rank, because weights may be sharded."""
    module = engine.modules[0]
    train = engine.sections.train
    failure: Exception | None = None
    # If logits are split, only training gathers them.
    compares = model.own_loss is None and engine.split.size == 1
    dtype = getattr(torch, train.compute_dtype or train.dtype)
    try:
        check_named(module, model.call(module), batch, read, compares=compares, dtype=dtype)
    except Exception as error:
        failure = error
    for gradients in engine.gradients:
        if isinstance(gradients, Sharded):
            gradients.reshard()

    def judge() -> None:
        if failure is not None:
            raise failure

    on_all_ranks(engine.mesh, "check the first batch", judge)


def _check_spec(check: StepCheck | None, engine: Engine, batch: Named, read: Read) -> None:
    """Check the module of a ModelSpec, unsplit, on the first rank."""

    def compare() -> None:
        if check is not None:
            with engine.mesh.debug.without_calls():
                check.before_first_dictionary(batch, read)

    on_all_ranks(engine.mesh, "check the first batch", compare)


def config_of_the_job(config: Config | None) -> Config:
    """Return the configuration, or the CONFIG passed to `meshcomm run` if none is given."""
    if config is not None:
        return config
    path = os.environ.get(CONFIG_VARIABLE)
    if path is None:
        raise ConfigError(
            "the trainer has no configuration",
            given="no config, and no config from meshcomm run",
            expected="one of the two",
            hint='Trainer(mesh, meshcomm.load_config("train.toml"), ...), or meshcomm run CONFIG script.py',
        )
    return load_config(path, os.environ.get(OVERRIDES_VARIABLE, "").splitlines())


def _configured(config: Config, known: Sections) -> Model:
    if known.model is None or known.data is None:
        raise ConfigError(
            "no model is given, and the configuration has none",
            given=f"{config.source} without [model]",
            expected="one of the two",
            hint="use Trainer(mesh, config, model), or [model] and [data] as in a config from meshcomm new",
        )
    return model_of(known.model, known.data, known.train)


def scheduler_for(make: MakeScheduler, optimizer: Optimizer, steps: int) -> LRScheduler:
    """Return the scheduler that `make` creates for the optimizer. Raises ConfigError or UnsupportedOp if it is invalid, or
    cannot be advanced `steps` times.
    """
    example = "lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step))"
    try:
        found = make(optimizer)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "the scheduler cannot be made",
            given=f"{type(error).__name__}: {error}",
            expected="a function of the optimizer",
            hint=example,
        ) from error
    kind = type(found).__name__
    if not isinstance(found, LRScheduler) or isinstance(found, ReduceLROnPlateau):
        raise UnsupportedOp(
            f"the scheduler is a {kind}",
            given=f"scheduler(optimizer) returned a {kind}",
            expected="a torch.optim.lr_scheduler.LRScheduler whose rates depend only on the number of steps",
            hint=example,
        )
    if found.optimizer is not optimizer:
        raise ConfigError(
            f"the {kind} belongs to another optimizer",
            given=f"a {kind} of another {type(found.optimizer).__name__}",
            expected="a scheduler for the optimizer that is passed to the function",
            hint=example,
        )
    total = getattr(found, "total_steps", None)
    if isinstance(total, int) and total < steps:
        raise ConfigError(
            f"the {kind} ends before the training",
            given=f"total_steps = {total}, train.steps = {steps}",
            expected="total_steps of train.steps or more",
            hint=f"total_steps={steps}",
        )
    return found
