"""The layers and the rank of each pipeline stage, and the relative cost of each part of the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import NamedTuple

from meshcomm.config import ModelConfig
from meshcomm.errors import LayoutError


@dataclass(frozen=True)
class Stage:
    """A contiguous part of the model. A rank runs one or more stages."""

    index: int
    count: int
    layers: range

    @property
    def is_first(self) -> bool:
        """Whether the stage receives the batch's inputs."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage computes the loss."""
        return self.index == self.count - 1


def stages_of_rank(coord: int, ranks: int, each: int) -> list[int]:
    """Return the stages that a rank runs, in model order. Stage s is on coord s % ranks.

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
    """Return the layers of each stage. Stages are contiguous, and the most expensive stage is as cheap as possible.

    Ties are broken by the most even split (least sum of squares), then by the cheapest last stage, then by the
    cheapest first stage. The last stage also computes the loss, and the first keeps the most microbatches in flight.

    Args:
        layers, stages: the number of layers and the number of stages; every stage gets at least one layer.
        costs: the cost of each layer, in any unit. If None, every layer costs 1.
        first: the cost of stage 0 in addition to its layers (the embedding), in the same unit.
        last: the cost of the last stage in addition to its layers (the head and the loss), in the same unit.

    The result is exact, because costs are compared as fractions. The search takes O(layers^2 stages) steps.
    Raises LayoutError if a stage would have no layer, or if a cost is negative or not finite.

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
    exact = _exact_costs(layers, [1] * layers if costs is None else costs, first, last)
    sums = [0, *accumulate(exact)]
    # least[stop]: the lowest possible cost of the most expensive stage in the first `stop` layers. Each round adds a stage.
    least: list[float] = [0, *[math.inf] * layers]
    for _ in range(stages):
        least = [math.inf] + [
            min(max(least[start], sums[stop] - sums[start]) for start in range(stop))
            for stop in range(1, layers + 1)
        ]
    # best[stop]: the smallest key (squares, last stage, first stage, layers in late stages) and its bounds, among the
    # splits of the first `stop` layers in which no stage costs more than least[layers].
    best: dict[int, tuple[list[int], tuple[int, ...]]] = {0: ([0] * 4, (0,))}
    for stage in range(stages):
        reached: dict[int, tuple[list[int], tuple[int, ...]]] = {}
        for start, (so_far, bounds) in best.items():
            for stop in range(start + 1, layers - (stages - 1 - stage) + 1):
                here = sums[stop] - sums[start]
                if here > least[layers]:
                    break
                more = here * here, here * (stage == stages - 1), here * (stage == 0), stage * (stop - start)
                total = [a + b for a, b in zip(so_far, more, strict=True)]
                if stop not in reached or total < reached[stop][0]:
                    reached[stop] = total, (*bounds, stop)
        best = reached
    return [range(start, stop) for start, stop in pairwise(best[layers][1])]


class PartCosts(NamedTuple):
    """Multiply-adds per token in a forward pass. The backward pass costs twice as much in every part."""

    embedding: int
    layers: tuple[int, ...]
    head: int

    def of_stages(self, parts: list[range]) -> list[int]:
        """Return the cost of each stage. The first stage includes the embedding, and the last includes the head."""
        costs = [sum(self.layers[layer] for layer in part) for part in parts]
        costs[0] += self.embedding
        costs[-1] += self.head
        return costs


def part_costs(model: ModelConfig, seq_len: int) -> PartCosts:
    """Return the cost of each part's matrix multiplications. Norms, rotations and the loss are not counted.

    seq_len: tokens per sample. Each query is multiplied by the keys of all tokens, including keys that the causal mask
    hides. Windowed attention is computed a few queries at a time, so twice the window's keys are counted.
    The embedding costs nothing, because it only looks up rows.
    """
    projections = 2 * model.hidden_size * model.head_size * (model.num_heads + model.num_kv_heads)
    dense = model.ff_matrices * model.hidden_size * model.intermediate_size
    experts = model.hidden_size * model.experts + min(model.experts_per_token, model.experts) * dense
    layers = (
        projections + attention + (experts if model.has_experts(i) else dense)
        for i, attention in enumerate(attention_costs(model, seq_len))
    )
    return PartCosts(0, tuple(layers), model.hidden_size * model.vocab_size)


def attention_costs(model: ModelConfig, seq_len: int) -> list[int]:
    """Return each layer's multiply-adds per token for queries times keys and scores times values; see `part_costs`."""
    windows = model.windows or (None,) * model.num_layers
    met = [seq_len if window is None else min(seq_len, 2 * window) for window in windows]
    return [2 * each * model.num_heads * model.head_size for each in met]


def model_stages(model: ModelConfig, seq_len: int, stages: int) -> list[range]:
    """Return the layers of each of the model's stages, balanced by `part_costs`; see `split_layers`."""
    costs = part_costs(model, seq_len)
    return split_layers(model.num_layers, stages, costs.layers, first=costs.embedding, last=costs.head)


def _exact_costs(layers: int, costs: Sequence[float], first: float, last: float) -> list[int]:
    """Return the layers' costs, including `first` and `last`, in a unit that makes all of them integers, so that
    comparisons are exact.
    """
    wrong = [cost for cost in (*costs, first, last) if not (math.isfinite(cost) and cost >= 0)]
    if wrong or len(costs) != layers:
        raise LayoutError(
            "stages cannot be balanced by this cost" if wrong else "every layer has one cost",
            given=f"{wrong[0]}" if wrong else f"{len(costs)} costs, layers = {layers}",
            expected=f"{layers} finite costs of 0 or more",
            hint="multiply-adds per token, or measured times; costs=None if all layers cost the same",
        )
    exact = [Fraction(cost) for cost in costs]
    exact[0] += Fraction(first)
    exact[-1] += Fraction(last)
    unit = math.lcm(*(value.denominator for value in exact))
    return [int(value * unit) for value in exact]
