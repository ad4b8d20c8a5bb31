"""Two jobs at once on one host, started by a launcher that gives neither of them an address."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

import torch

from tests.faults.row import DIFFERS_S, Rank, check, everyone, row

# Ranks of each of the two jobs of a row.
_EACH: Final = 2
_OF_TORCHRUN: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _mpi(job: int, rank: int) -> Mapping[str, str]:
    world = "OMPI_COMM_WORLD_"
    ranks = {f"{world}RANK": str(rank), f"{world}LOCAL_RANK": str(rank)}
    return {**ranks, f"{world}SIZE": "2", f"{world}LOCAL_SIZE": "2", "PMIX_NAMESPACE": f"13317{job}2593"}


def _slurm(job: int, rank: int) -> Mapping[str, str]:
    ranks = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NTASKS": "2"}
    return {**ranks, "SLURM_NNODES": "1", "SLURM_JOB_ID": "2711", "SLURM_STEP_ID": str(job)}


def _own_job(me: Rank) -> None:
    """Each job adds up its own numbers; who takes part in the other one's gets wrong ones."""
    job = me.number // _EACH
    for name in (*_OF_TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE"):
        os.environ.pop(name, None)
    me.strike()
    with me.mesh(dims={"dp": _EACH}, timeout_s=10.0) as mesh:
        for _ in range(20):
            check(mesh.all_reduce("dp", torch.full((3,), 10.0**job)), _EACH * 10.0**job)


ROWS = [
    row(
        f"two-jobs-{name} | two jobs at once under {what} variables | before agreement | dp",
        *(_own_job, everyone(""), (), DIFFERS_S),
        environment=lambda rank, variables=variables: variables(rank // _EACH, rank % _EACH),
        quick=True,
    )
    for name, what, variables in (("mpi", "MPI", _mpi), ("slurm", "Slurm step", _slurm))
]
