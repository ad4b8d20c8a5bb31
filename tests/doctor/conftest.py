"""Tests of the doctor see no variables of a launcher, whatever an earlier test has set."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE", "NCCL_SOCKET_IFNAME") or name.startswith(("GLOO_", "SLURM_")):
            monkeypatch.delenv(name)
