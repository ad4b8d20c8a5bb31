"""How the tokens of a step spread over the experts, counted once for each backward pass."""

from __future__ import annotations

from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Load(NamedTuple):
    """What one rank's tokens did in one layer since the last `take`. Plain sums: adding the loads of
    all ranks along the data's and the context's dims gives the load of the whole step.

    Fields:
        passes: backward passes; the same on every rank, so not to be added.
        balance: sum over the passes of the balance loss, 0-dim float64; where samples are split along
            a context dim, this rank's share of it. The mean over the step's samples is the sum over
            all ranks / (passes * size of the data's dims).
        chosen: (experts) int64: choices of each expert, dropped ones included.
        dropped: (experts) int64: choices beyond its capacity.
    """

    passes: int
    balance: Tensor
    chosen: Tensor
    dropped: Tensor


@final
class Tally:
    """Adds up loads in backward: a forward that is run again to save memory must not count twice."""

    def __init__(self, experts: int, device: torch.device) -> None:
        self._experts = experts
        self._device = device
        self._load = self._zero()

    def watch(self, y: Tensor, balance: Tensor, chosen: Tensor, dropped: Tensor) -> Tensor:
        """`y`, unchanged; a backward through it adds one pass with these values."""
        watched: Tensor = _Watch.apply(y, self, Load(1, balance.detach().double(), chosen, dropped))
        return watched

    def take(self) -> Load:
        """What was counted since the last `take`; counting starts again from zero."""
        found, self._load = self._load, self._zero()
        return found

    def add(self, load: Load) -> None:
        """Add one pass."""
        mine = self._load
        self._load = Load(
            mine.passes + load.passes,
            mine.balance + load.balance,
            mine.chosen + load.chosen,
            mine.dropped + load.dropped,
        )

    def _zero(self) -> Load:
        none = torch.zeros(self._experts, dtype=torch.int64, device=self._device)
        return Load(0, torch.zeros((), dtype=torch.float64, device=self._device), none, none)


class _Watch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, tally: Tally, load: Load) -> Tensor:
        ctx.tally, ctx.load = tally, load
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        ctx.tally.add(ctx.load)
        return dy, None, None
