"""Point-to-point messages between coords of one dim: sends, receives, exchanges and shifts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias, final
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from meshcomm.comm.caller import Caller
from meshcomm.comm.checks import (
    OWN_TAGS,
    all_plain,
    check_answered,
    check_apart,
    check_coord,
    check_envelopes,
    check_input,
    check_offset,
    check_other,
    check_tag,
    is_plain,
    lie_apart,
)
from meshcomm.comm.handle import Handle
from meshcomm.comm.shapes import (
    CARRIED,
    as_bytes,
    blank_header,
    buffer_for,
    described_by,
    header_of,
    into,
    leaving,
)
from meshcomm.comm.torch_private import unobserved
from meshcomm.errors import CallMismatchError, ShapeError, UnsupportedOp
from meshcomm.transport import P2P, Transport, Work
from meshcomm.transport.base import Direction
from meshcomm.transport.torch_private import profiling, written
from meshcomm.watching.callsite import line_of
from meshcomm.watching.messages import Batch, MessageLog, PendingMessage, told_of
from meshcomm.watching.recorder import FlightRecorder

Envelope: TypeAlias = tuple[Tensor, int] | tuple[Tensor, int, int]

# At most this many kinds of messages are remembered as checked. Each new tag adds another kind.
_MOST_FAST = 4096


@final
class Messages(Caller):
    """Point-to-point messages along `name`; each communicator has one. Peers are coords.

    Every call ends in `_start`, with one message or many, blocking or not. A message is not checked if its tensor
    is plain and an earlier message with the same peer, tag and dtype was checked.
    """

    def __init__(self, name: str, transport: Transport, who: str, recorder: FlightRecorder) -> None:
        super().__init__(name, transport, who, recorder)
        self.kinds = kinds = transport.message_kinds
        # The device of message headers: the CPU if the mesh can send from host memory.
        self._device = transport.device if transport.device.type in kinds else torch.device(kinds[0])
        self._fast: dict[tuple[object, ...], tuple[torch.device, str]] = {}
        recorder.quick.append(self._fast)
        # The receives from any source that are under way, by tag.
        self._any: list[tuple[int, ref[Handle[Any]]]] = []

    @property
    def ordered(self) -> bool:
        """Whether a message waits for earlier messages, in either direction."""
        return self.transport.ordered

    def send(self, x: Tensor, dst: int, tag: int = 0, handshake: bool = False, async_op: bool = False) -> Any:
        """Send `x` to coord `dst`; with `async_op`, return a handle. See `Mesh.send`."""
        if not handshake and (told := self._fast_kind("send", x, dst, tag)) is not None:
            return self._start_one(P2P("send", x, dst, tag), told, async_op)
        _, end = self._checked("send", "send", x, dst, tag)
        ends = [end._replace(x=header_of(end.x, self.where("send"))), end] if handshake else [end]
        return self._start(Batch("send", ends, async_op, nbytes=end.x.nbytes))

    def recv(self, out: Any, src: int | None, tag: int = 0, async_op: bool = False) -> Any:
        """Receive from coord `src`, or from any source if `src` is None. With `async_op`, return a handle.

        Without `out`, the message must have been sent with a handshake. See `Mesh.recv` and `Mesh.irecv`.
        """
        if (told := self._fast_kind("recv", out, src, tag)) is not None:
            written([out])
            return self._start_one(P2P("recv", out, src, tag), told, async_op, out, src)
        if out is None and not async_op:
            _, header = self._checked("recv", "recv", blank_header(self._device), src, tag)
            check_answered(
                self.transport.name, "the message's shape", self.where("recv"), "out=torch.empty(...)"
            )
            self._start(Batch("recv", [header], calls=0))
            try:
                out = described_by(header.x)
            finally:
                self.confirm("recv")
        out, end = self._checked("recv", "irecv" if async_op else "recv", out, src, tag)
        return self._start(Batch("recv", [end], async_op, partial(into, out, end.x), source=src))

    def recv_any(self, out: Tensor | None, tag: int = 0) -> tuple[Tensor, int]:
        """Receive from the rank that sends first, and return the tensor and that rank's coord. See `Mesh.recv_any`."""
        first = blank_header(self._device) if out is None else out
        first, end = self._checked("recv", "recv_any", first, None, tag)
        handle = self._start(Batch("recv_any", [end], True, calls=0 if out is None else 1))
        handle._at_once()
        handle.wait()
        if out is not None:
            return into(first, end.x), handle.source
        return self.recv(described_by(end.x), handle.source, tag), handle.source

    def exchange(
        self,
        sends: Sequence[Envelope] = (),
        recvs: Sequence[Envelope] = (),
        async_op: bool = False,
        call: str = "exchange",
    ) -> Any:
        """Send and receive several messages concurrently. See `Mesh.exchange`. call: the name of the call in errors."""
        if (ends := self._fast_batch(sends, recvs)) is not None:
            outs = [end.x for end in ends[: len(recvs)]]
            written(outs)
            return self._start(Batch(call, ends, async_op, result=outs, carried=True))
        check_envelopes(sends, "sends", partial(self.where, call))
        check_envelopes(recvs, "recvs", partial(self.where, call))
        received = [self._checked("recv", call, *recv) for recv in recvs]
        sent = [self._checked("send", call, *send) for send in sends]
        if call == "exchange":
            check_apart([out for out, _ in received], [x for x, _ in sent], partial(self.where, call))
        finish = partial(_finish, received)
        coming, going = [end for _, end in received], [end for _, end in sent]
        self._copy_own(call, coming, going)
        if ends := [end for end in (*coming, *going) if end.peer != self.coord]:
            return self._start(Batch(call, ends, async_op, finish))
        return Handle((), self, call, finish) if async_op else finish()

    def shift(self, x: Tensor, offset: int = 1, wrap: bool = True) -> Tensor | None:
        """Send `x` `offset` coords forward, and return the tensor from `offset` coords back. See `Mesh.shift`."""
        check_offset(offset, partial(self.where, "shift"))
        target, source = self.coord + offset, self.coord - offset
        if wrap:
            target, source = target % self.size, source % self.size
            is_known = self._fast_kind("send", x, target, 0) is not None
            if is_known and ("recv", source, 0, x.dtype) in self._fast:
                out = torch.empty_like(x)
                ends = [P2P("recv", out, source, 0), P2P("send", x, target, 0)]
                self._start(Batch("shift", ends, carried=True))
                return out
        goes, comes = 0 <= target < self.size, 0 <= source < self.size
        if not goes or self._fast_kind("send", x, target, 0) is None:
            x = check_input(x, self.kinds, partial(self.where, "shift"), "shift")
        if target == self.coord:
            return x.detach().clone()
        buffer = torch.empty_like(x, memory_format=torch.contiguous_format)
        sends, recvs = [(x, target)] if goes else [], [(buffer, source)] if comes else []
        received = self.exchange(sends, recvs, call="shift")
        return received[0] if received else None

    # -- inside ---------------------------------------------------------------------------------

    def _fast_batch(self, sends: Any, recvs: Any) -> list[P2P] | None:
        """Return the messages of an exchange, receives first; None if any message still has to be checked."""
        devices, ends, tensors = self._fast, [], []
        device: Any = None
        try:
            direction: Direction
            for direction, envelopes in (("recv", recvs), ("send", sends)):
                if type(envelopes) is not list and type(envelopes) is not tuple:
                    return None
                for envelope in envelopes:
                    x, peer, tag = envelope if len(envelope) == 3 else (*envelope, 0)
                    if type(peer) is not int or type(tag) is not int:
                        return None
                    device, _ = devices[direction, peer, tag, x.dtype]
                    ends.append(P2P(direction, x, peer, tag))
                    tensors.append(x)
            if not ends or not all_plain(tensors, device):
                return None
            return ends if lie_apart(tensors[: len(recvs)], tensors[len(recvs) :]) else None
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):
            return None

    def _fast_kind(self, direction: Direction, x: Any, peer: object, tag: object) -> str | None:
        """Return the name of the call in errors if a message of this kind was checked before, and `x` can be sent unchanged."""
        try:
            kind = self._fast.get((direction, peer, tag, x.dtype))
        except (AttributeError, TypeError):
            return None
        # True, 1.0 and NumPy's 1 hash like 1, so check types.
        if kind is not None and type(peer) is type(tag) is int and unobserved() and is_plain(x, kind[0]):
            return kind[1]
        return None

    def _checked(
        self, direction: Direction, call: str, x: Any, peer: Any, tag: int = 0
    ) -> tuple[Tensor, P2P]:
        """Return the caller's tensor, and one end of a message with the memory that is sent or received.

        peer: None for any source, which only irecv and recv_any accept.
        """
        if self._fast_kind(direction, x, peer, tag) is not None:
            return x, P2P(direction, x, peer, tag)
        where, comes = partial(self.where, call), direction == "recv"
        x = check_input(x, self.kinds, where, "shift" if comes else None, written=comes)
        if peer is None and call in ("irecv", "recv_any"):
            self._check_any(call)
        else:
            any_source = peer is None and call == "recv"
            hint = "x, src = mesh.recv_any(dims, x), for the rank that sends first" if any_source else None
            end = "src" if comes else "dst"
            check_coord(peer, self.size, end, where, hint)
            if call != "exchange":
                check_other(peer, self.coord, end, where)
        # The library's own calls, recorded separately, may use the reserved tags.
        if type(tag) is not int or tag < 0 or (tag >= OWN_TAGS and not self.recorder.inside):
            check_tag(tag, where)
        dense = buffer_for(x) if comes else leaving(x)
        if (
            dense is x
            and peer not in (None, self.coord)
            # Continue to refuse reserved tags from users.
            and tag < OWN_TAGS
            and x.dtype in CARRIED
            and len(self._fast) < _MOST_FAST
            and self.recorder.messages.settled(direction, peer)
        ):
            self._fast[direction, peer, tag, x.dtype] = x.device, told_of(direction, peer)
        return x, P2P(direction, dense, peer, tag)

    def _check_any(self, call: str) -> None:
        if self.size == 1:
            raise UnsupportedOp(
                f"{self.where(call)}: there is no rank to receive from",
                given="a dim of size 1",
                expected="a dim with another rank",
                hint="make the call only if mesh.size(dims) > 1",
            )
        if not self.transport.any_source:
            check_answered(self.transport.name, "which rank sends first", self.where(call), "src=, a coord")
            raise UnsupportedOp(
                f"{self.where(call)}: {self.transport.name} cannot receive from any source",
                given=f"backend {self.transport.name}",
                expected="a Gloo dim",
                hint="name the source: mesh.recv(dims, out, src=...)",
            )

    def _copy_own(self, call: str, coming: Sequence[P2P], going: Sequence[P2P]) -> None:
        """Copy the messages of a call that this rank sends to itself."""
        sent, received = ([end for end in ends if end.peer == self.coord] for ends in (going, coming))
        for ends in (sent, received):
            ends.sort(key=attrgetter("tag"))
        facts, wanted = ([(end.tag, end.x.dtype, end.x.numel()) for end in ends] for ends in (sent, received))
        if facts != wanted:
            raise ShapeError(
                f"{self.where(call)}: the receive does not fit the message that this rank sends to itself",
                given=f"sent {facts}; received {wanted}, as (tag, dtype, elements)",
                expected="both ends in one call, with the same dtype and number of elements",
                hint="out=torch.empty_like(x)",
            )
        for end, room in zip(sent, received, strict=True):
            into(room.x, end.x.view(room.x.shape))

    def _start_one(
        self, end: P2P, told: str, async_op: bool, result: Any = None, source: int | None = None
    ) -> Any:
        """`_start` for one message of a kind that was checked before, without the steps that only other messages need."""
        recorder, transport = self.recorder, self.transport
        if transport.ordered or profiling():
            return self._start(Batch(end.direction, [end], async_op, None, result, source, carried=True))
        if self._any and end.direction == "recv":
            self._check_any_order([end], told)
        log = recorder.messages
        message = handle = None
        works: Sequence[Work] = ()
        try:
            message = log.begin_one(self.name, end, recorder.under_way is None)
            works = transport.start_p2p((end,), True)
            if async_op:
                message.started()
                handle = Handle(works, self, told, result=result, pending=message, source=source, held=end)
                return handle
            for work in works:
                work.wait()
            return result
        except (RuntimeError, TimeoutError) as error:
            works = ()  # a stored error keeps this frame alive; it must not keep the group
            raise self.failed(told, error) from error
        finally:
            log.waiting = None
            if message is not None and handle is None:
                message.ended()

    def _start(self, batch: Batch) -> Any:
        """Start messages to other ranks. Return the result of the call, or a handle that waits for the messages."""
        recorder, log, transport = self.recorder, self.recorder.messages, self.transport
        message = handle = None
        works: Sequence[Work] = ()
        single = batch.call in ("send", "recv")
        alone = transport.ordered and len(batch.ends) == 1
        if alone:
            self._check_order(batch, log)
        if self._any:
            self._check_any_order(batch.ends, batch.told)
        try:
            # The messages of a collective that runs step by step are counted as part of it.
            message = log.begin(self.name, batch, recorder.under_way is None)
            ends = batch.ends if batch.carried else _carried(batch.ends)
            left_s = None
            if message.unanswered and not batch.async_op:
                if len(ends) > 1 and not transport.ordered:
                    started: list[Work] = []
                    works = started
                    with record_function(f"meshcomm::{batch.call} {self.name}{recorder.plan}"):
                        left_s, ends = self._start_agreed(ends, message, started), ()
                else:
                    left_s = log.confirm(message)
            if not ends:
                pass
            elif profiling():
                with record_function(f"meshcomm::{batch.call} {self.name}{recorder.plan}"):
                    works = transport.start_p2p(ends, single)
            else:
                works = transport.start_p2p(ends, single)
            if recorder.ordered:
                recorder.queued(works[-1], message)
            if batch.async_op:
                message.started()
                handle = self._handle(batch, works, message)
                if batch.ends and batch.ends[0].peer is None:
                    self._any.append((batch.ends[0].tag, ref(handle)))
                if alone:
                    log.flies(message)
                return handle
            for work in works:
                if left_s is None:
                    work.wait()
                else:
                    self.wait_within(work, left_s, True)
        except (
            RuntimeError,
            TimeoutError,
        ) as error:  # of the backend, or of the store while messages are compared
            works = ()  # a stored error keeps this frame alive; it must not keep the group
            raise self.failed(batch.told, error) from error
        finally:
            log.waiting = None
            if message is not None and handle is None:
                message.ended()
        return batch.result if batch.finish is None else batch.finish()

    def _start_agreed(self, ends: Sequence[P2P], message: PendingMessage, works: list[Work]) -> float | None:
        """Start each message as soon as both ends agree on it; the other end may wait for it before its next call. Messages
        that are in one call at the other end too start together. Return the result of `MessageLog.confirm`.
        """
        keys, agreed, waiting = message.keys, dict(message.agreed), list(range(len(ends)))

        def start() -> None:
            held = set()
            for index in list(waiting):
                end, key = ends[index], keys[index]
                channel = end.direction, end.peer, end.tag
                together = agreed.get(key, () if not key else None)
                if (
                    channel in held
                    or together is None
                    or any(key in keys and key not in agreed for key in together)
                ):
                    # Messages of one channel match in order.
                    held.add(channel)
                else:
                    waiting.remove(index)
                    works.extend(self.transport.start_p2p([end]))

        def heard(key: str, together: Sequence[str]) -> None:
            agreed[key] = together
            start()

        start()
        try:
            left_s = self.recorder.messages.confirm(message, heard)
        except CallMismatchError:
            # The other ends have started these, too.
            with suppress(RuntimeError):
                for work in works:
                    work.wait()
            raise
        for at in waiting:
            works.extend(self.transport.start_p2p([ends[at]]))
        return left_s

    def _handle(self, batch: Batch, works: Sequence[Work], message: PendingMessage) -> Handle[Any]:
        from_any = batch.ends[0].peer is None
        return Handle(
            works,
            self,
            batch.told,
            batch.finish,
            result=batch.result,
            pending=message,
            source=partial(self._served_by, works[0], message) if from_any else batch.source,
            confirm=partial(_confirm, self.recorder.messages, message) if message.unanswered else None,
            held=batch.ends,
        )

    def _check_order(self, batch: Batch, log: MessageLog) -> None:
        """Refuse a message that would wait for this rank's message in the other direction and could deadlock."""
        direction = batch.ends[0].direction
        other = next((message for message in log.flying if message.parts[0][0] != direction), None)
        if other is None:
            return
        raise UnsupportedOp(
            f"{self.where(batch.told)}: {self.transport.name} would start it only after an earlier "
            f"{'receive' if direction == 'send' else 'send'} ends, and ranks that all do this wait forever",
            given=f"{other.call} at {line_of(*other.place)} was not waited for",
            expected="messages in both directions as one call, or a wait in between",
            hint="mesh.exchange(dims, sends=[...], recvs=[...]), or mesh.shift",
        )

    def _check_any_order(self, ends: Sequence[P2P], told: str) -> None:
        """Refuse a receive from one rank behind a receive from any source: Gloo gives the rank's next message to either."""
        self._any = [
            (tag, at) for tag, at in self._any if (handle := at()) is not None and handle._works is not None
        ]
        tags = {tag for tag, _ in self._any}
        for direction, _, peer, tag in ends:
            if direction == "recv" and peer is not None and tag in tags:
                raise UnsupportedOp(
                    f"{self.where(told)}: a receive from any source with tag {tag} is under way, and either could get the message",
                    given=f"src={peer}, tag={tag}",
                    expected="one of the two at a time, or other tags",
                    hint="wait() for the receive from any source first, or give one of the two another tag",
                )

    def _served_by(self, work: Work, message: PendingMessage) -> int:
        """Return the coord whose message a receive from any source received."""
        src = self.transport.source_of(work)
        self.recorder.messages.arrived(message, src)
        return src


def _confirm(log: MessageLog, message: PendingMessage, most_s: float | None) -> float | None:
    return log.confirm(message, most_s=most_s)


def _carried(ends: Sequence[P2P]) -> list[P2P]:
    """Return the messages with tensors of dtypes that backends support."""
    return [end if end.x.dtype in CARRIED else end._replace(x=as_bytes(end.x.view(-1))) for end in ends]


def _finish(received: Sequence[tuple[Tensor, P2P]]) -> list[Tensor]:
    return [into(out, end.x) for out, end in received]
