"""Compares the first calls and messages of a group between its ranks, before their data moves."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import count
from types import FrameType
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, final

import torch
from torch import Tensor

from meshcomm.collectives import ALL_GATHER, ALL_REDUCE, Call
from meshcomm.errors import CallMismatchError
from meshcomm.layout.sizes import ranks_text
from meshcomm.lines import source_line
from meshcomm.transport import P2P, Transport, Work
from meshcomm.transport.base import Direction
from meshcomm.transport.support import name_of
from meshcomm.transport.torch_changes import wait_until
from meshcomm.transport.torch_private import profiling, record_functions
from meshcomm.watching.facts import parts_of
from meshcomm.watching.verdict import SAME, ToldCall, are_same, as_data, error_of, is_same, mismatch

_BYTES: Final = 1024
# A longer list is told by its length and a digest, so that a call and its line fit into these bytes.
_LONGEST: Final = 48
_SITE: Final = 200
# The number of calls that a rank remembers until it knows that the others have made them too.
_UNSETTLED: Final = 64
# How many calls later the store forgets a call that was compared through it.
_BEHIND: Final = 1024
# What becomes of a group in which ranks have made different calls that are under way.
_OUT_OF_STEP: Final = "this group cannot be used any more"
# The sizes of an asynchronous all_to_all are compared in groups of at most this many ranks, as each rank reads those of all.
_PAIRED: Final = 64
# How long, in seconds, a rank looks for a published difference after a comparison that was not equal. The ranks may have made
# the same call in two ways, of which different facts are known.
_LOOKS_S: Final = 10.0
# How long a rank whose call differs waits until it knows the calls of the others.
_MEETS_S: Final = 1.0
# What is told in place of a call when the ranks are known to have made different ones.
_APART: Final = "[]"
# Comparing a message costs seven operations on the job's single store.
_MOST_COMPARED: Final = 4
# The end that arrives first waits for the peer's confirmation before it moves the data: at most this long, and at most
# this fraction of the group's timeout. The wait counts toward the timeout, so a silent peer adds none.
_ANSWERED_S: Final = 5.0
_ANSWERED_PART: Final = 0.5
# Announced by an end outside the mesh, which reads no answer.
_PAST: Final = "past"
_WITH_HANDSHAKE: Final = "with handshake=True, the shape first,"

# Direction, the peer's coord and tag: messages of one channel arrive in the order in which they were sent.
Channel: TypeAlias = tuple[Direction, int, int]
# Direction, peer, tag and sequence number on that channel; peer and number are None and 0 while the source is unknown.
Part: TypeAlias = tuple[Direction, int | None, int, int]
# The announcement of an end that arrived first, until it is answered: the store's key, and the peer's global rank.
Unanswered: TypeAlias = tuple[str, int]
# Called with the key of a message on which both ends agree, and with the keys of all messages in the other end's call.
Heard: TypeAlias = Callable[[str, Sequence[str]], None]


class Exchange(Protocol):
    """Asks the watchdogs of other ranks, and publishes results for them; see mesh.rank_record.RecordExchange."""

    def ask(self, ranks: Sequence[int]) -> dict[int, Any]: ...

    def publish(self, call: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]: ...

    def published(self, call: str) -> dict[str, Any] | None: ...


@final
class Shared:
    """What a rank can ask of the other ranks without their taking part: in the job's store, or of their watchdogs.

    store: used for nothing else. look_s: time in seconds between two looks at what was published, for a rank that waits.
    """

    def __init__(self, store: Any, rank: int, exchange: Exchange, look_s: float) -> None:
        self.store, self.rank, self.exchange, self.look_s = store, rank, exchange, look_s

    def first(self, key: str, told: str) -> str:
        """Return what the first rank told under `key`, which is `told` if that is this rank."""
        first: bytes = self.store.compare_set(key, "", told)
        return first.decode()

    def lines(self, key: str, told: str) -> list[str]:
        """Add a line under `key`, and return all lines. Returns [] if the store has no such operation."""
        if not self.store.has_extended_api():
            return []
        self.store.append(key, f"{told}\n")
        lines: bytes = self.store.get(key)
        return lines.decode().splitlines()

    def made(self, label: str, number: int, ranks: Sequence[int]) -> dict[int, ToldCall]:
        """Return the compared call `number` of each rank that has made it. Waits for a short time."""
        made: dict[int, ToldCall] = {}
        until = time.monotonic() + _MEETS_S
        while left := [rank for rank in ranks if rank not in made]:
            for rank, status in self.exchange.ask(left).items():
                for group in status["groups"]:
                    if group["label"] == label and str(number) in group["compared"]:
                        made[rank] = ToldCall(**group["compared"][str(number)])
            if time.monotonic() > until:
                break
        return made


@final
class CallCheck:
    """Compares the first calls in one group between its ranks, and makes no call wait that the backend would not.

    On Gloo, every rank posts an all_reduce of 24 bytes before each call. A call that waits for all ranks anyway waits for
    it first: if calls differ, nothing is sent, the ranks exchange the calls in one all_gather, and the group is as good as
    before. Any other call (asynchronous, rooted, or on a backend whose calls the host does not wait for) is compared with
    the first rank's call through the job's store before it is issued, so only equal calls ever meet. If such calls differ,
    some of them are under way and never complete, and every later call on the group raises the published difference.

    transport: returns the group's transport; None once it is gone. limit: how many calls to compare, equal on all ranks; None
    to compare all. label: the group's name in statuses. key: its name in the store, which no later group has. shared: None if
    there are no other processes.

    raised: whether the program has been told that the ranks made different calls, some of which are under way.
    announced: the compared call that is about to be issued. guarded: whether it does not wait for the other ranks.
    is_over: whether no later call is compared, and every call so far is known to be that of the other ranks.
    made: the calls that may differ on another rank, with their numbers.
    """

    def __init__(
        self,
        transport: Callable[[], Transport | None],
        ranks: Sequence[int],
        limit: int | None,
        label: str = "",
        key: str = "",
        shared: Shared | None = None,
    ) -> None:
        self._transport = transport
        self._ranks = list(ranks)
        self._left = limit
        self._number = 0
        self._label, self._key, self._shared = label, key, shared
        self.guarded = self.is_over = False
        self.announced: ToldCall | None = None
        self.made: deque[tuple[int, ToldCall]] = deque(maxlen=_UNSETTLED)
        # Posted comparisons that no call waits for: the call's number, the Work, and the compared tensor.
        self._posted: deque[tuple[int, Work, torch.Tensor]] = deque()
        # The difference between the ranks, once it is known here.
        self._difference: dict[str, Any] | None = None
        # Until when a difference that another rank may have published is looked for.
        self._suspects = 0.0
        self.raised = False
        self._due = 0.0

    @property
    def coord(self) -> int:
        """This rank's place in the group."""
        transport = self._transport()
        return 0 if transport is None else transport.coord

    def announce_call(
        self, name: str, call: str, facts: dict[str, Any], waits: bool, frame: FrameType
    ) -> None:
        """Return when this rank may make a call on `name`, from the user's `frame`.

        waits: whether the call waits for all ranks of the group. If not, this method does not wait for any.

        Raises CallMismatchError, on every rank of the group, or as soon as this rank's call is known to differ.
        """
        shared = self._shared
        transport = None if self._left == 0 or len(self._ranks) == 1 else self._transport()
        if transport is None:
            self._refuse()
            self.is_over = self._settled()
            return
        if transport.compares_calls:
            transport.announce_call(name, call, shortened(facts))
            return
        self._refuse()
        rank = -1 if shared is None else shared.rank
        told = self.announced = ToldCall(call, shortened(facts), _line(frame)[-_SITE:], rank)
        try:
            self._number += 1
            self.made.append((self._number, told))
            if self._left is not None:
                self._left -= 1
            if shared is None:
                self._agrees(transport, name, told, True)
            elif transport.ordered or not self._agrees(transport, name, told, waits):
                self._meet(shared, name, told, parts_of(facts, len(self._ranks)))
                self.guarded = True
        except BaseException as error:
            if not isinstance(error, Exception):
                self.leave(name, told, type(error).__name__)
            self.announced = None
            raise
        finally:
            # A stored error keeps this frame alive; it must not keep the group.
            del transport

    def _refuse(self) -> None:
        """Raise CallMismatchError if the ranks are known to have made different calls that are under way."""
        self.announced, self.guarded = None, False
        self._settled()
        if time.monotonic() < self._suspects:
            self.difference()
        if self._difference is not None:
            self.raised = True
            raise error_of(self._difference)

    def _settled(self) -> bool:
        """Return whether every call so far is known to be that of the other ranks, as far as the backend tells."""
        now = time.monotonic()
        while self._posted and self._posted[0][1].is_completed():
            number, _, signs = self._posted.popleft()
            if signs[0] != -signs[1]:
                self._suspects = max(self._suspects, now + _LOOKS_S)
            while now >= self._suspects and self.made and self.made[0][0] <= number:
                self.made.popleft()
        return not self._posted and now >= self._suspects

    def leave(self, name: str, told: ToldCall, raised: str) -> None:
        """Record that this rank leaves the call under way before it is issued, although the call has been compared.

        raised: the type of the exception that interrupts it.
        """
        who = "this rank" if self._shared is None else f"rank {self._shared.rank}"
        left = CallMismatchError(
            f'{who} left call {self._number} along "{name}" before it sent its part; {_OUT_OF_STEP}',
            given=f"{raised} in {told.call} at {told.callsite}",
            expected=SAME,
            hint="end the program, or go on with a new group",
            mismatched_ranks=() if self._shared is None else (self._shared.rank,),
        )
        self._difference = as_data(left)
        if self._shared is not None:
            with suppress(RuntimeError, TimeoutError):
                self._difference = self._shared.exchange.publish(f"calls/{self._key}", lambda: as_data(left))
        self.raised = True

    def difference(self) -> CallMismatchError | None:
        """Return the error if the ranks of the group have made different calls, some of which are under way."""
        if self._difference is None and self._shared is not None and self._number:
            with suppress(RuntimeError, TimeoutError):
                self._difference = self._shared.exchange.published(f"calls/{self._key}")
        return None if self._difference is None else error_of(self._difference)

    def is_apart(self) -> bool:
        """Return whether the ranks have made different calls, some of which are under way and may never complete."""
        return self._difference is not None or (not self._settled() and self.difference() is not None)

    def ended(self, over: bool) -> CallMismatchError | None:
        """Return `difference` for a call that waits, or whose wait is `over`. While it waits, looks no more often than a
        watchdog does.
        """
        now = time.monotonic()
        if self._shared is None or (self._difference is None and now < self._due and not over):
            return None
        self._due = now + self._shared.look_s
        error = self.difference()
        self.raised |= error is not None
        return error

    def _agrees(self, transport: Transport, name: str, told: ToldCall, waits: bool) -> bool:
        """Post the comparison. Return whether the calls are equal, or False if this rank or another one does not wait for it."""
        digest = hashlib.blake2b(json.dumps(told[:2]).encode(), digest_size=8).digest()
        # 63 bits that are the same for equal calls in every process.
        sign = int.from_bytes(digest, "little") >> 1
        signs = torch.tensor([sign, -sign, int(not waits)], device=transport.device)
        compare = partial(transport.start, Call(ALL_REDUCE, signs, op="max"))
        # Not waited for at once, so it may outlive a profiler.
        work = compare() if transport.ordered else _unprofiled(compare)
        if work is not None:
            if not waits:
                self._posted.append((self._number, work, signs))
                return False
            if self._shared is None:
                work.wait()
            else:
                wait_until(work, self.ended)
        highest, lowest, guarded = signs.tolist()
        if highest != -lowest:
            if guarded:
                return False
            self._exchange(transport, name, told)
        self.made.clear()
        return True

    def _exchange(self, transport: Transport, name: str, told: ToldCall) -> None:
        """Exchange the calls themselves, because the digests differ."""
        message = torch.frombuffer(bytearray(_message(told).ljust(_BYTES, b"\0")), dtype=torch.uint8)
        own = message.to(transport.device)
        everyone = own.new_empty(transport.size * _BYTES)
        work = transport.start(Call(ALL_GATHER, own, everyone))
        if work is not None:
            work.wait()
        rows = everyone.cpu().view(-1, _BYTES)
        calls = [ToldCall(*json.loads(row.numpy().tobytes().rstrip(b"\0"))) for row in rows]
        if not are_same(calls):
            self.made.clear()
            raise mismatch(name, self._number, self._ranks, calls)

    def _meet(
        self, shared: Shared, name: str, told: ToldCall, parts: tuple[list[int], list[int]] | None
    ) -> None:
        """Compare this rank's call with the call of the rank that came first. Compare the sizes of an all_to_all with those of
        all ranks that have come. Does not wait for any rank.

        parts: what the call sends to each rank and expects from each, if it is known.
        """
        number, own = self._number, json.dumps(told)
        first = shared.first(f"{self._key}/{number}", own)
        if first == own and number > _BEHIND:
            # The call of a rank that is so far behind is not compared.
            for key in (f"{number - _BEHIND}", f"{number - _BEHIND}/parts"):
                shared.store.delete_key(f"{self._key}/{key}")
        known = {shared.rank: told}
        if first != _APART:
            theirs = ToldCall(*json.loads(first))
            if not is_same(told, theirs):
                known[theirs.rank] = theirs
            elif parts is None or self._fit(shared, f"{self._key}/{number}/parts", *parts):
                return
        self._difference = shared.exchange.publish(
            f"calls/{self._key}", partial(self._differ, shared, name, known)
        )
        # A rank that makes its next call through the store finds the difference there.
        later = (f"{self._key}/{after}" for after in count(number + 1))
        next(key for key in later if shared.first(key, _APART) == _APART)
        self._refuse()

    def _fit(self, shared: Shared, key: str, sends: list[int], expects: list[int]) -> bool:
        """Return whether this rank and each rank that has come expect what the other sends."""
        coord = self._ranks.index(shared.rank)
        if len(self._ranks) > _PAIRED:
            return True
        # Of two ranks, at least the one that adds its line last reads both.
        lines = shared.lines(key, json.dumps([coord, sends, expects]))
        return all(
            theirs[coord] == expects[other] and wanted[coord] == sends[other]
            for other, theirs, wanted in map(json.loads, lines)
        )

    def _differ(self, shared: Shared, name: str, known: dict[int, ToldCall]) -> dict[str, Any]:
        others = [rank for rank in self._ranks if rank not in known]
        calls = {**shared.made(self._label, self._number, others), **known}
        ranks = [rank for rank in self._ranks if rank in calls]
        error = mismatch(name, self._number, ranks, [calls[rank] for rank in ranks], _OUT_OF_STEP)
        if absent := [rank for rank in self._ranks if rank not in calls]:
            error.given = f"{error.given}\n{ranks_text(absent)}: not known yet"
        return as_data(error)


def _unprofiled(start: Callable[[], Work | None]) -> Work | None:
    """Return what `start` returns, called where torch.profiler records nothing.

    A Work of Gloo that was started under a profiler and completes after the profiler has been freed writes into the freed
    memory (onFunctionExitImpl in profiler_kineto.cpp). A profiler of one thread follows the Work to the thread of Gloo, so
    `start` then runs in a new thread.
    """
    if profiling():
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(start).result()
    # `profiling` knows nothing of profilers of all threads.
    record_functions(False)
    try:
        return start()
    finally:
        record_functions(True)


def shortened(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts with a digest in place of each long list."""
    return {
        key: _digest(value) if isinstance(value, list) and len(str(value)) > _LONGEST else value
        for key, value in facts.items()
    }


def _digest(values: list[Any]) -> str:
    text = json.dumps(values)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{text[: _LONGEST // 2].rstrip(', ')}.. ({len(values)}, digest {digest})"


def _line(frame: FrameType) -> str:
    return source_line(frame.f_code.co_filename, frame.f_lineno)


def _message(told: ToldCall) -> bytes:
    """Encode a call in at most a kilobyte. Equal facts give equal texts at any callsite."""
    while len(text := json.dumps(told).encode()) > _BYTES and told.callsite:
        told = told._replace(callsite=told.callsite[20:])
    return text


class _End(NamedTuple):
    """One end of a message as it is announced. keys: of all messages in its call. is_header: whether it tells the shape of
    the next message.
    """

    direction: str
    keys: Sequence[str] | str
    dtype: str
    elements: int
    shapes: str
    nbytes: int
    callsite: str
    is_header: bool = False


@final
class MessageCheck:
    """Compares the first messages between each pair of ranks in one group, in each direction.

    A receive whose buffer is larger than the message would return with part of the buffer unchanged, and a smaller
    buffer would crash the process (Gloo, tested with torch 2.13). Therefore each end announces its message,
    and the end that arrives second compares, answers, and raises if the two differ. The end that arrived first reads
    the answer before it waits for the data, so that both ends raise immediately.

    pairs: the number of compared messages in each direction with each peer. store: a store used for nothing else.
    ranks: the group's ranks, in coord order. timeout_s: the group's timeout. limit: the number of messages to
    compare, at most 4; None to compare all messages. of_job: as in MeshcommError.

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
        self.of_job = True
        self.pairs: Counter[tuple[Direction, int]] = Counter()
        # The channels on which the other end counts a tensor behind its header, and this one has refused the header.
        self.refused: list[Channel] = []

    def is_compared(self, direction: Direction, peer: int) -> bool:
        """Return whether the next message of this pair is compared."""
        return self.pairs[direction, peer] < self._limit

    def takes_any(self) -> None:
        """Record that this rank receives from any source or outside the mesh, so that others do not wait for its answer."""
        if not self._any:
            self._any = True
            self._store.set(f"{self._label}/any/{self._rank}", "1")

    def announce(
        self, ends: Sequence[P2P], parts: Sequence[Part], frame: FrameType, has_header: bool = False
    ) -> tuple[list[str], list[Unanswered], dict[str, Sequence[str]]] | None:
        """Announce the messages of a call, and compare those whose other end has announced them. None if none is compared.

        parts: the messages, with their numbers. has_header: whether the first is the header of a handshake. Returns the store's key of each message, "" for one that is not compared; the
        announcements to be answered; and, by its key, the keys of the other end's call for each message on which both agree.
        Raises CallMismatchError before the data moves, once all messages of the call are announced.
        """
        keys = [""] * len(parts)
        for at, (direction, peer, tag, number) in enumerate(parts):
            if peer is None:
                self.takes_any()
            elif self.is_compared(direction, peer):
                self.pairs[direction, peer] += 1
                keys[at] = self.key(*self._ends(direction, peer), tag, number)
        if not any(keys):
            return None
        unanswered: list[Unanswered] = []
        agreed: dict[str, Sequence[str]] = {}
        differs: CallMismatchError | None = None
        own = [*filter(None, keys)]
        for at, ((direction, x, peer, _), key) in enumerate(zip(ends, keys, strict=True)):
            if not key or peer is None:
                continue
            theirs, told = self._compare(direction, peer, key, [x], frame, own, has_header and not at)
            if theirs is None:
                unanswered.append((key, self._ranks[peer]))
                continue
            if theirs != _PAST:
                self._store.set(f"{key}/answer", json.dumps([told, own]))
            if told:
                differs = differs or self._differs(key, told)
            agreed[key] = () if theirs == _PAST else theirs
        if differs is not None:
            raise differs
        return keys, unanswered, agreed

    def _ends(self, direction: Direction, peer: int) -> tuple[int, int]:
        """Return the global ranks of a message's sender and receiver."""
        other = self._ranks[peer]
        return (self._rank, other) if direction == "send" else (other, self._rank)

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
        is_header: bool = False,
    ) -> tuple[Any, str]:
        """Announce this end's message. Return the `keys` that the other end has announced, None if it has not arrived; and how
        the two ends differ, "" if they do not.
        """
        own = _End(
            direction,
            keys,
            name_of(tensors[0].dtype),
            sum(x.numel() for x in tensors),
            " ".join(f"({', '.join(map(str, x.shape))})" for x in tensors),
            sum(x.nbytes for x in tensors),
            _line(frame),
            is_header,
        )
        # Atomic: the first end to arrive writes, and the second gets what the first has written.
        mine = json.dumps(own)
        first = self._store.compare_set(key, "", mine).decode()
        if first == mine:
            return None, ""
        other = _End(*json.loads(first))
        sent, room = (own, other) if direction == "send" else (other, own)
        fits = (sent.dtype, sent.elements, sent.is_header) == (room.dtype, room.elements, room.is_header)
        if _PAST in (own.keys, other.keys):
            fits = sent.nbytes <= room.nbytes
        src, dst = self._ends(direction, peer)
        sends, rooms = (f"{end.dtype} {end.shapes}" for end in (sent, room))
        if sent.is_header != room.is_header:
            sends = _WITH_HANDSHAKE if sent.is_header else f"{sends} without a handshake"
            rooms = (
                "the shape that a handshake tells" if room.is_header else f"{rooms}, and expects no handshake"
            )
        told = (
            f"rank {src} sends {sends} at {sent.callsite}\nrank {dst} has room for {rooms} at {room.callsite}"
        )
        return other.keys, "" if fits else told

    def confirm(self, waiting: list[Unanswered], heard: Heard, most_s: float | None = None) -> float | None:
        """Return when the peers have confirmed, or after a few seconds without an answer. In that case, the backend
        reports any difference. waiting: the announcements, without those that are answered after the call. heard: called for
        each message.

        Returns the remaining seconds if a peer was silent. Raises CallMismatchError if a peer passes another tensor, and
        TimeoutError if a peer is silent for `most_s` seconds.
        """
        began, pause = time.monotonic(), 0.0005
        until = began + min(_ANSWERED_S, _ANSWERED_PART * self._timeout_s)
        over = math.inf if most_s is None else began + most_s
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
            if waiting and (now := time.monotonic()) > over:
                raise TimeoutError(f"no answer after {most_s:g} s; the message stays under way")
            if waiting and now > until:
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
        expected = "the same dtype and number of elements at both ends; outside the mesh, room for all bytes that are sent"
        hint = "handshake=True on mesh.send and no out on mesh.recv, if the receiver cannot know the shape"
        if " handshake" in told:
            expected = "a handshake at both ends or at none"
            if _WITH_HANDSHAKE not in told:
                hint = "handshake=True on the sender, or out=torch.empty(...) on the receiver"
            else:
                if dst == self._rank:
                    peer = self._ranks.index(src)
                    self.pairs["recv", peer] += 1
                    self.refused.append(("recv", peer, int(tag)))
                hint = "no handshake=True on the sender, or mesh.recv(dims, src=...) with no out"
        return CallMismatchError(
            f"message {number} with tag {tag} from rank {src} to rank {dst} on {self._label} "
            "differs between its ends; nothing was sent",
            given=told,
            expected=expected,
            hint=hint,
            mismatched_ranks=(src, dst),
            of_job=self.of_job,
        )
