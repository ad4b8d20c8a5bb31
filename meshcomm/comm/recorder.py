"""The last calls on one group: which, with what, from which line, and whether one is under way."""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import perf_counter_ns as clock
from types import CodeType
from typing import Any, Final, final

from meshcomm.comm.message_check import MessageCheck
from meshcomm.comm.message_log import MessageLog
from meshcomm.comm.site import is_ours, line_of
from meshcomm.errors import CommunicationError

_KEPT: Final = 256

Entry = tuple[str, str, object, CodeType, int]
Inquire = Callable[["Recorder", str, BaseException], CommunicationError]


@final
class Recorder:
    """A ring of the last 256 calls on one group, whatever names the group has. Written on every call.

    started counts the calls; as ranks of a group call in the same order, the count tells which of
    them have come to a call. inside is true while a blocking call is under way. came holds when each
    of the calls in the ring began, on this host's monotonic clock, in nanoseconds. messages are kept
    beside: they are counted by peer.

    Args:
        label: the group with its common coords, as in `tp[pp=0 dp=1]`.
        ranks: its global ranks, in coord order.
        inquire: asked for the error when a call fails: who has not come, doing what instead.
        check: compares the first messages; see MessageLog.
    """

    __slots__ = ("came", "inquire", "inside", "label", "messages", "ranks", "ring", "started")

    def __init__(
        self, label: str, ranks: list[int], inquire: Inquire, check: MessageCheck | None = None
    ) -> None:
        self.label = label
        self.ranks = ranks
        self.inquire = inquire
        self.started = 0
        self.inside = False
        self.ring: list[Entry | None] = [None] * _KEPT
        self.came = [0] * _KEPT
        self.messages = MessageLog(check)

    def start(self, name: str, call: str, shape: object, depth: int) -> None:
        """A call on the dim `name` begins; `depth` frames up is the innermost that may be the user's."""
        frame: Any = sys._getframe(depth)
        while is_ours(frame.f_code.co_filename) and frame.f_back is not None:
            frame = frame.f_back
        self.started = number = self.started + 1
        self.inside = True
        # The instruction, not the line: finding the line takes longer than the rest together.
        self.ring[number % _KEPT] = (name, call, shape, frame.f_code, frame.f_lasti)
        self.came[number % _KEPT] = clock()

    def close(self) -> None:
        """Let go of what compares messages, and of its connection."""
        self.messages.close()

    def last(self) -> dict[str, Any] | None:
        """The latest call as plain data, or None where there was none."""
        entry = self.ring[self.started % _KEPT]
        if entry is None:
            return None
        name, call, shape, code, instruction = entry
        return {
            "number": self.started,
            "dim": name,
            "call": call,
            "shape": None if shape is None else list(shape),  # type: ignore[call-overload]
            "site": f"{code.co_filename}:{line_of(code, instruction)}",
            "inside": self.inside,
        }

    def status(self) -> dict[str, Any]:
        """What is known of the group's calls, as plain data."""
        return {
            "label": self.label,
            "ranks": self.ranks,
            "started": self.started,
            "last": self.last(),
            "messages": self.messages.status(self.ranks),
        }
