"""Run one rank under a launcher. The rank ends with its launcher, and its error is printed only once."""

from __future__ import annotations

import io
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from types import TracebackType

from meshcomm.job.reaper import end_with_parent
from meshcomm.mesh.rank_failure import end_rank, leave_stack_on_signal
from meshcomm.mesh.watchdog import explained, latest_label, leave_all
from meshcomm.rendezvous.launcher import Launch, speak_for_rank
from meshcomm.watching.exceptions import trace_of


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
    usual_hook, my_pid, ends = sys.__excepthook__, os.getpid(), False

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # The program's own hook may call this one. The job prints the error that ends this rank.
        if not ends:
            usual_hook(kind, error, trace)

    sys.excepthook = sys.__excepthook__ = show
    if launch.rank:
        # Only rank 0 reports an interrupt.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        body()
    except BaseException as error:
        if os.getpid() != my_pid and not isinstance(error, SystemExit):
            # A fork, as by os.fork. The rank goes on, and decides what its error means.
            sys.excepthook(type(error), error.with_traceback(trace_of(error)), error.__traceback__)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        explanation = explained(error)
        if isinstance(explanation, SystemExit):
            raise
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        leave_all()
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else None
        ends = True
        own_hook = sys.excepthook is not show and not isinstance(error, SystemExit)
        hook = partial(_call_hook, explanation) if own_hook else None
        end_rank(explanation, launch, latest_label() or label(), code=code, hook=hook)


def _call_hook(error: BaseException) -> None:
    """Call the hook that the program has set, as Python does for an exception that ends a program."""
    try:
        sys.excepthook(type(error), error, trace_of(error))
    except SystemExit:
        pass
    except BaseException:
        print("Error in sys.excepthook:", file=sys.stderr)
        traceback.print_exc(chain=False)
