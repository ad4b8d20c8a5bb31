"""How does this process meet the others? The store, the device, the default process group."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from meshcomm.config.process import ProcessConfig
from meshcomm.errors import LaunchError
from meshcomm.mesh.exposure import ExposedRendezvous, exposed_file, is_loopback, serve_on_loopback
from meshcomm.mesh.launch_environment import Launch, attempt_of, attempt_prefix
from meshcomm.mesh.rank_claim import came_twice, is_running, process_name
from meshcomm.mesh.store_connect import find_tcp_store
from meshcomm.transport.torch_private import default_store

_PREFIX: Final = "meshcomm/prefix"


@dataclass(frozen=True, slots=True)
class Meeting:
    """This process among the others, before any group exists.

    pretended: the other ranks do not exist; torch's fake backend plays them.
    kept: the store may hold what processes of an earlier attempt wrote.
    """

    store: dist.Store
    rank: int
    world_size: int
    launch: Launch
    pretended: bool = False
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
    """Find the other processes: by an explicit store, by `[process]`, or by the launcher.

    Raises LaunchError where nothing says who this process is, or nobody is met within the timeout.
    Rank 0 warns with ExposedRendezvous where all ranks are on this host and the address is one that others reach.
    """
    rank = _given(rank, process.rank, launch.rank)
    world_size = _given(world_size, process.world_size, launch.world_size)
    for name, value in (("rank", rank), ("world_size", world_size)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise LaunchError(
                f"{name} is no number of ranks: {value!r}",
                given=f"{name}={value!r}, a {type(value).__name__}",
                expected="a whole number",
                hint="leave it out where a launcher says it",
            )
    if store is not None and not isinstance(store, dist.Store):
        raise LaunchError(
            f"no store to meet at: {store!r}",
            given=f"store={store!r}, a {type(store).__name__}",
            expected="a torch.distributed.Store",
            hint="torch.distributed.TCPStore(...), or no store, and the launcher's is used",
        )
    if not 0 <= rank < world_size:
        raise LaunchError(
            f"rank {rank} is not in a world of {world_size}",
            given=f"rank={rank}, world_size={world_size}",
            expected=f"a rank from 0 to {world_size - 1}",
            hint="give both rank and world_size, or let a launcher set them",
        )
    # One who brings a store may use it again; of several agents, nobody counts the attempts of all.
    kept = store is not None or os.environ.get("GROUP_WORLD_SIZE", "1") != "1"
    if store is None:
        store = _find_store(process, launch, rank, world_size, timedelta(seconds=timeout_s))
    return Meeting(of_this_attempt(store), rank, world_size, launch, kept=kept)


def of_this_attempt(store: dist.Store) -> dist.Store:
    """`store`, without the keys that the ranks left in it before their launcher restarted them."""
    prefix = attempt_prefix(os.environ)
    return dist.PrefixStore(prefix, store) if prefix else store


def _given(argument: int | None, config: int | None, launcher: int) -> int:
    return next(value for value in (argument, config, launcher) if value is not None)


def _find_store(
    process: ProcessConfig, launch: Launch, rank: int, world_size: int, timeout: timedelta
) -> dist.Store:
    if process.init == "file":
        return _file_store(str(process.path), rank, world_size)
    if process.init == "tcp":
        address = str(process.address)
    elif launch.kind != "torchrun" and world_size == 1:
        return dist.HashStore()
    elif launch.address and launch.port is not None:
        host = f"[{launch.address}]" if ":" in launch.address else launch.address
        address = f"{host}:{launch.port}"
    else:
        raise LaunchError(
            f"rank {rank} of {world_size} has no address at which to meet the others",
            given=f"launcher {launch.kind}, no MASTER_ADDR and MASTER_PORT",
            expected="MASTER_ADDR and MASTER_PORT in the environment, or [process] init and address",
            hint='[process] init = "tcp", address = "HOST:PORT" of rank 0; or start with torchrun',
        )
    host, port = _split(address)
    # Under torchrun its agent hosts the store at MASTER_ADDR, and no rank does; elsewhere rank 0 does.
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and (host, port) == (
        (launch.address or "").strip("[]"),
        launch.port,
    )
    hosts = rank == 0 and not agents
    try:
        # What is made here is found by the next line, by its port.
        server = serve_on_loopback(host, port, timeout) if hosts else None
        # Whoever does not come is named by the agreement that follows, so nobody waits here.
        store = find_tcp_store(host, port, world_size, hosts=hosts, timeout=timeout)
        del server
    except (dist.DistError, OSError, ValueError, RuntimeError) as error:
        raise LaunchError(
            f"rank {rank} of {world_size} could not meet the others at {address}",
            given=str(error).splitlines()[0] if str(error) else type(error).__name__,
            expected=f"the store of rank 0 to answer within {timeout.total_seconds():g} s",
            hint=f"look whether rank 0 is running, and who has the port on its host: ss -ltnp 'sport = :{port}'",
        ) from error
    # Once for the job, not for each attempt.
    first = rank == 0 and not attempt_of(os.environ)
    if first and launch.local_size == world_size and not is_loopback(host):
        setting = (
            f'process.address = "127.0.0.1:{port}"' if process.init == "tcp" else "MASTER_ADDR=127.0.0.1"
        )
        warnings.warn(
            f"others can reach the job's store at {host}:{port}, though all its ranks are on this host: {setting}, "
            "or see meshcomm doctor",
            ExposedRendezvous,
            stacklevel=2,
        )
    return store


def _file_store(path: str, rank: int, world_size: int) -> dist.Store:
    if rank == 0 and (problem := exposed_file(path)) is not None:
        warnings.warn(str(problem), ExposedRendezvous, stacklevel=2)
    # torch's file store adds to what is in the file, so a restarted job needs another one.
    if prefix := attempt_prefix(os.environ):
        path = f"{path}.{prefix}"
    store = dist.FileStore(path, world_size)
    # Who writes here: one process, and no process of an earlier job.
    key, mine = f"meshcomm/process/{rank}", process_name()
    before = store.compare_set(key, "", mine).decode()
    if before != mine:
        if is_running(before):
            raise came_twice(of_this_attempt(store), rank, before)
        raise LaunchError(
            f"the rendezvous file {path} was left by an earlier job",
            given=f"rank {rank} is in it as {before}; this is {mine}",
            expected="a new file for each job: what the earlier one wrote would be taken for this one's",
            hint=f"rm {path}, or another process.path",
        )
    return store


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def start_default_group(
    meeting: Meeting, store: dist.Store, backend: str, device: torch.device, timeout_s: float, bind: bool
) -> None:
    """Give torch.distributed its default group, which it must not have yet."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        store=store,
        rank=meeting.rank,
        world_size=meeting.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if bind and device.type != "cpu" else None,
    )


def say_prefix(prefix: str) -> None:
    """Note in the default group's store that the mesh with this prefix made the group."""
    default_store().set(_PREFIX, prefix)


def outer_prefix() -> str:
    """What stands before the names of a mesh that is opened beside the one that made the default group.

    Both count from one, each in its own part of the store; torch has one list of names for both.
    """
    if not dist.is_initialized():
        return ""
    store = default_store()
    return f"{store.get(_PREFIX).decode()}." if store.check([_PREFIX]) else ""
