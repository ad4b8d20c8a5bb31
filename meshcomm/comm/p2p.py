"""Point to point between coords of one dim: sends, receives, sets of them, and the ring."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeAlias, final

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from meshcomm.comm.callsite import line_of
from meshcomm.comm.checks import (
    OWN_TAGS,
    all_usable,
    check_answered,
    check_apart,
    check_coord,
    check_envelopes,
    check_in_place,
    check_offset,
    check_tag,
    check_tensor,
    check_written,
    usable,
)
from meshcomm.comm.flight_recorder import Caller, FlightRecorder
from meshcomm.comm.handle import Handle
from meshcomm.comm.p2p_log import Batch, MessageLog, PendingMessage
from meshcomm.comm.shapes import (
    CARRIED,
    as_bytes,
    blank_header,
    buffer_for,
    described_by,
    header_of,
    into,
    leaving,
    materialised,
)
from meshcomm.errors import CommunicationError, ShapeError, UnsupportedOp
from meshcomm.transport import P2P, Done, Transport, Work
from meshcomm.transport.base import Direction
from meshcomm.transport.torch_private import profiling, written

Envelope: TypeAlias = tuple[Tensor, int] | tuple[Tensor, int, int]

_UNLABELLED: Final = nullcontext()
# So many kinds of messages are made without asking again; with a new tag for each there would be no end.
_MOST_FAST = 4096


@final
class Messages(Caller):
    """Point to point along `name`; a communicator has one. Peers are coords.

    Every call comes down to `_start`, of one message or many, blocking or not. What was checked before, with the
    same peer, tag and dtype, is not checked again where the tensor is `usable` as it is.
    """

    def __init__(self, name: str, transport: Transport, who: str, recorder: FlightRecorder) -> None:
        super().__init__(name, transport, who, recorder)
        self.kinds = kinds = transport.message_kinds
        # Where what describes a message is: that of the mesh, if messages are carried there.
        self._device = transport.device if transport.device.type in kinds else torch.device(kinds[0])
        self._fast: dict[tuple[object, ...], torch.device] = {}
        self._loopback = _Loopback(transport.coord)
        recorder.quick.append(self._fast)

    @property
    def ordered(self) -> bool:
        """Whether a message waits for those before it, in either direction."""
        return self.transport.ordered

    def send(self, x: Tensor, dst: int, tag: int = 0, handshake: bool = False, async_op: bool = False) -> Any:
        """Send `x` to coord `dst`; with `async_op`, a handle. See `Mesh.send`."""
        if not handshake and self._is_fast("send", x, dst, tag):
            return self._start(Batch("send", [P2P("send", x, dst, tag)], async_op, carried=True))
        end = self._checked("send", "send", x, dst, tag)
        ends = [end]
        if handshake and dst != self.coord:
            ends.insert(0, end._replace(x=header_of(end.x, self.where("send"))))
        return self._issue(Batch("send", ends, async_op, nbytes=end.x.nbytes))

    def recv(self, out: Tensor | None, src: int, tag: int = 0) -> Tensor:
        """Receive from coord `src`; without `out`, a message that was sent with its handshake."""
        if out is None:
            header = self._checked("recv", "recv", blank_header(self._device), src, tag)
            if src == self.coord:
                out = torch.empty_like(self._loopback.oldest(tag, self.where("recv")))
            else:
                check_answered(
                    self.transport.name, "the message's shape", self.where("recv"), "out=torch.empty(...)"
                )
                self._issue(Batch("recv", [header], calls=0))
                out = described_by(header.x)
        found: Tensor = self._receive("recv", out, src, tag, False)
        return found

    def irecv(self, out: Tensor, src: int | None, tag: int = 0) -> Any:
        """A handle of receiving into `out` from coord `src`; None: from any. See `Mesh.irecv`."""
        return self._receive("irecv", out, src, tag, True)

    def _receive(self, call: str, out: Tensor, src: int | None, tag: int, async_op: bool) -> Any:
        if self._is_fast("recv", out, src, tag):
            written([out])
            ends = [P2P("recv", out, src, tag)]
            return self._start(Batch("recv", ends, async_op, result=out, source=src, carried=True))
        end = self._checked("recv", call, out, src, tag)
        return self._issue(Batch("recv", [end], async_op, lambda: into(out, end.x), source=src))

    def recv_any(self, out: Tensor | None, tag: int = 0) -> tuple[Tensor, int]:
        """Receive from whoever sends first, and say who it was. See `Mesh.recv_any`."""
        first = blank_header(self._device) if out is None else out
        end = self._checked("recv", "recv_any", first, None, tag)
        handle = self._issue(Batch("recv_any", [end], True, calls=0 if out is None else 1))
        handle.at_once()
        handle.wait()
        if out is not None:
            return into(out, end.x), handle.source
        return self.recv(described_by(end.x), handle.source, tag), handle.source

    def exchange(
        self,
        sends: Sequence[Envelope] = (),
        recvs: Sequence[Envelope] = (),
        async_op: bool = False,
        call: str = "exchange",
    ) -> Any:
        """Send and receive a set of messages at once. See `Mesh.exchange`; `call` names it in errors."""
        if (ends := self._fast_batch(sends, recvs)) is not None:
            outs = [end.x for end in ends[: len(recvs)]]
            written(outs)
            return self._start(Batch(call, ends, async_op, result=outs, carried=True))
        check_envelopes(sends, "sends", lambda: self.where(call))
        check_envelopes(recvs, "recvs", lambda: self.where(call))
        coming = [self._checked("recv", call, *each) for each in recvs]
        going = [self._checked("send", call, *each) for each in sends]
        if call == "exchange":
            check_apart([x for x, *_ in recvs], [x for x, *_ in sends], lambda: self.where(call))

        def finish() -> list[Tensor]:
            return [into(each[0], end.x) for each, end in zip(recvs, coming, strict=True)]

        return self._issue(Batch(call, [*coming, *going], async_op, finish))

    def shift(self, x: Tensor, offset: int = 1, wrap: bool = True, handshake: bool = False) -> Tensor | None:
        """Send `x` `offset` coords further, return what came from as far behind. See `Mesh.shift`."""
        check_offset(offset, lambda: self.where("shift"))
        target, source = self.coord + offset, self.coord - offset
        if wrap:
            target, source = target % self.size, source % self.size
            known = not handshake and self._is_fast("send", x, target, 0)
            if known and ("recv", source, int, 0, int, x.dtype) in self._fast:
                out = torch.empty_like(x)
                ends = [P2P("recv", out, source, 0), P2P("send", x, target, 0)]
                self._start(Batch("shift", ends, carried=True))
                return out
        goes, comes = 0 <= target < self.size, 0 <= source < self.size
        if not goes or handshake or not self._is_fast("send", x, target, 0):
            check_tensor(x, self.kinds, lambda: self.where("shift"))
            check_in_place(x, lambda: self.where("shift"), "shift")
        if target == self.coord:
            return x.detach().clone()
        buffer = torch.empty_like(x, memory_format=torch.contiguous_format)
        if handshake:
            if comes:
                check_answered(
                    self.transport.name, "the shape that comes", self.where("shift"), "handshake=False"
                )
            blank = blank_header(self._device)
            first = [P2P("recv", blank, source, 0)] if comes else []
            if goes:
                header = header_of(materialised(x.detach()), self.where("shift"))
                first.append(P2P("send", header, target, 0))
            self._issue(Batch("shift", first, calls=0))
            buffer = described_by(blank) if comes else buffer
        sends, recvs = [(x, target)] if goes else [], [(buffer, source)] if comes else []
        received = self.exchange(sends, recvs, call="shift")
        return received[0] if received else None

    # -- inside ---------------------------------------------------------------------------------

    def _fast_batch(self, sends: Any, recvs: Any) -> list[P2P] | None:
        """The messages of an exchange, receives first; None where one was not checked before, or more is to be asked."""
        known, ends, tensors, spans = self._fast, [], [], []
        device: Any = None
        try:
            direction: Direction
            for direction, envelopes in (("recv", recvs), ("send", sends)):
                if type(envelopes) is not list and type(envelopes) is not tuple:
                    return None
                for each in envelopes:
                    x, peer, tag = each if len(each) == 3 else (*each, 0)
                    device = known[direction, peer, type(peer), tag, type(tag), x.dtype]
                    ends.append(P2P(direction, x, peer, tag))
                    tensors.append(x)
            if not ends or not all_usable(tensors, device):
                return None
            for end in ends:
                begin, comes = end.x.data_ptr(), end.direction == "recv"
                spans.append((begin, begin + end.x.nbytes, comes))
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):
            return None
        # What one message receives lies apart from all others; see check_apart.
        spans.sort()
        reach = received = 0
        for begin, end_, comes in spans:
            if begin < received or (comes and begin < reach):
                return None
            reach = max(reach, end_)
            received = max(received, end_) if comes else received
        return ends

    def _is_fast(self, direction: Direction, x: Any, peer: object, tag: object) -> bool:
        """Whether a message like this was checked before, and `x` travels as it is."""
        try:
            device = self._fast.get((direction, peer, type(peer), tag, type(tag), x.dtype))
            return device is not None and usable(x, device)
        except (AttributeError, TypeError, RuntimeError):
            return False

    def _checked(self, direction: Direction, call: str, x: Tensor, peer: Any, tag: int = 0) -> P2P:
        """One end of a message, of what moves for `x`; None as a peer, any source, is for irecv and recv_any."""
        if self._is_fast(direction, x, peer, tag):
            return P2P(direction, x, peer, tag)

        def where() -> str:
            return self.where(call)

        check_tensor(x, self.kinds, where)
        if peer is None and call in ("irecv", "recv_any"):
            self._check_any(call)
        else:
            any_source = peer is None and call == "recv"
            hint = "x, src = mesh.recv_any(dims, x), for whoever sends first" if any_source else None
            check_coord(peer, self.size, "dst" if direction == "send" else "src", where, hint)
        # The library's own calls, on a line of its own, may use the tags above.
        if type(tag) is not int or tag < 0 or (tag >= OWN_TAGS and not self.recorder.inside):
            check_tag(tag, where)
        if direction == "recv":
            check_in_place(x, where, "shift")
            check_written(x, where)
        dense = leaving(x) if direction == "send" else buffer_for(x)
        if (
            dense is x
            and peer not in (None, self.coord)
            # The library's own tags stay refused where a user gives them.
            and tag < OWN_TAGS
            and x.dtype in CARRIED
            and len(self._fast) < _MOST_FAST
            and self.recorder.messages.settled(direction, peer)
        ):
            self._fast[direction, peer, int, tag, int, x.dtype] = x.device
        return P2P(direction, dense, peer, tag)

    def _check_any(self, call: str) -> None:
        if self.size == 1:
            raise UnsupportedOp(
                f"{self.where(call)}: there is nobody to receive from",
                given="a dim of size 1",
                expected="a dim with another rank",
                hint="guard the call by mesh.size(dims) > 1",
            )
        if not self.transport.any_source:
            check_answered(self.transport.name, "who sends first", self.where(call), "src=, a coord")
            raise UnsupportedOp(
                f"{self.where(call)}: {self.transport.name} cannot receive from any source",
                given=f"backend {self.transport.name}",
                expected="a Gloo dim",
                hint="name the source: mesh.recv(dims, out, src=...)",
            )

    def _issue(self, batch: Batch) -> Any:
        """Start messages, those of this rank to itself first; their result, or the handle whose `wait` gives it."""
        ends, here = batch.ends, self.where("recv")
        batch.own = [self._loopback.start(end, here) for end in ends if end.peer == self.coord]
        for room in () if batch.async_op else batch.own:
            room.wait()
        batch.ends = [end for end in ends if end.peer != self.coord]
        if batch.ends:
            return self._start(batch)
        if batch.async_op:
            batch.ends = ends
            return Handle(batch.own, self, batch.told, batch.finish, source=batch.source)
        return batch.made()

    def _start(self, batch: Batch) -> Any:
        """Start messages to other ranks; their result, or the handle that waits for them and for `batch.own`."""
        recorder, log = self.recorder, self.recorder.messages
        message = handle = None
        works: Sequence[Work] = ()
        alone = self.transport.ordered and len(batch.ends) == 1
        if alone:
            self._check_order(batch, log)
        try:
            # Messages of a collective that is done step by step are a part of it.
            message = log.begin(self.name, batch, recorder.under_way is None)
            left_s = None if batch.async_op else log.confirm(message)
            with (
                record_function(f"meshcomm::{batch.call} {self.name}{recorder.plan}")
                if profiling()
                else _UNLABELLED
            ):
                works = self.transport.start_p2p(batch.ends if batch.carried else _carried(batch.ends))
            if recorder.ordered:
                recorder.queued(works[-1], message)
            if batch.async_op:
                message.started()
                if alone:
                    log.flies(message)
                handle = self._handle(batch, works, message)
            else:
                for work in works:
                    if left_s is None:
                        work.wait()
                    else:
                        self.wait_within(work, left_s)
        except RuntimeError as error:  # the backend's; or of the store, where messages are still compared
            works = ()  # an error that is kept keeps this frame, which must not keep the group
            raise self.failed(batch.told, error) from error
        finally:
            log.waiting = None
            if message is not None and handle is None:
                message.ended()
        return handle if batch.async_op else batch.made()

    def _handle(self, batch: Batch, works: Sequence[Work], message: PendingMessage) -> Handle[Any]:
        from_any = batch.ends[0].peer is None
        return Handle(
            [*batch.own, *works] if batch.own else works,
            self,
            batch.told,
            batch.finish,
            result=batch.result,
            pending=message,
            source=partial(self._served_by, works[0], message) if from_any else batch.source,
            confirm=partial(self.recorder.messages.confirm, message) if message.unanswered else None,
            held=batch.ends,
        )

    def _check_order(self, batch: Batch, log: MessageLog) -> None:
        """Refuse a message that has to wait for another one of this rank in the other direction, and may keep it waiting."""
        direction = batch.ends[0].direction
        other = next((each for each in log.flying if each.parts[0][0] != direction), None)
        if other is None:
            return
        raise UnsupportedOp(
            f"{self.where(batch.told)}: {self.transport.name} would start it when an earlier "
            f"{'receive' if direction == 'send' else 'send'} is over, and ranks that do the same wait for ever",
            given=f"{other.call} at {line_of(*other.place)} was not waited for",
            expected="messages in both directions as one call, or a wait in between",
            hint="mesh.exchange(dims, sends=[...], recvs=[...]), or mesh.shift",
        )

    def _served_by(self, work: Work, message: PendingMessage) -> int:
        """The coord that a receive from any source was served by."""
        src = self.transport.source_of(work)
        self.recorder.messages.arrived(message, src)
        return src


def _carried(ends: Sequence[P2P]) -> list[P2P]:
    """The messages in dtypes that backends carry."""
    return [end if end.x.dtype in CARRIED else end._replace(x=as_bytes(end.x.view(-1))) for end in ends]


@final
class _Loopback:
    """Messages of a rank to itself: they stay in memory, in order, by tag."""

    # Nothing that leads back to the Messages: they and their group have to go with their last reference.
    def __init__(self, coord: int) -> None:
        self._coord = coord
        self._sent: dict[int, deque[Tensor]] = defaultdict(deque)
        self._asked: dict[int, deque[_Room]] = defaultdict(deque)

    def start(self, end: P2P, where: str) -> Work:
        """Keep a copy of what is sent, or put it where an earlier receive wants it; the reverse for a receive."""
        sent, asked = self._sent[end.tag], self._asked[end.tag]
        if end.direction == "send":
            if asked:
                asked.popleft().fill(end.x)
            else:
                sent.append(end.x.clone())
            return Done()
        room = _Room(end.x, asked, where, self._nothing(end.tag, where))
        if sent:
            room.fill(sent.popleft())
        else:
            asked.append(room)
        return room

    def oldest(self, tag: int, where: str) -> Tensor:
        """The first message with this tag that has not been received."""
        if not self._sent[tag]:
            raise self._nothing(tag, where)
        return self._sent[tag][0]

    def _nothing(self, tag: int, where: str) -> CommunicationError:
        return CommunicationError(
            f"{where}: this rank has sent itself nothing, and would wait for ever",
            given=f"src={self._coord}, own coord {self._coord}, tag {tag}",
            expected="an earlier send to itself with this tag",
            hint="send first, or irecv before the send",
        )


@final
@dataclass(eq=False)
class _Room:
    """Where a message to itself goes; a Work. asked: the rooms that are to be filled, in order. nothing: no send came."""

    out: Tensor
    asked: deque[_Room]
    where: str
    nothing: CommunicationError

    def fill(self, x: Tensor) -> None:
        """Receive `x`."""
        out = self.out
        if out.dtype != x.dtype or out.numel() != x.numel():
            raise ShapeError(
                f"{self.where}: a message to itself does not fit",
                given=f"sent {tuple(x.shape)}, {x.dtype}; out {tuple(out.shape)}, {out.dtype}",
                expected="the same dtype and number of elements at both ends",
                hint="out=torch.empty_like(x)",
            )
        into(out, x.view(out.shape))

    def wait(self, timeout: timedelta | None = None) -> bool:
        """True where the message was sent; it cannot be sent while this rank waits."""
        if not self.is_completed():
            self.asked.remove(self)
            raise self.nothing
        return True

    def is_completed(self) -> bool:
        """Whether the message was sent."""
        return self not in self.asked
