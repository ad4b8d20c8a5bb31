"""A barrier with a timeout names the ranks that did not come, on every rank that did."""

from __future__ import annotations

import time

import torch

import meshcomm
from meshcomm.errors import BarrierTimeout, MeshcommError
from meshcomm.testing import Pool


def missing_one() -> tuple[str, tuple[int, ...], float]:
    with meshcomm.init(
        dims={"dp": 4, "tp": 2}, rank_order=[7, 1, 2, 3, 4, 5, 6, 0], device="cpu", timeout_s=30
    ) as mesh:
        for dims in (None, "dp", ("tp", "dp"), "tp"):
            mesh.barrier(dims, timeout_s=20)
        mesh.barrier("dp", timeout_s=20)
        took = mesh.warm_up()
        assert list(took) == ["dp", "tp"]
        began = time.monotonic()
        text, missing = "", ()
        if mesh.rank != 4:
            try:
                mesh.barrier("dp", timeout_s=2.0 if mesh.coord("tp") == 0 else 20.0)
            except BarrierTimeout as error:
                text, missing = str(error), error.missing
        waited = time.monotonic() - began
        mesh.barrier(None)
        if mesh.rank == 4:  # comes after the others gave up: it must not go on as if they had met
            try:
                mesh.barrier("dp", timeout_s=1.0)
            except BarrierTimeout as error:
                text = str(error)
        return text, missing, waited


def test_who_did_not_come(pool: Pool) -> None:
    found = pool.run(missing_one)
    # dp along tp=0 is 7 2 4 6, along tp=1 is 1 3 5 0.
    for rank in (7, 2, 6):
        text, missing, waited = found[rank]
        assert missing == (4,)
        assert "1 of 4 ranks did not come within 2 s" in text
        assert "missing: rank 4; came: rank 7 2 6" in text
        assert waited < 25
    for rank in (0, 1, 3, 5):
        assert found[rank][0] == ""
    assert "all have come by now, but some gave up before" in found[4][0]


def one_call_short() -> tuple[str, int]:
    with meshcomm.init(
        dims={"dp": 3, "tp": 1}, device="cpu", timeout_s=20, options={"dp": {"timeout_s": 12}}
    ) as mesh:
        for _ in range(5):
            mesh.barrier("dp", timeout_s=20)
            mesh.barrier(None, timeout_s=20)
        mesh.all_gather("dp", torch.ones(1))  # all have left the last barrier
        mesh.barrier("dp", timeout_s=20)
        kept = [key for key in mesh._store.list_keys() if "barrier/" in key]
        text = ""
        try:
            for number in range(80):
                if mesh.rank != 1 or number != 70:
                    mesh.all_reduce("dp", torch.ones(1))
            mesh.barrier("dp", timeout_s=2)
        except MeshcommError as error:
            text = f"{type(error).__name__}: {error}"
        return text, len(kept)


def test_a_barrier_after_a_skipped_call_says_who_has_made_how_many(pool: Pool) -> None:
    found = pool.run(one_call_short, ranks=3)
    text = found[1][0]
    assert text.startswith(
        "BarrierTimeout: barrier along dp on rank 1 (dp=1 tp=0): 2 of 3 ranks did not come"
    )
    # 81 calls, of which rank 1 made 80: one all_gather before them.
    for rank in (0, 2):
        assert f"rank {rank} has made 81 calls on dp" in text
    assert ", this rank 80; its last: all_reduce at " in text and "test_barrier.py:" in text
    assert "mesh.step() after each step names the call" in text
    # Only the keys of the barrier that a rank may still be leaving.
    assert all(kept <= 6 for _, kept in found)


def negated() -> list[float]:
    """Lazily negated and conjugated memory, where a flag says what the values are."""
    with meshcomm.init(dims={"dp": 2}, device="cpu", timeout_s=30) as mesh:
        sums = []
        for _ in range(2):
            x = torch.tensor([1 + 2j]).conj().imag
            assert x.is_neg()
            assert x.is_contiguous()
            sums.append(mesh.all_reduce("dp", x).item())
            y = torch.tensor([1 + 2j]).conj()
            sums.append(mesh.all_reduce("dp", y).imag.item())
            sums.append(mesh.all_gather("dp", torch.tensor([1 + 2j]).conj()).sum().imag.item())
        return sums


def test_values_behind_a_flag(pool: Pool) -> None:
    assert pool.run(negated, ranks=2) == [[-4.0, -4.0, -4.0] * 2] * 2
