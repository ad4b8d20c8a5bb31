"""Each rank has a thread that answers what it is doing, also while it is blocked, and one that ends what the backend holds."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, final
from weakref import WeakKeyDictionary, WeakMethod, ref

import torch
import torch.distributed as dist

from meshcomm.comm.callsite import is_ours, thread_frames
from meshcomm.comm.diagnosis import (
    Diagnosis,
    FailedCall,
    Reason,
    diagnose,
    first_line,
)
from meshcomm.comm.flight_recorder import FlightRecorder
from meshcomm.comm.handle import failure
from meshcomm.comm.p2p_log import MessageCheck, PendingMessage
from meshcomm.comm.stragglers import host
from meshcomm.errors import CallMismatchError, MeshcommError
from meshcomm.layout.sizes import rank_text
from meshcomm.mesh.desync import DesyncMonitor
from meshcomm.mesh.endings import ExceptHooks, backend_error, handles_exceptions
from meshcomm.mesh.runtime import Watching
from meshcomm.mesh.status_query import StatusQuery
from meshcomm.mesh.torch_store import within
from meshcomm.transport import Transport
from meshcomm.transport.torch_private import capturing, unlimited_barrier

# A call that its backend has not given up so long after the group's timeout: it never will.
GRACE_S: Final = 5.0

# How many looks of all ranks together, whether they are asked, the one store of a job gets a second; it can answer
# some 26,000 calls (TCPStore on one core).
_LOOKS_PER_S: Final = 2_000

# How often, in seconds, calls that are queued are looked at, where their group's timeout is long.
_ASKS_S: Final = 10.0

# How long closing waits for a store that has not been found silent: a busy host may take seconds to answer.
_CLOSES_S: Final = 10.0

# Counts the ranks that have created their groups.
_CREATED: Final = "created"

# At so many looks in a row nobody was handling the error of a failed call: the program has caught it.
_UNHANDLED_LOOKS: Final = 4

_PACKAGE: Final = f"{Path(__file__).parents[1]}{os.sep}"
_COMM: Final = f"{_PACKAGE}comm{os.sep}"
_TORCH: Final = f"{Path(torch.__file__).parent}{os.sep}"
_C10D: Final = (f"{_TORCH}distributed/distributed_c10d.py", f"{_TORCH}distributed/_functional_collectives.py")
_LIBRARY: Final = f"{Path(threading.__file__).parent}{os.sep}"


def _unknown(rank: int) -> str:
    return ""


@final
class Watchdog(Watching):
    """Answers for one rank, asks for it, and ends its process where the backend holds a call for ever.

    A rank whose call failed sets a key for each rank that it asks. Every rank looks at its own key a few times a
    second (less often in large worlds, so that the store sees 2,000 looks a second at most), and answers with
    its last calls on each group and the line that its program is at. Both threads end when the mesh is closed, or
    is gone without.

    Args:
        store: a torch store under a prefix of this mesh's own.
        coords: of this rank, by dim.
        reports: folder of this run for its ranks' reports, inside that of all runs; this rank's is written
            when it asks or is asked; "": none.
        compared: how many messages of each pair of ranks are compared at most; None: all.
        timeouts: seconds by the label of a group.
        end: ends the process for the error of a call that the backend holds, from another thread than the blocked one.
        alone: the other ranks are no processes, and nobody there says what it does.
        process_of: the state of a rank's process: "ended", "stopped" or "runs"; "" where nobody here knows.
        refused: the error where this rank may be of another job than the others; asked at each look.
    """

    timed = True

    def __init__(
        self,
        store: Any,
        rank: int,
        coords: dict[str, int],
        world_size: int,
        reports: str,
        compared: int | None,
        timeouts: Callable[[str], float],
        end: Callable[[MeshcommError], None],
        alone: bool = False,
        process_of: Callable[[int], str] = _unknown,
        refused: Callable[[], MeshcommError | None] = lambda: None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._coords = coords
        self._who = rank_text(rank, coords)
        self._reports = reports
        self._compared = compared
        self._world_size = world_size
        self._interval = look_interval_s(world_size)
        self._recorders: list[tuple[FlightRecorder, Callable[[], float]]] = []
        self._timeouts = timeouts
        self._process_of = process_of
        self._refused = refused
        self._end = end
        self._failed: dict[str, Any] | None = None
        self._timer = CallTimer()
        # The Work past the mesh that was last reported: as held, or as failed.
        self._reported: object = None
        # One that has failed, and at how many looks nobody was handling its error.
        self._unhandled: tuple[object, int] = (None, 0)
        # Recorders by the names of their groups; a `monitored_barrier` that a thread is in, and since when.
        self._carried: dict[str, tuple[FlightRecorder, Callable[[], float]]] = {}
        self._barrier = (0, 0.0)
        # What a thread of the program ended by.
        self._raised = ""
        self._process = os.getpid()
        self._main = threading.get_ident()
        self._stop = threading.Event()
        self._query = StatusQuery(store, rank, self._interval)
        self._silent = False
        self._answered = self._failures = 0
        self._alone = alone
        if not alone:
            # Without a store the answering thread says so.
            with contextlib.suppress(RuntimeError):
                store.add(_CREATED, 1)
        own = dist.PrefixStore("desync", store)
        self._desync = DesyncMonitor(own, rank, coords, self._recorders, world_size)
        # Two, as a look at a store that is gone never ends, and the backend must be watched all the same.
        self._threads = [
            threading.Thread(
                target=_poll, args=(ref(self), look, self._stop, self._interval), name=name, daemon=True
            )
            for name, look in (("meshcomm-answer", Watchdog._answer), ("meshcomm-watchdog", Watchdog._look))
            if not alone
        ]
        for thread in self._threads:
            thread.start()
        self._at_exit = partial(_end, ref(self))
        atexit.register(self._at_exit)
        self._hooks = None if alone else ExceptHooks(partial(_explained, ref(self)))

    def record(self, label: str, ranks: list[int], transport: Transport) -> FlightRecorder:
        check = None
        if self._compared != 0:
            store = dist.PrefixStore("messages", self._store)
            timeout_s = transport.timeout_s or self._timeouts(label)
            check = MessageCheck(store, label, ranks, self._rank, self._compared, timeout_s)
        # Weak, as a group outlives a mesh that is dropped without being closed.
        inquire = WeakMethod(self._inquire)

        def inquire_if_alive(recorder: FlightRecorder, where: str, error: BaseException) -> MeshcommError:
            found = inquire()
            return failure(where, error) if found is None else found(recorder, where, error)

        recorder = FlightRecorder(label, ranks, inquire_if_alive, check)
        recorder.ordered = transport.ordered
        of_plan = self._timeouts(label)
        # Weak, as the transport has the group's sockets. A group that is lent has a timeout of its own.
        carries = ref(transport)

        def timeout() -> float:
            alive = carries()
            return of_plan if alive is None else alive.timeout_s or of_plan

        self._recorders.append((recorder, timeout))
        self._carried[transport.group_name] = recorder, timeout
        return recorder

    def forget(self, recorder: FlightRecorder) -> None:
        recorder.close()
        self._recorders[:] = [each for each in self._recorders if each[0] is not recorder]

    def noted(self, step: int) -> None:
        self._desync.noted(step)

    def before_leaving(self) -> CallMismatchError | None:
        return None if self._alone else self._desync.before_leaving()

    def explain(self, error: BaseException) -> MeshcommError | None:
        cause = backend_error(error)
        if cause is None or self._stop.is_set() or os.getpid() != self._process or capturing():
            return None
        failed, under_way = self._calls_past()
        found = failed or under_way
        return None if found is None else self._explained(found, cause)

    def _calls_past(self) -> tuple[_Past | None, _Past | None]:
        """Of the calls past the mesh, the latest that its backend gave up, and the latest that is not over."""
        found: list[_Past] = []
        for recorder, _ in self._recorders:
            if recorder.ordered:
                continue  # what is queued is no part of the program's own errors
            # First what is under way: its failure is known to those who wait before the Work itself is over.
            unfinished = recorder.messages.unfinished()[:1]
            if (pending := recorder.pending) or (error := recorder.failure) is not None:
                began = recorder.began(recorder.started)
                found.append(_Past(began, recorder, None, None if pending else error))
            for message, lost in (*((each, None) for each in unfinished), *recorder.messages.failed()):
                found.append(_Past(message.began, recorder, message, lost))
        found.sort(key=lambda past: past.began)
        failed = [past for past in found if past.error is not None]
        under_way = [past for past in found if past.error is None]
        return failed[-1] if failed else None, under_way[-1] if under_way else None

    def _explained(self, past: _Past, error: BaseException) -> MeshcommError:
        recorder, message = past.recorder, past.message
        self._reported = past.call
        waiting, recorder.messages.waiting = recorder.messages.waiting, message
        try:
            return self._diagnosed(FailedCall.last_of(recorder, self._past(recorder), error))
        finally:
            recorder.messages.waiting = waiting

    def raised(self, error: BaseException, thread: str) -> None:
        """A thread of the program has ended by an error, which others hear of who wait for this rank."""
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        at = "" if trace is None else f", at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        self._raised = f"its thread {thread} raised {_one_line(error)}{at}"

    def report_failed(self) -> None:
        """Say in one line why a call past the mesh failed, where the program has not been told."""
        found = None if self._stop.is_set() or capturing() else self._calls_past()[0]
        if found is None or found.error is None or self._reported is found.call:
            return
        _report(self._explained(found, found.error))

    def drain(self) -> None:
        for recorder, _ in self._recorders:
            while recorder.ordered and recorder.pending:
                time.sleep(0.002)

    def close(self) -> None:
        if self._stop.is_set() or os.getpid() != self._process:
            return
        atexit.unregister(self._at_exit)
        if self._hooks is not None:
            self._hooks.close()
        # The store may end with this rank, and others are still to read what was found.
        time.sleep(self._desync.linger_s)
        self._stop.set()
        store, last = self._store, json.dumps({**self.status(), "closed": True, "raised": _raised()})
        waits_s = 5.0

        def leave() -> None:
            self._await_others()
            store.set(f"closed/{self._rank}", last)

        try:
            # Nobody waits for a store that has stopped answering, least of all for one that was found so.
            within(0.0 if self._silent else _CLOSES_S, leave)
        except TimeoutError:
            waits_s = 0.0
        except RuntimeError:
            pass
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(waits_s)
        for recorder, _ in self._recorders:
            recorder.close()
        # One where nobody answers, in place of a connection; and no Work, which holds the group's.
        self._store = dist.HashStore()
        self._process_of, self._refused = _unknown, lambda: None
        self._reported, self._unhandled = None, (None, 0)
        self._query = StatusQuery(self._store, self._rank, self._interval)
        self._desync.let_go()

    def _await_others(self) -> None:
        """Wait a while until all ranks have their groups: Gloo fails where a peer closes while it is connecting."""
        if self._alone or self._failed is not None or sys.exception() is not None:
            return
        until = time.monotonic() + _CLOSES_S / 2
        while self._store.add(_CREATED, 0) < self._world_size and time.monotonic() < until:
            time.sleep(min(self._interval, 0.05))

    # -- answering --------------------------------------------------------------------------------------

    def _answer(self) -> bool:
        """Answer what was asked; whether to look again."""
        try:
            while self._store.check([f"ask/{self._rank}/{self._answered + 1}"]):
                self._answered += 1
                self._store.set(f"answer/{self._rank}/{self._answered}", json.dumps(self.status()))
                self._write()
            if not self._alone:
                self._desync.look(time.monotonic())
            if (refused := self._refused()) is not None:
                self._end(refused)
        except RuntimeError:
            # Torch prints a trace each time that a store is gone for good.
            self._failures += 1
            if self._failures > 1 and not self._stop.is_set():
                lost = "has lost the job's store; it no longer answers others"
                print(f"meshcomm: {self._who} {lost}", file=sys.stderr)
            return self._failures < 2
        return True

    def status(self) -> dict[str, Any]:
        """What this rank is doing, as plain data."""
        return {
            "rank": self._rank,
            "coords": self._coords,
            "host": socket.gethostname(),
            "process": os.getpid(),
            "time": time.time(),
            "main": _main_line(self._main),
            "thread": self._raised,
            "failed": self._failed,
            "differs": self._desync.found,
            "groups": [each.status() for each, _ in self._recorders],
        }

    def _write(self) -> bool:
        """Whether this rank's report is there now: its status and its last calls, with the clock of their times."""
        if not self._reports:
            return False
        history = [call for each, _ in self._recorders for call in each.history()]
        now = time.perf_counter()
        report = {
            **self.status(),
            "clock": {"host": str(host()), "now_s": now, "ahead_s": time.time() - now},
            "history": sorted(history, key=lambda call: call["began"]),
        }
        folder = Path(self._reports)
        # A report that cannot be written must not hide the error that it is about.
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            half = folder / f".rank{self._rank}.json"
            half.write_text(json.dumps(report, indent=1))
            half.replace(folder / f"rank{self._rank}.json")
            return True
        return False

    # -- watching the backend ---------------------------------------------------------------------------

    def _look(self) -> bool:
        """Look for calls that their backend holds; whether to look again."""
        self._look_for_unhandled()
        if (barrier := self._unlimited_barrier(time.monotonic())) is not None:
            self._end(self._diagnosed(barrier))
            return False
        recorders = [(recorder, timeout()) for recorder, timeout in self._recorders]
        for recorder, call in self._timer.overdue(recorders, time.monotonic()):
            past = call is recorder.work
            inside = _C10D if past else _COMM
            if _is_inside(inside):
                where = f"a call inside the backend at {_main_line(self._main)}"
                held = TimeoutError("the backend is past its timeout and does not return: the process ends")
                error = self._diagnosed(FailedCall.last_of(recorder, where, held))
                error.given = f"{error.given}\n{held}"
                # Asking took a while, in which the backend may have given up or come to its end.
                again = self._timer.overdue([(recorder, 0.0)], time.monotonic())
                if (recorder, call) in again and _is_inside(inside):
                    self._end(error)
                    return False
            elif past and call is not self._reported:
                self._reported = call
                held = TimeoutError("its backend has not given it up")
                error = self._diagnosed(FailedCall.last_of(recorder, self._past(recorder), held))
                _report(error)
        for recorder, queued in self._timer.stuck(recorders, time.monotonic()):
            # The program waits for a value, or for the device: nothing can be raised there.
            self._end(self._diagnosed(self._queued(recorder, queued)))
            return False
        return True

    def _queued(self, recorder: FlightRecorder, queued: Queued) -> FailedCall:
        """What is known of a call that was queued and does not end."""
        held = TimeoutError("it was queued, and is not over; the process ends")
        message = queued.message
        if message is None:
            made = {"number": queued.number, "call": "a call", "dim": "?", "callsite": "?"}
            made = recorder.call_data(queued.number) or made
            where = f'{made["call"]} along "{made["dim"]}" on {self._who}'
            return FailedCall(recorder.status(), where, held, made)
        where = f'{message.call} along "{message.name}" on {self._who}'
        waiting, recorder.messages.waiting = recorder.messages.waiting, message
        try:
            return FailedCall.last_of(recorder, where, held)
        finally:
            recorder.messages.waiting = waiting

    def _unlimited_barrier(self, now: float) -> FailedCall | None:
        """`dist.monitored_barrier` on a group of the mesh, which torch lets wait 30 minutes where it gets no timeout."""
        frames = thread_frames() if self._carried else {}
        found = next(((frame, each) for frame in frames.values() if (each := unlimited_barrier(frame))), None)
        del frames
        number = 0 if found is None else id(found[0])
        if self._barrier[0] != number:
            self._barrier = number, now
        if found is None or found[1] not in self._carried:
            return None
        recorder, timeout = self._carried[found[1]]
        if now - self._barrier[1] < timeout() + GRACE_S:
            return None
        line = _main_line(self._main)
        last = {
            "number": 0,
            "call": "monitored_barrier",
            "dim": recorder.label,
            "callsite": line,
            "inside": True,
        }
        held = TimeoutError(
            f"timed out after the {timeout():g} s of the group, as it got no timeout; the process ends"
        )
        where = f"monitored_barrier on {recorder.label} on {self._who}"
        return FailedCall({**recorder.status(), "last": last}, where, held, counted=False)

    def _look_for_unhandled(self) -> None:
        """Report a call past the mesh whose error the program has caught, and did not end by.

        Not while some thread still handles an exception, which may be that of the call.
        """
        found = None if capturing() else self._calls_past()[0]
        failed = None if found is None else found.call
        if failed is None or failed is self._reported or handles_exceptions():
            self._unhandled = None, 0
            return
        looks = self._unhandled[1] + 1 if failed is self._unhandled[0] else 1
        self._unhandled = failed, looks
        if looks > _UNHANDLED_LOOKS:
            self.report_failed()

    # -- asking -----------------------------------------------------------------------------------------

    def statuses(self, ranks: list[int]) -> dict[int, dict[str, Any]]:
        with contextlib.suppress(TimeoutError, RuntimeError):
            return {} if self._alone else self._query.limited(lambda: self._query.ask(ranks))
        return {}

    def _inquire(self, recorder: FlightRecorder, where: str, error: BaseException) -> MeshcommError:
        """The error for a call that failed: who has not come, and what they do instead."""
        failed = FailedCall.last_of(recorder, where, error)
        if isinstance(error, RuntimeError):
            # The rest is a trace through C++, and its frames are ours.
            error.args = (first_line(error),)
        error.__traceback__ = None
        return self._diagnosed(failed)

    def _diagnosed(self, failed: FailedCall) -> MeshcommError:
        if failed.reason is Reason.OTHER:
            return failed.error_alone()
        # What fails after the first failure mostly follows from it.
        self._failed = self._failed or failed.facts
        reported = self._write()
        found: dict[str, Any] = {}
        try:
            if self._desync.found is None:
                found = self._query.limited(lambda: self._found(failed))
        except (TimeoutError, RuntimeError) as lost:
            self._silent = isinstance(lost, TimeoutError)
        self._desync.found = self._desync.found or found.get("differs")
        cause = self._desync.cause({self._rank: self.status()})
        if cause is not None:
            return cause
        if not found:
            return failed.error_unasked(self._rank, self._silent)
        diagnosis = Diagnosis(**found["diagnosis"])
        self._failed.setdefault("waited_for", [*diagnosis.missing, *diagnosis.mismatched])
        # The folder of all runs: this one's is the newest in it.
        runs = os.path.dirname(self._reports) or self._reports
        return failed.error(diagnosis, runs if reported else "")

    def _found(self, failed: FailedCall) -> dict[str, Any]:
        """What one rank of the group finds out for all, or for a message this rank for itself."""

        def make() -> dict[str, Any]:
            statuses = {**self._query.ask(failed.asks(self._rank)), self._rank: self.status()}
            self._desync.cause(statuses)
            silent = {
                rank: self._process_of(rank) for rank in failed.asks(self._rank) if rank not in statuses
            }
            found = diagnose(
                failed.label, failed.ranks, failed.number, statuses, failed.waiting, self._rank, silent
            )
            return {"differs": self._desync.found, "diagnosis": found._asdict()}

        if failed.waiting is not None or failed.number is None:
            return make()
        found = self._query.shared(f"{failed.label}/{failed.number}", make)
        # From a failure of the same call before this rank came to it, as by a handle's own short timeout.
        stale = self._rank in found["diagnosis"]["missing"]
        return make() if stale else found

    def _past(self, recorder: FlightRecorder) -> str:
        """What opens an error about a message on a group, or its last collective, that was made past the mesh."""
        status = recorder.status()
        call = status["messages"]["waiting"] or status["last"] or {"call": "a call", "dim": "?"}
        return f'{call["call"]} made past the mesh along "{call["dim"]}" on {self._who}'


def look_interval_s(world_size: int) -> float:
    """Seconds between two looks of a rank whether another one asks what it is doing."""
    return max(0.25, world_size / _LOOKS_PER_S)


@final
class CallTimer:
    """Since when is each group's blocking call, or the wait for one, under way?

    Asked again and again, from another thread than the one that is blocked; a call counts from when it was first seen.
    """

    def __init__(self) -> None:
        # Weak, as groups come and go.
        self._seen: WeakKeyDictionary[FlightRecorder, tuple[Any, float]] = WeakKeyDictionary()
        self._queued: WeakKeyDictionary[FlightRecorder, Queued] = WeakKeyDictionary()
        self._next: WeakKeyDictionary[FlightRecorder, float] = WeakKeyDictionary()

    def overdue(
        self, recorders: Sequence[tuple[FlightRecorder, float]], now: float
    ) -> list[tuple[FlightRecorder, Any]]:
        """The calls that are under way for longer than their group's timeout and a grace. now: in seconds.

        recorders: with the timeouts of their groups, in seconds. A call is a sequence number, a message, what waits
        for one, or the Work of a collective past the mesh.
        """
        found = []
        for recorder, timeout_s in recorders:
            call = _under_way(recorder)
            seen, since = self._seen.get(recorder, (None, now))
            if call is None or call != seen:
                self._seen[recorder] = (call, now)
            # A backend is asked no sooner: that may disturb the capture of a CUDA graph.
            elif now - since > timeout_s + GRACE_S and (call is not recorder.work or recorder.pending):
                found.append((recorder, call))
        return found

    def stuck(
        self, recorders: Sequence[tuple[FlightRecorder, float]], now: float
    ) -> list[tuple[FlightRecorder, Queued]]:
        """The calls of groups with ordered calls that are queued for longer than their group's timeout.

        A backend is asked eight times in a timeout, as that may disturb the capture of a CUDA graph. It is the same
        call that is asked for until it is over, however many the program queues behind it.
        """
        found = []
        for recorder, timeout_s in recorders:
            if not recorder.ordered or now < self._next.get(recorder, 0.0):
                continue
            self._next[recorder] = now + min(timeout_s / 8, _ASKS_S)
            queued = self._queued.get(recorder)
            work, message, number = recorder.work, recorder.message, recorder.started
            try:
                if queued is not None and not queued.work.is_completed():
                    if now - queued.since > timeout_s:
                        found.append((recorder, queued))
                    continue
                waits = work is not None and not work.is_completed()
            except RuntimeError:
                continue  # nothing is told while a graph is captured; it is asked again
            if queued is not None:
                recorder.over = max(recorder.over, queued.number)
            if waits:
                self._queued[recorder] = Queued(work, message, number, now)
            else:
                self._queued.pop(recorder, None)
        return found


class _Past(NamedTuple):
    """A collective past the mesh, or a message. error: the backend's, where it gave the call up."""

    began: float
    recorder: FlightRecorder
    message: PendingMessage | None
    error: RuntimeError | None

    @property
    def call(self) -> object:
        return self.message or self.recorder.work


class Queued(NamedTuple):
    """A call that was queued on its backend. number: of the collective, or of the last one before the message."""

    work: Any
    message: PendingMessage | None
    number: int
    since: float


def _under_way(recorder: FlightRecorder) -> Any:
    """The call or message that blocks the rank now, or the last Work past the mesh; None: none is known."""
    if recorder.under_way is not None:
        return recorder.started
    if recorder.messages.waiting is not None:
        return recorder.messages.waiting
    # A copy, as the program may make the first call of a kind meanwhile.
    waits = (total.waiting for total in list(recorder.counters.values()))
    return next((later for later in waits if later is not None), None) or (
        None if recorder.ordered else recorder.work
    )


# -- threads ----------------------------------------------------------------------------------------------


def _poll(
    watchdog: ref[Watchdog], look: Callable[[Watchdog], bool], stop: threading.Event, interval_s: float
) -> None:
    while not stop.wait(interval_s):
        alive = watchdog()
        if alive is None or not look(alive):
            return
        del alive


def _end(watchdog: ref[Watchdog]) -> None:
    """The program has ended without closing its mesh."""
    alive = watchdog()
    if alive is not None:
        alive.report_failed()
        alive.close()


def _explained(watchdog: ref[Watchdog], error: BaseException, thread: str) -> MeshcommError | None:
    """See Watching.explain. thread: the one that ends by `error`, "" for the main one."""
    alive = watchdog()
    if alive is None:
        return None
    if thread:
        alive.raised(error, thread)
    return alive.explain(error)


def _report(error: MeshcommError) -> None:
    # In one piece, as the lines of several ranks meet in one stream.
    sys.stderr.write(f"meshcomm: {' '.join(str(error).split())}\n")
    sys.stderr.flush()


def _raised() -> str:
    """The error that the program is leaving by, or has been ended by, in one line; "" where it is in none."""
    error = sys.exception() or getattr(sys, "last_value", None)
    return "" if error is None or isinstance(error, SystemExit) else _one_line(error)


def _one_line(error: BaseException) -> str:
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])


def _stack(thread: int) -> list[tuple[str, int, str]]:
    """File, line and function of each frame of a thread, the innermost first.

    No frame is kept: one that holds itself keeps its callers' locals, the tensors and connections of a failed call among
    them, until Python looks for cycles.
    """
    found = []
    frame = thread_frames().get(thread)
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return found


def _is_inside(files: str | tuple[str, ...]) -> bool:
    """Whether some thread is in a call of these files, and has not come back to the program, as by a signal's handler.

    Not one whose call has failed, and that is asking why.
    """
    for thread in list(thread_frames()):
        for file, _, _ in _stack(thread):
            if file.startswith(files):
                return True
            if file == __file__ or not _is_library(file):
                break
    return False


def _is_library(file: str) -> bool:
    """Whether a file is of this package, of torch, or of Python's own library, where a wait for the store is."""
    return is_ours(file) or (file.startswith(_LIBRARY) and "-packages" not in file)


def _main_line(thread: int) -> str:
    """file:line and function of the innermost frame of the program itself."""
    stack = _stack(thread)
    own = [place for place in stack if not _is_library(place[0])]
    for file, line, name in (own or stack)[:1]:
        return f"{file}:{line} in {name}"
    return "an unknown line"
