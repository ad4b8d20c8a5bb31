"""One rank's life under a launcher: signals, and an error that the job prints once, with its coords."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from meshcomm.errors import CommunicationError, MeshcommError
from meshcomm.mesh.launch import INTERRUPTED
from meshcomm.mesh.launcher import Launch

# A rank whose peer broke off waits this long for the peer to speak first: its own error only follows.
_PATIENCE_S = 3.0

# What rank 0 gets after Ctrl-C to print what it has.
_GRACE_S = 3.0


def as_rank(body: Callable[[], None], launch: Launch, label: Callable[[], str]) -> None:
    """Run `body`; where it raises, print the error unless another rank has, and end the process.

    label: this rank with its coords; only called for an error.
    """
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
        if _speaks_first(launch, patient=isinstance(error, CommunicationError)):
            print(_text(error, label()), file=sys.stderr)
        _leave(2 if isinstance(error, MeshcommError) and not isinstance(error, CommunicationError) else 1)


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


def _text(error: BaseException, who: str) -> str:
    if isinstance(error, MeshcommError) and not isinstance(error, CommunicationError):
        return f"{who}: {type(error).__name__}: {error}"
    # The frames that started the script say nothing about it.
    trace = error.__traceback__
    while (
        trace is not None and trace.tb_next is not None and _starts_scripts(trace.tb_frame.f_code.co_filename)
    ):
        trace = trace.tb_next
    return f"{who}:\n" + "".join(traceback.format_exception(type(error), error, trace)).rstrip()


def _starts_scripts(file: str) -> bool:
    return "runpy" in file or file == __file__ or Path(file).name == "jobs.py"


def _speaks_first(launch: Launch, patient: bool) -> bool:
    """Whether no other rank has printed an error. Where nobody can be asked, yes."""
    if launch.world_size == 1 or launch.address is None:
        return True
    try:
        store, _, _ = next(
            dist.rendezvous("env://", launch.rank, launch.world_size, timeout=timedelta(seconds=5))
        )
        deadline = time.monotonic() + (_PATIENCE_S if patient else 0.0)
        while time.monotonic() < deadline and store.add("meshcomm/spoke", 0) == 0:
            time.sleep(0.05)
        return bool(store.add("meshcomm/spoke", 1) == 1)
    except (dist.DistError, RuntimeError, ValueError, OSError):
        return True


def _leave(code: int) -> None:
    """End at once: waiting for peers that are gone, in some destructor, would help nobody."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
