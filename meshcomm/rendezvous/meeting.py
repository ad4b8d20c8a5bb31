"""The first step of a job: each process finds the job's store."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from meshcomm.config.process import ProcessConfig
from meshcomm.errors import LaunchError
from meshcomm.rendezvous import keys
from meshcomm.rendezvous.exposure import ExposedRendezvous, exposed_file, is_loopback
from meshcomm.rendezvous.job_store import find_job, ports_of
from meshcomm.rendezvous.launcher import (
    Launch,
    attempt_of,
    attempt_prefix,
    launch_by_arguments,
    run_of,
    several_agents,
)
from meshcomm.rendezvous.processes import came_twice, is_running, known_everywhere, process_name, started_by
from meshcomm.rendezvous.signed import signed


@dataclass(frozen=True, slots=True)
class Meeting:
    """This process's role in the job, before any group exists.

    store: torch's store, or a SignedStore.
    is_fake: no other ranks exist; torch's fake backend simulates them.
    kept: whether the store may hold keys that an earlier attempt's processes set.
    """

    store: Any
    rank: int
    world_size: int
    launch: Launch
    is_fake: bool = False
    kept: bool = False


def meet(
    process: ProcessConfig,
    launch: Launch,
    timeout_s: float,
    *,
    store: dist.Store | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> Meeting:
    """Find the other processes through an explicit store, `[process]` or the launcher.

    Raises LaunchError if this process has no rank, or if no store answers within the timeout. Rank 0 issues the warning
    ExposedRendezvous if all ranks are on this host and other hosts can reach the address.
    """
    if launch.kind == "single" and (world_size, process.world_size) != (None, None):
        launch = launch_by_arguments(os.environ)
    if rank is None:
        rank = launch.rank if process.rank is None else process.rank
    if world_size is None:
        world_size = launch.world_size if process.world_size is None else process.world_size
    for name, value in (("rank", rank), ("world_size", world_size)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise LaunchError(
                f"{name} is not an integer: {value!r}",
                given=f"{name}={value!r}, a {type(value).__name__}",
                expected="an integer",
                hint="leave it out if a launcher sets it",
            )
    if store is not None and not isinstance(store, dist.Store):
        raise LaunchError(
            f"not a torch store: {store!r}",
            given=f"store={store!r}, a {type(store).__name__}",
            expected="a torch.distributed.Store",
            hint="torch.distributed.TCPStore(...), or leave store out to use the launcher's",
        )
    if not 0 <= rank < world_size:
        raise LaunchError(
            f"rank {rank} is not in a world of {world_size}",
            given=f"rank={rank}, world_size={world_size}",
            expected=f"a rank from 0 to {world_size - 1}",
            hint="give both rank and world_size, or let a launcher set them",
        )
    if launch.kind == "given":
        launch = replace(launch, rank=rank, world_size=world_size)
    # A program may reuse the store that it passes. With several agents, attempts have no common count.
    kept = store is not None or several_agents(os.environ)
    if store is None:
        store, launch = _find_store(process, launch, rank, world_size, timedelta(seconds=timeout_s))
    return Meeting(signed(of_this_attempt(store)), rank, world_size, launch, kept=kept)


def of_this_attempt(store: dist.Store, env: Mapping[str, str] = os.environ) -> dist.Store:
    """Return `store` under a prefix that is unique to this run of torchrun at this endpoint, and to this attempt.

    env: the ranks' environment variables.
    """
    run = run_of(env)
    for prefix in (run and f"run-{run}", attempt_prefix(env)):
        if prefix:
            store = dist.PrefixStore(prefix, store)
    return store


def _find_store(
    process: ProcessConfig, launch: Launch, rank: int, world_size: int, timeout: timedelta
) -> tuple[dist.Store, Launch]:
    """Return the job's store, and `launch` updated with the store's address."""
    if process.init == "file":
        return _file_store(str(process.path), rank, world_size), launch
    job = launch.job or started_by(launch)
    ports = [] if launch.port is None else [launch.port]
    if process.init == "tcp":
        host, _, digits = str(process.address).rpartition(":")
        ports = [int(digits)]
    elif launch.kind != "torchrun" and world_size == 1:
        return dist.HashStore(), launch
    elif launch.address and (launch.port is not None or launch.kind in ("slurm", "mpi")):
        host = launch.address
        if launch.port is None:
            ports = ports_of(job if launch.one_host or known_everywhere(job) else "")
    else:
        raise LaunchError(
            f"rank {rank} of {world_size} has no address to meet the others at",
            given=f"MASTER_ADDR {launch.address or 'not set'}, MASTER_PORT {launch.port or 'not set'}, launcher {launch.kind}",
            expected="MASTER_ADDR and MASTER_PORT in the environment, or [process] init and address",
            hint='[process] init = "tcp", address = "HOST:PORT" of rank 0; or start with torchrun',
        )
    host = host.strip("[]")
    # Under torchrun, the agent hosts the store at MASTER_ADDR. Otherwise, rank 0 does.
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and (host, ports) == (
        (launch.address or "").strip("[]"),
        [launch.port],
    )
    store = find_job(host, ports, job, rank, world_size, timeout, agents=agents)
    launch = replace(launch, address=host, port=store.port)
    # Warn once per job, not once per attempt.
    first = rank == 0 and not attempt_of(os.environ)
    if first and launch.local_size == world_size and not is_loopback(host):
        address = f"127.0.0.1:{store.port}"
        setting = f'process.address = "{address}"' if process.init == "tcp" else "MASTER_ADDR=127.0.0.1"
        warnings.warn(
            f"others can reach the job's store at {host}:{store.port}, though all its ranks are on this host: {setting}, "
            "or see meshcomm doctor",
            ExposedRendezvous,
            stacklevel=2,
        )
    return store, launch


def _file_store(path: str, rank: int, world_size: int) -> dist.Store:
    if rank == 0 and (problem := exposed_file(path)) is not None:
        warnings.warn(str(problem), ExposedRendezvous, stacklevel=2)
    # torch's file store appends to the file, so a restarted job needs a new file.
    if prefix := attempt_prefix(os.environ):
        path = f"{path}.{prefix}"
    store = dist.FileStore(path, world_size)
    # Record the writing process, to detect a file left by an earlier job.
    key, mine = keys.PROCESS.format(rank), process_name()
    before = store.compare_set(key, "", mine).decode()
    if before != mine:
        if is_running(before):
            raise came_twice(of_this_attempt(store), rank, before)
        raise LaunchError(
            f"the rendezvous file {path} was left by an earlier job",
            given=f"rank {rank} is in it as {before}; this is {mine}",
            expected="a new file for each job: this job would read the earlier one's data as its own",
            hint=f"rm {path}, or another process.path",
        )
    return store
