"""How does this process meet the others, and is it the only one of its rank? By the job's store, before anything else."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from meshcomm.comm.diagnosis import first_line
from meshcomm.config.process import ProcessConfig
from meshcomm.errors import LaunchError, MeshMismatchError
from meshcomm.layout.sizes import ranks_text
from meshcomm.mesh.environment import Launch, attempt_of, attempt_prefix
from meshcomm.mesh.exposure import ExposedRendezvous, exposed_file, is_loopback, serve_on_loopback
from meshcomm.mesh.store import within

# What a client that is about to succeed gets beyond its timeout.
_GRACE_S: Final = 0.5
_LOOK_S: Final = 1.0

_NAME: Final = re.compile(r"process (\d+) of (.*), started at (\S+)")
_TWICE: Final = "meshcomm/twice"


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
            given=first_line(error),
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


# -- one process for each rank ----------------------------------------------------------------------------


def process_name() -> str:
    """What no other process is called: its host, number, and when it was started."""
    return f"process {os.getpid()} of {socket.gethostname()}, started at {_started('self') or '?'}"


def is_running(name: str) -> bool | None:
    """Whether the process with this `process_name` runs, as far as its host can tell; None on another host."""
    parts = _NAME.fullmatch(name)
    if parts is None or parts[2] != socket.gethostname():
        return None
    if parts[3] != "?":
        return _started(parts[1]) == parts[3]
    if sys.platform == "win32":
        return False  # there, a signal of 0 would be Ctrl-C
    try:
        os.kill(int(parts[1]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def state_of_rank(store: Any, rank: int) -> str:
    """What this host knows of the process that has claimed `rank`: "ended", "stopped" or "runs"; "" for nothing."""
    key = f"meshcomm/owner/{rank}"
    name = store.get(key).decode() if store.check([key]) else ""
    runs = is_running(name)
    if not runs:
        return "" if runs is None else "ended"
    with contextlib.suppress(OSError, AttributeError):
        number = _NAME.fullmatch(name)[1]  # type: ignore[index]
        return "stopped" if _stat(number)[0] in "Tt" else "runs"
    return "runs"


def _stat(process: str) -> list[str]:
    # The name in parentheses may hold anything; what follows it are a state and numbers.
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def _started(process: str) -> str | None:
    """When a process of this host was started, in the kernel's ticks; None where it has ended or nobody says."""
    try:
        numbers = _stat(process)
        return None if numbers[0] in "ZX" else numbers[19]
    except (OSError, IndexError):
        return None


def claim(store: Any, rank: int, *, kept: bool) -> None:
    """Say that this process is `rank`; harmless when repeated, and after a process that has ended.

    Called by: every process of the job, before anything else that counts its rank in the store.
    store: seen by all of them. kept: whether it may hold what earlier attempts of the job wrote; then a
    process of another host, of which nobody here knows whether it runs, counts as one of those.

    Costs one store operation. Raises LaunchError naming both processes where another one is this rank;
    `blame` then tells the others.
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
    """The error of this process where the one called `first` is `rank` as well; left for the others too."""
    mine = process_name()
    line = f"{rank}\t{first}\t{mine}\n"
    if store.has_extended_api():
        store.append(_TWICE, line)
    else:
        store.set(_TWICE, line)
    return LaunchError(
        f"rank {rank} came twice: another process has said before that it is rank {rank}",
        given=f"{first}\n{mine} (this one)",
        expected="another rank for each process of a job, and another address or file for each job",
        hint="look at what says the rank of both: RANK in the environment, process.rank, or init(rank=...)",
    )


def blame(error: MeshMismatchError, store: Any) -> None:
    """Where ranks never came, say in `error` which other ranks came twice: they are the mismatched ones.

    store: as for `claim`. Changes nothing where no rank came twice, or the store is gone.
    """
    if not error.missing:
        return
    try:
        lines = store.get(_TWICE).decode().splitlines() if store.check([_TWICE]) else []
        found = [(int(rank), first, second) for rank, first, second in (line.split("\t") for line in lines)]
        # What an earlier attempt left is of a process that is nobody's owner any more.
        found = [each for each in found if store.get(f"meshcomm/owner/{each[0]}").decode() == each[1]]
    except RuntimeError:
        return
    if not found:
        return
    error.mismatched_ranks = tuple(sorted({rank for rank, _, _ in found}))
    listed = [f"rank {rank} came twice: {first}; and {second}" for rank, first, second in found]
    error.given = "\n".join([str(error.given), *listed])
    error.hint = f"look at what says the rank of the processes that are {ranks_text(error.mismatched_ranks)}"
