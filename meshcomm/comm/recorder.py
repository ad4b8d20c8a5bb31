"""The last calls on one group: which, with what, from which line, and whether one is under way."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from time import perf_counter as clock
from types import CodeType
from typing import Any, Final, final

from torch import Tensor

from meshcomm.comm.desync import StepHistory
from meshcomm.comm.ledger import Later, Total, Totals, moved, total_of
from meshcomm.comm.message_check import MessageCheck
from meshcomm.comm.message_log import MessageLog
from meshcomm.comm.site import is_ours, line_of
from meshcomm.comm.spans import Span, Spans
from meshcomm.errors import MeshcommError

KEPT: Final = 256

# Where it is summed up, its bytes as the ledger counts them, the place in the program, when it began.
Entry = tuple[Total, int, CodeType, int, float]
Inquire = Callable[["Recorder", str, BaseException], MeshcommError]


@final
class Recorder:
    """A ring of the last 256 calls on one group, whatever names the group has. Written on every call.

    started counts the calls; as ranks of a group call in the same order, the count tells which of
    them have come to a call. under_way is what a blocking call was given while it is under way, and None
    while none is. left holds when the program went on after each of the calls in the ring, in seconds on
    this host's monotonic clock, as the ring holds when they began. totals sums up all calls. messages
    are kept beside: they are counted by peer. refused are numbers of calls of which nothing was sent, as the
    ranks were about to make different ones. steps has what was called in each step, where the program tells.

    plan ends the labels that profilers show. spans takes every call while a trace is taken, span is the last one; quick are dictionaries of prepared calls, which do not
    ask for it and are emptied for that time.

    Args:
        label: the group with its common coords, as in `tp[pp=0 dp=1]`.
        ranks: its global ranks, in coord order.
        inquire: asked for the error when a call fails: who has not come, doing what instead.
        check: compares the first messages; see MessageLog.
    """

    __slots__ = (
        "inquire",
        "label",
        "left",
        "messages",
        "plan",
        "quick",
        "ranks",
        "refused",
        "ring",
        "span",
        "spans",
        "started",
        "steps",
        "totals",
        "under_way",
    )

    def __init__(
        self, label: str, ranks: list[int], inquire: Inquire, check: MessageCheck | None = None
    ) -> None:
        self.label = label
        self.plan = ""
        self.ranks = ranks
        self.inquire = inquire
        self.started = 0
        self.under_way: object = None
        self.ring: list[Entry | None] = [None] * KEPT
        self.left = [0.0] * KEPT
        self.totals: Totals = {}
        self.messages = MessageLog(self.totals, label, check)
        self.quick: list[dict[Any, Any]] = []
        self.spans: Spans | None = None
        self.span: Span | None = None
        self.refused: deque[int] = deque(maxlen=KEPT)
        self.steps = StepHistory()

    @property
    def inside(self) -> bool:
        """Whether a blocking call is under way."""
        return self.under_way is not None

    def start(self, name: str, call: str, x: Tensor | None, depth: int) -> None:
        """A call on the dim `name` begins; `depth` frames up is the innermost that may be the user's."""
        frame: Any = sys._getframe(depth)
        while is_ours(frame.f_code.co_filename) and frame.f_back is not None:
            frame = frame.f_back
        nbytes = 0 if x is None else moved(call, x.nbytes, max(1, len(self.ranks)))
        self.started = number = self.started + 1
        self.under_way = True if x is None else x
        # The instruction, not the line: finding the line takes longer than the rest together.
        entry = (total_of(self.totals, name, call), nbytes, frame.f_code, frame.f_lasti, clock())
        self.ring[number % KEPT] = entry
        if self.spans is not None:
            tensors = () if x is None else (x,)
            at = (entry[2], entry[3])
            self.span = self.spans.begin(self.label, name, call, at, entry[4], nbytes, tensors, number=number)

    def end(self) -> None:
        """The blocking call under way is over, or has failed. Harmless where none is."""
        if self.under_way is None:
            return
        self.under_way = None
        place = self.started % KEPT
        entry = self.ring[place]
        self.left[place] = now = clock()
        if entry is not None:
            total = entry[0]
            total.calls += 1
            total.nbytes += entry[1]
            total.seconds += now - entry[4]
        if self.span is not None:
            self.span.left = now

    def resume(self) -> None:
        """What ended was a part of the call, which goes on."""
        place = self.started % KEPT
        entry = self.ring[place]
        if self.under_way is None and entry is not None:
            total = entry[0]
            total.calls -= 1
            total.nbytes -= entry[1]
            total.seconds -= self.left[place] - entry[4]
            self.under_way = True

    def is_of(self, nbytes: int) -> None:
        """The last call turns out to move so many bytes, by the ledger's count; before it ends for good."""
        place = self.started % KEPT
        entry = self.ring[place]
        if entry is not None:
            if self.under_way is None:
                entry[0].nbytes += nbytes - entry[1]
            self.ring[place] = (entry[0], nbytes, *entry[2:])
        if self.span is not None:
            self.span.nbytes = nbytes

    def refuse(self) -> None:
        """Nothing was sent of the last call: each rank of the group says so, whatever it was about to call."""
        self.refused.append(self.started)

    def note(self, step: int, number: int, excluded: bool, ended_at: tuple[CodeType, int]) -> None:
        """A step of the program is over; see StepHistory.note."""
        self.steps.note(step, number, self.ring, self.started, self.refused, excluded, ended_at)

    def later(self) -> Later | None:
        """The call under way is only started: who is told of the wait for it."""
        self.under_way = None
        place = self.started % KEPT
        entry = self.ring[place]
        self.left[place] = now = clock()
        if self.span is not None:
            self.span.left = now
        return None if entry is None else Later(entry[0], entry[1], entry[4], now, self.span)

    def trace(self, spans: Spans | None) -> None:
        """Tell `spans` of every call from now on; None: nobody."""
        self.spans = self.messages.spans = spans
        self.span = None
        for prepared in self.quick:
            prepared.clear()

    def began(self, number: int) -> float:
        """When the call `number` began, in seconds on the monotonic clock; it must be in the ring."""
        entry = self.ring[number % KEPT]
        return 0.0 if entry is None else entry[4]

    def remembered(self) -> range:
        """The numbers of the calls that the ring holds."""
        return range(max(1, self.started - KEPT + 1), self.started + 1)

    def close(self) -> None:
        """Let go of what compares messages, and of its connection; and of prepared calls, which hold the group."""
        self.trace(None)
        self.quick.clear()
        self.messages.close()

    def last(self) -> dict[str, Any] | None:
        """The latest call as plain data, or None where there was none. shape: while it is under way."""
        entry = self.ring[self.started % KEPT]
        if entry is None:
            return None
        total, nbytes, code, instruction, _ = entry
        shape = getattr(self.under_way, "shape", None)
        return {
            "number": self.started,
            "dim": total.name,
            "call": total.call,
            "shape": None if shape is None else list(shape),
            "bytes": nbytes,
            "site": f"{code.co_filename}:{line_of(code, instruction)}",
            "inside": self.inside,
        }

    def history(self) -> list[dict[str, Any]]:
        """The calls of the ring and the last messages as plain data, in the order of their beginning.

        began, over: seconds on the monotonic clock; over None: under way. An asynchronous call is over
        when it has been started.
        """
        found = []
        for number in self.remembered():
            entry = self.ring[number % KEPT]
            if entry is None:
                continue
            total, nbytes, _, _, began = entry
            over = None if number == self.started and self.inside else self.left[number % KEPT]
            found.append(
                {"dim": total.name, "call": total.call, "bytes": nbytes, "began": began, "over": over}
            )
        return sorted([*found, *self.messages.history()], key=lambda call: call["began"])

    def status(self) -> dict[str, Any]:
        """What is known of the group's calls, as plain data."""
        return {
            "label": self.label,
            "ranks": self.ranks,
            "started": self.started,
            "last": self.last(),
            "messages": self.messages.status(self.ranks),
            "steps": self.steps.told(),
        }
