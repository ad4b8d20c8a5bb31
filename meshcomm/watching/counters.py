"""The calls, bytes and time of a group since its creation, by dim and call."""

from __future__ import annotations

from time import perf_counter as clock
from types import CodeType
from typing import Any, Final, TypeAlias, final
from zlib import crc32

from meshcomm.watching.spans import Span

# Calls whose bytes may differ between ranks: uneven splits and objects.
_UNEVEN: Final = ("all_to_all", "objects.")


class Sums:
    """Running sums over calls. seconds: time in the calls. span_s: for asynchronous calls, time from start to end of wait."""

    def __init__(self) -> None:
        self.calls = self.nbytes = 0
        self.seconds = self.span_s = 0.0


@final
class CallCounter(Sums):
    """Running sums over the blocking calls of one kind, along one dim of a group.

    async_op: sums over the asynchronous calls, which are counted when they are waited for. sign: a checksum of `call`,
    the same in every process. alike: whether the call's bytes are equal on all ranks. waiting: the asynchronous call that the
    program is waiting for. past: whether the calls are made outside the mesh, in which case their time is unknown.
    """

    def __init__(self, name: str, call: str, past: bool = False) -> None:
        super().__init__()
        self.name = name
        self.call = call
        self.past = past
        self.async_op = Sums()
        self.sign = crc32(call.encode())
        self.alike = not call.startswith(_UNEVEN)
        self.waiting: PendingCall | None = None


# A collective: its counter, the bytes to count, its code object and instruction, its start time.
Entry: TypeAlias = tuple[CallCounter, int, CodeType, int, float]

Counters: TypeAlias = dict[tuple[str, str, bool], CallCounter]


def counter_of(counters: Counters, name: str, call: str, past: bool = False) -> CallCounter:
    """Return the counter of `call` on the dim `name`; create it for the first call."""
    counter = counters.get((name, call, past))
    if counter is None:
        counter = counters[name, call, past] = CallCounter(name, call, past)
    return counter


class PendingCall:
    """A call between its start and the end of its last wait. It is counted at its first wait.

    total: the call's counter; its `waiting` is this call during a wait. told: the call's span, if a trace is recorded. place:
    the code object and instruction of the user's line. over: when the last wait ended; 0.0 before any wait has ended. listed: the
    list of calls in flight that has this call until its first wait ends; None if no list has.
    """

    listed: list[Any] | None = None

    def __init__(
        self,
        total: CallCounter | None,
        nbytes: int,
        began: float,
        left: float,
        told: Span | None = None,
        place: tuple[CodeType, int] | None = None,
    ) -> None:
        self._total = total
        self._sums: Sums | None = None if total is None else total.async_op
        self._shown: Any = total
        self._calls = 1
        self.nbytes = nbytes
        self._seconds = left - began
        self.told = told
        self.place = place
        self.began = began
        self.over = 0.0

    def at_once(self) -> None:
        """Record that the wait follows immediately, so that the call counts as blocking."""
        self._sums = self._total
        if self.told is not None:
            self.told.at_once = True

    def waits(self) -> float:
        """Record that the program begins to wait. Return the current time, to pass to `waited`."""
        if self._shown is not None:
            self._shown.waiting = self
        return clock()

    def waited(self, since: float) -> None:
        """Record that a wait that began at `since` has ended. A call may have several waits in sequence."""
        before, self.over = self.over, clock()
        if self._shown is not None:
            self._shown.waiting = None
        if self.told is not None:
            self.told.waits.append((since, self.over))
        sums = self._sums
        if sums is not None:
            sums.seconds += self.over - since
            sums.span_s += self.over - (before or self.began)
            if not before:
                sums.calls += self._calls
                sums.nbytes += self.nbytes
                sums.seconds += self._seconds
        if self.listed is not None:
            self.listed.remove(self)
            self.listed = None
