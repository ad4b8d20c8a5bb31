"""A barrier with a timeout names the ranks that did not come, on every rank that did."""

from __future__ import annotations

import pytest
import torch

from meshcomm.errors import BarrierTimeout, MeshcommError
from meshcomm.mesh import Mesh


# dp along tp=0 is 7 2 4 6, along tp=1 is 1 3 5 0.
@pytest.mark.mesh(dp=4, tp=2, rank_order=[7, 1, 2, 3, 4, 5, 6, 0], via="gloo")
def test_who_did_not_come(mesh: Mesh) -> None:
    for dims in (None, "dp", ("tp", "dp"), "tp"):
        mesh.barrier(dims, timeout_s=20)
    mesh.barrier("dp", timeout_s=20)
    assert list(mesh.warm_up()) == ["dp", "tp"]
    if mesh.coord("tp") == 1:
        mesh.barrier("dp", timeout_s=20)
    elif mesh.rank != 4:
        with pytest.raises(BarrierTimeout, match="1 of 4 ranks did not come within 2 s") as caught:
            mesh.barrier("dp", timeout_s=2)
        assert caught.value.missing == (4,)
        assert "missing: rank 4; came: rank 7 2 6" in str(caught.value)
    mesh.barrier(None)
    if mesh.rank == 4:  # comes after the others gave up: it must not go on as if they had met
        with pytest.raises(BarrierTimeout, match="all have come by now, but some gave up before"):
            mesh.barrier("dp", timeout_s=1)


@pytest.mark.mesh(
    dp=3,
    tp=1,
    options={"dp": {"timeout_s": 12.0}},
    via="gloo",
    not_via={"emulated_nccl": "a call returns when it is queued"},
)
def test_a_barrier_after_a_skipped_call_says_who_has_made_how_many(mesh: Mesh) -> None:
    for _ in range(5):
        mesh.barrier("dp", timeout_s=20)
        mesh.barrier(None, timeout_s=20)
    mesh.all_gather("dp", torch.ones(1))  # all have left the last barrier
    mesh.barrier("dp", timeout_s=20)
    # Only the keys of the barrier that a rank may still be leaving.
    assert len([key for key in mesh._store.list_keys() if "barrier/" in key]) <= 6
    with pytest.raises(MeshcommError) as caught:
        for number in range(80):
            if mesh.rank != 1 or number != 70:
                mesh.all_reduce("dp", torch.ones(1))
        mesh.barrier("dp", timeout_s=2)
    if mesh.rank == 1:
        text = str(caught.value)
        assert isinstance(caught.value, BarrierTimeout)
        assert text.startswith("barrier along dp on rank 1 (dp=1 tp=0): 2 of 3 ranks did not come")
        # 81 calls, of which rank 1 made 80: one all_gather before them.
        for rank in (0, 2):
            assert f"rank {rank} has made 81 calls on dp" in text
        assert ", this rank 80; its last: all_reduce at " in text and "test_barrier.py:" in text
        assert "mesh.step() after each step names the call" in text
