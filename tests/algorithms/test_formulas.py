"""The formulas for the cost of an algorithm: times by hand, and the tables of the guide."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshcomm.algorithms import formulas
from tests.documents import tool

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "costs.md"


def test_times_by_hand() -> None:
    alpha, beta, size = 5e-6, 1e-9, 1 << 24
    assert formulas.tree(64, size).seconds(alpha, beta) == pytest.approx(12 * alpha + 12 * size * beta)
    assert formulas.ring(8, size).seconds(alpha, beta) == pytest.approx(14 * alpha + 1.75 * size * beta)
    # With 64 chunks, the busiest port determines the time instead of the chain.
    assert formulas.tree(64, size, 64).seconds(alpha, beta) == pytest.approx(75 * alpha + 3 * size * beta)


def test_the_guide_has_the_tables_of_the_formulas() -> None:
    text, page = GUIDE.read_text(), tool("algorithms")
    for table in (page.counts(), page.fastest(), page.many()):
        assert table in text, "python docs/tools/algorithms.py makes the tables"
