"""A moving average of the weights that a model trains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn

from meshcomm.errors import TrainingError
from meshcomm.parallel.tensor.parameters import local


@final
class Average:
    """The moving average of this rank's parts of the weights, as torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn
    computes it: the first applied step copies the weights. Frozen parameters and buffers have no average.

    values: the averages by the names in `named`, in the parameters' dtype. steps: float64 (), the number of averaged steps.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], decay: float, device: torch.device) -> None:
        self._parameters = {name: parameter for name, parameter in named if parameter.requires_grad}
        self._decay, self._swapped = decay, False
        self.values = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        self.steps = torch.zeros((), dtype=torch.float64, device=device)

    def settle(self) -> None:
        """Before the first averaged step, make the averages the weights of now. Raises TrainingError as `check` does."""
        self.check()
        if self.steps == 0:
            self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """Begin again with the weights of now."""
        self.steps.zero_()
        for name, parameter in self._parameters.items():
            local(self.values[name]).copy_(local(parameter))

    @torch.no_grad()
    def update(self, spoilt: Tensor) -> None:
        """Add the weights of now, unless the scalar `spoilt` is nonzero. Does not wait for the device."""
        applied = (spoilt == 0).to(self.steps)
        first = (self.steps == 0) & (spoilt == 0)
        # In float64: torch.where of two numbers would be float32.
        weight = applied * torch.full_like(self.steps, 1 - self._decay)
        self.steps += applied
        for name, parameter in self._parameters.items():
            now, average = local(parameter), local(self.values[name])
            # Copied, as what is there before the first step may be no number: weights are filled after they are made.
            average.copy_(torch.where(first, now, average.lerp(now, weight.to(now.dtype))))

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """In this context, the weights are the averages, and the averages the weights."""
        self.settle()
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        self._swapped = not self._swapped
        for name, parameter in self._parameters.items():
            weight, average = local(parameter), local(self.values[name])
            before = weight.clone()
            weight.copy_(average)
            average.copy_(before)

    def check(self) -> None:
        """Raise TrainingError if the weights are the averages now."""
        if self._swapped:
            raise TrainingError(
                "the weights of now are the averages",
                given="a step, a save or a load within Trainer.averaged()",
                expected="only evaluations and exports there",
                hint="move it out of the block",
            )
