"""One rank's messages in one group: the count on each channel, the messages in flight, and whether both ends agree."""

from __future__ import annotations

import json
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter as clock
from types import CodeType, FrameType
from typing import Any, Final, TypeAlias, final

from torch import Tensor

from meshcomm.comm.callsite import line_of, users_frame
from meshcomm.comm.counters import CallCounter, Counters, PendingCall, counter_of
from meshcomm.comm.spans import Span, Spans
from meshcomm.errors import CallMismatchError
from meshcomm.transport.base import P2P, Direction
from meshcomm.transport.support import name_of
from meshcomm.transport.torch_private import capturing, work_error

_KEPT: Final = 256
# Messages are counted for this many channels; the oldest are dropped first.
_CHANNELS: Final = 4096
# Comparing a message costs seven operations on the job's single store.
_MOST_COMPARED: Final = 4
# The end that arrives first waits for the peer's confirmation before it moves the data: at most this long, and at most
# this fraction of the group's timeout. The wait counts toward the timeout, so a silent peer adds none.
_ANSWERED_S: Final = 5.0
_ANSWERED_PART: Final = 0.5
# Announced by an end outside the mesh, which reads no answer.
_PAST: Final = "past"

# Direction, the peer's coord and tag: messages of one channel arrive in the order in which they were sent.
Channel: TypeAlias = tuple[Direction, int, int]
# Direction, peer, tag and sequence number on that channel; peer and number are None and 0 while the source is unknown.
Part: TypeAlias = tuple[Direction, int | None, int, int]
# The announcement of an end that arrived first, until it is answered: the store's key, and the peer's global rank.
Unanswered: TypeAlias = tuple[str, int]
# Called with the key of a message on which both ends agree, and with the keys of all messages in the other end's call.
Heard: TypeAlias = Callable[[str, Sequence[str]], None]


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
    def told(self) -> str:
        """The name of the call in errors, with the peer of a send or recv."""
        if self.call not in ("send", "recv"):
            return self.call
        peer = self.ends[-1].peer
        return (
            f"{self.call} {'to' if self.call == 'send' else 'from'} {'any coord' if peer is None else peer}"
        )


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
    # The log that lists this call as in flight; None if no log does.
    _log: MessageLog | None = None

    def __init__(
        self, log: MessageLog, name: str, call: str, nbytes: int, parts: Sequence[Part], frame: FrameType
    ) -> None:
        began = clock()
        super().__init__(None, nbytes, began, began, None, (frame.f_code, frame.f_lasti))
        self._shown = log
        self.name = name
        self.call = call
        self.parts = parts
        if log.spans is not None:
            span = Span(log.label, name, call, line_of(*self.place), began, nbytes=nbytes, parts=parts)
            self.told = log.spans.keep(span)
        log.recent.append(self)

    def counts(self, total: CallCounter, calls: int) -> None:
        """Set the counter. calls: 0 if another part of the same call is counted instead."""
        self._total, self._sums, self._calls = total, total.async_op, calls

    def started(self) -> None:
        """Record that the messages have been handed to the backend and the call is about to return."""
        now = clock()
        self._seconds = now - self.began
        if self.told is not None:
            self.told.left = now

    def waited(self, since: float) -> None:
        """Record that a wait that began at `since` has ended."""
        super().waited(since)
        if self._log is not None:
            self._log.flying.remove(self)
            self._log = None

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
        check = self._check
        parts: list[Part] = []
        unanswered: list[Unanswered] = []
        agreed: dict[str, Sequence[str]] = {}
        keys: list[str] = []
        differs: CallMismatchError | None = None
        sent = came = 0
        for direction, x, peer, tag in batch.ends:
            number = 0
            if direction == "send":
                sent += x.nbytes
            else:
                came += x.nbytes
            if peer is not None:
                compared = check is not None and check.is_compared(direction, peer)
                if check is not None and compared:
                    keys = keys or check.keys(batch.ends, self.begun)
                number = self._count(direction, peer, tag)
                if check is not None and compared:
                    key = keys[len(parts)]
                    check.pairs[direction, peer] += 1
                    try:
                        together = check.meet(direction, peer, key, x, frame, keys)
                    except CallMismatchError as error:
                        differs = differs or error
                    else:
                        if together is None:
                            unanswered.append((key, check.rank_of(peer)))
                        else:
                            agreed[key] = together
            elif check is not None:
                check.takes_any()
            parts.append((direction, peer, tag, number))
        if differs is not None:
            raise differs
        nbytes = batch.nbytes
        if nbytes is None:
            nbytes = max(sent, came) if batch.calls else 0
        self.waiting = message = PendingMessage(self, name, batch.call, nbytes, parts, frame)
        if message.told is not None:
            message.told.of([end.x for end in batch.ends])
        if counted:
            message.counts(counter_of(self._counters, name, batch.call), batch.calls)
        if unanswered:
            message.unanswered, message.keys, message.agreed = unanswered, keys, agreed
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
        return message

    def flies(self, message: PendingMessage) -> None:
        """Record that `message` is in flight until it is waited for, on a backend that runs messages in order."""
        message._log = self
        self.flying.append(message)

    def posted(self, message: PendingMessage, work: Any) -> None:
        """Record the backend's `work` for a message outside the mesh, and keep the message until that work has completed."""
        if capturing():
            return
        while self._posted and self._posted[0][1].is_completed():
            self._posted.popleft()
        self._posted.append((message, work))

    def unfinished(self) -> list[PendingMessage]:
        """Return the messages outside the mesh that have not completed, oldest first."""
        return [message for message, work in list(self._posted) if not work.is_completed()]

    def failed(self) -> list[tuple[PendingMessage, RuntimeError]]:
        """Return the first message outside the mesh that its backend has abandoned, and the backend's error; [] if there
        is none.
        """
        over = ((message, work) for message, work in list(self._posted) if work.is_completed())
        found = ((message, work_error(work)) for message, work in over)
        return next(([(message, error)] for message, error in found if error is not None), [])

    def confirm(self, message: PendingMessage, heard: Heard = lambda key, together: None) -> float | None:
        """Wait a limited time for peers to confirm messages that are still compared. Raises CallMismatchError.

        heard: called for each message as soon as its peer confirms, or is not waited for any longer.

        Returns the remaining seconds of the group's timeout if a peer stayed silent; None if all answered.
        """
        if not message.unanswered or self._check is None:
            return None
        unanswered, message.unanswered = message.unanswered, ()
        return self._check.confirm(unanswered, heard)

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
                [direction, ranks[peer], tag, count]
                for (direction, peer, tag), count in list(self.begun.items())
            ],
            "waiting": None
            if waiting is None
            else {
                "dim": waiting.name,
                "call": waiting.call,
                "parts": [
                    [direction, None if peer is None else ranks[peer], tag, number]
                    for direction, peer, tag, number in waiting.parts
                ],
                "callsite": line_of(*waiting.place),
            },
        }


@final
class MessageCheck:
    """Compares the first messages between each pair of ranks in one group, in each direction.

    A receive whose buffer is larger than the message would return with part of the buffer unchanged, and a smaller
    buffer would crash the process (Gloo, tested with torch 2.13). Therefore each end announces its message,
    and the end that arrives second compares, answers, and raises if the two differ. The end that arrived first reads
    the answer before it waits for the data, so that both ends raise immediately.

    pairs: the number of compared messages in each direction with each peer. store: a store used for nothing else.
    ranks: the group's ranks, in coord order. timeout_s: the group's timeout. limit: the number of messages to
    compare, at most 4; None to compare all messages.

    Messages outside the mesh are compared by their sizes in bytes, without an answer: the end that arrives second raises.
    As in torch, a receive may have room for more than comes.
    """

    def __init__(
        self, store: Any, label: str, ranks: list[int], rank: int, limit: int | None, timeout_s: float
    ) -> None:
        self._store = store
        self._label = label
        self._ranks = ranks
        self._rank = rank
        self._limit = math.inf if limit is None else min(limit, _MOST_COMPARED)
        self._timeout_s = timeout_s
        self._any = self._uncounted = False
        self.pairs: Counter[tuple[Direction, int]] = Counter()

    def is_compared(self, direction: Direction, peer: int) -> bool:
        """Return whether the next message of this pair is compared."""
        return self.pairs[direction, peer] < self._limit

    def takes_any(self) -> None:
        """Record that this rank receives from any source or outside the mesh, so that others do not wait for its answer."""
        if not self._any:
            self._any = True
            self._store.set(f"{self._label}/any/{self._rank}", "1")

    def rank_of(self, peer: int) -> int:
        """Return the global rank of a coord."""
        return self._ranks[peer]

    def keys(self, ends: Sequence[P2P], begun: Mapping[Channel, int]) -> list[str]:
        """Return the store's key of each message of a call, or "" for a message that is not compared.

        begun: the sequence number of the last message on each channel.
        """
        keys, numbers, pairs = [""] * len(ends), Counter(begun), Counter(self.pairs)
        for at, (direction, _, peer, tag) in enumerate(ends):
            if peer is not None and pairs[direction, peer] < self._limit:
                pairs[direction, peer] += 1
                numbers[direction, peer, tag] += 1
                src, dst = self._ends(direction, peer)
                keys[at] = self.key(src, dst, tag, numbers[direction, peer, tag])
        return keys

    def _ends(self, direction: Direction, peer: int) -> tuple[int, int]:
        """Return the global ranks of a message's sender and receiver."""
        other = self._ranks[peer]
        return (self._rank, other) if direction == "send" else (other, self._rank)

    def meet(
        self, direction: Direction, peer: int, key: str, x: Tensor, frame: FrameType, keys: Sequence[str]
    ) -> Sequence[str] | None:
        """Announce this end's message; compare it if the other end, coord `peer`, has announced its own.

        keys: of all messages in this end's call. Returns those of the other end's call, or None if that end has not arrived.
        Raises CallMismatchError before the data moves.
        """
        keys = [*filter(None, keys)]
        theirs, told = self._compare(direction, peer, key, [x], frame, keys)
        if theirs is None:
            return None
        if theirs != _PAST:
            self._store.set(f"{key}/answer", json.dumps([told, keys]))
        if told:
            raise self._differs(key, told)
        return () if theirs == _PAST else theirs

    def past(
        self,
        direction: Direction,
        peer: int | None,
        tag: int | None,
        number: int,
        tensors: Sequence[Tensor],
        frame: FrameType,
    ) -> None:
        """Compare a message outside the mesh, see MessageLog.past; number: its sequence number on its channel.

        Raises CallMismatchError before the data moves.
        """
        if not self._any:
            self.takes_any()
        if peer is None or tag is None:
            # From here on, the numbers of the two ends may differ.
            self._uncounted = True
        if peer is None:
            return
        pair = direction, peer
        self.pairs[pair] = made = self.pairs[pair] + 1
        if made > self._limit or self._uncounted:
            return
        key = self.key(*self._ends(direction, peer), tag or 0, number)
        theirs, told = self._compare(direction, peer, key, tensors, frame, _PAST)
        if theirs == _PAST:
            self._store.delete_key(key)
        elif theirs is not None:
            self._store.set(f"{key}/answer", json.dumps([told, ()]))
        if told:
            raise self._differs(key, told)

    def _compare(
        self,
        direction: Direction,
        peer: int,
        key: str,
        tensors: Sequence[Tensor],
        frame: FrameType,
        keys: Sequence[str] | str,
    ) -> tuple[Any, str]:
        """Announce this end's message. Return the `keys` that the other end has announced, None if it has not arrived; and how
        the two ends differ, "" if they do not.
        """
        facts = [
            name_of(tensors[0].dtype),
            sum(x.numel() for x in tensors),
            " ".join(f"({', '.join(map(str, x.shape))})" for x in tensors),
            sum(x.nbytes for x in tensors),
        ]
        mine = json.dumps([direction, keys, *facts, f"{frame.f_code.co_filename}:{frame.f_lineno}"])
        # Atomic: the first end to arrive writes, and the second gets what the first has written.
        first = self._store.compare_set(key, "", mine).decode()
        if first == mine:
            return None, ""
        theirs: Any = json.loads(first)[1]
        (dtype, count, shape, sent, line), (to, to_count, to_shape, room, to_line) = (
            each[2:] for each in sorted(map(json.loads, (mine, first)), key=lambda each: each[0] != "send")
        )
        src, dst = self._ends(direction, peer)
        told = (
            f"rank {src} sends {dtype} {shape} at {line}\n"
            f"rank {dst} has room for {to} {to_shape} at {to_line}"
        )
        fit = sent <= room if _PAST in (keys, theirs) else (dtype, count) == (to, to_count)
        return theirs, "" if fit else told

    def confirm(self, unanswered: Sequence[Unanswered], heard: Heard) -> float | None:
        """Return when the peers have confirmed, or after a few seconds without an answer. In that case, the backend
        reports any difference. heard: called for each message.

        Returns the remaining seconds if a peer was silent. Raises CallMismatchError if a peer passes another tensor.
        """
        began, pause, waiting = time.monotonic(), 0.0005, list(unanswered)
        until = began + min(_ANSWERED_S, _ANSWERED_PART * self._timeout_s)
        while waiting:
            for key, peer in list(waiting):
                if self._store.check([f"{key}/answer"]):
                    told, together = json.loads(self._store.get(f"{key}/answer"))
                    self._store.delete_key(key)
                    self._store.delete_key(f"{key}/answer")
                    if told:
                        raise self._differs(key, told)
                elif self._store.check([f"{self._label}/any/{peer}"]):
                    together = ()
                else:
                    continue
                waiting.remove((key, peer))
                pause = 0.0005
                heard(key, together)
            if waiting and (now := time.monotonic()) > until:
                for key, _ in waiting:
                    heard(key, ())
                return self._timeout_s - (now - began)
            if waiting:
                time.sleep(pause)
                pause = min(2 * pause, 0.01)
        return None

    def key(self, src: int, dst: int, tag: int, number: int) -> str:
        """Return the store's key for the announcement of the end that arrives first."""
        return f"{self._label}/{src}>{dst}/{tag}/{number}"

    def _differs(self, key: str, told: str) -> CallMismatchError:
        pair, tag, number = key.split("/")[-3:]
        src, dst = map(int, pair.split(">"))
        return CallMismatchError(
            f"message {number} with tag {tag} from rank {src} to rank {dst} on {self._label} "
            "differs between its ends; nothing was sent",
            given=told,
            expected="the same dtype and number of elements at both ends; outside the mesh, room for all bytes that are sent",
            hint="handshake=True on mesh.send and no out on mesh.recv, if the receiver cannot know the shape",
            mismatched_ranks=(src, dst),
        )
