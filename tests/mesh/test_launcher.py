"""What the environment of each launcher means."""

from __future__ import annotations

import pytest

from meshcomm.errors import LaunchError
from meshcomm.mesh.environment import Launch, attempt_prefix, find_launch

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
    "SLURM_NNODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}


@pytest.mark.parametrize(
    ("env", "launch"),
    [
        ({}, Launch("single", 0, 1, 0, 1)),
        (TORCHRUN, Launch("torchrun", 5, 8, 1, 4, "10.0.0.7", 2950)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Launch("torchrun", 0, 1, 0, 1, placed=False)),
        ({"RANK": "1", "WORLD_SIZE": "4"}, Launch("torchrun", 1, 4, 0, 1, placed=False)),
        (SLURM, Launch("slurm", 9, 16, 1, 8, "gpu007", 20000 + 123456 % 20000)),
        ({**SLURM, "MASTER_PORT": "1234", "MASTER_ADDR": "head"}, Launch("slurm", 9, 16, 1, 8, "head", 1234)),
        ({**SLURM, **TORCHRUN}, Launch("torchrun", 5, 8, 1, 4, "10.0.0.7", 2950)),
        ({**SLURM, "SLURM_NNODES": "1"}, Launch("slurm", 9, 16, 1, 16, "127.0.0.1", 20000 + 123456 % 20000)),
        (
            {**SLURM, "SLURM_NTASKS": "16", "SLURM_STEP_TASKS_PER_NODE": "16"},
            Launch("slurm", 9, 16, 1, 16, "127.0.0.1", 20000 + 123456 % 20000),
        ),
        (
            {**SLURM, "SLURM_NNODES": "1", "MASTER_ADDR": "head"},
            Launch("slurm", 9, 16, 1, 16, "head", 20000 + 123456 % 20000),
        ),
        ({**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, Launch("single", 0, 1, 0, 1)),
        (OPEN_MPI, Launch("mpi", 3, 4, 3, 4, "127.0.0.1", 29500)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "a"}, Launch("mpi", 1, 2, 0, 1, "a", 29500)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, Launch("mpi", 1, 2, 0, 1, None, 29500)),
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
