"""What the environment of each launcher means."""

from __future__ import annotations

import pytest

from meshcomm.errors import LaunchError
from meshcomm.mesh.environment import Launch, attempt_prefix, find_launch, ports_of

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "2950",
}
SLURM = {
    "SLURM_PROCID": "9",
    "SLURM_NTASKS": "16",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
    "SLURM_NNODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "1331822593",
}
# sbatch starts the script once, without a step.
BATCH = {
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_ID": "7",
    "SLURM_NNODES": "1",
}


@pytest.mark.parametrize(
    ("env", "launch"),
    [
        ({}, Launch("single", 0, 1, 0, 1)),
        (TORCHRUN, Launch("torchrun", 5, 8, 1, 4, "10.0.0.7", 2950)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Launch("torchrun", 0, 1, 0, 1, placed=False)),
        ({"RANK": "1", "WORLD_SIZE": "4"}, Launch("torchrun", 1, 4, 0, 1, placed=False)),
        (SLURM, Launch("slurm", 9, 16, 1, 8, "gpu007", job="Slurm step 123456.0")),
        (
            {**SLURM, "MASTER_PORT": "1234", "MASTER_ADDR": "head", "SLURM_RESTART_COUNT": "2"},
            Launch("slurm", 9, 16, 1, 8, "head", 1234, job="Slurm step 123456.0, requeued 2 times"),
        ),
        ({**SLURM, **TORCHRUN}, Launch("torchrun", 5, 8, 1, 4, "10.0.0.7", 2950)),
        (
            {**SLURM, "RANK": "9", "WORLD_SIZE": "16"},
            Launch("torchrun", 9, 16, 1, 1, job="Slurm step 123456.0"),
        ),
        (
            {**SLURM, "SLURM_NNODES": "1"},
            Launch("slurm", 9, 16, 1, 16, "127.0.0.1", job="Slurm step 123456.0"),
        ),
        (
            {**SLURM, "SLURM_STEP_NUM_NODES": "1"},
            Launch("slurm", 9, 16, 1, 16, "127.0.0.1", job="Slurm step 123456.0"),
        ),
        (
            {**SLURM, "SLURM_NTASKS": "16", "SLURM_STEP_TASKS_PER_NODE": "16"},
            Launch("slurm", 9, 16, 1, 16, "127.0.0.1", job="Slurm step 123456.0"),
        ),
        (
            {**SLURM, "SLURM_NNODES": "1", "MASTER_ADDR": "head"},
            Launch("slurm", 9, 16, 1, 16, "head", job="Slurm step 123456.0"),
        ),
        ({**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, Launch("single", 0, 1, 0, 1)),
        # srun --mpi=pmi2 sets both; mpirun in an allocation starts its daemons by srun.
        (
            {**SLURM, "PMI_RANK": "9", "PMI_SIZE": "16", "PMI_JOBID": "123456.0"},
            Launch("slurm", 9, 16, 1, 8, "gpu007", job="Slurm step 123456.0"),
        ),
        ({**SLURM, **OPEN_MPI}, Launch("mpi", 3, 4, 3, 4, "127.0.0.1", job="OpenMPI job 1331822593")),
        ({**BATCH, **OPEN_MPI}, Launch("mpi", 3, 4, 3, 4, "127.0.0.1", job="OpenMPI job 1331822593")),
        (OPEN_MPI, Launch("mpi", 3, 4, 3, 4, "127.0.0.1", job="OpenMPI job 1331822593")),
        (
            {**OPEN_MPI, "MASTER_PORT": "29500"},
            Launch("mpi", 3, 4, 3, 4, "127.0.0.1", 29500, job="OpenMPI job 1331822593"),
        ),
        (
            {**OPEN_MPI, "RANK": "3", "WORLD_SIZE": "4"},
            Launch("torchrun", 3, 4, 3, 1, job="OpenMPI job 1331822593"),
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "a"}, Launch("mpi", 1, 2, 0, 1, "a")),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "I_MPI_HYDRA_UUID": "9d26"},
            Launch("mpi", 1, 2, 0, 1, job="Hydra job 9d26"),
        ),
        (
            {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_NNODES": "1"}
            | {"FLUX_JOB_ID": "f4", "PMI_RANK": "1", "PMI_SIZE": "2"},
            Launch("mpi", 1, 2, 1, 2, "127.0.0.1", job="Flux job f4"),
        ),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}, Launch("torchrun", 5, 8, 1, 4, "10.0.0.7", 2950)),
        (
            {**TORCHRUN, "TORCHELASTIC_RUN_ID": "a7"},
            Launch("torchrun", 5, 8, 1, 4, "10.0.0.7", 2950, job="torchrun's run a7"),
        ),
        (
            {**TORCHRUN, "RAY_JOB_ID": "02000000"},
            Launch("torchrun", 5, 8, 1, 4, "10.0.0.7", 2950, job="Ray job 02000000"),
        ),
    ],
)
def test_each_launcher(env: dict[str, str], launch: Launch) -> None:
    assert find_launch(env) == launch


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "0"}, "the environment has half of a launcher's variables: WORLD_SIZE is missing"),
        ({"WORLD_SIZE": "2"}, "the environment has half of a launcher's variables: RANK is missing"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 is not a rank of a world of 2"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is not a number"),
        ({**TORCHRUN, "MASTER_PORT": ""}, "MASTER_PORT is not a number"),
        ({**TORCHRUN, "MASTER_PORT": "99999"}, "MASTER_PORT=99999 is not a port"),
        ({**OPEN_MPI, "MASTER_PORT": "-1"}, "MASTER_PORT=-1 is not a port"),
        (BATCH, "this is the batch script of Slurm job 7, and none of its 4 tasks"),
    ],
)
def test_what_makes_no_sense_is_refused(env: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError) as caught:
        find_launch(env)
    assert str(caught.value).splitlines()[0] == message


@pytest.mark.parametrize(
    ("env", "prefix"),
    [
        ({}, ""),
        ({"WORLD_SIZE": "4"}, ""),
        ({"WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "0"}, ""),
        ({"WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "3"}, "attempt3"),
        # Agents count their own ranks' failures: what differs between ranks is no name for all.
        ({"WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "3"}, "world4"),
        ({"WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "0"}, "world4"),
    ],
)
def test_each_attempt_has_keys_of_its_own(env: dict[str, str], prefix: str) -> None:
    assert attempt_prefix(env) == prefix


def test_a_batch_script_without_srun_is_told_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.orig_argv", ["python", "train.py", "--fast"])
    with pytest.raises(LaunchError, match=r"try: +put srun in front: srun python train.py --fast; "):
        find_launch(BATCH)
    assert find_launch({**BATCH, "SLURM_NTASKS": "1"}) == Launch("single", 0, 1, 0, 1)


def test_each_job_looks_at_other_ports() -> None:
    first, second = (ports_of(f"Slurm step 7.{step}") for step in (0, 1))
    assert first == ports_of("Slurm step 7.0")
    assert first != second
    # Systems give connections ports from 32768 on.
    assert all(20_000 <= port < 32_000 for port in (*first, *second))
