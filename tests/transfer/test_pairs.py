"""`link.transfer` between random pairs of layouts, bit for bit what torch.chunk of the whole tensor gives."""

from __future__ import annotations

import pytest

import meshcomm
from meshcomm.testing import Pool
from meshcomm.transfer import plan
from tests.transfer.pairs import check_pair, check_pairs_on_process


@pytest.mark.parametrize("least_striped_bytes", [0, 64 << 10])
@pytest.mark.parametrize("block", range(13), ids="block{}".format)
@pytest.mark.deep_cases("block[1-9]")
def test_pairs_in_the_simulator(
    monkeypatch: pytest.MonkeyPatch, block: int, least_striped_bytes: int
) -> None:
    monkeypatch.setattr(plan, "_LEAST_STRIPED_BYTES", least_striped_bytes)
    for seed in range(block * 20, block * 20 + 20):
        meshcomm.simulate(lambda mesh: check_pair(seed, 8, mesh.rank), dims={"all": 8}, schedule_seed=seed)


def test_pairs_on_processes(pool: Pool) -> None:
    pool.run(check_pairs_on_process, range(1000, 1012), 0, ranks=6)


@pytest.mark.parity
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", [4, 6, 8])
def test_many_pairs_on_processes(pool: Pool, ranks: int) -> None:
    """300 pairs, each set on ranks that are forked once."""
    seeds = range(ranks * 10_000, ranks * 10_000 + 100)
    pool.run(check_pairs_on_process, seeds, 0 if ranks == 8 else 64 << 10, ranks=ranks, timeout_s=1000)
