"""The messages of one rank on one group: how many with whom, and the ones that it waits for."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from time import perf_counter as clock
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple, final

from torch import Tensor

from meshcomm.comm.callsite import line_of, users_frame
from meshcomm.comm.counters import Counters, PendingCall, counter_of
from meshcomm.comm.message_check import MessageCheck, Unanswered
from meshcomm.comm.spans import Span, Spans
from meshcomm.transport.base import P2P, Direction
from meshcomm.transport.support import name_of
from meshcomm.transport.torch_private import capturing

_KEPT: Final = 256

# Of so many combinations of direction, peer and tag the messages are counted; the oldest go first.
_CHANNELS: Final = 4096


class Part(NamedTuple):
    """One message. number: how many were on its channel with it; 0 where it is not known yet from whom it comes."""

    direction: Direction
    peer: int | None
    tag: int
    number: int


class Message(NamedTuple):
    """A call that sends or receives, with the line that made it.

    nbytes: the larger of what it sends and what it receives. calls: 0 where it prepares another that
    counts. began: in seconds on the monotonic clock. told: its span, where a trace is taken. unanswered: what
    was said to other ends that had not come.
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
    unanswered: list[Unanswered]


@final
class MessageLog:
    """Counts messages by direction, peer and tag, so that both ends can say which is missing.

    Messages are not numbered among the group's collectives: ranks may send different numbers.
    waiting: the call that this rank is blocked in, None while it is in none.
    recent: the last calls, and when they ended, or who knows that. spans takes all while a trace is taken.
    counters: of the group, where calls are summed up.
    check: compares the first messages between their ends; None compares nothing.
    """

    __slots__ = ("_check", "_counters", "_counts", "_pairs", "_posted", "label", "recent", "spans", "waiting")

    def __init__(self, counters: Counters, label: str, check: MessageCheck | None = None) -> None:
        self._counters = counters
        self._check = check
        self.label = label
        self.recent: deque[tuple[Message, PendingCall | float]] = deque(maxlen=_KEPT)
        self.spans: Spans | None = None
        self._counts: dict[tuple[Direction, int, int], int] = {}
        self._pairs: Counter[tuple[Direction, int]] = Counter()
        self._posted: deque[tuple[Message, Any]] = deque()
        self.waiting: Message | None = None

    @property
    def begun(self) -> dict[tuple[Direction, int, int], int]:
        """How many messages have begun, by direction, peer's coord and tag."""
        # A copy, as another thread may send to somebody else meanwhile.
        return dict(self._counts)

    def settled(self, direction: Direction, peer: int) -> bool:
        """Whether messages with this peer are no longer compared, and nobody asks for each of them."""
        check = self._check
        return self.spans is None and (check is None or not check.compares(self._pairs[direction, peer] + 1))

    def begin(
        self, name: str, call: str, ends: Sequence[P2P], calls: int = 1, nbytes: int | None = None
    ) -> Message:
        """Count one call's messages and remember its line; the call is under way until `end` or `later`.

        calls, nbytes: see Message; for the counters.
        Raises CallMismatchError where the other end of one is known to mean another tensor; that
        message is not counted.
        """
        frame = users_frame(2)
        parts, unanswered = [], []
        sent = came = 0
        for direction, x, peer, tag in ends:
            number = 0
            if direction == "send":
                sent += x.nbytes
            else:
                came += x.nbytes
            if peer is not None:
                number = self._counts.get((direction, peer, tag), 0) + 1
                if self._check is not None:
                    unanswered += self._met(direction, peer, tag, number, x, frame)
                self._count(direction, peer, tag, number)
            elif self._check is not None:
                self._check.takes_any()
            parts.append(Part(direction, peer, tag, number))
        if nbytes is None:
            nbytes = sent if sent > came else came
        told, now = None, clock()
        code, instruction = at = frame.f_code, frame.f_lasti
        if self.spans is not None:
            tensors = [end.x for end in ends]
            told = self.spans.begin(self.label, name, call, at, now, nbytes, tensors, parts=parts)
        self.waiting = message = Message(
            name, call, tuple(parts), code, instruction, nbytes, calls, now, told, unanswered
        )
        return message

    def past(
        self, name: str, direction: Direction, peer: int | None, tensors: Sequence[Tensor], frame: FrameType
    ) -> Message:
        """A message that was sent or is received past the mesh; torch does not tell its tag, which counts as 0."""
        if self._check is not None:
            self._check.takes_any()
        number = 0
        if peer is not None:
            number = self._counts.get((direction, peer, 0), 0) + 1
            self._count(direction, peer, 0, number)
        nbytes = sum(x.nbytes for x in tensors)
        total = counter_of(self._counters, name, direction, True)
        total.calls += 1
        total.nbytes += nbytes
        part, now = Part(direction, peer, 0, number), clock()
        message = Message(name, direction, (part,), frame.f_code, frame.f_lasti, nbytes, 1, now, None, [])
        self.recent.append((message, now))
        return message

    def posted(self, message: Message, work: Any) -> None:
        """`work` is the backend's for a message past the mesh; it is kept until it is over."""
        if capturing():
            return
        while self._posted and (self._posted[0][1].is_completed() or len(self._posted) > _KEPT):
            self._posted.popleft()
        self._posted.append((message, work))

    def unfinished(self) -> Message | None:
        """The message past the mesh that its backend gave up, else the oldest that is not over."""
        posted = list(self._posted)
        failed = [message for message, work in posted if work.is_completed() and has_failed(work)]
        waiting = [message for message, work in posted if not work.is_completed()]
        return next(iter((*failed, *waiting)), None)

    def confirm(self, message: Message) -> None:
        """Wait, for a while, until the other ends of first messages mean the same. Raises CallMismatchError."""
        if message.unanswered and self._check is not None:
            self._check.confirm(message.unanswered)
            message.unanswered.clear()

    def end(self, message: Message, counted: bool) -> None:
        """A blocking call is over. counted: it is no part of a collective that is done step by step."""
        now = clock()
        self.waiting = None
        self.recent.append((message, now))
        if message.told is not None:
            message.told.left = message.began
            message.told.at_once = True
            message.told.waited(message.began, now)
        if counted:
            total = counter_of(self._counters, message.name, message.call)
            total.calls += message.calls
            total.nbytes += message.nbytes
            total.seconds += now - message.began

    def later(self, message: Message, counted: bool) -> PendingCall:
        """The messages of a call are started: who is told of the waits for them."""
        now = clock()
        self.waiting = None
        if message.told is not None:
            message.told.left = now
        total = counter_of(self._counters, message.name, message.call) if counted else None
        later = PendingCall(
            total, message.nbytes, message.began, now, message.told, message.calls, self, message
        )
        self.recent.append((message, later))
        return later

    def arrived(self, message: Message, src: int, tag: int) -> None:
        """A receive from whoever comes first was served by coord `src`."""
        number = self._counts.get(("recv", src, tag), 0) + 1
        self._count("recv", src, tag, number)
        if message.told is not None:
            message.told.parts = (Part("recv", src, tag, number),)

    def _count(self, direction: Direction, peer: int, tag: int, number: int) -> None:
        counts = self._counts
        if number == 1 and len(counts) >= _CHANNELS:
            del counts[next(iter(counts))]
        counts[direction, peer, tag] = number
        self._pairs[direction, peer] += 1

    def _met(
        self, direction: Direction, peer: int, tag: int, number: int, x: Tensor, frame: FrameType
    ) -> list[Unanswered]:
        check = self._check
        if check is None or not check.compares(self._pairs[direction, peer] + 1):
            return []
        facts = (name_of(x.dtype), x.numel(), f"({', '.join(map(str, x.shape))})")
        found = check.meet(
            direction, peer, tag, number, facts, f"{frame.f_code.co_filename}:{frame.f_lineno}"
        )
        return [] if found is None else [found]

    def history(self) -> list[dict[str, Any]]:
        """The last calls as plain data; see FlightRecorder.history."""
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

    def close(self) -> None:
        """Compare no more, and let go of what the backend holds."""
        self._check = None
        self._posted.clear()

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


def has_failed(work: Any) -> bool:
    """Whether a Work that is over has failed; to ask it for its exception is deprecated."""
    try:
        work.wait()
    except RuntimeError:
        return True
    return False
