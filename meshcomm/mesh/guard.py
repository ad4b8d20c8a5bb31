"""What keeps a job's processes from outliving the job: ended by name, with the parent, or by a guard.

Standard library alone, and runnable as a file: the guard is a process that must be there at once.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final, final

# The job's folder; every process that a rank starts inherits it, and is known by it.
JOB_VARIABLE: Final = "MESHCOMM_JOB"
LAUNCHER_VARIABLE: Final = "MESHCOMM_LAUNCHER"

_PR_SET_PDEATHSIG: Final = 1
_WELL: Final = b"well"


@final
class Guard:
    """A process that ends all processes of the job when this one is gone without having said why.

    folder: the job's, unique to it. The guard removes it where it has to act.
    """

    def __init__(self, folder: Path) -> None:
        hidden = (JOB_VARIABLE, LAUNCHER_VARIABLE)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={name: value for name, value in os.environ.items() if name not in hidden},
            # A signal for the launcher's process group is not for the guard.
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """The job has ended, and nothing of it is left."""
        with contextlib.suppress(OSError):
            self._process.communicate(_WELL)


def end_all(folder: Path, within_s: float = 10.0) -> list[int]:
    """End by SIGKILL every process of the job with this folder; return whom.

    Ranks and all they have started, in whatever session or process group, except those that were
    given another environment. Where the system has no /proc, nobody is found.
    """
    ended: list[int] = []
    deadline = time.monotonic() + within_s
    # One that is just being started shows what it is a moment later: two looks must find nothing.
    quiet = 0
    while quiet < 2 and time.monotonic() < deadline:
        found = _members(folder)
        for process in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        ended += [process for process in found if process not in ended]
        quiet = 0 if found else quiet + 1
        if quiet < 2:
            time.sleep(0.01)
    return ended


def _members(folder: Path) -> list[int]:
    mark = f"{JOB_VARIABLE}={folder}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        # What has ended meanwhile, and what belongs to others, cannot be read.
        with contextlib.suppress(OSError):
            if mark in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
    return [process for process in found if process != os.getpid()]


def end_with_parent(launcher: int | None = None, poll: bool = False) -> None:
    """From now on this process ends, by SIGKILL, when the one that started it has ended.

    launcher: the process that should be the parent; where it is gone already, this ends at once.
    poll: look once a second instead of asking the kernel, which only Linux lets one do.
    """
    parent = os.getppid() if launcher is None else launcher
    if not poll and sys.platform.startswith("linux"):
        import ctypes

        # It is the thread that started this process whose end counts: torchrun's main thread.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="meshcomm-parent", daemon=True).start()


def _main() -> None:
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    if sys.stdin.buffer.read() != _WELL:
        folder = Path(sys.argv[1])
        end_all(folder)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _main()
