"""Which layers are a stage, and on which rank does a stage lie?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import TypeAlias

from meshcomm.errors import LayoutError

# What is least among the splits whose largest stage costs least, first things first.
_Rank: TypeAlias = tuple[int, int, int, int]


@dataclass(frozen=True)
class Stage:
    """One contiguous part of the model; a rank runs one or several of them."""

    index: int
    count: int
    layers: range

    @property
    def is_first(self) -> bool:
        """It takes the batch's inputs."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """It computes the loss."""
        return self.index == self.count - 1


def stages_of_rank(coord: int, ranks: int, each: int) -> list[int]:
    """The stages that a rank runs, in the model's order: stage s lies on coord s % ranks.

    >>> stages_of_rank(1, ranks=4, each=2)
    [1, 5]
    """
    return [coord + ranks * turn for turn in range(each)]


def split_layers(
    layers: int,
    stages: int,
    costs: Sequence[float] | None = None,
    *,
    first: float = 0.0,
    last: float = 0.0,
) -> list[range]:
    """Layers of each stage: contiguous, and no other split has a cheaper largest stage.

    Among those that are as good the most even one is taken (least sum of squares), then one whose
    last stage costs least, then one whose first does: the last has the loss to compute besides,
    and the first keeps the most microbatches in flight.

    Args:
        layers, stages: numbers of them; every stage gets a layer.
        costs: of each layer, in any unit; None: 1 each.
        first: what stage 0 costs besides its layers, in the same unit (the embedding).
        last: what the last stage costs besides (the head and the loss).

    Exact: costs are compared as fractions. Takes O(layers^2 stages) steps.
    Raises LayoutError where a stage would have no layer, or a cost is negative or not finite.

    >>> [len(part) for part in split_layers(6, 4)], [len(part) for part in split_layers(7, 4)]
    ([1, 2, 2, 1], [2, 2, 2, 1])
    >>> [len(part) for part in split_layers(8, 3, last=2)]
    [3, 4, 1]
    """
    if not 1 <= stages <= layers:
        raise LayoutError(
            f"{layers} layers cannot fill {stages} pipeline stages",
            given=f"layers = {layers}, {stages} pipeline stages",
            expected="at least one stage, and at least one layer per stage",
            hint=f"layers = {max(stages, 1)}, or {max(layers, 1)} stages",
        )
    each, begin, end = _whole_numbers(layers, [1.0] * layers if costs is None else costs, first, last)
    sums = [0, *accumulate(each)]

    def cost(stage: int, start: int, stop: int) -> int:
        return sums[stop] - sums[start] + begin * (stage == 0) + end * (stage == stages - 1)

    most = _least_largest(layers, stages, cost)

    def rank(stage: int, start: int, stop: int) -> _Rank:
        here = cost(stage, start, stop)
        final, leading = here * (stage == stages - 1), here * (stage == 0)
        return here * here, final, leading, stage * (stop - start)

    # best[stop]: the best split of layers 0 .. stop - 1 into the stages so far, and its bounds.
    best: dict[int, tuple[_Rank, tuple[int, ...]]] = {0: ((0, 0, 0, 0), (0,))}
    for stage in range(stages):
        found: dict[int, tuple[_Rank, tuple[int, ...]]] = {}
        for start, (so_far, bounds) in best.items():
            for stop in range(start + 1, layers - (stages - 1 - stage) + 1):
                if cost(stage, start, stop) > most:
                    break
                new = rank(stage, start, stop)
                total = (
                    so_far[0] + new[0],
                    so_far[1] + new[1],
                    so_far[2] + new[2],
                    so_far[3] + new[3],
                )
                if stop not in found or total < found[stop][0]:
                    found[stop] = total, (*bounds, stop)
        best = found
    bounds = best[layers][1]
    return [range(start, stop) for start, stop in pairwise(bounds)]


def _least_largest(layers: int, stages: int, cost: Callable[[int, int, int], int]) -> int:
    """The cost of the largest stage where that is least. One stage after the other, all of its ends."""
    least: dict[int, int] = {0: 0}
    for stage in range(stages):
        found: dict[int, int] = {}
        for start, largest in least.items():
            for stop in range(start + 1, layers - (stages - 1 - stage) + 1):
                here = max(largest, cost(stage, start, stop))
                if stop not in found or here < found[stop]:
                    found[stop] = here
        least = found
    return least[layers]


def _whole_numbers(
    layers: int, costs: Sequence[float], first: float, last: float
) -> tuple[list[int], int, int]:
    """The same costs in a unit in which all are whole, so that sums and comparisons are exact."""
    if len(costs) != layers:
        raise LayoutError(
            "every layer has one cost",
            given=f"{len(costs)} costs, layers = {layers}",
            expected=f"{layers} costs",
            hint="costs=None where all layers cost the same",
        )
    wrong = [cost for cost in (*costs, first, last) if not (math.isfinite(cost) and cost >= 0)]
    if wrong:
        raise LayoutError(
            "a stage cannot be balanced by this cost",
            given=f"{wrong[0]}",
            expected="costs of 0 or more, finite",
            hint="multiply-adds per token, or measured times",
        )
    exact = [Fraction(cost) for cost in (*costs, first, last)]
    unit = math.lcm(*(value.denominator for value in exact))
    *each, begin, end = (int(value * unit) for value in exact)
    return each, begin, end
