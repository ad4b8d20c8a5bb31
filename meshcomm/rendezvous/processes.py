"""The processes of a job: their names, whether they run, and which rank each has claimed in the job's store."""

from __future__ import annotations

import multiprocessing
import os
import re
import socket
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from meshcomm.errors import LaunchError, MeshMismatchError
from meshcomm.layout.sizes import ranks_text
from meshcomm.rendezvous import keys
from meshcomm.rendezvous.launcher import MPI_RANKS, Launch

# Also part of the names of jobs. The groups are the PID, the host, and the start time.
_NAME: Final = re.compile(r"process (\d+) of (.*), started at (\S+)")


def process_name(number: int | None = None) -> str:
    """Return a unique name for the process `number` on this host, by default this process: host, PID and start time."""
    return _own_name(os.getpid()) if number is None else _name(number)


def _name(process: int) -> str:
    return f"process {process} of {socket.gethostname()}, started at {_started(str(process)) or '?'}"


# Each simulated rank claims its rank in this name. A forked process has another number.
_own_name: Final = cache(_name)


def is_running(name: str) -> bool | None:
    """Return whether the process with this `process_name` is running; None if this host cannot tell."""
    parts = _NAME.fullmatch(name)
    if parts is None or parts[2] != socket.gethostname():
        return None
    if parts[3] == "?":
        import psutil

        return psutil.pid_exists(int(parts[1]))
    return _started(parts[1]) == parts[3]


def is_stopped(name: str) -> bool:
    """Return whether the process with this `process_name` on this host is stopped by SIGSTOP or a debugger."""
    parts = _NAME.fullmatch(name)
    return parts is not None and (_status(parts[1]) or "R")[0] in "Tt"


def _started(process: str) -> str | None:
    """Return the start time of a process on this host in kernel ticks, or None if the process has ended or is unknown.

    psutil's `create_time` also counts from the clock, so two processes may read different times.
    """
    status = _status(process)
    return None if status is None or status[0] in "ZX" else status[19]


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
    variable = next((name for name in MPI_RANKS if name in os.environ), None)
    if launch.kind == "mpi" and variable is not None:
        import psutil

        for parent in psutil.Process().parents():
            try:
                words, environment = parent.cmdline(), parent.environ()
            except psutil.Error:
                break
            if "--control-port" in words[:-1]:
                return f"the job of mpiexec at {words[words.index('--control-port') + 1]}"
            if variable not in environment:
                return f"the job of {process_name(parent.pid)}"
    started = multiprocessing.parent_process()
    return "" if started is None or started.pid is None else f"the job of {process_name(started.pid)}"


def known_everywhere(job: str) -> bool:
    """Return whether all hosts of a job use this job name. False if the name is derived from the process that started one
    host's ranks.
    """
    return _NAME.search(job) is None


# -- claims of ranks ----------------------------------------------------------------------------------------


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


def own(store: Any, job: str) -> None:
    """Record that this process, rank 0 of a job, serves the store."""
    store.set(keys.JOB, f"{job}\n{process_name()}\n{process_name(os.getppid())}")


def owner_of(store: Any) -> Owner | None:
    """Return the owner of the store, or None if no job's rank 0 has written its name."""
    return Owner(*store.get(keys.JOB).decode().split("\n")) if store.check([keys.JOB]) else None


def claim(store: Any, rank: int, *, kept: bool) -> None:
    """Claim `rank` for this process, with one store operation. This process may claim the rank again, and other processes
    may claim it once this process has ended.

    Called by: every process of the job, before any other operation that counts its rank in the store.
    kept: whether the store may hold keys of earlier attempts of the job. If so, a process on another host is assumed to
        belong to an earlier attempt.
    Raises LaunchError naming both processes if another process has this rank; `blame` then informs the other ranks.
    """
    key, mine = keys.OWNER.format(rank), process_name()
    first = store.compare_set(key, "", mine).decode()
    if first == mine:
        return
    runs = is_running(first)
    if runs or (runs is None and not kept):
        raise came_twice(store, rank, first)
    store.compare_set(key, first, mine)


def state_of_rank(store: Any, rank: int) -> str:
    """Return the state of the process that has claimed `rank`: "ended", "stopped" or "runs"; "" if this host cannot tell."""
    name = process_of_rank(store, rank)
    runs = is_running(name)
    if not runs:
        return "" if runs is None else "ended"
    return "stopped" if is_stopped(name) else "runs"


def is_claimed(store: Any, rank: int) -> bool:
    """Return whether a process has claimed `rank`, on this host or another one."""
    return bool(process_of_rank(store, rank))


def process_of_rank(store: Any, rank: int) -> str:
    """Return the name of the process that has claimed `rank`, or "" if none has."""
    key = keys.OWNER.format(rank)
    return store.get(key).decode() if store.check([key]) else ""


def came_twice(store: Any, rank: int, first: str) -> LaunchError:
    """Return this process's error if the process `first` has the same rank. The error is also reported to the other ranks."""
    note_twice(store, rank, first)
    return LaunchError(
        f"rank {rank} exists twice: another process has already claimed rank {rank}",
        given=f"{first}\n{process_name()} (this one)",
        expected="a different rank for each process of a job, and a different address or file for each job",
        hint="check what sets the rank of both: RANK in the environment, process.rank, or init(rank=...)",
    )


class _Twice(NamedTuple):
    """A rank, and the names of the process that claimed it, a later process with this rank, and the later process's parent."""

    rank: int
    first: str
    second: str
    parent: str

    def __str__(self) -> str:
        return f"rank {self.rank} exists twice: {self.first}; and {self.second}"


def note_twice(store: Any, rank: int, first: str) -> None:
    """Report to the other ranks that this process and the process `first` both have the rank `rank`."""
    line = f"{rank}\t{first}\t{process_name()}\t{process_name(os.getppid())}\n"
    if store.has_extended_api():
        store.append(keys.TWICE, line)
    else:
        store.set(keys.TWICE, line)


def _twice(store: Any) -> list[_Twice]:
    """Return the processes that were refused because another process has their rank, except processes of earlier attempts."""
    lines = store.get(keys.TWICE).decode().splitlines() if store.check([keys.TWICE]) else []
    refused = [_Twice(int(rank), *names) for rank, *names in (line.split("\t") for line in lines)]
    return [refusal for refusal in refused if process_of_rank(store, refusal.rank) == refusal.first]


def blame(error: MeshMismatchError, store: Any) -> None:
    """If ranks are missing, set the mismatched ranks of `error` to the ranks that two processes claim."""
    if not error.missing:
        return
    try:
        refused = _twice(store)
    except RuntimeError:
        return
    if refused:
        error.mismatched_ranks = tuple(sorted({refusal.rank for refusal in refused}))
        error.given = "\n".join([str(error.given), *map(str, refused)])
        error.hint = (
            f"check what sets the rank of the processes that are {ranks_text(error.mismatched_ranks)}"
        )


def another_job(store: Any) -> LaunchError | None:
    """Return the error if processes of another job used this store and this rank may belong to that job. This rank cannot
    belong to that job if a single process started this rank and rank 0 but none of the refused processes.
    """
    refused = _twice(store)
    if not refused:
        return None
    owner, parent = owner_of(store), process_name(os.getppid())
    if owner is not None and owner.parent == parent and parent not in {refusal.parent for refusal in refused}:
        return None
    return LaunchError(
        "another job used this job's store: the ranks of both jobs may be mixed",
        given="\n".join([*map(str, refused), f"this is {process_name()}"]),
        expected="a different address for each job: ranks of jobs without a name cannot be told apart",
        hint="a different MASTER_PORT for each job, or one job name in TORCHELASTIC_RUN_ID on all its ranks",
    )
