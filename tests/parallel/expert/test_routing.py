"""The capacity of experts."""

from __future__ import annotations

from meshcomm.parallel.expert.routing import capacity


def test_the_capacity_is_the_decimal_one() -> None:
    assert capacity(1.1, 45, 2, 1) == 99
    assert capacity(1.0, 8, 2, 8) == 2
    assert capacity(1.01, 8, 2, 8) == 3
