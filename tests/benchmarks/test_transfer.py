"""The benchmark of transfers, on small weights: both ways give equal weights, and a link sends no byte twice."""

from __future__ import annotations

from meshcomm.testing import Pool
from tests.benchmarks.transfer import CASES, measured


def test_a_transfer_receives_what_it_needs(pool: Pool) -> None:
    case = [*CASES][2]
    ranks = pool.run(measured, case, 1, 32, ranks=8)
    assert {result.received for result in ranks} == {1.0} and len(ranks[0].ours) == len(ranks[0].theirs) == 1
