"""Optimizers of torch.optim that keep their moments in a narrower dtype between steps.

DeepSeek-V3 (2024, 3.3.3) trained with both of AdamW's moments in bfloat16.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

# The number of weight elements whose moments are in the weights' dtype at a time.
_AT_ONCE: Final = 1 << 24


class NarrowState(torch.optim.Optimizer):
    """Base class of optimizers that store moments in `state_dtype` and compute with them in the weights' dtype.

    A step processes the weights in parts, so that only a few moments are wide at a time.
    """

    state_dtype: ClassVar[torch.dtype]
    kind: ClassVar[type[torch.optim.Optimizer]]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Like the step of the torch.optim class, but without a closure."""
        step, groups = inspect.unwrap(self.kind.step), self.param_groups
        try:
            for group in groups:
                for part in _parts(group["params"]):
                    self.param_groups = [{**group, "params": part}]
                    self._have(part, narrow=False)
                    step(self)
                    self._have(part, narrow=True)
        finally:
            self.param_groups = groups

    def _have(self, parameters: list[Tensor], *, narrow: bool) -> None:
        for parameter in parameters:
            state = self.state.get(parameter, {})
            for key, value in state.items():
                if is_moment(value, parameter):
                    state[key] = value.to(self.state_dtype if narrow else parameter.dtype)


def narrowed(kind: type[torch.optim.Optimizer], dtype: torch.dtype) -> type[torch.optim.Optimizer]:
    """Return a subclass of `kind`, a class of torch.optim, with the same name and moments in `dtype`."""
    return type(kind.__name__, (NarrowState, kind), {"state_dtype": dtype, "kind": kind})


def is_moment(value: Any, parameter: Tensor) -> bool:
    """Return whether `value`, from an optimizer's state, is a floating-point tensor in the shape of `parameter`."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.shape == parameter.shape


def _parts(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    part: list[Tensor] = []
    elements = 0
    for parameter in parameters:
        elements += parameter.numel()
        if part and elements > _AT_ONCE:
            yield part
            part, elements = [], parameter.numel()
        part.append(parameter)
    if part:
        yield part
