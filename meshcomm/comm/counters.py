"""What has gone along a group since it was made: calls, bytes and time, by dim and call."""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter as clock
from typing import Any, Final, NamedTuple, TypeAlias, final
from zlib import crc32

from meshcomm.comm.spans import Span

# Their bytes may differ from rank to rank: splits of a rank's own, and objects.
_UNEVEN: Final = ("all_to_all", "objects.")


@final
class CallCounter:
    """Running sums of one call on one dim of one group.

    calls, nbytes, seconds: of blocking calls; seconds from start to return. later_*: of asynchronous
    calls, once they are waited for; later_seconds is what their program spent on starting them and on
    waiting, later_span_s from start to the end of the wait, whatever was done in between.

    sign: stands for the name of the call, the same in every process. alike: whether its bytes are equal
    on all ranks of a group. waiting: the asynchronous call that the program waits for now. past: made past
    the mesh, so that nobody knows how long the program was in it.
    """

    __slots__ = (
        "alike",
        "call",
        "calls",
        "later_calls",
        "later_nbytes",
        "later_seconds",
        "later_span_s",
        "name",
        "nbytes",
        "past",
        "seconds",
        "sign",
        "waiting",
    )

    def __init__(self, name: str, call: str, past: bool = False) -> None:
        self.name = name
        self.past = past
        self.call = call
        self.sign = crc32(call.encode())
        self.alike = not call.startswith(_UNEVEN)
        self.waiting: PendingCall | None = None
        self.calls = self.nbytes = self.later_calls = self.later_nbytes = 0
        self.seconds = self.later_seconds = self.later_span_s = 0.0


Counters: TypeAlias = dict[tuple[str, str, bool], CallCounter]


def counter_of(counters: Counters, name: str, call: str, past: bool = False) -> CallCounter:
    """The sums of `call` on the dim `name`, made where it is the first."""
    found = counters.get((name, call, past))
    if found is None:
        found = counters[name, call, past] = CallCounter(name, call, past)
    return found


class Count(NamedTuple):
    """Sums of one call on one dim: of blocking calls, or (later) of asynchronous ones.

    call: with " (torch)" behind it for calls past the mesh, whose time nobody knows.
    seconds: that the program spent in the calls; span_s: from start to the end of the wait. None: not known.
    """

    dim: str
    call: str
    later: bool
    calls: int
    nbytes: int
    seconds: float | None
    span_s: float | None


def counts(counters: Iterable[Counters]) -> list[Count]:
    """The sums of several groups, each in the order of its first calls; what was never called is left out."""
    found: list[Count] = []
    for each in counters:
        # A copy, as another thread may make the first call of a kind meanwhile.
        for t in list(each.values()):
            if t.calls:
                if t.past:
                    found.append(Count(t.name, f"{t.call} (torch)", False, t.calls, t.nbytes, None, None))
                else:
                    found.append(Count(t.name, t.call, False, t.calls, t.nbytes, t.seconds, t.seconds))
            if t.later_calls:
                sums = (t.later_calls, t.later_nbytes, t.later_seconds, t.later_span_s)
                found.append(Count(t.name, t.call, True, *sums))
    return found


class PendingCall:
    """A call between its start and the end of its last wait. It counts from its first wait on.

    total: where it counts; None: nowhere. calls: 0 for a part of a call that another part counts for.
    shown: whose `waiting` it is while it is waited for; None: of `total`.
    began, over: when it began and when the last wait for it ended; over 0.0: there was none yet.
    """

    __slots__ = (
        "_at_once",
        "_calls",
        "_counted_to",
        "_seconds",
        "_shown",
        "_total",
        "began",
        "nbytes",
        "over",
        "told",
    )

    def __init__(
        self,
        total: CallCounter | None,
        nbytes: int,
        began: float,
        left: float,
        told: Span | None = None,
        calls: int = 1,
        shown: Any = None,
    ) -> None:
        self._total = total
        self._shown = shown or total
        self._calls = calls
        self.nbytes = nbytes
        self._seconds = left - began
        self._counted_to = 0.0
        self._at_once = False
        self.told = told
        self.began = began
        self.over = 0.0

    def at_once(self) -> None:
        """Nothing is done before the wait: it counts as a blocking call."""
        self._at_once = True
        if self.told is not None:
            self.told.at_once = True

    def waits(self) -> float:
        """The program begins to wait; returns when, for `waited`."""
        if self._shown is not None:
            self._shown.waiting = self
        return clock()

    def waited(self, since: float) -> None:
        """A wait that began at `since` is over; there may be several, one after the other."""
        self.over = now = clock()
        if self._shown is not None:
            self._shown.waiting = None
        if self.told is not None:
            self.told.waited(since, now)
        total = self._total
        if total is None:
            return
        calls, nbytes, spent, span = 0, 0, now - since, now - self._counted_to
        if self._counted_to == 0.0:
            calls, nbytes = self._calls, self.nbytes
            spent, span = spent + self._seconds, now - self.began
        self._counted_to = now
        if self._at_once:
            total.calls += calls
            total.nbytes += nbytes
            total.seconds += spent
        else:
            total.later_calls += calls
            total.later_nbytes += nbytes
            total.later_seconds += spent
            total.later_span_s += span
