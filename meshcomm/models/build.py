"""Builds the model that a configuration names."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from meshcomm.config import DataConfig, ModelConfig, TrainConfig
from meshcomm.errors import ConfigError, MeshcommError
from meshcomm.models.spec import ModelSpec
from meshcomm.models.spec_model import SpecModel
from meshcomm.models.transformer import BuiltIn
from meshcomm.parallel.memory import on_meta, seeded
from meshcomm.parallel.model import Model


def model_of(config: ModelConfig, data: DataConfig, train: TrainConfig) -> Model:
    """Return the model of a `[model]` section: the built-in model, a transformers model, or the result of a function.

    Raises: ConfigError if the function cannot be called or does not return a model; UnsupportedOp if meshcomm does not
            support the type of the folder's model.
    """
    if config.pretrained is not None:
        from meshcomm.models.families import hugging_face

        spec = with_lora(hugging_face(config, data.seq_len, train), config, train)
        return SpecModel(spec, train, data.seq_len, family=True, packed=data.document_mask)
    if config.build is not None:
        built = _built(config, train.seed)
        if isinstance(built, ModelSpec):
            built = with_lora(built, config, train)
        elif config.lora is not None:
            raise no_adapters(type(built).__name__)
        if isinstance(built, Model):
            return built
        return SpecModel(built, train, data.seq_len, packed=data.document_mask)
    return BuiltIn(config, data, train)


def no_adapters(kind: str) -> ConfigError:
    """Return the error for [model.lora] with a model that is not described by a ModelSpec."""
    return ConfigError(
        "this model cannot have adapters",
        given=f"[model.lora], and a {kind}",
        expected="a transformers folder, or a meshcomm.models.ModelSpec",
        hint="ModelSpec(module=...), or remove model.lora",
    )


def with_lora(spec: ModelSpec, config: ModelConfig | None, train: TrainConfig) -> ModelSpec:
    """Return the spec with the adapters that [model.lora] describes, if this section is set."""
    if config is None or config.lora is None:
        return spec
    from meshcomm.models.lora import adapted

    return adapted(spec, config.lora, train.seed)


def function_of(name: str) -> Callable[..., Any]:
    """Return the function that `module:function` names, imported as a script in the working directory would import it.

    Errors during the import are raised unchanged.
    """
    where, _, key = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    function: Callable[..., Any] = getattr(importlib.import_module(where), key)
    return function


def _built(config: ModelConfig, seed: int) -> ModelSpec | Model:
    assert config.build is not None
    try:
        build = partial(function_of(config.build), **config.args)
        # A ModelSpec may refer to tensors that its function draws.
        with on_meta(), seeded(seed):
            model = build()
    except MeshcommError:
        raise
    except Exception as error:
        raise ConfigError(
            f"model.build could not be called: {type(error).__name__}: {error}",
            given=f"build = {config.build!r}, args = {dict(config.args)}",
            expected="a function that every rank can import, and that accepts args by name",
            hint="put its module into the folder where meshcomm is started, or into a folder in PYTHONPATH",
        ) from error
    if isinstance(model, nn.Module):
        return ModelSpec(module=build)
    if not isinstance(model, (ModelSpec, Model)):
        raise ConfigError(
            "model.build did not return a model",
            given=f"{config.build} returned {type(model).__name__}",
            expected="an nn.Module, or a meshcomm.models.ModelSpec, which describes how it is split",
        )
    return model
