"""Checks the predictions that the tests on two hosts compare with; needs no two hosts."""

from __future__ import annotations

import pytest

from tests.two_hosts.traffic import ORDERS, SIZES, TRAININGS, traffic


@pytest.mark.parametrize("name", TRAININGS)
def test_each_order_is_one_that_tune_ranks(name: str) -> None:
    found = traffic(name)
    assert len(ORDERS) == 6 and len(found.candidates) == 3
    predicted = {order: found.predicted_s(order) for order in ORDERS}
    assert sorted({round(s, 9) for s in predicted.values()}) == pytest.approx(found.candidates)
    # Messages along the outermost dim cross the cable, so a step takes at least as long as their bytes do.
    for order, seconds in predicted.items():
        crossing = [share for dim, share in found.shares if dim == order[0]]
        sent = sum(share.calls * share.flow.size_bytes for share in crossing)
        assert seconds > sent / (200e6 / 8 / 4)
    assert {dim for dim, _ in found.shares} == set(SIZES)


def test_the_two_trainings_want_different_orders() -> None:
    slowest = {name: max(ORDERS, key=traffic(name).predicted_s)[0] for name in TRAININGS}
    assert slowest == {"activations": "tp", "weights": "dp"}
