"""The messages of one rank on one group: how many with whom, and the one that it waits for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from types import CodeType
from typing import Any, Literal, NamedTuple, final

from meshcomm.comm.site import is_ours, line_of
from meshcomm.transport import Work

Direction = Literal["send", "recv"]


class Part(NamedTuple):
    """One message as its sender and its receiver both count it.

    peer: the coord at the other end; None for a receive from whoever comes first.
    number: the how-manieth message between the two in this direction with this tag, from 1.
    """

    direction: Direction
    peer: int | None
    tag: int
    number: int


class Message(NamedTuple):
    """A call that sends or receives, with the line that made it."""

    name: str
    call: str
    shape: object
    parts: tuple[Part, ...]
    code: CodeType
    instruction: int


@final
class MessageLog:
    """Counts messages by direction, peer and tag, so that both ends can say which is missing.

    Messages are not numbered among the group's collectives: ranks may send different numbers.
    waiting: the call that this rank is blocked in, None while it is in none.
    """

    __slots__ = ("begun", "waiting")

    def __init__(self) -> None:
        self.begun: dict[tuple[Direction, int, int], int] = {}
        self.waiting: Message | None = None

    def begin(
        self, name: str, call: str, shape: object, ends: Sequence[tuple[Direction, int | None, int]]
    ) -> Message:
        """Count one call's messages, given as (direction, peer's coord, tag), and remember its line."""
        frame: Any = sys._getframe(2)
        while is_ours(frame.f_code.co_filename) and frame.f_back is not None:
            frame = frame.f_back
        parts = tuple(
            Part(direction, peer, tag, self._next(direction, peer, tag)) for direction, peer, tag in ends
        )
        return Message(name, call, shape, parts, frame.f_code, frame.f_lasti)

    def _next(self, direction: Direction, peer: int | None, tag: int) -> int:
        if peer is None:
            return 0
        key = (direction, peer, tag)
        number = self.begun[key] = self.begun.get(key, 0) + 1
        return number

    def arrived(self, src: int, tag: int) -> None:
        """A receive from whoever comes first was served by coord `src`."""
        self._next("recv", src, tag)

    def status(self, ranks: Sequence[int]) -> dict[str, Any]:
        """All of it as plain data, peers as global ranks; `ranks` by coord."""
        waiting = self.waiting
        return {
            "begun": [
                [direction, ranks[peer], tag, count] for (direction, peer, tag), count in self.begun.items()
            ],
            "waiting": None
            if waiting is None
            else {
                "dim": waiting.name,
                "call": waiting.call,
                "shape": None if waiting.shape is None else list(waiting.shape),  # type: ignore[call-overload]
                "parts": [
                    [each.direction, None if each.peer is None else ranks[each.peer], each.tag, each.number]
                    for each in waiting.parts
                ],
                "site": f"{waiting.code.co_filename}:{line_of(waiting.code, waiting.instruction)}",
            },
        }


@final
class Awaited:
    """A Work whose wait shows in the log."""

    __slots__ = ("_log", "_message", "_work")

    def __init__(self, work: Work, log: MessageLog, message: Message) -> None:
        self._work = work
        self._log = log
        self._message = message

    def wait(self, timeout: timedelta | None = None) -> bool:
        """As the work's own; after a failure the message stays in the log until it was asked about."""
        self._log.waiting = self._message
        done = self._work.wait() if timeout is None else self._work.wait(timeout)
        self._log.waiting = None
        return done

    def is_completed(self) -> bool:
        return self._work.is_completed()
