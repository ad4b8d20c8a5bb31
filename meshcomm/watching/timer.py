"""How long each group's calls have been running, both blocking and queued calls."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, NamedTuple, final
from weakref import WeakKeyDictionary

from meshcomm.transport.torch_private import unfinished_collectives
from meshcomm.watching.messages import PendingMessage
from meshcomm.watching.recorder import FlightRecorder

# A backend that has not ended a call this many seconds after the group's timeout never will.
GRACE_S: Final = 5.0

# The interval in seconds between checks of queued calls if their group's timeout is long.
_ASKS_S: Final = 10.0


class Queued(NamedTuple):
    """A call that the backend has queued.

    number: the number of the collective or, for a message, of the last collective before the message; 0 if unknown.
    work: None for a blocking call on NCCL.
    record: the call's number in torch's flight recorder.
    """

    work: Any
    message: PendingMessage | None
    number: int
    since: float
    record: int | None = None


@dataclass(slots=True)
class _Timed:
    """The last check of a group. `since` is when `call` was first seen running, and `next` is when to check `queued` again.

    wait: when the call's wait before this one ended. A program may wait again for a call after a wait with a time limit.
    """

    call: Any
    since: float
    wait: float = 0.0
    queued: Queued | None = None
    next: float = 0.0


@final
class CallTimer:
    """Measures how long each group's blocking call, or the wait for a call, has been running since it was first seen."""

    def __init__(self) -> None:
        # Weak references, because groups are created and released over time.
        self._groups: WeakKeyDictionary[FlightRecorder, _Timed] = WeakKeyDictionary()

    def overdue(
        self, recorders: Sequence[FlightRecorder], now: float, most_s: float = math.inf
    ) -> list[tuple[FlightRecorder, Any]]:
        """Return the calls that have been running for longer than `most_s`, or for longer than their group's timeout plus a
        grace period (see `_under_way`).
        """
        late = []
        for recorder in list(recorders):
            call, seen = _under_way(recorder), self._groups.setdefault(recorder, _Timed(None, now))
            wait = getattr(call, "over", 0.0)
            if call is None or call != seen.call or wait != seen.wait:
                seen.call, seen.since, seen.wait = call, now, wait
            # Do not ask the backend earlier, because the query may disturb CUDA graph capture.
            elif now - seen.since > min(most_s, recorder.timeout_s() + GRACE_S) and is_held(recorder, call):
                late.append((recorder, call))
        return late

    def stuck(self, recorders: Sequence[FlightRecorder], now: float) -> list[tuple[FlightRecorder, Queued]]:
        """Return the calls that have been queued for longer than their group's timeout, earliest first, because later calls
        may wait for them.

        The backend is queried only eight times per timeout, because a query may disturb CUDA graph capture. It is queried
        about the same call until that call has ended.
        """
        late, unfinished = [], cache(unfinished_collectives)
        for recorder in list(recorders):
            seen = self._groups.setdefault(recorder, _Timed(None, now))
            if not recorder.ordered or now < seen.next:
                continue
            timeout_s = recorder.timeout_s()
            seen.next = now + min(timeout_s / 8, _ASKS_S)
            before = seen.queued
            try:
                seen.queued = queued_in(recorder, before, unfinished, now)
            except RuntimeError:
                continue  # a graph is being captured; ask again later
            if before is not None and before is not seen.queued:
                recorder.over = max(recorder.over, before.number)
            elif before is not None and now - before.since > timeout_s:
                late.append((recorder, before))
        # An earlier call of another group may have been seen later, if both calls were made during one check.
        late_recorders = [recorder for recorder, _ in late]
        for recorder in [recorder for recorder in recorders if late and recorder not in late_recorders]:
            queued = self._groups[recorder].queued
            if queued is None or now - _began(recorder, queued) <= recorder.timeout_s():
                continue
            with contextlib.suppress(RuntimeError):
                # Check again: the call may have ended since.
                if queued_in(recorder, queued, unfinished, now) is queued:
                    late.append((recorder, queued))
        return sorted(late, key=lambda pair: _began(*pair))


def queued_in(
    recorder: FlightRecorder,
    before: Queued | None,
    unfinished: Callable[[], Mapping[str, Sequence[tuple[int, str]]]],
    now: float,
) -> Queued | None:
    """Return the call that the backend has queued but not completed, or `before` if the call is still the same."""
    if before is not None and before.work is not None and not before.work.is_completed():
        return before
    work, message, number = recorder.work, recorder.message, recorder.started
    if work is not None:
        return None if work.is_completed() else Queued(work, message, number, now)
    calls = unfinished().get(recorder.group_name, ()) if number else ()
    if not calls:
        return None
    # Do not compare meshcomm's own number: without torch's hooks, it does not change when others make calls.
    record, name = calls[0]
    if before is not None and before.record == record:
        return before
    number = max(1, number - len(calls) + 1)
    return Queued(None, None, number if _has_recorded(recorder, number, name) else 0, now, record)


def _began(recorder: FlightRecorder, queued: Queued) -> float:
    """Return the time at which the program made the call; if unknown, when it was first seen."""
    if queued.message is not None:
        return queued.message.began
    record = recorder.call_data(queued.number) if queued.number else None
    return queued.since if record is None else float(record["began"])


def _has_recorded(recorder: FlightRecorder, number: int, name: str) -> bool:
    """Return whether the recorder has recorded the call that the backend names `name`.

    Without hooks, the recorder does not record calls made outside the mesh.
    """
    has_hooks = recorder.hooks is not None and recorder.hooks.group is not None
    if has_hooks or (number == recorder.started and recorder.under_way is not None):
        return True
    recorded = recorder.call_data(number)
    return recorded is not None and recorded["call"] in name


def _under_way(recorder: FlightRecorder) -> Any:
    """Return what currently blocks the rank: a sequence number, a message, a wait, or the last Work outside the
    mesh; or None.
    """
    if recorder.under_way is not None:
        return recorder.started
    if recorder.messages.waiting is not None:
        return recorder.messages.waiting
    # Iterate over a copy, because the program may make its first call of a kind in the meantime.
    waits = (total.waiting for total in list(recorder.counters.values()))
    return next((later for later in waits if later is not None), None) or (
        None if recorder.ordered else recorder.work
    )


def is_held(recorder: FlightRecorder, call: Any) -> bool:
    """Return whether this call is still running. For a call outside the mesh, check its Work."""
    return bool(_under_way(recorder) == call and (call is not recorder.work or recorder.inside))
