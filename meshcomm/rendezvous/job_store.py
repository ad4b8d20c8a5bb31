"""Finds the store of this job. Several jobs may use the same host and port."""

from __future__ import annotations

import errno
import hashlib
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from multiprocessing.util import Finalize
from typing import Final

import torch.distributed as dist

from meshcomm.errors import LaunchError
from meshcomm.rendezvous.exposure import serve_on_loopback
from meshcomm.rendezvous.processes import Owner, note_twice, own, owner_of, process_name
from meshcomm.rendezvous.store import within
from meshcomm.transport.connections import connections
from meshcomm.watching.exceptions import first_line, hint_about

# Ports for jobs that specify none. They are below the range that systems use for outgoing connections.
_PORTS: Final = range(20_000, 32_000)
_CANDIDATES: Final = 8

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
NOBODY: Final = "no program listens there"
_TAKEN: Final = (
    "a program listens, but no torch store answers: another program has the port, or the store is stopped"
)
# How long a rank 0 that ends with an error keeps serving other ranks that are still connected.
_FAILED_S: Final = 3.0


def ports_of(job: str) -> list[int]:
    """Return the ports at which a job's ranks look for the job's store, in search order. All ranks of a job get the same
    ports, and other jobs get different ones.

    >>> ports_of("Slurm step 17.0")[:3], ports_of("Slurm step 17.1")[0], ports_of("")
    ([31041, 30979, 23700], 23035, [29500])
    """
    if not job:
        return [29500]
    digest = hashlib.sha256(job.encode()).digest()
    numbers = (int.from_bytes(digest[4 * i : 4 * i + 4], "big") for i in range(_CANDIDATES))
    return [_PORTS[number % len(_PORTS)] for number in numbers]


@dataclass(frozen=True, slots=True)
class _Answer:
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


def find_job(
    host: str,
    ports: Sequence[int],
    job: str,
    rank: int,
    world_size: int,
    timeout: timedelta,
    *,
    agents: bool = False,
) -> dist.TCPStore:
    """Return the store of `job` ("" if unknown). Rank 0 serves the store at the first free port in `ports`, where the
    other ranks look for it. agents: any store at the port is the job's, because torchrun's agent serves it.

    Rank 0's process serves the store until it exits, also for later meshes of the job. At exit, it waits up to `timeout` for
    other processes that are still connected.

    A rank writes nothing to a store that has not named its job. Raises LaunchError immediately if another job uses the only
    port. Raises LaunchError with a line for each port if no store of this job answers within the timeout, or if the name
    `host` is unknown for a minute.
    """
    me = Owner(job, process_name())
    connect = partial(find_tcp_store, host, hosts=True, timeout=timeout)
    for port in ports:
        if port in _SERVED and (rank or _SERVED[port].owner != me):
            # This process now belongs to another job, or has another rank.
            stop_serving(port)
        if port in _SERVED:
            return connect(port)
    serves, alone = rank == 0 and not agents, len(ports) == 1
    began = time.monotonic()
    deadline = began + timeout.total_seconds()
    known_by, pause_s = min(deadline, began + _UNKNOWN_S), _PAUSE_S
    answers = dict[int, _Answer]()
    again = dict.fromkeys(ports, began)
    # A client of torch's store looks up the names of both ends, which takes seconds if a name server does not answer.
    limits_s = dict.fromkeys(ports, _ANSWERS_S)
    while True:
        for port in ports:
            if (now := time.monotonic()) < again[port]:
                continue
            # Agreement, which follows, names missing ranks, so a rank need not look at its only port again.
            limit_s = timeout.total_seconds() if alone and not serves else limits_s[port]
            answer = answers[port] = _look(host, port, min(max(deadline - now, 0.1), limit_s), agents)
            # Only rank 0 can tell its job's store from the store of an earlier program.
            mine = answer.owner and (answer.owner == me if serves else answer.owner.may_be(job))
            if answer.client is not None and (mine or agents):
                answer.client.set_timeout(timeout)
                return connect(port) if serves else answer.client
            if answer.owner is None and not answer.free:
                again[port] = now + _SILENT_S
                limits_s[port] *= 2
        for port in ports:
            if serves and answers[port].free and not answers[port].unknown:
                try:
                    return _serve(host, port, me, timeout)
                except (OSError, RuntimeError, ValueError) as error:
                    answers[port] = _Answer(first_line(error) + _elsewhere(host), error=error)
        unknown = all(answer.unknown for answer in answers.values())
        owned = [answer for answer in answers.values() if answer.owner is not None]
        # A job that has the only port will not leave it, and an agent that accepts connections answers if it can.
        in_vain = alone and (bool(owned) or (agents and not answers[ports[0]].free))
        if in_vain or (serves and not unknown) or time.monotonic() >= (known_by if unknown else deadline):
            for answer in owned:
                if serves and answer.client is not None and answer.owner and answer.owner.may_be(job):
                    note_twice(answer.client, 0, answer.owner.process)
            cause = next((answer.error for answer in answers.values() if answer.error is not None), None)
            raise _not_found(host, answers, job, rank, world_size, timeout) from cause
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSES_S)


def find_common_store(
    host: str, port: int, job: str, timeout: timedelta, *, serves: bool, in_vain: Callable[[], bool]
) -> dist.TCPStore:
    """Return a store that several jobs use. serves: this process serves it if no program listens at the address.

    It is then served until this process exits, and three seconds longer at most. job: as in Owner. in_vain: whether to give up.

    Raises LaunchError if this process cannot serve it, and TimeoutError, with the reason, if no store answers within the timeout.
    """
    deadline, pause_s = time.monotonic() + timeout.total_seconds(), _PAUSE_S
    while True:
        left_s = max(deadline - time.monotonic(), 0.1)
        try:
            try:
                _knock(host, port, min(left_s, _LOOK_S))
            except OSError as error:
                why = _reason(host, error)
                if serves and isinstance(error, ConnectionRefusedError):
                    return _serve(host, port, Owner(job, process_name()), timeout, _FAILED_S)
            else:
                client = find_tcp_store(host, port, hosts=False, timeout=timedelta(seconds=left_s))
                client.set_timeout(timeout)
                return client
        except OSError as error:
            why = first_line(error)
        except (RuntimeError, ValueError) as error:
            why = f"{_TAKEN} ({first_line(error)})"
        if serves and (elsewhere := _elsewhere(host)):
            raise LaunchError(
                f"this process cannot serve the store at {host}:{port}",
                given=f"{why}{elsewhere}",
                expected="an address of this host, or a store that runs there already",
                hint="the address of the host of the source's lowest rank",
            )
        if time.monotonic() >= deadline or in_vain():
            raise TimeoutError(why)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSES_S)


def _look(host: str, port: int, within_s: float, agents: bool) -> _Answer:
    """Probe an address for a store. agents: see `find_job`."""
    deadline = time.monotonic() + within_s
    try:
        _knock(host, port, min(within_s, _LOOK_S))
    except OSError as error:
        return _Answer(
            _reason(host, error), free=True, unknown=isinstance(error, socket.gaierror), error=error
        )
    try:
        client = find_tcp_store(host, port, hosts=False, timeout=timedelta(seconds=within_s))
        if agents:
            return _Answer("the store of torchrun's agent", client=client)
        # Rank 0 writes the job's name as soon as its server runs.
        while (owner := owner_of(client)) is None:
            if time.monotonic() >= deadline:
                return _Answer("a store of torch that belongs to no meshcomm job")
            time.sleep(_PAUSE_S)
    except (OSError, RuntimeError, ValueError) as error:
        return _Answer(first_line(error), error=error)
    return _Answer(f"the store of {owner}", owner, client)


def _knock(host: str, port: int, within_s: float) -> None:
    """Raise OSError unless a program listens at the address."""
    with socket.create_connection((host, port), timeout=within_s):
        pass


def _reason(host: str, error: OSError) -> str:
    """Return why no program could be reached, in words."""
    if isinstance(error, socket.gaierror):
        return f"the name {host} is unknown: {error.strerror}"
    if isinstance(error, ConnectionRefusedError):
        return NOBODY
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


def _not_found(
    host: str, answers: dict[int, _Answer], job: str, rank: int, world_size: int, timeout: timedelta
) -> LaunchError:
    where = f"{host}:{' '.join(map(str, answers))}"
    given = "\n".join(f"{host}:{port}: {answer.what}" for port, answer in answers.items())
    if all(answer.owner is not None for answer in answers.values()):
        return LaunchError(
            f"rank {rank} of {world_size} cannot meet the others at {where}: another job uses this address",
            given=f"{given}\nthis is {Owner(job, process_name()) if rank == 0 else job or f'rank {rank}, {process_name()}'}",
            expected="a different address for each job, or a launcher that gives each job a name",
            hint="another MASTER_PORT, or none under mpirun and srun; or one job name in TORCHELASTIC_RUN_ID on all ranks",
        )
    if all(answer.unknown for answer in answers.values()):
        grace_s = min(timeout.total_seconds(), _UNKNOWN_S)
        return LaunchError(
            f"rank {rank} of {world_size} cannot meet the others: this host does not know the name {host}",
            given=f"{given}\nfor {grace_s:g} s",
            expected="the address of rank 0's host, or a name that every rank's host can look up",
            hint=f"getent hosts {host}; or MASTER_ADDR with the host's IP address",
        )
    look = ("look" if rank == 0 else "check whether rank 0 is running, and look on its host") + (
        f" which program has the port: ss -ltnp 'sport = :{next(iter(answers))}'"
    )
    return LaunchError(
        f"rank {rank} of {world_size} could not meet the others at {where}",
        given=given,
        expected=f"the store of rank 0 to answer within {timeout.total_seconds():g} s",
        hint=hint_about(given, f"{look}, or use another MASTER_PORT" if rank == 0 else look),
    )


def find_tcp_store(host: str, port: int, *, hosts: bool, timeout: timedelta) -> dist.TCPStore:
    """Return torch's store at `host`:`port`, with `timeout` for its calls. With `hosts`, this process runs the server.

    Does not wait for the other ranks. Raises torch's errors, and TimeoutError soon after the timeout.
    """
    make = partial(dist.TCPStore, host, port, None, hosts, timeout, wait_for_workers=False, multi_tenant=True)
    try:
        return within(timeout.total_seconds() + _GRACE_S, make)
    except TimeoutError as late:
        try:
            _knock(host, port, _LOOK_S)
        except OSError as error:
            raise TimeoutError(_reason(host, error)) from late
        raise TimeoutError(_TAKEN) from late


# -- rank 0, which serves the store --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Served:
    """A store that this process serves as rank 0, and what ends it at the process's exit."""

    owner: Owner
    at_exit: Finalize


# By port. Ranks close a mesh and open the next one at different times, so a store outlives the meshes that use it.
_SERVED: Final[dict[int, _Served]] = {}


def _serve(
    host: str, port: int, me: Owner, timeout: timedelta, stays_s: float | None = None
) -> dist.TCPStore:
    """Serve the store of this process's job at `port`. stays_s: how long to serve it at exit; None for `timeout`."""
    # `find_tcp_store` finds this server by port.
    server = serve_on_loopback(host, port, timeout)
    store = find_tcp_store(host, port, hosts=True, timeout=timeout)
    del server
    own(store, me.job)
    # Last, after the end of processes that this one has started.
    stays_s = timeout.total_seconds() if stays_s is None else stays_s
    at_exit = Finalize(None, _serve_to_the_end, (store, port, stays_s), exitpriority=-100)
    _SERVED[port] = _Served(me, at_exit)
    return store


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
    found = connections()
    mine = {connection.here[1] for connection in found}
    return any(connection.here[1] == port and connection.there[1] not in mine for connection in found)
