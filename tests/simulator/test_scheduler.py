"""A simulated rank waits outside the mesh: for a file, for a future, or in its own loop."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

import meshcomm
from meshcomm.errors import DeadlockError
from meshcomm.mesh import Mesh


@pytest.mark.timeout(60)
@pytest.mark.parametrize("waits", [0, 1])
def test_a_rank_that_sleeps_until_there_is_a_file_lets_the_writer_run(waits: int, tmp_path: Path) -> None:
    def program(mesh: Mesh) -> str:
        file = tmp_path / "ready"
        if mesh.rank == waits:
            while not file.exists():
                time.sleep(0.001)
        else:
            file.write_text("there")
        mesh.barrier()
        return file.read_text()

    assert meshcomm.simulate(program, dims={"dp": 2}) == ["there"] * 2


@pytest.mark.timeout(60)
@pytest.mark.deep
def test_a_rank_that_never_lets_others_run_is_named_after_the_timeout(tmp_path: Path) -> None:
    before = threading.active_count()
    give_up = threading.Event()

    def program(mesh: Mesh) -> None:
        if mesh.rank == 1:
            while not (tmp_path / "ready").exists() and not give_up.is_set():
                pass
        mesh.barrier()
        (tmp_path / "ready").touch()

    with pytest.raises(DeadlockError, match=r"rank 1 \(dp=1\) has run for 0.5 s without letting") as caught:
        meshcomm.simulate(program, {"mesh": {"dims": {"dp": 3}, "timeout_s": 0.5}})
    assert "test_yielding.py:" in str(caught.value) and "mesh.store.wait" in str(caught.value)
    give_up.set()
    until = time.monotonic() + 20
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() == before
    # The ranks ended after the simulation, and this process's environment is unchanged.
    assert "RANK" not in os.environ
