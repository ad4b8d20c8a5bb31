"""The orphan reaper: what keeps a job's processes from outliving the job.

Standard library alone, and runnable as a file: the reaper is a process that must be there at once.
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

# The job's folder: every process that a rank starts inherits this variable, and is found by it.
JOB_VARIABLE: Final = "MESHCOMM_JOB"

DISMISSED: Final = b"dismissed"

_PR_SET_PDEATHSIG: Final = 1


def start_reaper(folder: Path) -> subprocess.Popen[bytes]:
    """A process that ends all of the job, unless it is sent DISMISSED before its stdin closes.

    folder: the job's, unique to it. The reaper removes it where it has to act.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={name: value for name, value in os.environ.items() if name != JOB_VARIABLE},
        # A signal for the launcher's process group is not for the reaper.
        start_new_session=True,
    )


def end_all(folder: Path, within_s: float = 10.0) -> None:
    """End by SIGKILL every process of the job with this folder.

    Ranks and all they have started, in whatever session or process group, except those that were
    given another environment. Where the system has no /proc, nobody is found.
    """
    deadline = time.monotonic() + within_s
    # A process that is just being started shows its environment a moment later: two looks must find nothing.
    quiet = 0
    while quiet < 2 and time.monotonic() < deadline:
        found = _members(folder)
        for process in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        quiet = 0 if found else quiet + 1
        if quiet < 2:
            time.sleep(0.01)


def _members(folder: Path) -> list[int]:
    mark = f"{JOB_VARIABLE}={folder}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        # Processes that have ended meanwhile, and those of other users, cannot be read.
        with contextlib.suppress(OSError):
            if mark in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
    return [process for process in found if process != os.getpid()]


def end_with_parent(poll: bool = False) -> None:
    """From now on this process ends, by SIGKILL, when the one that started it has ended.

    poll: look once a second instead of asking the kernel, which only Linux lets one do.
    """
    parent = os.getppid()
    if not poll and sys.platform.startswith("linux"):
        import ctypes

        # The death signal follows the thread that started this process: a launcher's main thread.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="meshcomm-parent", daemon=True).start()


def signal_text(number: int) -> str:
    """`SIGKILL`, or `signal 99` for one without a name."""
    known = {each.value for each in signal.Signals}
    return signal.Signals(number).name if number in known else f"signal {number}"


def _main() -> None:
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    if sys.stdin.buffer.read() != DISMISSED:
        folder = Path(sys.argv[1])
        end_all(folder)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _main()
