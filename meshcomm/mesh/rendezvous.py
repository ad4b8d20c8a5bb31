"""The first step of a job: each process finds the job's store and claims its rank there."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from meshcomm.config.process import ProcessConfig
from meshcomm.errors import LaunchError, MeshMismatchError
from meshcomm.layout.sizes import ranks_text
from meshcomm.mesh.environment import Launch, attempt_of, attempt_prefix, launch_by_arguments, ports_of
from meshcomm.mesh.exposure import ExposedRendezvous, exposed_file, is_loopback
from meshcomm.mesh.job_store import (
    TWICE,
    find_agent,
    find_job,
    is_running,
    is_stopped,
    known_everywhere,
    note_twice,
    owner_of,
    process_name,
    started_by,
)
from meshcomm.mesh.signed import signed


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
    rank, world_size = (
        next(value for value in values if value is not None)
        for values in (
            (rank, process.rank, launch.rank),
            (world_size, process.world_size, launch.world_size),
        )
    )
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
    kept = store is not None or os.environ.get("GROUP_WORLD_SIZE", "1") != "1"
    if store is None:
        store, launch = _find_store(process, launch, rank, world_size, timedelta(seconds=timeout_s))
    return Meeting(signed(of_this_attempt(store)), rank, world_size, launch, kept=kept)


def of_this_attempt(store: dist.Store, env: Mapping[str, str] = os.environ) -> dist.Store:
    """Return `store` under a prefix that is unique to this run of torchrun at this endpoint, and to this attempt.

    env: the ranks' environment variables.
    """
    run = env.get("TORCHELASTIC_RUN_ID", "none")
    own = [*([] if run in ("", "none") else [f"run-{run}"]), *filter(None, [attempt_prefix(env)])]
    for prefix in own:
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
    if agents:
        store = find_agent(host, ports[0], rank, world_size, timeout)
    else:
        store = find_job(host, ports, job, rank, world_size, timeout)
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
    key, mine = f"meshcomm/process/{rank}", process_name()
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


# -- one process for each rank ----------------------------------------------------------------------------


def state_of_rank(store: Any, rank: int) -> str:
    """Return the state of the process that has claimed `rank`: "ended", "stopped" or "runs"; "" if this host cannot tell."""
    key = f"meshcomm/owner/{rank}"
    name = store.get(key).decode() if store.check([key]) else ""
    runs = is_running(name)
    if not runs:
        return "" if runs is None else "ended"
    return "stopped" if is_stopped(name) else "runs"


def claim(store: Any, rank: int, *, kept: bool) -> None:
    """Claim `rank` for this process, with one store operation. This process may claim the rank again, and other processes
    may claim it once this process has ended.

    Called by: every process of the job, before any other operation that counts its rank in the store.
    kept: whether the store may hold keys of earlier attempts of the job. If so, a process on another host is assumed to
        belong to an earlier attempt.
    Raises LaunchError naming both processes if another process has this rank; `blame` then informs the other ranks.
    """
    key, mine = f"meshcomm/owner/{rank}", process_name()
    first = store.compare_set(key, "", mine).decode()
    if first == mine:
        return
    runs = is_running(first)
    if runs or (runs is None and not kept):
        raise came_twice(store, rank, first)
    store.compare_set(key, first, mine)


def came_twice(store: Any, rank: int, first: str) -> LaunchError:
    """Return this process's error if the process `first` has the same rank. The error is also reported to the other ranks."""
    mine = process_name()
    note_twice(store, rank, first)
    return LaunchError(
        f"rank {rank} exists twice: another process has already claimed rank {rank}",
        given=f"{first}\n{mine} (this one)",
        expected="a different rank for each process of a job, and a different address or file for each job",
        hint="check what sets the rank of both: RANK in the environment, process.rank, or init(rank=...)",
    )


def blame(error: MeshMismatchError, store: Any) -> None:
    """If ranks are missing, set the mismatched ranks of `error` to the ranks that two processes claim."""
    if not error.missing:
        return
    try:
        found = _twice(store)
    except RuntimeError:
        return
    if not found:
        return
    error.mismatched_ranks = tuple(sorted({each.rank for each in found}))
    error.given = "\n".join([str(error.given), *map(str, found)])
    error.hint = f"check what sets the rank of the processes that are {ranks_text(error.mismatched_ranks)}"


def another_job(store: Any) -> LaunchError | None:
    """Return the error if processes of another job used this store and this rank may belong to that job. This rank cannot
    belong to that job if a single process started this rank and rank 0 but none of the refused processes.
    """
    found = _twice(store)
    if not found:
        return None
    owner, parent = owner_of(store), process_name(os.getppid())
    if owner is not None and owner.parent == parent and parent not in {each.parent for each in found}:
        return None
    return LaunchError(
        "another job used this job's store: the ranks of both jobs may be mixed",
        given="\n".join([*map(str, found), f"this is {process_name()}"]),
        expected="a different address for each job: ranks of jobs without a name cannot be told apart",
        hint="a different MASTER_PORT for each job, or one job name in TORCHELASTIC_RUN_ID on all its ranks",
    )


class _Twice(NamedTuple):
    """A rank, and the names of the process that claimed it, a later process with this rank, and the later process's parent."""

    rank: int
    first: str
    second: str
    parent: str

    def __str__(self) -> str:
        return f"rank {self.rank} exists twice: {self.first}; and {self.second}"


def _twice(store: Any) -> list[_Twice]:
    """Return the processes that were refused because another process has their rank, except processes of earlier attempts."""
    lines = store.get(TWICE).decode().splitlines() if store.check([TWICE]) else []
    found = [_Twice(int(rank), *names) for rank, *names in (line.split("\t") for line in lines)]
    owners = {each: f"meshcomm/owner/{each.rank}" for each in found}
    return [
        each for each, key in owners.items() if store.check([key]) and store.get(key).decode() == each.first
    ]
