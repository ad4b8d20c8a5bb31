"""One rank's messages in one group: the count on each channel, the messages in flight, and whether both ends agree."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter as clock
from types import CodeType, FrameType
from typing import Any, Final, final

from torch import Tensor

from meshcomm.transport.base import P2P, Direction
from meshcomm.transport.torch_private import capturing, work_error
from meshcomm.watching.callsite import line_of, origin, users_frame
from meshcomm.watching.compare import Channel, Heard, MessageCheck, Part, Unanswered
from meshcomm.watching.counters import CallCounter, Counters, PendingCall, counter_of
from meshcomm.watching.spans import Span, Spans

_KEPT: Final = 256
# Messages are counted for this many channels; the oldest are dropped first.
_CHANNELS: Final = 4096


def told_of(call: str, peer: int | None) -> str:
    """Return the name of a send or recv in errors."""
    return f"{call} {'to' if call == 'send' else 'from'} {'any coord' if peer is None else peer}"


@final
@dataclass(slots=True, eq=False)
class Batch:
    """One call that sends or receives: its messages, receives first, and its result.

    finish:  computes the result. result: the result, if there is no `finish`.
    source:  for a receive, the sender's coord.
    calls:   0 if the call only prepares another, counted call. nbytes: bytes to count; if None, the bytes of all `ends`.
    carried: whether backends are known to support the dtypes of all messages.
    """

    call: str
    ends: Sequence[P2P]
    async_op: bool = False
    finish: Callable[[], Any] | None = None
    result: Any = None
    source: int | None = None
    calls: int = 1
    nbytes: int | None = None
    carried: bool = False

    @property
    def has_header(self) -> bool:
        """Whether the first message is the header of a handshake."""
        return not self.calls or (self.call == "send" and len(self.ends) == 2)

    @property
    def told(self) -> str:
        """The name of the call in errors, with the peer of a send or recv."""
        return told_of(self.call, self.ends[-1].peer) if self.call in ("send", "recv") else self.call


@final
class PendingMessage(PendingCall):
    """A call that sends or receives, and the line that made it.

    parts: the call's messages. nbytes: the bytes sent or the bytes received, whichever is larger. unanswered: the
    announcements to peers that had not arrived; keys: the store's key of each message, "" for one that is not compared;
    agreed: the arguments of Heard for the messages that were compared at once. For the other fields, see PendingCall.
    """

    place: tuple[CodeType, int]
    unanswered: Sequence[Unanswered] = ()
    keys: Sequence[str] = ()
    agreed: Mapping[str, Sequence[str]]

    def __init__(
        self,
        log: MessageLog,
        name: str,
        call: str,
        nbytes: int,
        parts: Sequence[Part],
        frame: FrameType,
        total: CallCounter | None = None,
    ) -> None:
        began = clock()
        super().__init__(total, nbytes, began, began, None, (frame.f_code, frame.f_lasti))
        self._shown = log
        self.name = name
        self.call = call
        self.parts = parts
        if log.spans is not None:
            span = Span(log.label, name, call, line_of(*self.place), began, nbytes=nbytes, parts=parts)
            self.told = log.spans.keep(span)
        log.recent.append(self)

    def data(self, ranks: Sequence[int]) -> dict[str, Any]:
        """Return the call as plain data, with peers as global ranks; the peer of a message from any source is None."""
        parts = [
            {
                "direction": direction,
                "peer": None if peer is None else ranks[peer],
                "tag": tag,
                "number": number,
            }
            for direction, peer, tag, number in self.parts
        ]
        return {"dim": self.name, "call": self.call, "parts": parts, **origin(*self.place)}

    def started(self) -> None:
        """Record that the messages have been handed to the backend and the call is about to return."""
        now = clock()
        self._seconds = now - self.began
        if self.told is not None:
            self.told.left = now

    def ended(self) -> None:
        """Record that a blocking call has ended, whether or not it failed."""
        self.over = now = clock()
        total = self._total
        if total is not None:
            total.calls += self._calls
            total.nbytes += self.nbytes
            total.seconds += now - self.began
        if self.told is not None:
            self.told.at_once, self.told.left = True, self.began
            self.told.waits.append((self.began, now))
        self._shown = None


@final
class MessageLog:
    """Counts messages by channel, so that both ends can identify a missing message.

    Unlike collectives, messages are not numbered per group: ranks may send different numbers of messages.

    begun:   the sequence number of the last message on each channel. waiting: the call that this rank is blocked in.
    flying:  the messages in flight, see `flies`. recent: the most recent calls.
    spans:   receives all calls while a trace is recorded. check: compares the first messages between their ends.
    """

    def __init__(self, counters: Counters, label: str, check: MessageCheck | None = None) -> None:
        self._counters = counters
        self._check = check
        self._posted: deque[tuple[PendingMessage, Any]] = deque(maxlen=_KEPT)
        # A message outside the mesh that the backend has not taken. It stays if the backend raises, as for a lost peer.
        self._issuing: PendingMessage | None = None
        self.flying: list[PendingMessage] = []
        self.begun: dict[Channel, int] = {}
        self.label = label
        self.recent: deque[PendingMessage] = deque(maxlen=_KEPT)
        self.spans: Spans | None = None
        self.waiting: PendingMessage | None = None

    def settled(self, direction: Direction, peer: int) -> bool:
        """Return whether messages with this peer no longer need sequence numbers, because they are no longer compared
        and no trace is recorded.
        """
        return self.spans is None and (self._check is None or not self._check.is_compared(direction, peer))

    def begin(self, name: str, batch: Batch, counted: bool) -> PendingMessage:
        """Count a call's messages and store its line; the call is under way until it has `started` or `ended`.

        counted: False for a part of a collective that runs step by step.
        Raises CallMismatchError if a peer is known to pass a different tensor. All messages of the call are announced and
        counted first, as at the other end, so that both ends go on with the same numbers.
        """
        frame = users_frame(4)  # past the frames of p2p.py
        parts: list[Part] = []
        sent = came = 0
        check, compares = self._check, False
        for direction, x, peer, tag in batch.ends:
            if direction == "send":
                sent += x.nbytes
            else:
                came += x.nbytes
            parts.append((direction, peer, tag, 0 if peer is None else self._count(direction, peer, tag)))
            if check is not None and (peer is None or check.is_compared(direction, peer)):
                compares = True
        # Not of every call: most are no longer compared.
        compared = None
        if compares and check is not None:
            try:
                compared = check.announce(batch.ends, parts, frame, batch.has_header)
            except RuntimeError:  # of the store; the error is about this call
                self.waiting = PendingMessage(self, name, batch.call, 0, parts, frame)
                self.waiting.ended()
                raise
            finally:
                self._count_refused(check)
        nbytes = batch.nbytes
        if nbytes is None:
            nbytes = max(sent, came) if batch.calls else 0
        total = counter_of(self._counters, name, batch.call) if counted else None
        self.waiting = message = PendingMessage(self, name, batch.call, nbytes, parts, frame, total)
        message._calls = batch.calls
        if message.told is not None:
            message.told.of([end.x for end in batch.ends])
        if compared is not None:
            message.keys, message.unanswered, message.agreed = compared
        return message

    def begin_one(self, name: str, end: P2P, counted: bool) -> PendingMessage:
        """`begin` for a message that is not compared any more, to a known peer."""
        direction, x, peer, tag = end
        assert peer is not None
        frame = users_frame(4)
        total = counter_of(self._counters, name, direction) if counted else None
        parts = [(direction, peer, tag, self._count(direction, peer, tag))]
        self.waiting = message = PendingMessage(self, name, direction, x.nbytes, parts, frame, total)
        return message

    def past(
        self,
        name: str,
        direction: Direction,
        peer: int | None,
        tag: int | None,
        tensors: Sequence[Tensor],
        frame: FrameType,
    ) -> PendingMessage:
        """Record and return a message that is sent or received outside the mesh. tag: None if torch does not tell it, and
        on a backend without tags.

        Raises CallMismatchError if the other end is known to have no room for the message.
        """
        number = 0 if peer is None else self._count(direction, peer, tag or 0)
        if self._check is not None:
            self._check.past(direction, peer, tag, number, tensors, frame)
        nbytes = tensors[0].nbytes if len(tensors) == 1 else sum(x.nbytes for x in tensors)
        total = counter_of(self._counters, name, direction, True)
        total.calls += 1
        total.nbytes += nbytes
        message = PendingMessage(self, name, direction, nbytes, [(direction, peer, tag or 0, number)], frame)
        message.over = message.began
        if message.told is not None:
            message.told.of(tensors)
            message.told.left = message.began
        self._issuing = message
        return message

    def flies(self, message: PendingMessage) -> None:
        """Record that `message` is in flight until it is waited for, on a backend that runs messages in order."""
        message.listed = self.flying
        self.flying.append(message)

    def posted(self, message: PendingMessage, work: Any, queues: bool) -> None:
        """Record the backend's `work` for a message outside the mesh, and keep the message until that work has completed.

        queues: whether the backend queues its calls. Only such calls can be captured in a CUDA graph.
        """
        self._issuing = None
        if queues and capturing():
            return
        while self._posted and self._posted[0][1].is_completed():
            self._posted.popleft()
        self._posted.append((message, work))

    def unfinished(self) -> list[PendingMessage]:
        """Return the messages outside the mesh that have not completed, oldest first."""
        return [message for message, work in list(self._posted) if not work.is_completed()]

    def refused(self) -> list[PendingMessage]:
        """Return the message outside the mesh that the backend has refused, because it raised; [] if there is none."""
        return [] if self._issuing is None else [self._issuing]

    def failed(self) -> list[tuple[PendingMessage, RuntimeError]]:
        """Return the first message outside the mesh that its backend has abandoned, and the backend's error; [] if there
        is none.
        """
        over = ((message, work) for message, work in list(self._posted) if work.is_completed())
        errors = ((message, work_error(work)) for message, work in over)
        return next(([(message, error)] for message, error in errors if error is not None), [])

    def confirm(
        self,
        message: PendingMessage,
        heard: Heard = lambda key, together: None,
        most_s: float | None = None,
    ) -> float | None:
        """Wait a limited time for peers to confirm messages that are still compared. Raises CallMismatchError.

        heard: called for each message as soon as its peer confirms, or is not waited for any longer.
        most_s: after this many seconds, raises TimeoutError; a later call goes on.

        Returns the remaining seconds of the group's timeout if a peer stayed silent; None if all answered.
        """
        if not message.unanswered or self._check is None:
            return None
        unanswered, message.unanswered = list(message.unanswered), ()
        try:
            return self._check.confirm(unanswered, heard, most_s)
        except TimeoutError:
            message.unanswered = unanswered
            raise
        finally:
            if self._check is not None:
                self._count_refused(self._check)

    def _count_refused(self, check: MessageCheck) -> None:
        """Count the tensors of handshakes that this end has refused, as the other end does."""
        while check.refused:
            self._count(*check.refused.pop())

    def arrived(self, message: PendingMessage, src: int) -> None:
        """Record that a receive from any source received its message from coord `src`."""
        tag = message.parts[0][2]
        number = self._count("recv", src, tag)
        if self._check is not None:
            self._check.pairs["recv", src] += 1
        if message.told is not None:
            message.told.parts = (("recv", src, tag, number),)

    def _count(self, direction: Direction, peer: int, tag: int) -> int:
        """Return the sequence number of the next message on its channel."""
        begun, channel = self.begun, (direction, peer, tag)
        begun[channel] = number = begun.get(channel, 0) + 1
        if len(begun) > _CHANNELS:
            del begun[next(iter(begun))]
        return number

    def history(self) -> list[dict[str, Any]]:
        """Return the most recent calls as plain data; see FlightRecorder.history."""
        return [
            {
                "dim": message.name,
                "call": message.call,
                "bytes": message.nbytes,
                "began": message.began,
                "over": message.over or None,
            }
            for message in list(self.recent)
        ]

    def close(self) -> None:
        """Stop comparing messages, and release the backend's objects."""
        self._check = None
        self._posted.clear()

    def status(self, ranks: Sequence[int]) -> dict[str, Any]:
        """Return the log as plain data, with peers as global ranks. ranks: the group's global ranks, in coord order."""
        waiting = self.waiting
        return {
            # A copy, as another thread may be sending to another rank.
            "begun": [
                {"direction": direction, "peer": ranks[peer], "tag": tag, "number": number}
                for (direction, peer, tag), number in list(self.begun.items())
            ],
            "waiting": None if waiting is None else waiting.data(ranks),
        }
