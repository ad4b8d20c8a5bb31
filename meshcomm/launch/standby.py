"""A process that has imported torch before it is needed, so that it can take a lost rank's place at once.

Imports take most of the time of a start. They run at the lowest priority, so that the ranks are not slowed down.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, final

from meshcomm.launch.reaper import end_with_parent

# How a launcher starts the `meshcomm` command.
COMMAND: Final = ("-P", "-m", "meshcomm")

# The modules that a command imports in rank processes, by command. The key None holds the modules that every command imports.
_IMPORTED: Final[Mapping[str | None, Sequence[str]]] = {
    None: ("meshcomm.cli.app", "meshcomm.jobs.running", "meshcomm.mesh.opening"),
    "train": ("meshcomm.train", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"),
}


@final
class Standby:
    """The process that waits, if `arguments` are those of a `meshcomm` command. environment: without rank variables."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._words = arguments[len(COMMAND) :] if (*arguments[: len(COMMAND)],) == COMMAND else ()
        self._environment = environment
        self._waiting: tuple[subprocess.Popen[bytes], int] | None = None

    def start(self) -> None:
        """Start the process, if none waits."""
        if self._waiting is not None or not self._words:
            return
        here, there = os.pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(here), *self._words],
                env=self._environment,
                pass_fds=(here,),
                start_new_session=True,
            )
        except BaseException:
            os.close(there)
            raise
        finally:
            os.close(here)
        self._waiting = process, there

    def take(self, variables: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
        """Make the process run the command with these variables. Returns None if no process waits.

        A process that is still importing runs the command when it has finished.
        """
        if self._waiting is None:
            return None
        (process, there), self._waiting = self._waiting, None
        try:
            with open(there, "w") as pipe:
                json.dump(dict(variables), pipe)
        except BrokenPipeError:
            process.wait()
            return None
        return process

    def end(self) -> None:
        """End the process without running the command."""
        if self._waiting is not None:
            process, there = self._waiting
            self._waiting = None
            os.close(there)
            process.kill()
            process.wait()


def _main() -> None:
    end_with_parent()
    importing = threading.Thread(target=_import, args=(sys.argv[2],))
    importing.start()
    importing.join()
    with open(int(sys.argv[1])) as pipe:
        # Empty if the launcher has ended.
        variables = json.loads(pipe.read() or "null")
    if variables is None:
        return
    os.environ.update(variables)
    # As `ps` and `top` show the process; its environment in /proc stays that of the start.
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(f"rank {variables['RANK']}")
    sys.argv = ["meshcomm", *sys.argv[2:]]
    runpy.run_module("meshcomm", run_name="__main__", alter_sys=True)


def _import(command: str) -> None:
    """Import the modules of a command, in a thread that runs only when no other process needs the core.

    Linux schedules each thread by itself. A process that had lowered its own priority could raise it again only as root.
    """
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    # If an import fails, it fails again in the command, which reports it.
    with contextlib.suppress(Exception):
        for name in (*_IMPORTED[None], *_IMPORTED.get(command, ())):
            importlib.import_module(name)


if __name__ == "__main__":
    _main()
