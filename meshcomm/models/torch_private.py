"""Private names of transformers and torch that have no public counterpart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn


def draw(model: Any, part: nn.Module) -> None:
    """Initialize the parameters of one part of a model, excluding nested parts, as the model's family does."""
    model._init_weights(part)


def published_styles(model: Any) -> Mapping[str, str]:
    """Return the tensor-parallel plan of a full model: patterns of names -> styles."""
    return model._tp_plan or {}


def has_attention_interface(model: Any) -> bool:
    """Return whether the function that computes the model's attention can be replaced."""
    return bool(model._supports_attention_backend)


def named_arguments(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operator's call by name."""
    names = [argument.name for argument in operator._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}
