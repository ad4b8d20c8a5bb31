"""The meaning of each launcher's environment."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from meshcomm.errors import LaunchError
from meshcomm.rendezvous.launcher import (
    Launch,
    attempt_prefix,
    find_launch,
    is_helper,
    launch_of_command,
    speak_for_rank,
)


def env(text: str) -> dict[str, str]:
    return dict(each.split("=") for each in text.split())


TORCHRUN = env("RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=10.0.0.7 MASTER_PORT=2950")
SLURM = env(
    "SLURM_PROCID=9 SLURM_NTASKS=16 SLURM_LOCALID=1 SLURM_JOB_ID=123456 SLURM_STEP_ID=0 SLURM_NNODES=2"
)
SLURM |= {"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_STEP_NODELIST": "gpu[007-008]"}
OMPI = "OMPI_COMM_WORLD_"
OPEN_MPI = env(f"{OMPI}RANK=3 {OMPI}SIZE=4 {OMPI}LOCAL_RANK=3 {OMPI}LOCAL_SIZE=4 PMIX_NAMESPACE=1331822593")
# sbatch starts the script once, without a job step.
BATCH = env("SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_LOCALID=0 SLURM_JOB_ID=7 SLURM_NNODES=1")

# Variables that are set in addition to these environments, and the expected launch.
ONE_NODE = ("slurm", 9, 16, 1, 16, "127.0.0.1")
STEP = "Slurm step 123456.0"
OF_MPI = ("mpi", 3, 4, 3, 4, "127.0.0.1")
MPI_JOB = "OpenMPI job 1331822593"
OF_TORCHRUN = ("torchrun", 5, 8, 1, 4, "10.0.0.7", 2950)
FLUX = env("FLUX_TASK_RANK=1 FLUX_JOB_SIZE=2 FLUX_TASK_LOCAL_ID=1 FLUX_JOB_NNODES=1 FLUX_JOB_ID=f4")


@pytest.mark.parametrize(
    ("variables", "more", "launch"),
    [
        ({}, "", Launch("single", 0, 1, 0, 1)),
        (TORCHRUN, "", Launch(*OF_TORCHRUN)),
        ({}, "RANK=0 WORLD_SIZE=1", Launch("torchrun", 0, 1, 0, 1, placed=False)),
        ({}, "RANK=1 WORLD_SIZE=4", Launch("torchrun", 1, 4, 0, 1, placed=False)),
        (SLURM, "", Launch("slurm", 9, 16, 1, 8, "gpu007", job=STEP)),
        (
            SLURM,
            "MASTER_PORT=1234 MASTER_ADDR=head SLURM_RESTART_COUNT=2",
            Launch("slurm", 9, 16, 1, 8, "head", 1234, job=f"{STEP}, requeued 2 times"),
        ),
        ({**SLURM, **TORCHRUN}, "", Launch(*OF_TORCHRUN)),
        (SLURM, "RANK=9 WORLD_SIZE=16", Launch("torchrun", 9, 16, 1, 1, job=STEP)),
        (SLURM, "SLURM_NNODES=1", Launch(*ONE_NODE, job=STEP)),
        (SLURM, "SLURM_STEP_NUM_NODES=1", Launch(*ONE_NODE, job=STEP)),
        (SLURM, "SLURM_STEP_TASKS_PER_NODE=16", Launch(*ONE_NODE, job=STEP)),
        (
            SLURM,
            "SLURM_STEP_TASKS_PER_NODE=7(x2),2 SLURM_NNODES=3 SLURM_NODEID=2",
            Launch("slurm", 9, 16, 1, 2, "gpu007", job=STEP),
        ),
        (SLURM, "SLURM_NNODES=1 MASTER_ADDR=head", Launch("slurm", 9, 16, 1, 16, "head", job=STEP)),
        (SLURM, "SLURM_NTASKS=1 SLURM_PROCID=0", Launch("single", 0, 1, 0, 1)),
        (BATCH, "SLURM_NTASKS=1", Launch("single", 0, 1, 0, 1)),
        # srun --mpi=pmi2 sets both; mpirun in an allocation starts its daemons by srun.
        (
            SLURM,
            "PMI_RANK=9 PMI_SIZE=16 PMI_JOBID=123456.0",
            Launch("slurm", 9, 16, 1, 8, "gpu007", job=STEP),
        ),
        ({**SLURM, **OPEN_MPI}, "", Launch(*OF_MPI, job=MPI_JOB)),
        ({**BATCH, **OPEN_MPI}, "", Launch(*OF_MPI, job=MPI_JOB)),
        (OPEN_MPI, "", Launch(*OF_MPI, job=MPI_JOB)),
        (OPEN_MPI, "MASTER_PORT=29500", Launch(*OF_MPI, 29500, job=MPI_JOB)),
        (OPEN_MPI, "RANK=3 WORLD_SIZE=4", Launch("torchrun", 3, 4, 3, 1, job=MPI_JOB)),
        ({}, "PMI_RANK=1 PMI_SIZE=2 MASTER_ADDR=a", Launch("mpi", 1, 2, 0, 1, "a")),
        ({}, "PMI_RANK=1 PMI_SIZE=2 I_MPI_HYDRA_UUID=9d26", Launch("mpi", 1, 2, 0, 1, job="Hydra job 9d26")),
        (FLUX, "PMI_RANK=1 PMI_SIZE=2", Launch("mpi", 1, 2, 1, 2, "127.0.0.1", job="Flux job f4")),
        (TORCHRUN, "TORCHELASTIC_RUN_ID=none", Launch(*OF_TORCHRUN)),
        (TORCHRUN, "TORCHELASTIC_RUN_ID=a7", Launch(*OF_TORCHRUN, job="torchrun's run a7")),
        (TORCHRUN, "RAY_JOB_ID=02000000", Launch(*OF_TORCHRUN, job="Ray job 02000000")),
        (TORCHRUN, "RAY_JOB_ID=ffffffff", Launch(*OF_TORCHRUN)),
    ],
)
def test_each_launcher(variables: dict[str, str], more: str, launch: Launch) -> None:
    assert find_launch(variables | env(more)) == launch


def test_a_worker_that_ray_has_started_ahead_of_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(get_job_id=lambda: "01000000")
    ray = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", ray)
    jobs = [find_launch({**TORCHRUN, "RAY_JOB_ID": job}).job for job in ("ffffffff", "01000000")]
    assert jobs == ["Ray job 01000000"] * 2


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, "the environment has only some of a launcher's variables: WORLD_SIZE is missing"),
        ({"WORLD_SIZE": "2"}, "the environment has only some of a launcher's variables: RANK is missing"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE=0 is not a number of ranks"),
        ({"RANK": "0", "WORLD_SIZE": "-1"}, "WORLD_SIZE=-1 is not a number of ranks"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 is not a rank in a world of 2"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is not a number"),
        ({**TORCHRUN, "MASTER_PORT": ""}, "MASTER_PORT is not a number"),
        ({**TORCHRUN, "MASTER_PORT": "99999"}, "MASTER_PORT=99999 is not a port"),
        ({**OPEN_MPI, "MASTER_PORT": "-1"}, "MASTER_PORT=-1 is not a port"),
        (BATCH, "this is the batch script of Slurm job 7, not one of its 4 tasks"),
    ],
)
def test_what_makes_no_sense_is_refused(variables: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError) as caught:
        find_launch(variables)
    assert str(caught.value).splitlines()[0] == message


@pytest.mark.parametrize(
    ("variables", "prefix"),
    [
        ("", ""),
        ("WORLD_SIZE=4", ""),
        ("WORLD_SIZE=4 GROUP_WORLD_SIZE=1 TORCHELASTIC_RESTART_COUNT=0", ""),
        ("WORLD_SIZE=4 GROUP_WORLD_SIZE=1 TORCHELASTIC_RESTART_COUNT=3", "attempt3"),
        # Each agent counts the failures of its ranks, so the count differs between ranks and cannot name the attempt.
        ("WORLD_SIZE=4 GROUP_WORLD_SIZE=2 TORCHELASTIC_RESTART_COUNT=3", "world4"),
        ("WORLD_SIZE=4 GROUP_WORLD_SIZE=2 TORCHELASTIC_RESTART_COUNT=0", "world4"),
    ],
)
def test_each_attempt_has_keys_of_its_own(variables: str, prefix: str) -> None:
    assert attempt_prefix(env(variables)) == prefix


def test_what_a_rank_starts_is_not_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = env("RANK=1 WORLD_SIZE=2 MASTER_PORT=29500 TORCHELASTIC_RUN_ID=a")
    assert not is_helper(variables)
    speak_for_rank(variables)
    # The rank itself, even after it has replaced its program (exec).
    assert not is_helper(variables) and launch_of_command(variables).rank == 1
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert is_helper(variables) and launch_of_command(variables).kind == "single"
    assert find_launch(variables).rank == 1
    # A rank of a job that a rank has started, or of the next attempt.
    for other in (
        {"TORCHELASTIC_RUN_ID": "b"},
        {"MASTER_PORT": "29501"},
        {"TORCHELASTIC_RESTART_COUNT": "1"},
        {"RANK": "0"},
    ):
        assert not is_helper(variables | other)
