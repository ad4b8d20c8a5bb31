"""Private names of transformers that have no public counterpart."""

from __future__ import annotations

from collections.abc import Mapping
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
