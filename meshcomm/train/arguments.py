"""Check and resolve the arguments of a Trainer: the configuration, the model, the loss, the scheduler and the callbacks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from inspect import signature
from typing import TypeAlias

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from meshcomm.config import Config, load_config
from meshcomm.errors import ConfigError, UnsupportedOp
from meshcomm.mesh.source import CONFIG_VARIABLE, OVERRIDES_VARIABLE
from meshcomm.models import ModelSpec, model_of
from meshcomm.models.build import no_adapters, with_lora
from meshcomm.models.spec_model import SpecModel
from meshcomm.models.wrapped import WrappedModule
from meshcomm.parallel.loss import takes_inputs
from meshcomm.parallel.model import LossOf, Model
from meshcomm.parallel.splits import Sections
from meshcomm.train.callbacks import Callback

MakeScheduler: TypeAlias = Callable[[Optimizer], LRScheduler]


def model_for(
    config: Config, sections: Sections, model: nn.Module | ModelSpec | Model | None, loss: LossOf | None
) -> Model:
    """Return the model to train. If the program does not provide one, build the model described in [model]."""
    if model is not None and not isinstance(model, (nn.Module, ModelSpec, Model)):
        raise ConfigError(
            "this model cannot be trained",
            given=f"model = {_said(model)}",
            expected="an nn.Module that is built, a ModelSpec, or None with [model] in the configuration",
            hint="call it: model=Net()" if callable(model) else "model=module",
        )
    check_function(loss)
    if isinstance(model, Model) or (model is None and loss is not None):
        if loss is not None:
            raise ConfigError(
                "the loss of this model is fixed",
                given=f"loss, and {'the model of [model]' if model is None else 'a Model'}",
                expected="a module, or a ModelSpec, whose loss can be replaced",
                hint="ModelSpec(module=..., loss=...)",
            )
        assert model is not None
        return model
    if model is None:
        if sections.model is None or sections.data is None:
            raise ConfigError(
                "no model is given, and the configuration has none",
                given=f"{config.source} without [model]",
                expected="one of the two",
                hint="use Trainer(mesh, config, model), or [model] and [data] as in a config from meshcomm new",
            )
        return model_of(sections.model, sections.data, sections.train)
    seq_len = 1 if sections.data is None else sections.data.seq_len
    packed = sections.data is not None and sections.data.document_mask
    if isinstance(model, ModelSpec):
        check_function(model.loss)
        spec = model if loss is None else replace(model, loss=loss)
        return SpecModel(
            with_lora(spec, sections.model, sections.train), sections.train, seq_len, packed=packed
        )
    if sections.model is not None and sections.model.lora is not None:
        raise no_adapters(type(model).__name__)
    return WrappedModule(model, sections.parallel, sections.train, loss)


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
    if not isinstance(callbacks, Iterable):
        wrong, given = callbacks, f"callbacks = {_said(callbacks)}"
    else:
        several = tuple(callbacks)
        others = [callback for callback in several if not isinstance(callback, Callback)]
        if not others:
            return several
        wrong, given = others[0], f"{_said(others[0])} in callbacks"
    hint = "a class with on_step(self, step), derived from meshcomm.train.Callback"
    if isinstance(wrong, Callback):
        hint = "callbacks=[callback]"
    elif isinstance(wrong, type):
        hint = f"callbacks=[{wrong.__name__}()]"
    raise ConfigError(
        "these callbacks cannot be called",
        given=given,
        expected="a list of instances of meshcomm.train.Callback",
        hint=hint,
    )


def _said(value: object) -> str:
    """Return a short description of an argument."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return repr(value) if isinstance(value, (str, int, float)) else f"a {type(value).__name__}"


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


def scheduler_for(make: MakeScheduler, optimizer: Optimizer, steps: int) -> LRScheduler:
    """Return the scheduler that `make` creates for the optimizer. Raises ConfigError or UnsupportedOp if it is invalid, or
    cannot be advanced `steps` times.
    """
    example = "lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step))"
    try:
        scheduler = make(optimizer)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "the scheduler cannot be made",
            given=f"{type(error).__name__}: {error}",
            expected="a function of the optimizer",
            hint=example,
        ) from error
    kind = type(scheduler).__name__
    if not isinstance(scheduler, LRScheduler):
        raise UnsupportedOp(
            f"the scheduler is a {kind}",
            given=f"scheduler(optimizer) returned a {kind}",
            expected="a torch.optim.lr_scheduler.LRScheduler",
            hint=example,
        )
    if scheduler.optimizer is not optimizer:
        raise ConfigError(
            f"the {kind} belongs to another optimizer",
            given=f"a {kind} of another {type(scheduler.optimizer).__name__}",
            expected="a scheduler for the optimizer that is passed to the function",
            hint=example,
        )
    total = getattr(scheduler, "total_steps", None)
    if isinstance(total, int) and total < steps:
        raise ConfigError(
            f"the {kind} ends before the training",
            given=f"total_steps = {total}, train.steps = {steps}",
            expected="total_steps of train.steps or more",
            hint=f"total_steps={steps}",
        )
    return scheduler
