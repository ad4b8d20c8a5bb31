"""One rank's life under a launcher: signals, its parent's end, and an error that the job prints once."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from meshcomm.mesh.failures import await_cause, failure_of, leave
from meshcomm.mesh.guard import JOB_VARIABLE, LAUNCHER_VARIABLE, end_with_parent
from meshcomm.mesh.launch import INTERRUPTED
from meshcomm.mesh.launcher import Launch, attempt_of
from meshcomm.mesh.process import of_this_attempt
from meshcomm.mesh.reach import within

# A rank whose peer broke off, or is the one that differs, waits this long for the peer to speak first.
_PATIENCE_S = 3.0

# How long the job's store may take to say whether another rank has spoken.
_ASK_S = 5.0

# What rank 0 gets after Ctrl-C to print what it has.
_GRACE_S = 3.0


def as_rank(body: Callable[[], None], launch: Launch, label: Callable[[], str]) -> None:
    """Run `body`; where it raises, see to it that the job prints one error, and end the process.

    label: this rank with its coords; only called for an error.

    meshcomm's own launcher is left the error, and prints that of the rank that was the cause. Under
    another launcher the first rank that fails prints its own. Under an agent of torch, this process
    ends when the agent does.
    """
    _write_whole_lines()
    job = _job()
    if job is not None:
        end_with_parent(int(os.environ[LAUNCHER_VARIABLE]))
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
    if launch.rank == 0:
        _end_after_interrupt()
    else:
        # Only rank 0 has something to say about an interrupt.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        body()
    except KeyboardInterrupt:
        _leave(INTERRUPTED)
    except SystemExit:
        raise
    except BaseException as error:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        end_rank(error, launch, label())


def end_rank(
    error: BaseException, launch: Launch, label: str, *, patience_s: float = _PATIENCE_S
) -> NoReturn:
    """See to it that the job prints one error, and end this process, from whichever thread.

    patience_s: how long a rank that is not the cause waits for the one that is to speak first.
    """
    job = _job()
    failure = failure_of(error, launch.rank, label)
    attempt = attempt_of(os.environ)
    if job is not None and leave(failure, job, attempt):
        if failure.patient:
            await_cause(job, attempt, patience_s)
    elif _speaks_first(launch, patience_s if failure.patient else 0.0):
        print(failure.text, file=sys.stderr)
    _leave(failure.code)


def _write_whole_lines() -> None:
    """Several ranks share one pipe: unbuffered, their lines run into each other; buffered, they come at the end."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _job() -> Path | None:
    """The folder of the launcher that started this rank; None where another launcher did."""
    folder = os.environ.get(JOB_VARIABLE)
    if folder is None or LAUNCHER_VARIABLE not in os.environ:
        return None
    # A rank may start a job of its own, by torchrun: then these are its parent's.
    path = Path(folder)
    return path if os.environ.get("TORCHELASTIC_RUN_ID") == path.name else None


def _end_after_interrupt() -> None:
    """After Ctrl-C, give Python a moment to end well, then end the process.

    Python's own handler waits for the backend's operation to return, and with the peers gone that
    may take until its timeout. A thread can act meanwhile: the backend holds no lock of Python.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def watch() -> None:
        while os.read(reader, 1) != bytes([signal.SIGINT]):
            pass
        time.sleep(_GRACE_S)
        _leave(INTERRUPTED)

    threading.Thread(target=watch, name="meshcomm-interrupt", daemon=True).start()


def _speaks_first(launch: Launch, patience_s: float) -> bool:
    """Whether no other rank has printed an error. Where nobody can be asked, yes."""
    if launch.world_size == 1 or launch.address is None:
        return True
    try:
        store, _, _ = within(
            _ASK_S + 1,
            lambda: next(
                dist.rendezvous("env://", launch.rank, launch.world_size, timeout=timedelta(seconds=_ASK_S))
            ),
        )
        store = of_this_attempt(store)
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline and store.add("meshcomm/spoke", 0) == 0:
            time.sleep(0.05)
        return bool(store.add("meshcomm/spoke", 1) == 1)
    except (dist.DistError, RuntimeError, ValueError, OSError):
        return True


def _leave(code: int) -> NoReturn:
    """End at once: waiting for peers that are gone, in some destructor, would help nobody."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
