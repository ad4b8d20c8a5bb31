"""Runs a test's body as every rank of a simulation, in the pytest process."""

from __future__ import annotations

import contextlib
import ctypes
import io
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from typing import Any, Final, TextIO, final

import pytest

from meshcomm.errors import ConfigError, MeshcommError, RankFailed
from meshcomm.mesh import Mesh
from meshcomm.simulator import simulate
from meshcomm.simulator.scheduler import Unwound
from meshcomm.testing.marker import MeshRequest
from meshcomm.testing.pool import Ended
from meshcomm.testing.processes import given
from meshcomm.testing.report import Ends, Outcome, outcome_of, stack_text
from meshcomm.watching.callsite import thread_frames

# The prefix of the simulator's thread names.
_THREAD: Final = "meshcomm-rank-"
# How many seconds a rank may take to end after the timeout has interrupted it.
_GRACE_S: Final = 2.0


@final
class TimeUp(BaseException):
    """Raised on a rank when the test's time is up. It is not an Exception, so that no test catches it."""


def run(item: pytest.Function, request: MeshRequest) -> Ends:
    """Run the body of `item` as every rank. Raises MeshTestError or ConfigError if it cannot be started."""
    bodies = _Bodies(item)
    full = bodies.full
    out, err = _Streams(sys.stdout), _Streams(sys.stderr)

    def body(mesh: Mesh) -> None:
        out.here.rank = err.here.rank = mesh.rank
        bodies.run(mesh)

    verdict: MeshcommError | None = None
    with redirect_stdout(out), redirect_stderr(err), _Watch(request.timeout_s, full) as watch:
        try:
            simulate(body, request.config, world_size=request.world_size)
        except RankFailed as error:
            for rank, cause in error.by_rank.items():
                if rank not in bodies.outcomes and not isinstance(cause, TimeUp):
                    bodies.outcomes[rank] = outcome_of(_raising(cause), full)
        except ConfigError:
            raise
        except MeshcommError as error:
            verdict = error
        except TimeUp:
            pass
        late = watch.done
    waits = f"did not return within {request.timeout_s:g} s" if late else "waits for others"
    outcomes = bodies.outcomes
    ranks = [
        Ended(
            "returned" if rank in outcomes else "late",
            outcomes.get(rank),
            text="" if rank in outcomes else waits,
            stack=watch.stacks.get(rank, bodies.stacks.get(rank, "")),
            out="".join(out.kept.get(rank, ())),
            err="".join(err.kept.get(rank, ())),
        )
        for rank in range(request.world_size)
    ]
    return Ends(ranks, verdict)


@final
class _Bodies:
    """Runs a test's body on each rank, and stores the outcomes by rank and the stacks of interrupted ranks."""

    def __init__(self, item: pytest.Function) -> None:
        self.full: bool = item.config.getoption("fulltrace")
        self.outcomes: dict[int, Outcome] = {}
        self.stacks: dict[int, str] = {}
        self._item = item
        self._values = given(item)

    def run(self, mesh: Mesh) -> None:
        """Run the body on one rank. Raises the exception that ends the rank."""
        failed: list[BaseException] = []
        outcome = outcome_of(partial(self._call, mesh, failed), self.full)
        unwound = bool(failed) and isinstance(failed[0], (Unwound, TimeUp))
        if not unwound:
            self.outcomes[mesh.rank] = outcome
        if failed and (unwound or outcome.kind not in ("skipped", "exited")):
            # The simulator lets the other ranks continue as far as possible, then reports which of them wait for this one.
            raise failed[0]

    def _call(self, mesh: Mesh, failed: list[BaseException]) -> None:
        function: Callable[..., object] = self._item.obj
        if self._item.cls is not None:
            instance = self._item.cls()
            instance.__dict__.update(_copy(self._values.of_self))
            function = getattr(instance, self._item.originalname)
        try:
            function(**{**_copy(self._values.arguments), "mesh": mesh})
        except Unwound as end:
            self.stacks[mesh.rank] = stack_text(traceback.extract_tb(end.__traceback__), self.full)
            failed.append(end)
        except TimeUp as end:
            failed.append(end.with_traceback(None))
        except BaseException as error:
            failed.append(error)
            raise


def _copy(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the values for one rank. Values that cannot be pickled are not copied, so ranks share them."""
    copied = dict(values)
    for name, value in values.items():
        if not isinstance(value, pytest.MonkeyPatch):  # it changes the process, which all ranks share
            with contextlib.suppress(Exception):
                copied[name] = pickle.loads(pickle.dumps(value))
    return copied


def _raising(error: BaseException) -> Callable[[], None]:
    def body() -> None:
        raise error

    return body


@final
class _Watch:
    """Interrupts the ranks when the time is up. stacks: the ranks' stacks at that time. The main thread must enter it."""

    def __init__(self, timeout_s: float, full: bool) -> None:
        self.done = False
        self.stacks: dict[int, str] = {}
        self._full = full
        self._timeout_s = timeout_s
        self._over = threading.Event()
        self._usual: Any = None
        self._thread = threading.Thread(target=self._watch, name="meshcomm-timeout", daemon=True)

    def __enter__(self) -> _Watch:
        if threading.current_thread() is threading.main_thread():
            self._usual = signal.signal(signal.SIGINT, self._interrupted)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._usual is not None:
            signal.signal(signal.SIGINT, self._usual)

    def _interrupted(self, number: int, frame: Any) -> None:
        if not self.done:
            self._usual(number, frame)
        elif not self._over.is_set():
            raise TimeUp

    def _watch(self) -> None:
        if self._over.wait(self._timeout_s):
            return
        for rank, _, frame in self._ranks():
            stack = traceback.extract_stack(frame)
            # A rank that is still waiting for its first turn has no stack to report.
            begun = any(frame.filename == __file__ for frame in stack)
            self.stacks[rank] = stack_text(stack, self._full) if begun else ""
        self.done = True
        deadline = time.monotonic() + _GRACE_S
        while not self._over.wait(0.1):
            for _, ident, frame in self._ranks():
                # All ranks but one are waiting for their turn in the scheduler.
                if frame.f_globals.get("__name__") != Unwound.__module__:
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(ident), ctypes.py_object(TimeUp)
                    )
            if time.monotonic() > deadline and self._usual is not None:
                # The rank is inside a call that no exception can interrupt, so abandon it. The first interrupt
                # stops the simulator once the rank returns; the second stops it without waiting for the rank.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def _ranks(self) -> Iterator[tuple[int, int, Any]]:
        frames = thread_frames()
        for thread in threading.enumerate():
            if thread.name.startswith(_THREAD) and thread.ident in frames:
                yield int(thread.name.removeprefix(_THREAD)), thread.ident, frames[thread.ident]


@final
class _Streams(io.TextIOBase):
    """A text stream that collects each rank's output separately. Other threads write to the original stream."""

    def __init__(self, usual: TextIO) -> None:
        self.here = threading.local()
        self.kept: dict[int, list[str]] = {}
        self._usual = usual

    def write(self, text: str) -> int:
        rank = getattr(self.here, "rank", None)
        if rank is None:
            return self._usual.write(text)
        self.kept.setdefault(rank, []).append(text)
        return len(text)

    def flush(self) -> None:
        # The original stream may already be closed when this one is garbage-collected.
        if getattr(self.here, "rank", None) is None and not self._usual.closed:
            self._usual.flush()

    def writable(self) -> bool:
        return True
