"""A job opens meshes in turn, under launchers where rank 0 serves the store. This works whichever rank is late."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

import meshcomm
from meshcomm.rendezvous.job_store import find_job, stop_serving
from meshcomm.testing import Pool
from tests.forked_jobs import Job
from tests.ports import free_port
from tests.rendezvous.test_job_store import flux, intel_mpi, open_mpi, slurm_steps

WORLD = 3
Launcher = Callable[[int, int], Mapping[str, str]]

# A rank may be late inside a mesh, or between two meshes.
IN_TURN = """
import os, sys
from tests.rendezvous.test_meshes_in_turn import in_turn
in_turn(int(os.environ["THIS"]), os.environ["LATE"], int(os.environ["TIMES"]))
"""


def in_turn(rank: int, late: str, times: int, port: int | None = None) -> None:
    """Open `times` meshes. late: "ever" (all ranks, random delays), or which ranks are late and where, such as "0 inside"."""
    if port is not None:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    told = {} if port is None else {"rank": rank, "world_size": WORLD}
    chance = random.Random(rank)

    def wait(where: str) -> None:
        if late == "ever":
            time.sleep(chance.random() / 20)
        elif f"{'others' if rank else 0} {where}" in late.split(", "):
            time.sleep(0.3)

    for number in range(times):
        with meshcomm.init(dims={"dp": WORLD}, device="cpu", timeout_s=30, **told) as mesh:  # type: ignore[arg-type]
            x = torch.tensor([float(rank + number)])
            assert mesh.all_reduce("dp", x).item() == sum(range(WORLD)) + WORLD * number
            wait("inside" if number < times - 1 else "at the end")
            # The remaining calls need the store, but not rank 0.
            if rank:
                mesh.store.set(f"{rank}", "there")
                assert mesh.store.get(f"{WORLD - rank}") == b"there"
        wait("between")
    print("in turn", flush=True)


def shell_loop(job: int, rank: int) -> Mapping[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1"}


def of_three(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables of another test's two-rank launchers, for three ranks. The jobs get other names, because both tests may
    run at the same time.
    """
    sizes = ("SIZE", "TASKS", "NRANKS")
    more = {name: str(WORLD) for name in variables if name.endswith(sizes)}
    jobs = {
        name: f"{value}{os.getpid()}"
        for name, value in variables.items()
        if name.endswith(("JOB_ID", "NAMESPACE"))
    }
    return {**variables, **more, **jobs}


def outcomes(pool: Pool, folder: Path, launcher: Launcher, late: str, times: int, port: int) -> list[object]:
    more = {"LATE": late, "TIMES": str(times)}
    if launcher in (shell_loop, intel_mpi):
        more["MASTER_PORT"] = str(port)
    jobs = [
        Job(
            *(pool, folder, "-c", IN_TURN),
            env={**of_three(launcher(0, rank)), **more, "THIS": str(rank), "PYTHONPATH": os.getcwd()},
            name=f"{rank}-",
        )
        for rank in range(WORLD)
    ]
    return [job.finish() for job in jobs]


FINE = [(0, "in turn\n", "")] * WORLD
LAUNCHERS = [shell_loop, slurm_steps, open_mpi, intel_mpi, flux]
# As in torch's order of processes, rank 0 leaves first and arrives last.
HARD = "0 inside, others at the end"


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.__name__)
@pytest.mark.deep_cases(r"\[(intel_mpi|flux)")
def test_rank_0_leaves_after_the_others_or_before(pool: Pool, tmp_path: Path, launcher: Launcher) -> None:
    assert outcomes(pool, tmp_path, launcher, HARD, 2, free_port()) == FINE


@pytest.mark.parametrize("late", ["0 between", "others inside", "others between"])
def test_whichever_rank_is_late(pool: Pool, tmp_path: Path, late: str) -> None:
    assert outcomes(pool, tmp_path, slurm_steps, late, 2, free_port()) == FINE


def test_twenty_meshes_whose_ranks_are_late_by_chance(pool: Pool, tmp_path: Path) -> None:
    assert outcomes(pool, tmp_path, shell_loop, "ever", 20, free_port()) == FINE


def test_a_second_job_at_the_port_of_the_first(pool: Pool, tmp_path: Path) -> None:
    port = free_port()
    for _ in range(2):
        assert outcomes(pool, tmp_path, shell_loop, "others at the end", 1, port) == FINE


@pytest.mark.parametrize(
    "start_method", [pytest.param("spawn", marks=pytest.mark.faults), "fork", "forkserver"]
)
def test_under_multiprocessing(start_method: str) -> None:
    """Processes end differently with each start method."""
    mp.start_processes(in_turn, (HARD, 2, free_port()), nprocs=WORLD, start_method=start_method)


def test_a_store_is_not_left_to_another_job_of_the_same_process() -> None:
    port, short = free_port(), timedelta(seconds=5)
    first = find_job("127.0.0.1", [port], "one", 0, 1, short)
    first.set("key", "of one")
    del first
    assert find_job("127.0.0.1", [port], "one", 0, 1, short).get("key") == b"of one"
    assert not find_job("127.0.0.1", [port], "two", 0, 1, short).check(["key"])
    stop_serving(port)
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_after_ranks_that_never_arrived_a_rank_0_that_stays_meets_new_processes(
    pool: Pool, tmp_path: Path
) -> None:
    """As in a notebook whose other ranks are started again after a mistake."""
    script = """
import os, subprocess, sys, meshcomm
os.environ |= {"RANK": "0", "WORLD_SIZE": "2"}
try:
    meshcomm.init(dims={"dp": 2}, device="cpu", timeout_s=1)
except meshcomm.MeshcommError as error:
    print(error.missing)
code = "import meshcomm; meshcomm.init(dims={'dp': 2}, device='cpu', timeout_s=60).close()"
other = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"RANK": "1"})
meshcomm.init(dims={"dp": 2}, device="cpu", timeout_s=60).close()
print(other.wait())
"""
    job = Job(pool, tmp_path, "-c", script, env={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())})
    assert job.finish()[:2] == (0, "(1,)\n0\n")
