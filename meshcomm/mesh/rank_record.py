"""Each rank's record of its most recent calls in each group and its current line. Other ranks read it through the store."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar, final

from meshcomm.layout.sizes import rank_text
from meshcomm.lines import source_line
from meshcomm.mesh.rank_failure import leave_folder
from meshcomm.rendezvous.store import within
from meshcomm.transport.torch_changes import failed_barrier
from meshcomm.watching.callsite import C10D, place_in, stack_of
from meshcomm.watching.exceptions import Raised, Reason, handled_by, reason_of, unawaited
from meshcomm.watching.recorder import FlightRecorder
from meshcomm.watching.spans import host
from meshcomm.watching.words import BARRIER

T = TypeVar("T")

# How long a rank whose call failed waits for answers from other ranks.
_ANSWER_S: Final = 1.5

# How long a store that has not answered is not asked again.
_AGAIN_S: Final = 5.0

# How often a rank that waits for answers looks whether the others can still answer, and at most how many of them it looks at per
# second: each takes three operations of the store.
_STATE_S: Final = 0.25
_STATES_PER_S: Final = 2_000

# Extra time for slow checks on a busy machine, where the other ranks are slow to answer too.
_PAUSE_S: Final = 0.02
_LOOK_S: Final = 0.03
_LONGER: Final = 4


@final
class RankRecord:
    """Written by a rank's main thread. Any thread may read it.

    label: the rank with its coords.
    failed: the first call that failed, see `FailedCall.facts`; None if no call has failed.
    thread: the error that ended another thread of the program, "" if none.
    recorders: the recorders of the rank's groups. The list may grow.
    reports: this run's folder, inside the folder for all runs; "" for no reports.
    """

    def __init__(
        self, rank: int, coords: Mapping[str, int], recorders: Sequence[FlightRecorder], reports: str = ""
    ) -> None:
        self.rank, self.coords, self.recorders = rank, dict(coords), recorders
        self.label = rank_text(rank, coords)
        self.failed: dict[str, Any] | None = None
        self.thread = ""
        self._main = threading.get_ident()
        self._reports = reports
        # The exception that the main thread is handling, by its id, and the number of calls when it was first seen. A program
        # may open its mesh while it handles an exception.
        self._handled = (id(handled_by(self._main)), -1)

    @property
    def main_line(self) -> str:
        """The file:line and function to show of the main thread, see `place_in`."""
        stack = stack_of(self._main)
        if not stack:
            return "an unknown line"
        file, line, name = stack[place_in([file for file, _, _ in stack]) or 0]
        return f"{source_line(file, line)} in {name}"

    @property
    def _in_barrier(self) -> bool:
        """Whether the main thread is in `dist.monitored_barrier`, or handles its error."""
        stack = stack_of(self._main)
        error = handled_by(self._main)
        return any(file in C10D and name == BARRIER for file, _, name in stack) or (
            error is not None and failed_barrier(error) is not None
        )

    @property
    def reports(self) -> str:
        """The folder for the reports of all runs."""
        return os.path.dirname(self._reports) or self._reports

    def raised(self) -> Raised | None:
        """Return an exception that the main thread handles, in an `except` or `finally` block, without having made a call since,
        or that has ended a task that no other task has awaited. None if there is none, or if the rank is in a call.
        """
        calls = 0
        for recorder in list(self.recorders):
            if recorder.inside or recorder.messages.waiting is not None:
                return None
            calls += sum(total.calls for total in list(recorder.counters.values()))
        error = handled_by(self._main)
        if error is not None and not isinstance(error, (SystemExit, KeyboardInterrupt, GeneratorExit)):
            if id(error) != self._handled[0]:
                self._handled = (id(error), calls)
            if calls == self._handled[1]:
                return Raised(error, "")
        return next(iter(unawaited()), None)

    def data(self, differs: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the record as plain data. `differs` is a difference between the ranks' steps; see `find_desync`."""
        # Calls first: one that fails meanwhile is then found to be under way or to have failed, never neither.
        groups = [recorder.status() for recorder in list(self.recorders)]
        raised = self.raised()
        failed = isinstance(raised and raised.error, RuntimeError | OSError)
        return {
            "rank": self.rank,
            "coords": self.coords,
            "host": socket.gethostname(),
            "process": os.getpid(),
            "time": time.time(),
            "main": self.main_line,
            "thread": self.thread,
            "raised": str(raised or ""),
            # A backend's error that the rank has not passed on yet, for example within a backward pass.
            "call_failed": raised is not None and failed and reason_of(raised.error) is not Reason.OTHER,
            "barrier": self._in_barrier,
            "failed": self.failed,
            "differs": differs,
            "groups": groups,
        }

    def write(self, differs: Mapping[str, Any] | None = None) -> bool:
        """Write this rank's report: the record, its last calls and its clock. Return whether the report was written."""
        if not self._reports:
            return False
        history = [call for recorder in list(self.recorders) for call in recorder.history()]
        now = time.perf_counter()
        report = {
            **self.data(differs),
            "clock": {"host": str(host()), "now_s": now, "ahead_s": time.time() - now},
            "history": sorted(history, key=lambda call: call["began"]),
        }
        folder = Path(self._reports)
        # Failing to write a report must not hide the error that the report describes.
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            half = folder / f".rank{self.rank}.json"
            half.write_text(json.dumps(report, indent=1))
            half.replace(folder / f"rank{self.rank}.json")
            leave_folder(folder)
            return True
        return False


@final
class RecordExchange:
    """Asks ranks for their records, answers other ranks, and shares diagnoses.

    look_s: time in seconds between checks for questions.
    state_of: returns the state of a rank's process, as `state_of_rank`. One that has ended is not waited for.
    Keys: `asked/RANK` counts the questions to a rank, `ask/RANK/N` is question N, `answer/RANK/N` is its answer,
    and `closed/RANK` is a rank's last status. `first/CALL` is the rank that diagnoses a call, and `diagnosis/CALL`
    is the diagnosis.
    """

    def __init__(
        self, store: Any, rank: int, look_s: float, state_of: Callable[[int], str] = lambda rank: ""
    ) -> None:
        self._store = store
        self._rank = rank
        self._state_of = state_of
        self._within_s = max(_ANSWER_S, 2 * look_s)
        self._pause_s = max(_PAUSE_S, look_s / 10)
        self._answered = 0
        self._silent_until = 0.0

    def limited(self, call: Callable[[], T]) -> T:
        """Return the result of `call`, which uses this exchange. Raises TimeoutError if the store does not answer."""
        self._soon(partial(self._store.check, ["asked"]))
        # `shared` waits for another rank's diagnosis, then for answers, twice if ranks may hang. A longer silence means that the
        # store has stopped.
        return within(4 * _LONGER * self._within_s, call)

    def shared(self, call: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the result of `make` from the first rank that asks about this call.

        If that rank does not publish a result, each rank that has waited for it calls `make` and publishes its own.
        """
        my_rank, published = str(self._rank), f"diagnosis/{call}"
        first = int(self._store.compare_set(f"first/{call}", "", my_rank))
        if first != self._rank and self._awaits(first, published):
            read: dict[str, Any] = json.loads(self._store.get(published))
            return read
        result = make()
        self._store.set(published, json.dumps(result))
        return result

    def _awaits(self, first: int, published: str) -> bool:
        """Return whether the first rank publishes its result, which it does not if it leaves meanwhile."""
        # It waits this long for answers, and longer on a busy machine.
        until, looks = time.monotonic() + _LONGER * self._within_s, 0.0
        while not self._store.check([published]):
            now = time.monotonic()
            if now > looks:
                if now > until or not self._answering({first: ""}):
                    return bool(self._store.check([published]))
                looks = now + _STATE_S
            time.sleep(self._pause_s)
        return True

    def publish(self, call: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the result of `shared`, as `limited`."""
        return self.limited(partial(self.shared, call, make))

    def published(self, call: str) -> dict[str, Any] | None:
        """Return the result of `shared` if there is one already.

        Raises TimeoutError if the store does not answer.
        """
        key = f"diagnosis/{call}"
        if not self._soon(partial(self._store.check, [key])):
            return None
        result: dict[str, Any] = json.loads(self._soon(partial(self._store.get, key)))
        return result

    def _soon(self, call: Callable[[], T]) -> T:
        """Return the result of one operation on the store, which must come soon: a lost host does not refuse connections.

        Raises TimeoutError, and then at once for a while, so that a rank waits for a lost store only once.
        """
        if time.monotonic() < self._silent_until:
            raise TimeoutError("no answer")
        try:
            return within(self._within_s, call)
        except TimeoutError:
            self._silent_until = time.monotonic() + _AGAIN_S
            raise

    def ask(self, ranks: Sequence[int]) -> dict[int, Any]:
        """Return the records of the `ranks` that answer in time. Takes a few store operations per rank."""
        began = last = time.monotonic()
        answers = self._read({rank: f"closed/{rank}" for rank in ranks})
        number_of = {rank: self._store.add(f"asked/{rank}", 1) for rank in ranks if rank not in answers}
        for rank, number in number_of.items():
            self._store.set(f"ask/{rank}/{number}", str(self._rank))
        keys = {rank: f"answer/{rank}/{number}" for rank, number in number_of.items()}
        waited_s = looked_s = 0.0
        waits = self._answering(keys)
        while waits and waited_s < self._within_s and last - began < _LONGER * self._within_s:
            if self._store.check([*waits.values()]):
                break
            time.sleep(_PAUSE_S)
            if waited_s > looked_s + max(_STATE_S, len(waits) / _STATES_PER_S):
                waits, looked_s = self._answering(waits), waited_s
            now = time.monotonic()
            waited_s += min(now - last, _LOOK_S)
            last = now
        answers |= self._read(keys)
        return answers | self._read({rank: f"closed/{rank}" for rank in keys if rank not in answers})

    def answer(self, status: Callable[[], Mapping[str, Any]]) -> bool:
        """Answer the pending questions. Return whether there were any. Raises RuntimeError if the store fails."""
        before = self._answered
        while self._store.check([f"ask/{self._rank}/{self._answered + 1}"]):
            self._answered += 1
            self._store.set(f"answer/{self._rank}/{self._answered}", json.dumps(status()))
        return self._answered > before

    def leave(self, status: Mapping[str, Any]) -> None:
        """Stop answering. All later questions receive this rank's last status."""
        self._store.set(f"closed/{self._rank}", json.dumps(status))

    def _answering(self, keys: dict[int, str]) -> dict[int, str]:
        """Return the keys of the ranks that may still answer."""
        return {
            rank: key
            for rank, key in keys.items()
            if self._state_of(rank) != "ended" and not self._store.check([f"closed/{rank}"])
        }

    def _read(self, keys: dict[int, str]) -> dict[int, Any]:
        """Return the values of the keys that exist."""
        return {
            rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])
        }
