"""A barrier names the device of the mesh."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from meshcomm.collectives import BARRIER
from meshcomm.transport import ProcessGroupTransport
from meshcomm.transport.base import Call


def test_a_barrier_names_the_device_of_the_mesh() -> None:
    # Without a device, NCCL guesses one from the rank and creates a context there.
    told: list[Any] = []
    group: Any = SimpleNamespace(
        group_name="dp", size=lambda: 2, rank=lambda: 0, barrier=told.append, allreduce=lambda *given: None
    )
    transport = ProcessGroupTransport(group, "nccl", torch.device("cuda", 3), owned=False, timeout_s=1.0)
    transport.start(Call(BARRIER, blocking=True))
    assert told[0].device == torch.device("cuda", 3)
