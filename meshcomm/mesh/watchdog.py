"""Watches one rank's backend: explains its errors and ends the process if the backend blocks a call forever."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar, final
from weakref import WeakValueDictionary, ref

import torch.distributed as dist

from meshcomm.errors import CollectiveTimeout, MeshClosed, MeshcommError, PeerLost, RankLost
from meshcomm.layout.sizes import fold
from meshcomm.mesh.desync import DesyncMonitor
from meshcomm.mesh.rank_failure import (
    ExceptHooks,
    answer_place,
    expect_question,
    forget_seen,
    leave_seen,
    show_hidden,
)
from meshcomm.mesh.rank_record import RankRecord, RecordExchange
from meshcomm.mesh.runtime import Watching
from meshcomm.rendezvous.store import prefixed, within
from meshcomm.transport import Transport
from meshcomm.transport.torch_changes import failed_barrier, overdue_barrier
from meshcomm.transport.torch_private import await_at_exit, capturing, unfinished_collectives
from meshcomm.watching.callsite import C10D, caller, is_inside
from meshcomm.watching.compare import MessageCheck, Shared
from meshcomm.watching.exceptions import (
    Raised,
    Reason,
    about_torch,
    backend_error,
    caused_by,
    error_under_way,
    first_line,
    place_of,
)
from meshcomm.watching.failed_call import FailedCall
from meshcomm.watching.messages import PendingMessage
from meshcomm.watching.recorder import FlightRecorder
from meshcomm.watching.timer import GRACE_S, CallTimer, is_held, queued_in
from meshcomm.watching.verdict import Diagnosis, diagnose, find_hung, places_of, unasked
from meshcomm.watching.words import BARRIER, UNKNOWN, activity, failure, made_at

M = TypeVar("M", MeshcommError, MeshcommError | None)

# The part of a group's timeout after which the ranks that a call waits for are hung. Backends do not wait to the millisecond.
_LEAST: Final = 0.9

# How many times per second all ranks together check the job's store for questions. A TCPStore on one core answers about
# 26,000 calls per second.
_LOOKS_PER_S: Final = 2_000

# How long closing waits for a store that still seems to answer. A busy host may take seconds.
_CLOSES_S: Final = 10.0

# After how long an exception that the program has raised, but that has not ended it, is left for the launcher, and printed.
_SEEN_S: Final = 0.2
_TELLS_RAISED_S: Final = 10.0

# After this many seconds of asking, no further rank is asked.
_FOLLOWS_S: Final = 1.5

# The counter of ranks that have created their groups.
_CREATED: Final = "created"

_COMM: Final = f"{Path(__file__).parents[1] / 'comm'}{os.sep}"


# The watchdogs of this process, by the time at which they started.
_ALL: WeakValueDictionary[int, Watchdog] = WeakValueDictionary()


@final
@dataclass(frozen=True, slots=True)
class WatchOptions:
    """Facts about the mesh and the job that a watchdog needs.

    timeout_s:  timeout for groups whose transport does not know the timeout.
    end:        ends the process, from another thread, with the error of a call that is blocked in the backend.
    reports:    folder for the reports of this run's ranks; see `RankRecord`.
    compared:   maximum number of messages compared per pair of ranks; if None, all messages.
    alone:      whether no other rank is a process. If so, no rank asks or answers.
    process_of: returns the state of a rank's process: "ended", "stopped" or "runs"; "" if unknown.
    warn_after_s: a call that blocks for this long, but not beyond its group's timeout, is reported in one line.
    refused:    returns the error if this rank may belong to another job. Called at each check.
    lost:       (call, whether a peer is gone, whether a value is used) -> the error if the launcher has replaced lost ranks.
    hung:       reports hung ranks, with what each does, to a launcher that replaces them; None if none does.
    of_job:     whether the ranks are those of the job. If not, those of a link between two jobs, the job's launcher hears nothing
                of them, and errors are marked; see `MeshcommError.of_job`.
    host:       the rank whose process serves the store; None if none of these ranks does.
    """

    timeout_s: float
    end: Callable[[MeshcommError], None]
    reports: str = ""
    compared: int | None = 0
    alone: bool = False
    process_of: Callable[[int], str] = lambda rank: ""
    warn_after_s: float = 60.0
    refused: Callable[[], MeshcommError | None] = lambda: None
    lost: Callable[[str, bool, bool], MeshcommError | None] = lambda what, waits, confirms: None
    hung: Callable[[Mapping[int, str]], None] | None = None
    of_job: bool = True
    host: int | None = None


@final
class Watchdog(Watching):
    """Two threads on one rank: one answers other ranks from this rank's record, and the other looks for calls that hang.

    A rank whose call failed asks the other ranks; see `RecordExchange`. Both threads end when the mesh is closed or dropped.
    own: this rank's record.
    store: the job's store, under this mesh's own prefix.
    coords: this rank's coords, by dim.
    """

    timed = True

    def __init__(
        self, store: Any, rank: int, coords: Mapping[str, int], world_size: int, options: WatchOptions
    ) -> None:
        self._store = store
        self._world_size = world_size
        self._options = options
        self.of_job = options.of_job
        self._recorders: list[FlightRecorder] = []
        self._interval_s = look_interval_s(world_size)
        self.own = RankRecord(rank, coords, self._recorders, options.reports)
        self._exchange = RecordExchange(store, rank, self._interval_s, options.process_of)
        self._desync = DesyncMonitor(prefixed("desync", store), self.own, world_size)
        if not options.alone:
            self.shared = Shared(prefixed("calls", store), rank, self._exchange, self._interval_s)
        self._timer = CallTimer()
        # The last Work outside the mesh that was reported as blocked or failed.
        self._reported: object = None
        # The last recorder and call that were reported as blocked.
        self._told: object = None
        # The id of the last exception that the program was seen to handle, when it was first seen, and whether it was printed.
        self._raised = (0, 0.0, False)
        # Whether the launcher knows where this rank is.
        self._placed = False
        # The line that the program was at, and since when, while calls are compared.
        self._line, self._line_since = "", 0.0
        self._silent = False
        self._failures = 0
        self._process = os.getpid()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._hooks: ExceptHooks | None = None
        self._at_exit = partial(_at_exit, ref(self))
        atexit.register(self._at_exit)
        if options.alone:
            return
        if self.of_job:
            forget_seen()
            expect_question(True)
        # If the store has failed, the answering thread reports it.
        with contextlib.suppress(RuntimeError):
            store.add(_CREATED, 1)
        # Two threads are needed: a call to a lost store never returns, and the backend must still be watched.
        looks = {"meshcomm-answer": Watchdog._answer, "meshcomm-watchdog": Watchdog._look}
        for name, look in looks.items():
            polled = (ref(self), look, self._stop, self._interval_s)
            self._threads.append(threading.Thread(target=_poll, args=polled, name=name, daemon=True))
            self._threads[-1].start()
        self._hooks = ExceptHooks(partial(_explain, ref(self)))
        _ALL[time.monotonic_ns()] = self

    # -- for the mesh -----------------------------------------------------------------------------------

    def record(self, label: str, ranks: list[int], transport: Transport) -> FlightRecorder:
        options, check = self._options, None
        if options.compared != 0:
            store = prefixed("messages", self._store)
            timeout_s = transport.timeout_s or options.timeout_s
            check = MessageCheck(store, label, ranks, self.own.rank, options.compared, timeout_s)
            check.of_job = self.of_job
        # A weak reference, because a group outlives a mesh that is dropped without being closed, and a transport holds the
        # group's sockets.
        recorder = FlightRecorder(label, ranks, partial(_inquire, ref(self)), check)
        recorder.of_job, recorder.ordered = self.of_job, transport.ordered
        recorder.group_name = transport.group_name
        recorder.lost = self._options.lost
        recorder.timeout_s = partial(_timeout_s, ref(transport), options.timeout_s)
        self._recorders.append(recorder)
        return recorder

    def forget(self, recorder: FlightRecorder) -> None:
        recorder.close()
        self._recorders[:] = [other for other in self._recorders if other is not recorder]

    def noted(self, step: int) -> None:
        try:
            self._desync.noted(step)
        except MeshcommError as error:
            error.of_job = self.of_job
            raise

    def before_leaving(self) -> MeshcommError | None:
        return None if self._options.alone else self._marked(self._desync.before_leaving())

    def explain(self, error: BaseException) -> MeshcommError | None:
        return self._marked(about_torch(error) or self._explanation(error))

    def _marked(self, error: M) -> M:
        """Mark an error that names ranks of a link."""
        if error is not None:
            error.of_job = self.of_job
        return error

    def _explanation(self, error: BaseException) -> MeshcommError | None:
        cause = backend_error(error)
        if cause is None or self._stop.is_set() or os.getpid() != self._process or capturing():
            return None
        name = failed_barrier(cause)
        if name is not None and (recorder := self._named(name)) is not None:
            return self._barrier_error(recorder, first_line(cause), place_of(cause))
        # Prefer a failed call to a call that is still running. Among several calls, take the latest.
        found = max(self._calls_past(), key=lambda past: (past.error is not None, past.began), default=None)
        return None if found is None else self._explained(found, cause)

    def _report_failed(self) -> None:
        """Print one line on why the latest call outside the mesh failed, unless the program already has an explanation."""
        past = [] if capturing() else self._calls_past()
        failed = next((call for call in reversed(past) if call.error is not None), None)
        if failed is not None and failed.error is not None and self._reported is not failed.call:
            _report(self._explained(failed, failed.error))

    def drain(self) -> None:
        for recorder in self._recorders:
            pause_s = 0.001
            while (
                recorder.ordered
                and recorder.started
                and queued_in(recorder, None, unfinished_collectives, 0.0)
            ):
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.1)

    def close(self, *, abandons: bool = False) -> None:
        if self._stop.is_set() or os.getpid() != self._process:
            return
        atexit.unregister(self._at_exit)
        if self._hooks is not None:
            self._hooks.close()
        if not abandons:
            self._report_failed()
            # The store may close when this rank exits, and the other ranks still have to read the result.
            time.sleep(self._desync.linger_s)
        self._stop.set()
        if not self._options.alone and self.of_job:
            expect_question(any(other is not self for other in _of_job()[:1]))
        error = sys.exception()
        if error is not None and not abandons and self.of_job and not isinstance(error, SystemExit):
            leave_seen(error, self.own.label)
            show_hidden(error)
        last = {**self.status(), "closed": True, "raised": error_under_way()}
        waits_s = 5.0
        try:
            if abandons:
                raise TimeoutError
            # Do not wait for a store that has stopped answering.
            leave = partial(self._leave, self._store, self._exchange, last)
            within(0.0 if self._silent else _CLOSES_S, leave)
        except TimeoutError:
            waits_s = 0.0
        except RuntimeError:
            pass
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(waits_s)
                await_at_exit(thread)
        ends = self.own.failed is None and not abandons
        for recorder in self._recorders:
            recorder.close()
            if ends:
                recorder.inquire = partial(_closed, caller())
        # Replace the connection with an unused store, and drop the Work, which would keep the group alive.
        self._store = dist.HashStore()
        self._options = WatchOptions(self._options.timeout_s, self._options.end)
        self._reported = self.shared = None
        self._exchange = RecordExchange(self._store, self.own.rank, self._interval_s)
        self._desync.let_go()

    def _leave(self, store: Any, exchange: RecordExchange, last: Mapping[str, Any]) -> None:
        """Publish this rank's last status once all ranks have their groups: Gloo fails if a peer closes while connecting."""
        until = time.monotonic() + _CLOSES_S / 2
        waits = not self._options.alone and last["failed"] is None
        while waits and store.add(_CREATED, 0) < self._world_size and time.monotonic() < until:
            time.sleep(min(self._interval_s, 0.05))
        exchange.leave(last)

    # -- answering --------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Return this rank's record as plain data."""
        return self.own.data(self._desync.found)

    def statuses(self, ranks: list[int]) -> dict[int, dict[str, Any]]:
        with contextlib.suppress(TimeoutError, RuntimeError):
            return {} if self._options.alone else self._exchange.limited(partial(self._exchange.ask, ranks))
        return {}

    def gone(self, ranks: list[int]) -> list[int]:
        def look() -> list[int]:
            statuses = self._exchange.ask(ranks)
            silent = [
                rank for rank in ranks if rank not in statuses and self._options.process_of(rank) != "runs"
            ]
            return silent + [rank for rank, status in statuses.items() if status.get("closed")]

        with contextlib.suppress(TimeoutError, RuntimeError):
            return self._exchange.limited(look)
        return []

    def _answer(self) -> bool:
        """Answer the pending questions. Return whether to check again."""
        if not self._placed and _of_job()[:1] == [self]:
            self._placed = answer_place(self.status)
        try:
            if self._exchange.answer(self.status):
                self.own.write(self._desync.found)
            self._desync.look(time.monotonic())
            if (refused := self._options.refused()) is not None:
                self._options.end(refused)
        except RuntimeError:
            # Torch prints a stack trace for each call to a lost store.
            self._failures += 1
            if self._failures > 1 and not self._stop.is_set() and self.of_job:
                lost = "has lost the job's store; it no longer answers others"
                print(f"meshcomm: {self.own.label} {lost}", file=sys.stderr)
            return self._failures < 2
        return True

    # -- watching the backend ---------------------------------------------------------------------------

    def _look(self) -> bool:
        """Look for calls that are blocked in their backend. Return whether to check again."""
        now = time.monotonic()
        # The host may be blocked in a later call than the queued one.
        error = (
            self._held_apart(now) or self._held_barrier(now) or self._held_queue(now) or self._held_call(now)
        )
        # If ranks were replaced, the call is interrupted, and the program goes on.
        ends = error is not None and not isinstance(error, RankLost)
        if error is not None and ends:
            self._options.end(self._marked(error))
        self._tell(now)
        if self.of_job:
            self._tell_raised(now)
        return not ends

    def _tell_raised(self, now: float) -> None:
        """Leave an exception for the launcher that the program has raised but that has not ended it; after a while, print it."""
        raised = self.own.raised()
        before, since, told = self._raised
        if raised is None or id(raised.error) != before:
            if since and now - since > _SEEN_S:
                forget_seen()
            self._raised = (0 if raised is None else id(raised.error), now if raised else 0.0, False)
        elif now - since > _SEEN_S and not told:
            leave_seen(raised.error, self.own.label)
            if now - since > _TELLS_RAISED_S and backend_error(raised.error) is None:
                self._raised = (before, since, True)
                ago = f"{_TELLS_RAISED_S:g} s ago and has not ended; it is at {self.own.main_line}"
                sys.stderr.write(f"meshcomm: {self.own.label}: {raised}, {ago}\n")
                sys.stderr.flush()

    def _tell(self, now: float) -> None:
        """Before a group's timeout, print which ranks a long-blocked call waits for. One rank prints for the whole group."""
        for recorder, call in self._timer.overdue(self._recorders, now, self._options.warn_after_s):
            # The group's timeout tells of a call that blocks for longer.
            if self._told == (id(recorder), call) or recorder.timeout_s() <= self._options.warn_after_s:
                continue
            self._told = (id(recorder), call)
            failed = FailedCall.last_of(self.own.rank, recorder, "", TimeoutError("timed out"))
            tell = partial(self._told_of, failed)
            if failed.blocked.messages is None:
                key = f"waits/{failed.blocked.label}/{failed.blocked.number}"
                tell = partial(self._exchange.shared, key, tell)
            with contextlib.suppress(TimeoutError, RuntimeError):
                self._exchange.limited(tell)

    def _told_of(self, failed: FailedCall) -> dict[str, Any]:
        found = self._diagnosis(failed)["diagnosis"]
        self.own.write(self._desync.found)
        if found["missing"] or found["mismatched"]:
            call = f"{failed.facts['call']}, {made_at(failed.facts)}"
            waited = f"{self.own.label} has waited {self._options.warn_after_s:g} s in {call}"
            sys.stderr.write(f"meshcomm: {waited}: {'; '.join(found['lines'])}\n")
            sys.stderr.flush()
        return {}

    def _held_call(self, now: float) -> MeshcommError | None:
        """Return the error for a call that has blocked a thread past the call's timeout.

        A pending Work outside the mesh is only reported.
        """
        for recorder, call in self._timer.overdue(self._recorders, now):
            past = call is recorder.work
            inside = C10D if past else _COMM
            if is_inside(inside, __file__):
                where = f"a call inside the backend at {self.own.main_line}"
                held = TimeoutError("the backend is past its timeout and does not return; this process ends")
                error = self._diagnosed(FailedCall.last_of(self.own.rank, recorder, where, held))
                error.given = f"{error.given}\n{held}"
                # Asking took a while. The backend may have given up or completed the call in the meantime.
                if is_held(recorder, call) and is_inside(inside, __file__):
                    return error
            elif past and call is not self._reported:
                self._reported = call
                held = TimeoutError("its backend has not ended it")
                _report(self._diagnosed(self._failed_past(recorder, held)))
        return None

    def _held_apart(self, now: float) -> MeshcommError | None:
        """Return the error for a rank that stays at one line because the ranks of a group have made different calls: in a
        wait inside C++, or until its device has run the group's calls.
        """
        compared = [
            recorder
            for recorder in self._recorders
            if (check := recorder.check) and check.made and not check.raised
        ]
        # Looking for the line takes the frames of the program's thread.
        line = self.own.main_line if compared else ""
        if line != self._line:
            self._line, self._line_since = line, now
        elif now - self._line_since > GRACE_S:
            for recorder in compared:
                with contextlib.suppress(RuntimeError):  # while a graph is captured
                    held = recorder.inside or queued_in(recorder, None, unfinished_collectives, now)
                    if held and (error := recorder.difference()) is not None:
                        return error
        return None

    def _held_queue(self, now: float) -> MeshcommError | None:
        """Return the error for a queued call that hangs while the program waits for a value or for the device."""
        for recorder, queued in self._timer.stuck(self._recorders, now):
            held = TimeoutError("it was queued and has not completed; this process ends")
            if (message := queued.message) is not None:
                where = f'{message.call} along "{message.name}" on {self.own.label}'
                with _waiting_for(recorder, message):
                    failed = FailedCall.last_of(self.own.rank, recorder, where, held)
            else:
                made = recorder.call_data(queued.number) or {**UNKNOWN, "number": queued.number}
                where = f'{made["call"]} along "{made["dim"]}" on {self.own.label}'
                failed = FailedCall(self.own.rank, recorder.status(), where, held, made)
            return self._diagnosed(failed)
        return None

    def _held_barrier(self, now: float) -> MeshcommError | None:
        """Return the error for a blocked `dist.monitored_barrier` on a group of the mesh. By default, torch lets the barrier
        wait for 30 minutes.
        """

        def limit_s(name: str) -> float:
            recorder = self._named(name)
            return math.inf if recorder is None else recorder.timeout_s() + GRACE_S

        name = overdue_barrier(limit_s, now)
        recorder = None if name is None else self._named(name)
        if recorder is None:
            return None
        limit = f"timed out after the group's {recorder.timeout_s():g} s, because it was given no timeout; this process ends"
        return self._barrier_error(recorder, limit, self.own.main_line)

    def _named(self, name: str) -> FlightRecorder | None:
        """Return the recorder of the group of this name. The hooks do not see a barrier, so it may be the group's first call."""
        return next(
            (recorder for recorder in self._recorders if recorder.group_name == name), None
        ) or self.outside(name)

    def _barrier_error(self, recorder: FlightRecorder, why: str, at: str) -> MeshcommError:
        """Return the error for a `dist.monitored_barrier` that some ranks of the group have not reached.

        why: how it ended. at: the line of the program.
        """
        own, call = self.own, f"{BARRIER} on {recorder.label}"
        others = [rank for rank in recorder.ranks if rank != own.rank]
        record = {**UNKNOWN, "call": call, "callsite": at}
        own.failed = own.failed or {**record, "label": "", "error": [why], "waiting": None}
        own.write(self._desync.found)
        statuses = self.statuses(others)
        if (cause := self._desync.cause(statuses)) is not None:
            return cause
        silent = {rank: self._options.process_of(rank) for rank in others if rank not in statuses}
        # Rank 0 of the group says which ranks it waited for; the others see only that it has given up.
        message = re.search(r"Ranks? ([\d, ]+) failed to pass", why)
        missing = [recorder.ranks[int(place)] for place in re.findall(r"\d+", message[1])] if message else []
        was_in = {rank: status["failed"] or {"call": ""} for rank, status in statuses.items()}
        came = {rank for rank, failed in was_in.items() if failed["call"].startswith(BARRIER)}
        came |= {rank for rank, status in statuses.items() if status["barrier"]}
        missing = missing or [rank for rank in others if rank not in came]
        own.failed.setdefault("waited_for", missing)
        shown = sorted(others, key=lambda rank: rank not in missing)
        lines = [activity(rank, statuses.get(rank), silent.get(rank, "")) for rank in shown]
        lost = any(silent.get(rank, "runs") != "runs" for rank in missing)
        return (PeerLost if lost else CollectiveTimeout)(
            f"{call} on {own.label} {(Reason.CLOSED if lost else Reason.TIMEOUT).value}",
            given="\n".join([f"{call}, ranks {fold(recorder.ranks)}, {made_at(record)}", why, *lines]),
            expected="every rank of the group to make the same call and stay alive until it ends",
            hint="look at the ranks named above",
            missing=tuple(missing),
            chain=[
                [rank, place.name, place.doing, place.waits_for]
                for rank, place in places_of(statuses, silent).items()
                if rank in missing
            ],
        )

    # -- calls outside the mesh ----------------------------------------------------------------------------

    def _calls_past(self) -> list[_Past]:
        """Return the calls outside the mesh that have not completed or that their backend has given up on, earliest first."""
        calls: list[_Past] = []
        for recorder in self._recorders:
            if recorder.ordered or (recorder.check is not None and recorder.check.raised):
                continue  # errors of queued calls are not raised in the program's own lines; others have been raised
            # Running calls come first, because waiters learn of a failure before the Work itself completes.
            # A refused message is the latest: its call ended with the error that is to be explained.
            unfinished = recorder.messages.unfinished()[:1] + recorder.messages.refused()
            if (pending := recorder.pending) or (error := recorder.failure) is not None:
                began = recorder.began(recorder.started)
                calls.append(_Past(began, recorder, None, None if pending else error))
            for message, lost in (*((message, None) for message in unfinished), *recorder.messages.failed()):
                calls.append(_Past(message.began, recorder, message, lost))
        return sorted(calls, key=attrgetter("began"))

    def _explained(self, past: _Past, error: BaseException) -> MeshcommError:
        self._reported = past.call
        with _waiting_for(past.recorder, past.message):
            return self._diagnosed(self._failed_past(past.recorder, error))

    def _failed_past(self, recorder: FlightRecorder, error: BaseException) -> FailedCall:
        """Return the failed call: a message, or the last collective, that was issued on a group outside the mesh."""
        status = recorder.status()
        call = status["messages"]["waiting"] or status["last"] or UNKNOWN
        where = f'{call["call"]} {recorder.past_the_mesh}along "{call["dim"]}" on {self.own.label}'
        return FailedCall.last_of(self.own.rank, recorder, where, error)

    # -- asking -----------------------------------------------------------------------------------------

    def inquire(self, recorder: FlightRecorder, where: str, error: BaseException) -> MeshcommError:
        """Return the error for a call that failed. The error names the missing ranks and what each of them is doing."""
        failed = FailedCall.last_of(self.own.rank, recorder, where, error)
        if isinstance(error, RuntimeError):
            # Drop the rest of the text, a C++ stack trace, and the traceback, whose frames are meshcomm's.
            error.args = (first_line(error),)
        error.__traceback__ = None
        before = self.own.failed
        told = self._marked(self._diagnosed(failed))
        # A handle's limited wait ends no call.
        if isinstance(error, TimeoutError) and type(told) is CollectiveTimeout:
            self.own.failed = before
        return told

    def _diagnosed(self, failed: FailedCall) -> MeshcommError:
        # If the store was cut off while a group connected through it, the error states no reason.
        recorder = next(
            (recorder for recorder in self._recorders if recorder.label == failed.blocked.label), None
        )
        if recorder is not None and (different := recorder.difference()) is not None:
            return different
        waits = failed.reason not in (Reason.TIMEOUT, Reason.OTHER)
        if (lost := self._options.lost(failed.at, waits, False)) is not None:
            return lost
        if failed.reason is Reason.OTHER:
            return failed.error_alone()
        own = self.own
        # Later failures usually follow from the first.
        own.failed = own.failed or failed.facts
        written = own.write(self._desync.found)
        if failed.reason is Reason.TIMEOUT and (lost := self._replaced(failed)) is not None:
            return lost
        shared: dict[str, Any] = {}
        try:
            if self._desync.found is None:
                shared = self._exchange.limited(partial(self._shared_diagnosis, failed))
        except (TimeoutError, RuntimeError) as lost:
            self._silent = isinstance(lost, TimeoutError)
        self._desync.found = self._desync.found or shared.get("differs")
        cause = self._desync.cause({own.rank: self.status()})
        if cause is not None:
            return cause
        if not shared:
            return failed.error_unasked(self._silent, self._options.host)
        diagnosis = Diagnosis(**shared["diagnosis"])
        own.failed.setdefault("waited_for", [*diagnosis.missing, *diagnosis.mismatched])
        return failed.error(diagnosis, own.reports if written else "")

    def _replaced(self, failed: FailedCall) -> MeshcommError | None:
        """Report the hung ranks that a call has waited for until its group's timeout. Return the error if the launcher has
        replaced them.
        """
        report, blocked = self._options.hung, failed.blocked
        recorder = next((recorder for recorder in self._recorders if recorder.label == blocked.label), None)
        if report is None or recorder is None or self._desync.found is not None:
            return None
        message = recorder.messages.waiting
        began = recorder.began(blocked.number) if message is None else message.began
        # A handle may wait for less.
        if time.monotonic() - began < _LEAST * recorder.timeout_s():
            return None
        find = self._find_hung
        if blocked.messages is None:
            find = partial(self._exchange.shared, f"hung/{blocked.label}/{blocked.number}", find)
        with contextlib.suppress(TimeoutError, RuntimeError):
            if hung := self._exchange.limited(find):
                report({int(rank): what for rank, what in hung.items()})
                return self._options.lost(failed.at, True, False)
        return None

    def _find_hung(self) -> dict[str, Any]:
        others = [rank for rank in range(self._world_size) if rank != self.own.rank]
        statuses = {**self._exchange.ask(others), self.own.rank: self.status()}
        silent = {rank: self._options.process_of(rank) for rank in others if rank not in statuses}

        def ask_later(ranks: list[int]) -> dict[int, Any]:
            # Long enough for a rank to get from a failed call to its error.
            time.sleep(look_interval_s(self._world_size))
            return self._exchange.ask(ranks)

        hung = find_hung(statuses, silent, ask_later)
        return {str(rank): what for rank, what in hung.items()}

    def _shared_diagnosis(self, failed: FailedCall) -> dict[str, Any]:
        """Return the diagnosis that one rank makes for the whole group or, for a message, this rank's own diagnosis."""
        make = partial(self._diagnosis, failed)
        if failed.blocked.messages is not None:
            return make()
        shared = self._exchange.shared(f"{failed.blocked.label}/{failed.blocked.number}", make)
        # That diagnosis may describe an earlier failure of this call, before this rank arrived, for example after a handle's
        # short timeout.
        stale = self.own.rank in shared["diagnosis"]["missing"]
        return make() if stale else shared

    def _diagnosis(self, failed: FailedCall) -> dict[str, Any]:
        statuses, silent = {self.own.rank: self.status()}, dict[int, str]()
        asks, began = failed.asks, time.monotonic()
        # Follow the chain of waiting to its end, but not for longer than the other ranks wait for the result.
        while asks:
            statuses |= self._exchange.ask(asks)
            silent |= {rank: self._options.process_of(rank) for rank in asks if rank not in statuses}
            late = time.monotonic() - began > _FOLLOWS_S
            asks = [] if late else unasked(failed.blocked, statuses, silent)
        self._desync.cause(statuses)
        diagnosis = diagnose(failed.blocked, statuses, silent)
        return {"differs": self._desync.found, "diagnosis": diagnosis._asdict()}


def look_interval_s(world_size: int) -> float:
    """Return the interval in seconds at which a rank checks for questions from other ranks."""
    return max(0.25, world_size / _LOOKS_PER_S)


class _Past(NamedTuple):
    """A collective outside the mesh, or a message. `error` is the backend's error if the backend gave up on the call."""

    began: float
    recorder: FlightRecorder
    message: PendingMessage | None
    error: RuntimeError | None

    @property
    def call(self) -> object:
        return self.message or self.recorder.work


@contextlib.contextmanager
def _waiting_for(recorder: FlightRecorder, message: PendingMessage | None) -> Iterator[None]:
    """Inside the block, report this rank as waiting for `message` or, if it is None, as blocked in a collective."""
    waiting, recorder.messages.waiting = recorder.messages.waiting, message
    try:
        yield
    finally:
        recorder.messages.waiting = waiting


# -- called by threads, hooks and recorders, which hold no reference to the watchdog --------------------------


def _poll(
    watchdog: ref[Watchdog], look: Callable[[Watchdog], bool], stop: threading.Event, interval_s: float
) -> None:
    while not stop.wait(interval_s):
        alive = watchdog()
        if alive is None or not look(alive):
            return
        del alive


def _at_exit(watchdog: ref[Watchdog]) -> None:
    """Handle a program that has ended without closing its mesh."""
    alive = watchdog()
    if alive is not None:
        alive.close()


def _explain(watchdog: ref[Watchdog], error: BaseException, thread: str) -> MeshcommError | None:
    """See Watching.explain. `thread` names the thread that ends with `error`, "" for the main thread."""
    alive = watchdog()
    if alive is not None and thread:
        # Ranks that wait for this rank will read it.
        alive.own.thread = str(Raised(error, f"thread {thread}"))
        if alive.of_job:
            leave_seen(error, f"{alive.own.label}, thread {thread}")
    return None if alive is None else alive.explain(error)


def _inquire(
    watchdog: ref[Watchdog], recorder: FlightRecorder, where: str, error: BaseException
) -> MeshcommError:
    alive = watchdog()
    return failure(where, error) if alive is None else alive.inquire(recorder, where, error)


def _closed(place: str, recorder: FlightRecorder, where: str, error: BaseException) -> MeshcommError:
    return MeshClosed(
        f"{where} was under way when this rank closed the mesh",
        given=f"a wait after the mesh was closed at {place}: {first_line(error)}",
        expected="wait() for every call before the mesh closes",
        hint="move handle.wait() into the with block, or before mesh.close()",
    )


def _timeout_s(transport: ref[Transport], default: float) -> float:
    """Return the group's timeout, which a program may change, or `default` if the transport does not know the timeout."""
    alive = transport()
    return default if alive is None else alive.timeout_s or default


def _report(error: MeshcommError) -> None:
    # Use one write, because several ranks write to the same stream.
    sys.stderr.write(f"meshcomm: {' '.join(str(error).split())}\n")
    sys.stderr.flush()


# -- for the error that ends the process ------------------------------------------------------------------


def explained(error: BaseException) -> BaseException:
    """Return the explanation of `error`, which ends the process, if a watchdog has one; otherwise `error`."""
    for watchdog in _latest():
        if (explanation := watchdog.explain(error)) is not None:
            return caused_by(explanation, error)
    return error


def leave_all() -> None:
    """Report to the other ranks that this rank ends with the current exception."""
    for watchdog in _latest():
        watchdog.close()


def latest_label() -> str | None:
    """Return this rank's name in errors, with its coords in the last mesh opened, or None if there is no mesh."""
    return next((watchdog.own.label for watchdog in _of_job()), None)


def _latest() -> list[Watchdog]:
    """Return the watchdogs that still exist, the last one that started first."""
    return [watchdog for _, watchdog in sorted(_ALL.items(), reverse=True)]


def _of_job() -> list[Watchdog]:
    """Return `_latest` without the watchdogs of links between two jobs."""
    return [watchdog for watchdog in _latest() if watchdog.of_job]
