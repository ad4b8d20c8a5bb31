"""Barriers with a timeout name the ranks that did not arrive."""

from __future__ import annotations

import pytest
import torch

from meshcomm.errors import BarrierTimeout, CommunicationError, MeshcommError, StoreTimeout
from meshcomm.mesh import Mesh


@pytest.mark.faults
@pytest.mark.mesh(
    dp=2,
    tp=2,
    options={"tp": {"timeout_s": 1.0}},
    via="gloo",
    not_via={"emulated_nccl": "a call returns when it is queued"},
)
def test_who_waits_at_the_store_answers(mesh: Mesh) -> None:
    """It still reports its state, so that others do not take it for dead."""
    mesh.warm_up()
    if mesh.coord("tp") == 1:
        with pytest.raises(CommunicationError, match="in test_who_waits_at_the_store_answers") as caught:
            mesh.all_reduce("tp", torch.ones(1))
        assert "has ended" not in str(caught.value)
    elif mesh.coord("dp") == 0:
        with pytest.raises(StoreTimeout):
            mesh.store.get("nobody sets it", timeout_s=2.5)
    else:
        with pytest.raises(BarrierTimeout):
            mesh.debug.monitored_barrier("dp", timeout_s=2.5)


# dp along tp=0 is 7 2 4 6, along tp=1 is 1 3 5 0.
@pytest.mark.mesh(dp=4, tp=2, rank_order=[7, 1, 2, 3, 4, 5, 6, 0], via="gloo")
def test_who_did_not_come(mesh: Mesh) -> None:
    for dims in (None, "dp", ("tp", "dp"), "tp"):
        mesh.debug.monitored_barrier(dims, timeout_s=20)
    mesh.debug.monitored_barrier("dp", timeout_s=20)
    assert list(mesh.warm_up()) == ["dp", "tp"]
    if mesh.coord("tp") == 1:
        mesh.debug.monitored_barrier("dp", timeout_s=20)
    elif mesh.rank != 4:
        with pytest.raises(BarrierTimeout, match="1 of 4 ranks did not arrive within 2 s") as caught:
            mesh.debug.monitored_barrier("dp", timeout_s=2)
        assert caught.value.missing == (4,)
        assert "missing: rank 4; arrived: rank 7 2 6" in str(caught.value)
    mesh.barrier(None)
    if mesh.rank == 4:  # arrives after the others gave up, and must not continue as if they had met
        with pytest.raises(BarrierTimeout, match="all have arrived by now, but some gave up earlier"):
            mesh.debug.monitored_barrier("dp", timeout_s=1)


@pytest.mark.mesh(
    dp=3,
    tp=1,
    options={"dp": {"timeout_s": 12.0}},
    via="gloo",
    not_via={"emulated_nccl": "a call returns when it is queued"},
)
def test_a_barrier_after_a_skipped_call_says_who_has_made_how_many(mesh: Mesh) -> None:
    for _ in range(5):
        mesh.debug.monitored_barrier("dp", timeout_s=20)
        mesh.debug.monitored_barrier(None, timeout_s=20)
    mesh.all_gather("dp", torch.ones(1))  # all have left the last barrier
    mesh.debug.monitored_barrier("dp", timeout_s=20)
    # Only keys of the barrier that some rank may still be leaving exist.
    assert len([key for key in mesh._state.held.store.list_keys() if "barrier/" in key]) <= 6
    with pytest.raises(MeshcommError) as caught:
        for number in range(80):
            if mesh.rank != 1 or number != 70:
                mesh.all_reduce("dp", torch.ones(1))
        mesh.debug.monitored_barrier("dp", timeout_s=2)
    if mesh.rank == 1:
        text = str(caught.value)
        assert isinstance(caught.value, BarrierTimeout)
        assert text.startswith("barrier along dp on rank 1 (dp=1 tp=0): 2 of 3 ranks did not arrive")
        # 81 calls, of which rank 1 made 80: one all_gather before the 80 all_reduces.
        for rank in (0, 2):
            assert f"rank {rank} has made 81 calls on dp" in text
        assert ", this rank 80; its last call: all_reduce at " in text and "test_barriers.py:" in text
        assert "mesh.step() after each step names the call" in text
