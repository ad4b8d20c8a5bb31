"""The messages of one rank on one group: how many with whom, and the one that it waits for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from types import CodeType
from typing import Any, NamedTuple, final

from torch import Tensor

from meshcomm.comm.message_check import Direction, MessageCheck
from meshcomm.comm.site import is_ours, line_of
from meshcomm.transport import Work
from meshcomm.transport.support import name_of

End = tuple[Direction, int | None, int, Tensor]


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
    parts: tuple[Part, ...]
    code: CodeType
    instruction: int


@final
class MessageLog:
    """Counts messages by direction, peer and tag, so that both ends can say which is missing.

    Messages are not numbered among the group's collectives: ranks may send different numbers.
    waiting: the call that this rank is blocked in, None while it is in none.
    check: compares the first messages between their ends; None compares nothing.
    """

    __slots__ = ("_check", "begun", "waiting")

    def __init__(self, check: MessageCheck | None = None) -> None:
        self._check = check
        self.begun: dict[tuple[Direction, int, int], int] = {}
        self.waiting: Message | None = None

    def begin(self, name: str, call: str, ends: Sequence[End]) -> Message:
        """Count one call's messages, given as (direction, peer's coord, tag, tensor), and remember its line.

        Raises CallMismatchError where the other end of one is known to mean another tensor; that
        message is not counted.
        """
        frame: Any = sys._getframe(2)
        while is_ours(frame.f_code.co_filename) and frame.f_back is not None:
            frame = frame.f_back
        parts = []
        for direction, peer, tag, x in ends:
            number = 0
            if peer is not None:
                key = (direction, peer, tag)
                number = self.begun.get(key, 0) + 1
                if self._check is not None and self._check.compares(number):
                    facts = (name_of(x.dtype), x.numel(), f"({', '.join(map(str, x.shape))})")
                    site = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                    self._check.meet(direction, peer, tag, number, facts, site)
                self.begun[key] = number
            parts.append(Part(direction, peer, tag, number))
        return Message(name, call, tuple(parts), frame.f_code, frame.f_lasti)

    def differences(self) -> list[str]:
        """What the other ends found different in the messages that this rank waits for."""
        if self._check is None or self.waiting is None:
            return []
        found = [
            self._check.difference(each.direction, each.peer, each.tag, each.number)
            for each in self.waiting.parts
            if each.peer is not None
        ]
        return [text for text in found if text is not None]

    def close(self) -> None:
        """Compare no more."""
        self._check = None

    def arrived(self, src: int, tag: int) -> None:
        """A receive from whoever comes first was served by coord `src`."""
        key: tuple[Direction, int, int] = ("recv", src, tag)
        self.begun[key] = self.begun.get(key, 0) + 1

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
