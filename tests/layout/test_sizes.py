"""Suggested sizes fit."""

from __future__ import annotations

import math
import random

import pytest

from meshcomm.layout.sizes import nearest_fits, resolve


@pytest.mark.parametrize("seed", range(100))
def test_what_is_suggested_fits(seed: int) -> None:
    rng = random.Random(seed)
    sizes = {name: rng.randint(1, 9) for name in rng.sample("abcd", rng.randint(1, 4))}
    if rng.random() < 0.4:
        sizes[rng.choice(list(sizes))] = -1
    world = rng.randint(1, 64)
    suggestions = nearest_fits(sizes, world)
    for suggestion in suggestions:
        assert math.prod(resolve(suggestion, world).values()) == world and suggestion != sizes
    if sizes != {next(iter(sizes)): -1}:
        assert suggestions or resolve(sizes, world)
