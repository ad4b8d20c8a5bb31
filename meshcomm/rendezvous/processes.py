"""Names of processes, whether a process is still running, and how it has ended."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
from pathlib import Path
from typing import Final

import psutil

from meshcomm.rendezvous.launcher import MPI_RANKS, Launch

# Also part of the names of jobs. The groups are the PID, the host, and the start time.
NAME: Final = re.compile(r"process (\d+) of (.*), started at (\S+)")


def process_name(number: int | None = None) -> str:
    """Return a unique name for the process `number` on this host, by default this process: host, PID and start time."""
    process = os.getpid() if number is None else number
    return f"process {process} of {socket.gethostname()}, started at {_started(str(process)) or '?'}"


def is_running(name: str) -> bool | None:
    """Return whether the process with this `process_name` is running; None if this host cannot tell."""
    parts = NAME.fullmatch(name)
    if parts is None or parts[2] != socket.gethostname():
        return None
    return psutil.pid_exists(int(parts[1])) if parts[3] == "?" else _started(parts[1]) == parts[3]


def is_stopped(name: str) -> bool:
    """Return whether the process with this `process_name` on this host is stopped by SIGSTOP or a debugger."""
    parts = NAME.fullmatch(name)
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
    return NAME.search(job) is None


def signal_text(number: int) -> str:
    """Return a signal's name, such as `SIGKILL`, or `signal 99` if it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
