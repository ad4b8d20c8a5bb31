"""A standby process that imports torch in advance. Copies of this process replace lost ranks immediately.

Imports take most of a rank's startup time. The standby process imports at the lowest priority, so that it does not slow down
the ranks.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import runpy
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Final, TypeAlias, final

from meshcomm.job.reaper import end_with_parent, prctl

# How a launcher starts the `meshcomm` command.
COMMAND: Final = ("-P", "-m", "meshcomm")

# The modules that each command imports in rank processes. The key None is for the modules that every command imports.
_IMPORTED: Final[Mapping[str | None, Sequence[str]]] = {
    None: ("meshcomm.commands.processes", "meshcomm.config.read", "meshcomm.mesh.opening"),
    "train": ("meshcomm.train", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"),
}

_PR_SET_CHILD_SUBREAPER: Final = 36
# The time in which a copy reports its process ID.
_ANSWERS_S: Final = 10.0
_LOOK_S: Final = 0.05


@final
class _Copy:
    """A copy of the standby process. The kernel made it a child of this process when its own parent ended."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if ended else None
        return self._code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)


Process: TypeAlias = "subprocess.Popen[bytes] | _Copy"
"""A process of a job. Its `poll` returns the exit code, negative for a signal, or None while it is running."""


@final
class Standby:
    """Manages a standby process, if `arguments` are those of a `meshcomm` command and the system is Linux.

    environment: the environment variables of the process, without a rank's own variables.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._words = arguments[len(COMMAND) :] if (*arguments[: len(COMMAND)],) == COMMAND else ()
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection
        self._ready = False

    def start(self) -> None:
        """Start a standby process if there is none. From then on, orphaned descendants become children of this process."""
        if self._process is not None or not self._words or not sys.platform.startswith("linux"):
            return
        prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._pipe, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), *self._words],
                env=self._environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def take(self, variables: Mapping[str, str]) -> Process | None:
        """Return a new process that runs the command with the given variables.

        Returns None if there is no standby process, or if it is still importing. In these cases, a newly started process would
        be ready just as early.
        """
        # The standby process must not import numpy with this module, at the usual priority.
        from meshcomm.rendezvous.processes import is_stopped, process_name

        if self._process is None or not self.is_ready():
            return None
        name, until = process_name(self._process.pid), time.monotonic() + _ANSWERS_S
        with contextlib.suppress(OSError, EOFError):
            self._pipe.send(dict(variables))
            # The ranks of the job wait meanwhile, so a stopped process is not waited for.
            while time.monotonic() < until and not is_stopped(name):
                if self._pipe.poll(_LOOK_S):
                    return _Copy(self._pipe.recv())
        # A copy without an answer in time ends itself, because no process reads the answer then.
        self.end()
        return None

    def is_ready(self) -> bool:
        """Return whether the standby process has finished its imports."""
        try:
            if self._process is not None and not self._ready and self._pipe.poll():
                self._ready = self._pipe.recv()
        except (OSError, EOFError):
            self.end()
        return self._ready

    def end(self) -> None:
        """End the standby process. Its copies keep running."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._pipe.close()
            self._process, self._ready = None, False


def _main() -> None:
    end_with_parent()
    descriptor, *words = sys.argv[1:]
    importing = threading.Thread(target=_import, args=(words[0],))
    importing.start()
    importing.join()
    with Connection(int(descriptor)) as pipe:
        pipe.send(True)
        while True:
            try:
                variables = pipe.recv()
            except (OSError, EOFError):
                return  # the launcher has ended
            if _is_copy():
                pipe.send(os.getpid())
                break
    os.environ.update(variables)
    # Set the name that `ps` and `top` show. The environment in /proc remains the original one.
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(f"rank {variables['RANK']}")
    sys.argv = ["meshcomm", *words]
    runpy.run_module("meshcomm", run_name="__main__", alter_sys=True)


def _is_copy() -> bool:
    """Copy this process. Return True in the copy, whose parent is the launcher, and False in the original process.

    The copy becomes the launcher's child because the intermediate process exits immediately.
    """
    with warnings.catch_warnings():
        # The only other threads are those of numpy's OpenBLAS, which stops and starts them around a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        if between := os.fork():
            # If the second fork has failed, the launcher reads the end of the answers.
            if os.waitpid(between, 0)[1]:
                sys.exit(1)
            return False
        between = os.getpid()
        try:
            copied = os.fork()
        except OSError:
            os._exit(1)
        if copied:
            os._exit(0)
    os.setsid()
    while os.getppid() == between:
        time.sleep(0.001)
    return True


def _import(command: str) -> None:
    """Import the modules of a command in a thread that runs only when no other process needs the CPU core.

    Linux schedules each thread separately. A process that has lowered its priority needs root privileges to raise it again.
    """
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    # If an import fails, it fails again in the command, which reports it.
    with contextlib.suppress(Exception):
        for name in (*_IMPORTED[None], *_IMPORTED.get(command, ())):
            importlib.import_module(name)


if __name__ == "__main__":
    _main()
