"""Finds the store of this job. Several jobs may use the same host and port."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Final

import psutil
import torch.distributed as dist

from meshcomm.errors import LaunchError
from meshcomm.mesh.environment import MPI_RANKS, Launch
from meshcomm.mesh.exposure import serve_on_loopback
from meshcomm.mesh.store import within
from meshcomm.watching.exceptions import first_line

# How long a client that is about to succeed may continue after its timeout.
_GRACE_S: Final = 0.5
_LOOK_S: Final = 1.0
# How long one of several stores may take to answer at first, and how long to pause before probing a silent port again.
_ANSWERS_S: Final = 2.0
_SILENT_S: Final = 10.0
_PAUSE_S: Final = 0.02
_PAUSES_S: Final = 0.25
# How long a host's name may be unknown. A cluster may create the name only when rank 0 runs.
_UNKNOWN_S = 60.0

_NAME: Final = re.compile(r"process (\d+) of (.*), started at (\S+)")
# A key in a store that rank 0 serves. Its value has the names of the job, rank 0's process and the parent process.
_JOB: Final = "meshcomm/job"
# Processes that claimed the rank of another process.
TWICE: Final = "meshcomm/twice"

# How long a rank 0 that ends with an error keeps serving other ranks that are still connected.
_FAILED_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of a store.

    job: as in Launch, "" if unknown.
    process: the name of rank 0's process.
    """

    job: str
    process: str
    parent: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.job or 'a job without a name'}, whose rank 0 is {self.process}"

    def may_be(self, job: str) -> bool:
        """Return whether `job` may be this job, according to the known facts."""
        theirs, ours = _NAME.search(self.job), _NAME.search(job)
        # A host knows only the process that started the host's own ranks. This process may be rank 0.
        elsewhere = theirs is not None and ours is not None and theirs[2] != ours[2]
        by_rank_0 = ours is not None and ours[0] == self.process
        return self.job == job or elsewhere or by_rank_0 or not (self.job and job)


@dataclass(frozen=True, slots=True)
class _Found:
    """The result of probing a port.

    owner, client: set if a job's store answers.
    free: whether no program listens.
    unknown: whether the host's name is unknown.
    """

    what: str
    owner: Owner | None = None
    client: dist.TCPStore | None = field(default=None, compare=False)
    free: bool = False
    unknown: bool = False
    error: Exception | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        # Frames in a traceback would keep a store, and its server, until Python collects garbage.
        link: BaseException | None = self.error
        while link is not None:
            link.__traceback__, link = None, link.__cause__ or link.__context__


@dataclass(frozen=True, slots=True)
class _Served:
    """A store that this process serves as rank 0, and what ends it at the process's exit."""

    owner: Owner
    at_exit: Finalize


# By port. Ranks close a mesh and open the next one at different times, so a store outlives the meshes that use it.
_SERVED: Final[dict[int, _Served]] = {}


def find_job(
    host: str, ports: Sequence[int], job: str, rank: int, world_size: int, timeout: timedelta
) -> dist.TCPStore:
    """Return the store of `job` ("" if unknown). Rank 0 serves the store at the first free port in `ports`, where the
    other ranks look for it.

    Rank 0's process serves the store until it exits, also for later meshes of the job. At exit, it waits up to `timeout` for
    other processes that are still connected.

    A rank writes nothing to a store that has not named its job. Raises LaunchError immediately if another job uses the only
    port. Raises LaunchError with a line for each port if no store of this job answers within the timeout, or if the name
    `host` is unknown for a minute.
    """
    found: dict[int, _Found] = {}
    deadline = time.monotonic() + timeout.total_seconds()
    pause_s, known_by = _PAUSE_S, min(deadline, time.monotonic() + _UNKNOWN_S)
    again: dict[int, float] = {}
    me = Owner(job, process_name())
    for port in ports:
        if port in _SERVED and (rank or _SERVED[port].owner != me):
            # This process now belongs to another job, or has another rank.
            stop_serving(port)
        if port in _SERVED:
            return find_tcp_store(host, port, world_size, hosts=True, timeout=timeout)
    # A client of torch's store looks up the names of both ends, which takes seconds if a name server does not answer.
    answers_s = dict.fromkeys(ports, _ANSWERS_S)
    while True:
        for port in ports:
            if (now := time.monotonic()) < again.get(port, now):
                continue
            left_s = max(deadline - now, 0.1)
            alone = rank != 0 and len(ports) == 1
            found[port] = here = _look(host, port, left_s if alone else min(left_s, answers_s[port]))
            # Only rank 0 can tell its job's store from the store of an earlier program.
            mine = here.owner and (here.owner.may_be(job) if rank else here.owner == me)
            if mine and here.client is not None:
                here.client.set_timeout(timeout)
                return (
                    find_tcp_store(host, port, world_size, hosts=True, timeout=timeout)
                    if rank == 0
                    else here.client
                )
            if here.owner is None and not here.free:
                again[port] = now + _SILENT_S
                answers_s[port] *= 2
        for port in (port for port in ports if rank == 0 and found[port].free and not found[port].unknown):
            try:
                # `find_tcp_store` finds this server by port.
                server = serve_on_loopback(host, port, timeout)
                store = find_tcp_store(host, port, world_size, hosts=True, timeout=timeout)
                del server
            except (OSError, RuntimeError, ValueError) as error:
                found[port] = _Found(first_line(error) + _elsewhere(host), error=error)
                continue
            store.set(_JOB, f"{job}\n{me.process}\n{process_name(os.getppid())}")
            # Last, after the end of processes that this one has started.
            at_exit = Finalize(
                None, _serve_to_the_end, (store, port, timeout.total_seconds()), exitpriority=-100
            )
            _SERVED[port] = _Served(me, at_exit)
            return store
        # If there is only one port, a job that has the port will not leave it.
        taken = [here for here in found.values() if here.owner is not None]
        unknown = all(here.unknown for here in found.values())
        until = known_by if unknown else deadline
        if (rank == 0 and not unknown) or len(taken) == len(ports) == 1 or time.monotonic() >= until:
            for here in found.values():
                if rank == 0 and here.client is not None and here.owner and here.owner.may_be(job):
                    note_twice(here.client, 0, here.owner.process)
            errors = (here.error for here in found.values() if here.error is not None)
            raise _not_found(host, found, job, rank, world_size, timeout) from next(errors, None)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSES_S)


def is_serving(port: int | None) -> bool:
    """Return whether this process serves a store at `port` until it exits."""
    return port in _SERVED


def stop_serving(port: int) -> None:
    """Serve the store at `port` only as long as this process's meshes use it. No effect if another process serves it."""
    if (served := _SERVED.pop(port, None)) is not None:
        served.at_exit.cancel()


def _serve_to_the_end(store: dist.TCPStore, port: int, limit_s: float) -> None:
    """Wait until no other process is connected to `store`, which this process serves."""
    error = sys.exception() or getattr(sys, "last_value", None)
    if error is not None and not (isinstance(error, SystemExit) and not error.code):
        limit_s = min(limit_s, _FAILED_S)
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and _has_clients(port):
        time.sleep(_PAUSE_S)
    _SERVED.pop(port, None)


def _has_clients(port: int) -> bool:
    """Return whether another process is connected to the store that this process serves at `port`."""
    found = [each for each in psutil.Process().net_connections("tcp") if each.raddr]
    mine = {each.laddr.port for each in found}
    return any(each.laddr.port == port and each.raddr.port not in mine for each in found)


def find_agent(host: str, port: int, rank: int, world_size: int, timeout: timedelta) -> dist.TCPStore:
    """Return the store of torchrun's agent. Raises LaunchError if the store does not answer."""
    deadline = time.monotonic() + timeout.total_seconds()
    known_by = min(deadline, time.monotonic() + _UNKNOWN_S)
    while True:
        # The agreement that follows names missing ranks, so do not wait for them here.
        here = _look(host, port, max(deadline - time.monotonic(), 0.1), owned=False)
        if here.client is not None:
            here.client.set_timeout(timeout)
            return here.client
        if not here.free or time.monotonic() >= (known_by if here.unknown else deadline):
            raise _not_found(host, {port: here}, "", rank, world_size, timeout) from here.error
        time.sleep(_PAUSES_S)


def _look(host: str, port: int, within_s: float, owned: bool = True) -> _Found:
    """Probe an address for a store. owned: whether only the store of a job counts."""
    deadline = time.monotonic() + within_s
    try:
        _knock(host, port, min(within_s, _LOOK_S))
    except OSError as error:
        unknown = isinstance(error, socket.gaierror)
        return _Found(_reason(host, error), free=True, unknown=unknown, error=error)
    try:
        client = find_tcp_store(host, port, None, hosts=False, timeout=timedelta(seconds=within_s))
        if not owned:
            return _Found("the store of torchrun's agent", client=client)
        # Rank 0 writes the job's name as soon as its server runs.
        while (owner := owner_of(client)) is None:
            if time.monotonic() >= deadline:
                return _Found("a store of torch that belongs to no meshcomm job")
            time.sleep(_PAUSE_S)
    except (OSError, RuntimeError, ValueError) as error:
        return _Found(first_line(error), error=error)
    return _Found(f"the store of {owner}", owner, client)


def _knock(host: str, port: int, within_s: float) -> None:
    """Raise OSError unless a program listens at the address."""
    with socket.create_connection((host, port), timeout=within_s):
        pass


def _reason(host: str, error: OSError) -> str:
    """Return why no program could be reached, in words."""
    if isinstance(error, socket.gaierror):
        return f"the name {host} is unknown: {error.strerror}"
    if isinstance(error, ConnectionRefusedError):
        return "no program listens there"
    if isinstance(error, TimeoutError):
        return "this host does not answer: a firewall, or an address in another network"
    return f"not reachable: {error.strerror or error}"


def _elsewhere(host: str) -> str:
    """Return the end of a sentence about a store that could not be served at `host`."""
    try:
        with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            return ""
    except OSError as error:
        other = error.errno == errno.EADDRNOTAVAIL
        return f"; {host} is not an address of this host, where rank 0 runs" if other else ""


def owner_of(store: dist.Store) -> Owner | None:
    """Return the owner of the store, or None if no job's rank 0 has written its name."""
    return Owner(*store.get(_JOB).decode().split("\n")) if store.check([_JOB]) else None


def note_twice(store: Any, rank: int, first: str) -> None:
    """Report to the other ranks that this process and the process `first` both have the rank `rank`."""
    line = f"{rank}\t{first}\t{process_name()}\t{process_name(os.getppid())}\n"
    if store.has_extended_api():
        store.append(TWICE, line)
    else:
        store.set(TWICE, line)


def _not_found(
    host: str, found: dict[int, _Found], job: str, rank: int, world_size: int, timeout: timedelta
) -> LaunchError:
    owners = [here.owner for here in found.values() if here.owner is not None]
    where = f"{host}:{' '.join(map(str, found))}"
    given = "\n".join(f"{host}:{port}: {here.what}" for port, here in found.items())
    if len(owners) == len(found):
        return LaunchError(
            f"rank {rank} of {world_size} cannot meet the others at {where}: another job uses this address",
            given=f"{given}\nthis is {Owner(job, process_name()) if rank == 0 else job or f'rank {rank}, {process_name()}'}",
            expected="a different address for each job, or a launcher that gives each job a name",
            hint="another MASTER_PORT, or none under mpirun and srun; or one job name in TORCHELASTIC_RUN_ID on all ranks",
        )
    if all(here.unknown for here in found.values()):
        grace_s = min(timeout.total_seconds(), _UNKNOWN_S)
        return LaunchError(
            f"rank {rank} of {world_size} cannot meet the others: this host does not know the name {host}",
            given=f"{given}\nfor {grace_s:g} s",
            expected="the address of rank 0's host, or a name that every rank's host can look up",
            hint=f"getent hosts {host}; or MASTER_ADDR with the host's IP address",
        )
    return LaunchError(
        f"rank {rank} of {world_size} could not meet the others at {where}",
        given=given,
        expected=f"the store of rank 0 to answer within {timeout.total_seconds():g} s",
        hint=("look" if rank == 0 else "check whether rank 0 is running, and look on its host")
        + f" which program has the port: ss -ltnp 'sport = :{next(iter(found))}'"
        + (", or use another MASTER_PORT" if rank == 0 else ""),
    )


def find_tcp_store(
    host: str, port: int, world_size: int | None, *, hosts: bool, timeout: timedelta
) -> dist.TCPStore:
    """Return torch's store at `host`:`port`, with `timeout` for its calls. With `hosts`, this process runs the server.

    Does not wait for the other ranks. Raises torch's errors, and TimeoutError soon after the timeout.
    """
    make = partial(
        dist.TCPStore, host, port, world_size, hosts, timeout, wait_for_workers=False, multi_tenant=True
    )
    try:
        return within(timeout.total_seconds() + _GRACE_S, make)
    except TimeoutError as late:
        try:
            _knock(host, port, _LOOK_S)
        except OSError as error:
            raise TimeoutError(_reason(host, error)) from late
        raise TimeoutError(
            "a program listens, but no torch store answers: another program has the port, or the store is stopped"
        ) from late


# -- names of processes, and of jobs by them ----------------------------------------------------------------


def process_name(number: int | None = None) -> str:
    """Return a unique name for the process `number` on this host, by default this process: host, PID and start time."""
    found = os.getpid() if number is None else number
    return f"process {found} of {socket.gethostname()}, started at {_started(str(found)) or '?'}"


def is_running(name: str) -> bool | None:
    """Return whether the process with this `process_name` is running; None if this host cannot tell."""
    parts = _NAME.fullmatch(name)
    if parts is None or parts[2] != socket.gethostname():
        return None
    if parts[3] != "?":
        return _started(parts[1]) == parts[3]
    if sys.platform == "win32":
        return False  # on Windows, signal 0 would be Ctrl-C
    try:
        os.kill(int(parts[1]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def is_stopped(name: str) -> bool:
    """Return whether the process with this `process_name` on this host is stopped by SIGSTOP or a debugger."""
    parts = _NAME.fullmatch(name)
    return parts is not None and (_status(parts[1]) or "R")[0] in "Tt"


def _started(process: str) -> str | None:
    """Return the start time of a process on this host in kernel ticks, or None if the process has ended or is unknown."""
    numbers = _status(process)
    return None if numbers is None or numbers[0] in "ZX" else numbers[19]


def _status(process: str) -> list[str] | None:
    """Return the state and the other /proc fields of a process on this host, or None if the process has ended or is
    unknown.
    """
    try:
        # The name in parentheses may contain any character.
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def started_by(launch: Launch) -> str:
    """Return a name for a job that its launcher does not name. The name is derived from the process that started this host's
    ranks or from Hydra's mpiexec, which is the same on all hosts of the job. Returns "" if nothing is known."""
    parent = multiprocessing.parent_process()
    variable = next((name for name in MPI_RANKS if name in os.environ), None)
    if launch.kind == "mpi" and variable is not None:
        for each in psutil.Process().parents():
            try:
                words, environment = each.cmdline(), each.environ()
            except psutil.Error:
                break
            if "--control-port" in words[:-1]:
                return f"the job of mpiexec at {words[words.index('--control-port') + 1]}"
            if variable not in environment:
                return f"the job of {process_name(each.pid)}"
    return "" if parent is None or parent.pid is None else f"the job of {process_name(parent.pid)}"


def known_everywhere(job: str) -> bool:
    """Return whether all hosts of a job use this job name. False if the name is derived from the process that started one
    host's ranks.
    """
    return _NAME.search(job) is None
