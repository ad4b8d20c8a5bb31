"""A stopped or hung rank is replaced like a dead one, at the timeout of the call in which all others wait."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest

from meshcomm.rendezvous.generation import hung_in
from meshcomm.testing import Pool
from tests.elastic.deaths import config_of, forked_training, simulated, training
from tests.elastic.test_replaced import run

STEPS = 12

HANGS = """
import os, signal, sys, time, meshcomm, torch
way = sys.argv[1]
mesh = meshcomm.init(dims={"dp": 2, "tp": 2}, timeout_s=4)
first = not mesh.elastic.generation.number
begun = first

def of_the_farthest(step):
    for dim in ("dp", "tp"):
        step = max(mesh.objects.all_gather(dim, step))
    return step

def hangs():
    if way == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif way == "outside":
        time.sleep(60)
    elif way == "in C":
        import ctypes
        ctypes.PyDLL(None).sleep(60)  # a call that keeps Python's GIL

step, lost = 0, None
while step < 6:
    try:
        if lost is not None:
            mesh.elastic.reopen(lost)
            lost, begun = None, False
        if not begun:
            step, begun = of_the_farthest(step), True
        if (mesh.rank, step) == (3, 2) and first:
            hangs()
        if way == "message" and (mesh.rank, step) == (1, 2) and first:
            time.sleep(60)
        x = torch.full((2,), float(step))
        if way == "message":
            y = mesh.shift("tp", x, 1)
        if way == "async":
            mesh.all_reduce("tp", x, async_op=True).wait()
            if (mesh.rank, step) == (3, 2) and first:
                time.sleep(60)
        if way == "torch":
            if (mesh.rank, step) == (3, 2) and first:
                time.sleep(60)
            torch.distributed.all_reduce(x, group=mesh.group("tp"))
        mesh.all_reduce("tp", x)
        mesh.all_reduce("dp", x)
        mesh.barrier()
        step += 1
    except Exception as error:
        if mesh.elastic.lost(error) is None:
            raise
        lost = error
print("done", step, dict(mesh.elastic.generation.replaced))
mesh.elastic.finish()
"""


@pytest.mark.faults
@pytest.mark.parametrize(
    ("way", "rank", "what"),
    [
        ("stopped", 3, "hung: it does not answer: its process is stopped"),
        ("outside", 3, "hung: it is at "),
        ("in C", 3, "hung: it does not answer, but its process runs"),
        ("message", 1, "hung: it is at "),
        ("async", 3, "hung: it is at "),
        ("torch", 3, "hung: it is at "),
    ],
)
def test_a_loop_of_ones_own_goes_on_without_a_hung_rank(
    way: str, rank: int, what: str, tmp_path: Path
) -> None:
    script = tmp_path / "hangs.py"
    script.write_text(HANGS)
    ended = run("--world-size", "4", str(script), way)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("done 6") == 4, ended.stdout + ended.stderr
    (said,) = (line for line in ended.stderr.splitlines() if "replacements left: 0" in line)
    assert said.startswith(f"meshcomm: rank {rank} (dp={rank // 2} tp={rank % 2}) {what}"), said


SKIPS = """
import sys, meshcomm, torch
mesh = meshcomm.init(dims={"dp": 2}, timeout_s=3, validate_calls=0)
for step in range(20):
    try:
        mesh.all_reduce("dp", torch.ones(2))
        if (mesh.rank, step) == (1, 3):
            mesh.barrier("dp")
    except meshcomm.errors.RankLost as error:
        mesh.elastic.reopen(error)
if mesh.rank == 1:
    mesh.barrier()
mesh.close()
"""


@pytest.mark.faults
def test_ranks_that_make_different_calls_are_not_hung(tmp_path: Path) -> None:
    """Such a mistake ends the program, as without --replace."""
    script = tmp_path / "skips.py"
    script.write_text(SKIPS)
    ended = run("--world-size", "2", str(script), replace=3)
    assert ended.returncode != 0
    assert "hung" not in ended.stderr and "replaced" not in ended.stderr, ended.stderr


def stop(job: object, rank: int) -> psutil.Process:
    process: psutil.Process = job.ranks()[rank]  # type: ignore[attr-defined]
    process.send_signal(signal.SIGSTOP)
    return process


@pytest.mark.faults
def test_a_training_replaces_a_stopped_rank_and_not_one_that_continues(pool: Pool, tmp_path: Path) -> None:
    words = ["--set", "mesh.timeout_s=5.0"]
    with forked_training(pool, tmp_path, config_of("dp2", STEPS), 1, words=words) as job:
        assert job.await_step(2)
        process = stop(job, 1)
        time.sleep(1)
        process.send_signal(signal.SIGCONT)
        assert job.await_step(4)
        assert "replaced" not in job.log.read_text() and job.ranks()[1].pid == process.pid
        stop(job, 0)
        assert job.process.wait(100) == 0, job.log.read_text()
        assert [line["loss"] for line in job.lines] == simulated(tmp_path, "dp2", STEPS)
        said = job.log.read_text()
    assert "rank 0 (dp=0) hung: it does not answer: its process is stopped; replaced" in said, said
    assert "rank 0 replaced: continues after step" in (tmp_path / "out").read_text()


@pytest.mark.faults
@pytest.mark.parametrize("mesh", ["pp2 dp2 tp2", "dp2 fsdp2"])
def test_a_rank_that_others_wait_for_through_others_is_found(mesh: str, tmp_path: Path) -> None:
    with training(tmp_path / "before", config_of(mesh, STEPS), 0) as job:
        assert job.process.wait(200) == 0, job.log.read_text()
        before = [line["loss"] for line in job.lines]
    words = ["--set", "mesh.timeout_s=8.0"]
    with training(tmp_path / "after", config_of(mesh, STEPS), 1, words=words) as job:
        assert job.await_step(3)
        stop(job, 2)
        assert job.process.wait(200) == 0, job.log.read_text()
        said = job.log.read_text()
        assert [line["loss"] for line in job.lines] == before, said
    assert said.count("replacements left: 0") == 1 and "rank 2 (" in said


def test_a_report_of_an_earlier_generation_counts_no_longer() -> None:
    class Store(dict[str, bytes]):
        def check(self, keys: list[str]) -> bool:
            return all(key in self for key in keys)

    store = Store({"meshcomm/hung/1": b'[3, "is stopped"]\n[3, "is stopped"]\n[1, "is at a.py:1"]\n'})
    assert hung_in(store, 1) == {3: "is stopped", 1: "is at a.py:1"}
    assert hung_in(store, 2) == {}
