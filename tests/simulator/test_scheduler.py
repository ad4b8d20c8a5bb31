"""Simulated ranks run one at a time: schedules by seed, interrupts, unwinding, and ranks that wait outside the mesh."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import meshcomm
from meshcomm.errors import CallMismatchError, DeadlockError, RankFailed
from meshcomm.mesh import Mesh
from meshcomm.simulator import scheduler
from tests.simulator.planted_bugs import DIMS, MERGE, one
from tests.simulator.test_diagnosis import verdict_of


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
    assert "test_scheduler.py:" in str(caught.value) and "mesh.store.wait" in str(caught.value)
    give_up.set()
    until = time.monotonic() + 20
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() == before
    # The ranks ended after the simulation, and this process's environment is unchanged.
    assert "RANK" not in os.environ


@pytest.mark.timeout(60)
@pytest.mark.parametrize("seed", range(4))
def test_a_rank_that_sleeps_for_longer_than_others_wait_is_named_at_once(seed: int) -> None:
    def program(mesh: Mesh) -> None:
        if mesh.rank == 1:
            time.sleep(1e6)
        mesh.all_reduce("dp", torch.ones(1))

    with pytest.raises(
        DeadlockError, match=r"rank 1 sleeps for longer than the timeout, while ranks 0 2 wait"
    ) as caught:
        meshcomm.simulate(program, dims={"dp": 3}, schedule_seed=seed)
    assert "rank 1 (dp=1) sleeps for 1e+06 s at " in str(caught.value)
    assert "rank 2 (dp=2) waits in all_reduce, call 1 on dp at " in str(caught.value)


@pytest.mark.timeout(60)
def test_a_long_sleep_is_no_error_if_nobody_gives_up_meanwhile() -> None:
    def program(mesh: Mesh) -> bytes:
        if mesh.rank == 1:
            time.sleep(0.3)
            mesh.store.set("done", b"1")
        return mesh.store.get("done", timeout_s=60)

    assert meshcomm.simulate(program, {"mesh": {"dims": {"dp": 2}, "timeout_s": 0.2}}) == [b"1", b"1"]


def test_one_seed_is_one_schedule() -> None:
    def first_come(mesh: Mesh) -> Any:
        # Wrong: a rank does not know which ranks reached the store first.
        root = 0 if mesh.store.add("come", 1) <= 2 else 1
        return mesh.broadcast("tp", one(mesh.rank), src=root)

    def verdict(seed: int) -> str:
        try:
            meshcomm.simulate(first_come, dims=DIMS, schedule_seed=seed)
        except CallMismatchError as error:
            return str(error)
        return ""

    failed = {seed: text for seed in range(20) if (text := verdict(seed))}
    assert failed
    for seed, text in failed.items():
        assert f"schedule seed {seed} reproduces it" in text and verdict(seed) == text


def test_ranks_are_unwound_through_their_finally_blocks_and_broad_excepts() -> None:
    cleaned: list[int] = []

    def program(mesh: Mesh) -> None:
        try:
            try:
                mesh.all_reduce("tp" if mesh.rank in (1, 2) else "dp", one())
            except Exception:
                raise AssertionError("a verdict is not for the program to catch") from None
        finally:
            cleaned.append(mesh.rank)
            # A call that waits while its rank is unwound ends the rank again.
            mesh.barrier("tp")

    assert isinstance(verdict_of(program), DeadlockError)
    assert sorted(cleaned) == [0, 1, 2, 3]


@pytest.mark.parametrize("look_s", [0.0, scheduler._LOOK_S], ids=["at any line", "while it waits"])
def test_an_interrupt_ends_all_ranks(look_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_LOOK_S", look_s)

    def raises(mesh: Mesh) -> None:
        if mesh.rank == 1:
            raise KeyboardInterrupt
        mesh.barrier("all")

    def goes_on(mesh: Mesh) -> None:
        if mesh.rank == 1:
            os.kill(os.getpid(), signal.SIGINT)
        while True:
            mesh.barrier("all")

    before = threading.active_count()
    error = verdict_of(raises)
    assert isinstance(error, RankFailed) and isinstance(error.by_rank[1], KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        meshcomm.simulate(goes_on, dims=DIMS, merge=MERGE)
    assert threading.active_count() == before


def test_an_interrupt_does_not_wait_for_a_rank_that_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_PATIENCE_S", 0.1)
    over = threading.Event()

    def sleeps(mesh: Mesh) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        over.wait(30)

    with pytest.raises(KeyboardInterrupt):
        meshcomm.simulate(sleeps, dims={"x": 1})
    (rank,) = [each for each in threading.enumerate() if each.name == "meshcomm-rank-0"]
    over.set()
    rank.join(30)


def test_a_simulation_inside_a_rank_is_one_of_its_own() -> None:
    def inner(mesh: Mesh) -> int:
        return int(mesh.all_reduce("x", torch.tensor(mesh.rank)).item())

    def outer(mesh: Mesh) -> tuple[list[int], int]:
        found = meshcomm.simulate(inner, dims={"x": 3})
        return found, int(mesh.all_reduce("all", torch.tensor(mesh.rank)).item())

    assert meshcomm.simulate(outer, dims=DIMS, merge=MERGE) == [([3, 3, 3], 6)] * 4


@pytest.mark.deep
def test_stacks_are_taken_without_a_collection_that_would_hang() -> None:
    # Python 3.11 holds a lock while it lists the stacks, and the end of a threading.local asks for the same lock.
    program = """
import gc, threading
from meshcomm.watching.callsite import thread_frames
class Ring: pass
done = threading.Event()
for more in range(8):
    for _ in range(4):
        threading.Thread(target=done.wait, daemon=True).start()
    gc.collect(), gc.disable()
    ring = Ring()
    ring.me, ring.local = ring, threading.local()
    ring.local.x, ring = 1, None
    gc.set_threshold(gc.get_count()[0] + more), gc.enable()
    assert thread_frames()[threading.get_ident()].f_code.co_name == "<module>"
assert gc.isenabled()
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=200).returncode == 0
