"""What the tests on two hosts compare with, without two hosts."""

from __future__ import annotations

import pytest

from tests.two_hosts.hosts import Link
from tests.two_hosts.page import PAGE, Loss, Step, Way, section
from tests.two_hosts.traffic import ORDERS, SIZES, TRAININGS, traffic


@pytest.mark.parametrize("name", TRAININGS)
def test_each_order_is_one_that_place_ranks(name: str) -> None:
    found = traffic(name)
    assert len(ORDERS) == 6 and len(found.candidates) == 3
    predicted = {order: found.predicted_s(order) for order in ORDERS}
    assert sorted({round(s, 9) for s in predicted.values()}) == pytest.approx(found.candidates)
    # What the outermost dim sends crosses the cable: at least its bytes take their time there.
    for order, seconds in predicted.items():
        crossing = [share for dim, share in found.shares if dim == order[0]]
        sent = sum(share.calls * share.flow.size_bytes for share in crossing)
        assert seconds > sent / (200e6 / 8 / 4)
    assert {dim for dim, _ in found.shares} == set(SIZES)


def test_the_two_trainings_want_different_orders() -> None:
    slowest = {name: max(ORDERS, key=traffic(name).predicted_s)[0] for name in TRAININGS}
    assert slowest == {"activations": "tp", "weights": "dp"}


def test_the_page_is_what_the_run_writes() -> None:
    ways = [Way("flat", (2.0, 3.0), 56), Way("hierarchical", (1.0, 1.0), 32)]
    steps = [Step("weights", ("dp", "pp"), 0.5, (0.6, 0.7, 0.5))]
    text = section(Link(), 32_000_000, ways, steps, [Loss(2, "node1", "PeerLost", (0, 1), 7.5)], 6.0)
    assert "| flat | 2.50 | 2.00 3.00 | 0.0 MB |" in text
    assert "Hierarchical is 2.50 times as fast." in text
    assert "| weights | dp pp | 0.50 | 0.60 | 0.50 0.60 0.70 |" in text
    assert "| 2 | node1 | PeerLost | 0 1 | 7.5 |" in text
    # The one in docs has the same parts, with another run's figures.
    heads = [
        line for line in text.splitlines() if line.startswith(("#", "| algorithm", "| traffic", "| rank"))
    ]
    written = PAGE.read_text(encoding="utf-8").splitlines()
    assert [line for line in heads if line not in written] == []
