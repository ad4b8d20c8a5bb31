"""Pipeline stages: the split of layers, and the stages of each rank."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from meshcomm.config import load_config
from meshcomm.errors import LayoutError
from meshcomm.predict.stages import model_stages, part_costs, split_layers, stages_of_rank

ROOT = Path(__file__).parents[2]


def all_splits(layers: int, stages: int) -> list[list[range]]:
    found = []
    for inner in itertools.combinations(range(1, layers), stages - 1):
        bounds = [0, *inner, layers]
        found.append([range(a, b) for a, b in itertools.pairwise(bounds)])
    return found


def test_no_split_has_a_cheaper_largest_stage_and_none_as_good_is_more_even() -> None:
    draw = random.Random(5)
    for _ in range(150):
        layers = draw.randint(1, 9)
        stages = draw.randint(1, layers)
        costs = [draw.choice([1.0, 1.0, 0.5, 2.25, 0.1]) for _ in range(layers)]
        first, last = draw.choice([0.0, 0.3, 3.0]), draw.choice([0.0, 0.7, 2.0])

        def of(parts: list[range], costs: list[float] = costs, ends: Any = (first, last)) -> list[float]:
            each = [sum(costs[layer] for layer in part) for part in parts]
            each[0] += ends[0]
            each[-1] += ends[1]
            return each

        found = split_layers(layers, stages, costs, first=first, last=last)
        assert [layer for part in found for layer in part] == list(range(layers))
        every = [of(parts) for parts in all_splits(layers, stages)]
        least = min(max(each) for each in every)
        assert max(of(found)) == pytest.approx(least)
        even = min(sum(c * c for c in each) for each in every if max(each) <= least + 1e-9)
        assert sum(c * c for c in of(found)) == pytest.approx(even)


@pytest.mark.parametrize(
    ("layers", "stages", "settings", "expected"),
    [
        (6, 4, {}, [1, 2, 2, 1]),
        (7, 4, {}, [2, 2, 2, 1]),
        (5, 4, {}, [1, 2, 1, 1]),
        (8, 2, {"last": 2.0}, [5, 3]),
        (8, 2, {"first": 2.0}, [3, 5]),
        (4, 2, {"last": 9.0}, [3, 1]),
        (4, 2, {"costs": [1, 1, 1, 3]}, [3, 1]),
        (4, 1, {"last": 9.0}, [4]),
        # 0.1 + 0.2 and 0.3 are different floats. Rounding must not lead to a worse split.
        (4, 2, {"costs": [0.1, 0.2, 0.3, 1e-17]}, [2, 2]),
        (3, 2, {"costs": [1.04, 1.0, 1.03]}, [1, 2]),
    ],
)
def test_ends_and_costs_move_the_split(
    layers: int, stages: int, settings: dict[str, Any], expected: list[int]
) -> None:
    assert [len(part) for part in split_layers(layers, stages, **settings)] == expected


@pytest.mark.parametrize(
    ("arguments", "settings", "text"),
    [
        ((3, 4), {}, "3 layers cannot fill 4 pipeline stages"),
        ((3, 0), {}, "3 layers cannot fill 0 pipeline stages"),
        ((3, 2), {"costs": [1, 2]}, "every layer has one cost"),
        ((2, 2), {"costs": [1, float("nan")]}, "stages cannot be balanced by this cost"),
        ((2, 2), {"last": -1.0}, "stages cannot be balanced by this cost"),
    ],
)
def test_a_wrong_split_is_refused(arguments: tuple[int, int], settings: dict[str, Any], text: str) -> None:
    with pytest.raises(LayoutError, match=f"^{text}"):
        split_layers(*arguments, **settings)


def test_a_model_is_split_by_what_its_parts_cost() -> None:
    model = load_config(ROOT / "configs/quickstart.toml", ["model.num_layers=8"]).model
    assert model is not None
    costs = part_costs(model, 128)
    assert costs.head == 128 * 256
    assert costs.layers == (2 * 128 * (128 + 64) + 2 * 128 * 128 + 3 * 128 * 384,) * 8
    parts = model_stages(model, 128, 3)
    assert [len(part) for part in parts] == [3, 3, 2]
    assert sum(costs.of_stages(parts)) == sum(costs.layers) + costs.head
    some = model.model_copy(update={"experts": 8, "experts_per_token": 2, "experts_every": 2})
    dense, experts = part_costs(some, 128).layers[:2]
    assert experts - dense == 3 * 128 * 384 + 128 * 8


def test_stage_s_lies_on_coord_s_mod_ranks() -> None:
    for ranks, each in ((2, 1), (4, 2), (3, 3)):
        found = {stage: coord for coord in range(ranks) for stage in stages_of_rank(coord, ranks, each)}
        assert found == {stage: stage % ranks for stage in range(ranks * each)}
