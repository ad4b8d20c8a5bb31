"""Records of all ranks: stragglers, and the sums of all calls."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import meshcomm
from meshcomm.mesh import Mesh
from meshcomm.mesh.all_ranks import arrivals, of_every_rank, stats_of_all


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


def test_the_sums_of_all_ranks_name_the_slowest() -> None:
    # Rank r spent r + 1 seconds, and rank 2 made a call that the others did not.
    records: list[Any] = [(rank, rank + 1.0, [("tp", "shift", False, 1, 8, rank + 1.0)]) for rank in range(4)]
    records[2][2].append(("dp", "send", True, 3, 24, 0.5))
    found = stats_of_all(reversed(records), ["dp", "tp"])
    assert found.seconds == 4.0
    assert [tuple(row) for row in found.rows] == [
        ("dp", "send", True, 1, 3, 24, 0.5, 2, 0.5, 2, 0.5),
        ("tp", "shift", False, 4, 4, 32, 2.5, 0, 1.0, 3, 4.0),
    ]
    # Among equally fast ranks the lowest is named; one rank with unknown seconds makes all times unknown.
    equal = [(rank, 1.0, [("tp", "shift", False, 1, 8, 2.0)]) for rank in (3, 1)]
    assert stats_of_all(equal, []).rows[0][6:] == (2.0, 1, 2.0, 1, 2.0)
    unknown = [*equal, (0, 1.0, [("tp", "shift", False, 1, 8, None)])]
    assert stats_of_all(unknown, []).rows[0][6:] == (None, 0, None, 0, None)


def test_records_of_all_ranks_are_in_the_order_of_the_grid() -> None:
    def body(mesh: Mesh) -> list[int]:
        return of_every_rank(mesh, mesh.rank)

    for found in meshcomm.simulate(body, dims={"dp": 2, "one": 1, "tp": 3}):
        assert found == list(range(6))
