"""Stragglers: ranks that arrive late at calls that they make together."""

from __future__ import annotations

import time

import pytest
import torch

from meshcomm.mesh import Mesh
from meshcomm.mesh.all_ranks import arrivals


def test_arrivals_by_hand() -> None:
    # The ring of coord 0 no longer holds call 9, and coord 2 has not reached call 12.
    found = arrivals(
        [
            {10: 1_000, 11: 5_000, 12: 9_000},
            {9: 7, 10: 4_000, 11: 2_000},
            {9: 7, 10: 1_000, 11: 8_000},
        ],
        ranks=[3, 4, 5],
    )
    assert found.calls == 2
    assert found.mean_s == pytest.approx((1.5e-6, 1.5e-6, 3e-6))
    assert found.worst_s == pytest.approx((3e-6, 3e-6, 6e-6))
    assert found.last == (0.0, 0.5, 0.5)
    assert found.latest == 2
    nothing = arrivals([{}, {1: 5}], ranks=[0, 1])
    assert (nothing.calls, nothing.mean_s, nothing.last) == (0, (0.0, 0.0), (0.0, 0.0))


CALLS = 6


@pytest.mark.mesh(pp=2, dp=2, tp=2, via="gloo")
def test_the_slow_rank_is_found_along_its_dim(mesh: Mesh) -> None:
    x = torch.ones(2)
    for number in range(CALLS):
        if mesh.rank == 4:
            mesh.store.set(f"here/{number}", b"")
        if mesh.rank == 5:
            mesh.store.wait([f"here/{number}"])  # it arrives after rank 4, however busy the machine is
            time.sleep(0.15)
        mesh.all_reduce("tp", x, op="avg")
        mesh.all_reduce("dp", x, op="avg")
    found = mesh.debug.stragglers()
    assert found.hosts == 1 and found.latest["tp"].rank == 5
    assert 0.075 < found.latest["tp"].mean_s < 20
    assert set(found.groups) == {"pp", "dp", "tp"} and found.groups["pp"].calls == 0
    own = found.groups["tp"]
    assert own.ranks == tuple(mesh.ranks("tp")) and own.calls == CALLS
    if mesh.rank == 4:
        # Rank 5 holds rank 4 up, so rank 4 is late along dp. Along tp only rank 5 is late.
        assert own.last[1] > 0.8 and own.mean_s[1] > 0.075
        text = str(found)
        assert f"tp, {CALLS} calls" in text and "tp: rank 5, " in text
        assert "latest of the mesh along" in text
