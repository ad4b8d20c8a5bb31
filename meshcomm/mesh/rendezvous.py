"""How does this process meet the others? The store of the job, and what is there where none is found."""

from __future__ import annotations

import os
import socket
import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch.distributed as dist

from meshcomm.config.process import ProcessConfig
from meshcomm.errors import LaunchError
from meshcomm.mesh.environment import Launch, attempt_of, attempt_prefix
from meshcomm.mesh.exposure import ExposedRendezvous, exposed_file, is_loopback, serve_on_loopback
from meshcomm.mesh.rank_claim import came_twice, is_running, process_name
from meshcomm.mesh.store import within

# What a client that is about to succeed gets beyond its timeout.
_GRACE_S: Final = 0.5
_LOOK_S: Final = 1.0


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
    host, _, digits = address.rpartition(":")
    host, port = host.strip("[]"), int(digits)
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


def find_tcp_store(
    host: str, port: int, world_size: int, *, hosts: bool, timeout: timedelta
) -> dist.TCPStore:
    """torch's store at `host`:`port`, whose calls get `timeout`; with `hosts`, its server is here.

    Nobody waits for the other ranks. Raises what torch does, and TimeoutError, which says what is at the
    address instead, about a second after the timeout.
    """

    def make() -> dist.TCPStore:
        return dist.TCPStore(
            host, port, world_size, hosts, timeout, wait_for_workers=False, multi_tenant=True
        )

    try:
        return within(timeout.total_seconds() + _GRACE_S, make)
    except TimeoutError as late:
        try:
            found = within(_LOOK_S, lambda: what_is_at(host, port))
        except TimeoutError:
            found = f"nothing that could be reached within {_LOOK_S:g} s"
        raise TimeoutError(f"at {host}:{port} there is {found}") from late


def what_is_at(host: str, port: int) -> str:
    """What is at an address where no store of torch answers, in words."""
    try:
        with socket.create_connection((host, port), timeout=_LOOK_S) as connection:
            connection.settimeout(_LOOK_S / 4)
            try:
                said = connection.recv(64)
            except TimeoutError:
                return "a program that accepts connections and says nothing: no store of torch, or one that is stopped"
            return f"a program that says {said!r}: no store of torch" if said else "a program that hangs up"
    except OSError as error:
        return f"nobody to be reached: {error.strerror or error}"
