"""A rank that waits at the store can still be asked what it does: others must not call it dead."""

from __future__ import annotations

import torch

import meshcomm
from meshcomm.errors import BarrierTimeout, CommunicationError, StoreTimeout
from meshcomm.testing import Pool


def asked_while_it_waits() -> str:
    options = {"tp": {"timeout_s": 1}}
    with meshcomm.init(dims={"dp": 2, "tp": 2}, device="cpu", timeout_s=30, options=options) as mesh:
        mesh.warm_up()
        try:
            if mesh.coord("tp") == 1:
                mesh.all_reduce("tp", torch.ones(1))
            elif mesh.coord("dp") == 0:
                mesh.store.get("nobody sets it", timeout_s=4)
            else:
                mesh.barrier("dp", timeout_s=4)
        except (CommunicationError, StoreTimeout, BarrierTimeout) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"


def test_who_waits_at_the_store_answers(pool: Pool) -> None:
    at_get, asks_it, at_barrier, asks_the_other = pool.run(asked_while_it_waits, ranks=4)
    assert at_get.startswith("StoreTimeout")
    assert at_barrier.startswith("BarrierTimeout")
    for asked in (asks_it, asks_the_other):
        assert "in asked_while_it_waits" in asked
        assert "has ended" not in asked
