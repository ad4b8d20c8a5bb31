"""The orphan reaper, which keeps a job's processes from outliving the job.

It uses only the standard library and can run as a script, because the reaper process must start immediately.
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
from typing import Final

# The job's folder. Every process that a rank starts inherits this variable, which identifies the job's processes.
JOB_VARIABLE: Final = "MESHCOMM_JOB"

DISMISSED: Final = b"dismissed"

# How long to look for new processes.
_ENDS_S: Final = 10.0
_PR_SET_PDEATHSIG: Final = 1


def start_reaper(folder: Path) -> subprocess.Popen[bytes]:
    """Start a process that ends all of the job's processes unless it receives DISMISSED before its stdin closes.

    folder: the job's folder. The reaper also removes the folder when it ends the processes.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={name: value for name, value in os.environ.items() if name != JOB_VARIABLE},
        # Signals for the launcher's process group must not reach the reaper.
        start_new_session=True,
    )


def end_all(folder: Path) -> None:
    """Send SIGKILL to every process of the job that uses this folder.

    This includes ranks and all processes that they have started, in any session or process group, except processes whose
    environment differs. On a system without /proc, no processes are found.
    """
    deadline = time.monotonic() + _ENDS_S
    # A new process shows its environment only after a moment, so two consecutive scans must find nothing.
    quiet = 0
    while quiet < 2 and time.monotonic() < deadline:
        members = _members(folder)
        for process in members:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        quiet = 0 if members else quiet + 1
        if quiet < 2:
            time.sleep(0.01)


def _members(folder: Path) -> list[int]:
    mark = f"{JOB_VARIABLE}={folder}".encode()
    members = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        # Processes that have ended since, and other users' processes, cannot be read.
        with contextlib.suppress(OSError):
            if mark in entry.read_bytes().split(b"\0"):
                members.append(int(entry.parent.name))
    return [process for process in members if process != os.getpid()]


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process or thread. Linux only."""
    import ctypes

    ctypes.CDLL(None).prctl(option, value)


def end_with_parent(poll: bool = False) -> None:
    """Have this process killed with SIGKILL when its parent exits.

    poll: check the parent once a second instead of asking the kernel, which is possible only on Linux.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)

    if poll or not sys.platform.startswith("linux"):
        threading.Thread(target=watch, name="meshcomm-parent", daemon=True).start()
        return
    # The kernel sends the signal when the thread that started this process ends, which is the launcher's main thread.
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.stdin.buffer.read() != DISMISSED:
        folder = Path(sys.argv[1])
        end_all(folder)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _main()
