"""The messages of one rank on one group: how many with whom, and the one that it waits for."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from time import perf_counter as clock
from types import CodeType
from typing import Any, Final, NamedTuple, final

from torch import Tensor

from meshcomm.comm.ledger import Later, Totals, total_of
from meshcomm.comm.message_check import Direction, MessageCheck
from meshcomm.comm.site import is_ours, line_of
from meshcomm.comm.spans import Span, Spans
from meshcomm.transport import Work
from meshcomm.transport.support import name_of

End = tuple[Direction, int | None, int, Tensor]

_KEPT: Final = 256


@final
class Lane:
    """The messages of this rank with one peer, in one direction and with one tag.

    peer: its coord; None: whoever comes first. begun: how many; the number of the last one, as both of its
    ends count them. text: what errors call such a message.
    """

    __slots__ = ("begun", "direction", "peer", "tag", "text")

    def __init__(self, direction: Direction, peer: int | None, tag: int) -> None:
        self.direction = direction
        self.peer = peer
        self.tag = tag
        self.begun = 0
        self.text = f"{direction} {'to' if direction == 'send' else 'from'} {peer}"


class Part(NamedTuple):
    """One message. number: how many were on the lane with it; 0 where it is not known yet from whom it comes."""

    lane: Lane
    number: int

    @property
    def direction(self) -> Direction:
        """Which way it goes."""
        return self.lane.direction

    @property
    def peer(self) -> int | None:
        """The coord at its other end."""
        return self.lane.peer

    @property
    def tag(self) -> int:
        """Its tag."""
        return self.lane.tag

    def plain(self) -> tuple[Direction, int | None, int, int]:
        """Direction, peer, tag, number."""
        return self.lane.direction, self.lane.peer, self.lane.tag, self.number


class Message(NamedTuple):
    """A call that sends or receives, with the line that made it.

    nbytes: the larger of what it sends and what it receives. calls: 0 where it prepares another that
    counts. began: in seconds on the monotonic clock. told: its span, where a trace is taken.
    """

    name: str
    call: str
    parts: tuple[Part, ...]
    code: CodeType
    instruction: int
    nbytes: int
    calls: int
    began: float
    told: Span | None


@final
class MessageLog:
    """Counts messages by direction, peer and tag, so that both ends can say which is missing.

    Messages are not numbered among the group's collectives: ranks may send different numbers.
    waiting: the call that this rank is blocked in, None while it is in none.
    recent: the last calls, and when they ended, or who knows that. spans takes all while a trace is taken.
    totals: of the group, where calls are summed up.
    check: compares the first messages between their ends; None compares nothing.
    """

    __slots__ = ("_check", "_lanes", "_totals", "label", "recent", "spans", "waiting")

    def __init__(self, totals: Totals, label: str, check: MessageCheck | None = None) -> None:
        self._totals = totals
        self._check = check
        self.label = label
        self.recent: deque[tuple[Message, Later | float]] = deque(maxlen=_KEPT)
        self.spans: Spans | None = None
        self._lanes: dict[tuple[Direction, int, int], Lane] = {}
        self.waiting: Message | None = None

    @property
    def begun(self) -> dict[tuple[Direction, int, int], int]:
        """How many messages have begun, by direction, peer's coord and tag."""
        # A copy first, as another thread may send to somebody else meanwhile.
        return {key: lane.begun for key, lane in list(self._lanes.items()) if lane.begun}

    def lane(self, direction: Direction, peer: int | None, tag: int) -> Lane:
        """Where messages like this are counted; those from whoever comes first are not."""
        if peer is None:
            return Lane(direction, None, tag)
        key = (direction, peer, tag)
        found = self._lanes.get(key)
        if found is None:
            found = self._lanes[key] = Lane(direction, peer, tag)
        return found

    def settled(self, lane: Lane) -> bool:
        """Whether its messages are no longer compared, and nobody asks for each of them."""
        check = self._check
        return self.spans is None and (check is None or not check.compares(lane.begun + 1))

    def begin(
        self, name: str, call: str, ends: Sequence[End], *, calls: int = 1, nbytes: int | None = None
    ) -> Message:
        """Count one call's messages, given as (direction, peer's coord, tag, tensor), and remember its line.

        calls, nbytes: see Message; for the ledger.
        Raises CallMismatchError where the other end of one is known to mean another tensor; that
        message is not counted.
        """
        frame: Any = sys._getframe(2)
        while is_ours(frame.f_code.co_filename) and frame.f_back is not None:
            frame = frame.f_back
        parts = []
        sent = came = 0
        for direction, peer, tag, x in ends:
            lane, number = self.lane(direction, peer, tag), 0
            if direction == "send":
                sent += x.nbytes
            else:
                came += x.nbytes
            if peer is not None:
                number = lane.begun + 1
                if self._check is not None and self._check.compares(number):
                    facts = (name_of(x.dtype), x.numel(), f"({', '.join(map(str, x.shape))})")
                    site = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                    self._check.meet(direction, peer, tag, number, facts, site)
                lane.begun = number
            parts.append(Part(lane, number))
        if nbytes is None:
            nbytes = sent if sent > came else came
        code, instruction, told, now = frame.f_code, frame.f_lasti, None, clock()
        if self.spans is not None:
            tensors = [end[3] for end in ends]
            plain = [each.plain() for each in parts]
            at = (code, instruction)
            told = self.spans.begin(self.label, name, call, at, now, nbytes, tensors, parts=plain)
        return Message(name, call, tuple(parts), code, instruction, nbytes, calls, now, told)

    def left(self, message: Message, count_as: str | None) -> Later:
        """The messages of a call are started: who is told of the waits for them.

        count_as: under which call the ledger counts it; None: not at all.
        """
        now = clock()
        if message.told is not None:
            message.told.left = now
        total = None if count_as is None else total_of(self._totals, message.name, count_as)
        later = Later(total, message.nbytes, message.began, now, message.told, message.calls)
        self.recent.append((message, later))
        return later

    def history(self) -> list[dict[str, Any]]:
        """The last calls as plain data; see Recorder.history."""
        found = list(self.recent)
        waiting = self.waiting
        if waiting is not None and all(message is not waiting for message, _ in found):
            found.append((waiting, 0.0))
        return [
            {
                "dim": message.name,
                "call": message.call,
                "bytes": message.nbytes,
                "began": message.began,
                "over": (over if isinstance(over, float) else over.over) or None,
            }
            for message, over in found
        ]

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

    def arrived(self, message: Message, src: int, tag: int) -> None:
        """A receive from whoever comes first was served by coord `src`."""
        lane = self.lane("recv", src, tag)
        lane.begun += 1
        if message.told is not None:
            message.told.parts = (Part(lane, lane.begun).plain(),)

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
    """A Work whose wait shows in the log and in the ledger."""

    __slots__ = ("_later", "_log", "_message", "_work")

    def __init__(self, work: Work, log: MessageLog, message: Message, later: Later) -> None:
        self._work = work
        self._later = later
        self._log = log
        self._message = message

    def wait(self, timeout: timedelta | None = None) -> bool:
        """As the work's own; after a failure the message stays in the log until it was asked about."""
        self._log.waiting = self._message
        since = clock()
        try:
            done = self._work.wait() if timeout is None else self._work.wait(timeout)
        finally:
            self._later.waited(since)
        self._log.waiting = None
        return done

    def is_completed(self) -> bool:
        return self._work.is_completed()
