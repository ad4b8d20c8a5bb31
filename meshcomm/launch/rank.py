"""Run one rank under a launcher. The rank ends with its launcher, and its error is printed only once."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable

from meshcomm.launch.reaper import end_with_parent
from meshcomm.mesh.environment import Launch, speak_for_rank
from meshcomm.mesh.rank_failure import end_rank, leave_stack_on_signal, trace_of
from meshcomm.mesh.watchdogs import explained, latest_label, leave_all


def as_rank(body: Callable[[], None], launch: Launch, label: Callable[[], str]) -> None:
    """Run `body`. If `body` raises an exception, end the process, and make sure that the job prints a single error.

    label: a function that returns this rank with its coords. It is called only if an error occurs before a mesh is opened.

    meshcomm's own launcher prints the error of the root cause. Under any other launcher, the first rank that fails prints
    its own error. Under torch's agent and meshcomm's launcher, this process ends when the launcher ends.
    """
    # Several ranks share one pipe. Unbuffered output would mix lines, and fully buffered output would appear only at the end.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
    speak_for_rank(os.environ)
    leave_stack_on_signal()
    own = os.getpid()
    if launch.rank:
        # Only rank 0 reports an interrupt.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        body()
    except BaseException as error:
        if os.getpid() != own and not isinstance(error, SystemExit):
            # A fork, as by os.fork. The rank goes on, and decides what its error means.
            sys.excepthook(type(error), error.with_traceback(trace_of(error)), error.__traceback__)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        found = explained(error)
        if isinstance(found, SystemExit):
            raise
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        leave_all()
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else None
        end_rank(found, launch, latest_label() or label(), code=code)
