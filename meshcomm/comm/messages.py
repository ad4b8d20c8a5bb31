"""Messages between coords of one dim: sends, receives, sets of them, and the ring."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from meshcomm.comm.checks import (
    OWN_TAGS,
    check_coord,
    check_envelopes,
    check_in_place,
    check_offset,
    check_tag,
    check_tensor,
    check_written,
)
from meshcomm.comm.fast_path import usable
from meshcomm.comm.flight_recorder import FlightRecorder
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
    materialised,
)
from meshcomm.errors import CommunicationError, MeshcommError, ShapeError, UnsupportedOp
from meshcomm.transport import Transport
from meshcomm.transport.base import P2P, Direction
from meshcomm.transport.profile import labelled, profiling
from meshcomm.transport.torch_private import written

Envelope: TypeAlias = tuple[Tensor, int] | tuple[Tensor, int, int]

# So many kinds of messages are made without asking again; with a new tag for each there would be no end.
_MOST_FAST = 4096


@final
class Messages:
    """Point to point along `name`; a communicator has one. Peers are coords.

    Every call, of one message or many, blocking or not, goes through `_issue`. What was checked before, with the
    same peer, tag and dtype, is not checked again where the tensor is `usable` as it is.
    """

    __slots__ = ("_fast", "_kinds", "_name", "_own", "_recorder", "_size", "_transport", "_who", "coord")

    def __init__(self, name: str, transport: Transport, who: str, recorder: FlightRecorder) -> None:
        self._name = name
        self._transport = transport
        self._kinds = transport.kinds
        self._size = transport.size
        self.coord = transport.coord
        self._who = who
        self._recorder = recorder
        self._fast: dict[tuple[object, ...], torch.device] = {}
        self._own = _ToItself()
        recorder.quick.append(self._fast)

    def send(self, x: Tensor, dst: int, tag: int = 0, handshake: bool = False) -> None:
        """Send `x` to coord `dst`. See `Mesh.send`."""
        if handshake or not self._is_fast("send", x, dst, tag):
            self._send(x, dst, tag, handshake, False)
        else:
            self._issue("send", [P2P("send", x, dst, tag)])

    def isend(self, x: Tensor, dst: int, tag: int = 0, handshake: bool = False) -> Handle[None]:
        """Start sending `x` to coord `dst`. See `Mesh.isend`."""
        if handshake or not self._is_fast("send", x, dst, tag):
            found: Handle[None] = self._send(x, dst, tag, handshake, True)
            return found
        return self._start("send", f"send to {dst}", [P2P("send", x, dst, tag)])

    def _send(self, x: Tensor, dst: int, tag: int, handshake: bool, async_op: bool) -> Any:
        check_coord(dst, self._size, "dst", lambda: self.where("send"))
        check_tensor(x, self._kinds, lambda: self.where("send"))
        self._check_tag(tag, "send")
        dense = leaving(x)
        call = f"send to {dst}"
        if dst == self.coord:
            self._own.send(self, dense, tag)
            return Handle((), self, call) if async_op else None
        going = [P2P("send", dense, dst, tag)]
        if handshake:
            going.insert(0, P2P("send", header_of(dense, self.where("send")), dst, tag))
        else:
            self._keep("send", dense, x, dst, tag)
        if async_op:
            # Holds the copies until the message has left.
            return self._start("send", call, going, nbytes=dense.nbytes)
        return self._issue("send", going, nbytes=dense.nbytes)

    def recv(self, out: Tensor | None, src: int, tag: int = 0) -> Tensor:
        """Receive from coord `src`; without `out`, a message that was sent with its handshake."""
        if out is not None and self._is_fast("recv", out, src, tag):
            written([out])
            self._issue("recv", [P2P("recv", out, src, tag)])
            return out
        check_coord(src, self._size, "src", lambda: self.where("recv"))
        self._check_tag(tag, "recv")
        if out is not None:
            self._door(out, "recv")
        if src == self.coord:
            return self._own.recv(self, out, tag)
        if out is None:
            header = blank_header(self._transport.device)
            self._issue("recv", [P2P("recv", header, src, tag)], header=True)
            out = described_by(header)
        dense = buffer_for(out)
        self._keep("recv", dense, out, src, tag)
        self._issue("recv", [P2P("recv", dense, src, tag)])
        return into(out, dense)

    def irecv(self, out: Tensor, src: int | None, tag: int = 0) -> Handle[Tensor]:
        """Start receiving into `out` from coord `src`; None: from any. See `Mesh.irecv`."""
        call = "recv from any coord" if src is None else f"recv from {src}"
        if self._is_fast("recv", out, src, tag):
            written([out])
            return self._start("recv", call, [P2P("recv", out, src, tag)], result=out, source=src)
        if src is None:
            self._check_any("irecv")
        else:
            check_coord(src, self._size, "src", lambda: self.where("recv"))
        self._check_tag(tag, "recv")
        self._door(out, "recv")
        if src == self.coord:
            return self._own.irecv(self, out, tag, call)
        dense = buffer_for(out)
        if src is not None:
            self._keep("recv", dense, out, src, tag)
        return self._start(
            "recv", call, [P2P("recv", dense, src, tag)], finish=lambda: into(out, dense), source=src
        )

    def recv_any(self, out: Tensor | None, tag: int = 0) -> tuple[Tensor, int]:
        """Receive from whoever sends first, and say who it was. See `Mesh.recv_any`."""
        self._check_any("recv_any")
        self._check_tag(tag, "recv_any")
        first = blank_header(self._transport.device) if out is None else out
        self._door(first, "recv_any")
        dense = buffer_for(first)
        handle: Handle[None] = self._start(
            "recv_any", "recv_any", [P2P("recv", dense, None, tag)], header=out is None
        )
        handle.at_once()
        handle.wait()
        src = handle.source
        if out is not None:
            return into(out, dense), src
        return self.recv(described_by(dense), src, tag), src

    def exchange(
        self, sends: Sequence[Envelope] = (), recvs: Sequence[Envelope] = (), call: str = "exchange"
    ) -> list[Tensor]:
        """Send and receive a set of messages at once. See `Mesh.exchange`; `call` names it in errors."""
        batch, finish = self._batch(sends, recvs, call)
        if batch:
            self._issue(call, batch)
        return finish()

    def iexchange(
        self, sends: Sequence[Envelope] = (), recvs: Sequence[Envelope] = ()
    ) -> Handle[list[Tensor]]:
        """`exchange`, started only."""
        batch, finish = self._batch(sends, recvs, "exchange")
        if not batch:
            return Handle((), self, "exchange", finish)
        return self._start("exchange", "exchange", batch, finish=finish)

    def _batch(
        self, sends: Sequence[Envelope], recvs: Sequence[Envelope], call: str
    ) -> tuple[list[P2P], Callable[[], list[Tensor]]]:
        """The messages as they travel, receives first, and what gives the received tensors afterwards."""
        check_envelopes(sends, "sends", lambda: self.where(call))
        check_envelopes(recvs, "recvs", lambda: self.where(call))
        going: list[P2P] = []
        coming: list[P2P] = []
        both: tuple[tuple[Direction, Sequence[Envelope], list[P2P]], ...] = (
            ("recv", recvs, coming),
            ("send", sends, going),
        )
        for direction, listed, batch in both:
            for x, peer, *rest in listed:
                tag = rest[0] if rest else 0
                if self._is_fast(direction, x, peer, tag):
                    batch.append(P2P(direction, x, peer, tag))
                    continue
                check_tensor(x, self._kinds, lambda: self.where(call))
                check_coord(
                    peer, self._size, "dst" if direction == "send" else "src", lambda: self.where(call)
                )
                self._check_tag(tag, call)
                if direction == "recv":
                    self._door(x, call)
                dense = leaving(x) if direction == "send" else buffer_for(x)
                if peer != self.coord:
                    self._keep(direction, dense, x, peer, tag)
                batch.append(P2P(direction, dense, peer, tag))

        def finish() -> list[Tensor]:
            return [into(each[0], message.x) for each, message in zip(recvs, coming, strict=True)]

        for message in (*going, *coming):
            if message.peer == self.coord:
                if message.direction == "send":
                    self._own.send(self, message.x, message.tag)
                else:
                    self._own.recv(self, message.x, message.tag)
        return [message for message in (*coming, *going) if message.peer != self.coord], finish

    def shift(self, x: Tensor, offset: int = 1, wrap: bool = True, handshake: bool = False) -> Tensor | None:
        """Send `x` `offset` coords further, return what came from as far behind. See `Mesh.shift`."""
        check_offset(offset, lambda: self.where("shift"))
        target, source = self.coord + offset, self.coord - offset
        if wrap:
            target, source = target % self._size, source % self._size
        goes, comes = 0 <= target < self._size, 0 <= source < self._size
        if not goes or handshake or not self._is_fast("send", x, target, 0):
            self._door(x, "shift")
        if target == self.coord:
            return x.detach().clone()
        buffer = torch.empty_like(x, memory_format=torch.contiguous_format)
        if handshake:
            header = header_of(materialised(x.detach()), self.where("shift"))
            blank = blank_header(self._transport.device)
            first = [P2P("recv", blank, source, 0)] if comes else []
            if goes:
                first.append(P2P("send", header, target, 0))
            self._issue("shift", first, header=True)
            buffer = described_by(blank) if comes else buffer
        received = self.exchange([(x, target)] if goes else [], [(buffer, source)] if comes else [], "shift")
        return received[0] if received else None

    def where(self, call: str) -> str:
        """What opens an error about a call."""
        return f'{call} along "{self._name}" on {self._who}'

    def failed(self, call: str, error: BaseException) -> MeshcommError:
        """The error for a call that the backend gave up on."""
        return self._recorder.inquire(self._recorder, self.where(call), error)

    # -- inside ---------------------------------------------------------------------------------

    def _is_fast(self, direction: Direction, x: Any, peer: object, tag: object) -> bool:
        """Whether a message like this was checked before, and `x` travels as it is."""
        try:
            device = self._fast.get((direction, peer, type(peer), tag, type(tag), x.dtype))
            return device is not None and usable(x, device)
        except (AttributeError, TypeError, RuntimeError):
            return False

    def _keep(self, direction: Direction, dense: Tensor, x: Tensor, peer: int, tag: int) -> None:
        """Do not check messages like this one again, of which `dense` is what moves for `x`."""
        # The library's own tags stay refused where a user gives them.
        if (
            dense is x
            and tag < OWN_TAGS
            and x.dtype in CARRIED
            and len(self._fast) < _MOST_FAST
            and self._recorder.messages.settled(direction, peer)
        ):
            self._fast[direction, peer, int, tag, int, x.dtype] = x.device

    def _door(self, x: Tensor, call: str) -> None:
        check_tensor(x, self._kinds, lambda: self.where(call))
        check_in_place(x, lambda: self.where(call), "shift")
        if call != "shift":  # whose x only leaves
            check_written(x, lambda: self.where(call))

    def _check_tag(self, tag: int, call: str) -> None:
        # The library's own calls, on a line of its own, may use the tags above.
        if type(tag) is not int or tag < 0 or (tag >= OWN_TAGS and not self._recorder.inside):
            check_tag(tag, lambda: self.where(call))

    def _check_any(self, call: str) -> None:
        if self._size == 1:
            raise UnsupportedOp(
                f"{self.where(call)}: there is nobody to receive from",
                given="a dim of size 1",
                expected="a dim with another rank",
                hint="guard the call by mesh.size(dims) > 1",
            )
        if not self._transport.any_source:
            raise UnsupportedOp(
                f"{self.where(call)}: {self._transport.name} cannot receive from any source",
                given=f"backend {self._transport.name}",
                expected="a Gloo dim",
                hint="name the source: mesh.recv(dims, out, src=...)",
            )

    def _issue(self, call: str, batch: list[P2P], header: bool = False, nbytes: int | None = None) -> None:
        """Start messages and wait for them. header: they count with the call that follows."""
        recorder, log = self._recorder, self._recorder.messages
        # Messages of a collective that is done step by step are a part of it.
        counted = recorder.under_way is None
        message = None
        try:
            message = log.begin(self._name, call, batch, 0 if header else 1, 0 if header else nbytes)
            log.confirm(message)
            if profiling():
                with labelled(f"meshcomm::{call} {self._name}{recorder.plan}"):
                    works = self._transport.start_p2p(_wired(batch))
            else:
                works = self._transport.start_p2p(_wired(batch))
            for work in works:
                work.wait()
        except RuntimeError as error:  # the backend's; or of the store, where messages are still compared
            raise self.failed(_told(call, batch), error) from error
        finally:
            if message is not None:
                log.end(message, counted)

    def _start(
        self,
        call: str,
        told: str,
        batch: list[P2P],
        *,
        finish: Callable[[], Any] | None = None,
        result: Any = None,
        source: int | None = None,
        header: bool = False,
        nbytes: int | None = None,
    ) -> Handle[Any]:
        """Start messages; the handle's `wait` gives the result."""
        recorder, log = self._recorder, self._recorder.messages
        counted = recorder.under_way is None
        try:
            message = log.begin(self._name, call, batch, 0 if header else 1, 0 if header else nbytes)
            works = self._transport.start_p2p(_wired(batch))
        except RuntimeError as error:
            raise self.failed(told, error) from error
        finally:
            log.waiting = None
        pending = log.later(message, counted)
        confirm = (lambda: log.confirm(message)) if message.unanswered else None

        def find() -> int:
            src = self._transport.source_of(works[0])
            log.arrived(message, src, batch[0].tag)
            return src

        return Handle(
            works,
            self,
            told,
            finish,
            result=result,
            pending=pending,
            source=find if batch[0].peer is None else source,
            confirm=confirm,
            held=batch,
        )


def _told(call: str, batch: Sequence[P2P]) -> str:
    """What an error calls a call: with its peer where it has one."""
    if len(batch) != 1 or call not in ("send", "recv"):
        return call
    return f"{call} {'to' if call == 'send' else 'from'} {batch[0].peer}"


def _wired(batch: list[P2P]) -> list[P2P]:
    """The same messages, in dtypes that every backend carries."""
    if all(message.x.dtype in CARRIED for message in batch):
        return batch
    return [
        message if message.x.dtype in CARRIED else message._replace(x=as_bytes(message.x.view(-1)))
        for message in batch
    ]


@final
class _ToItself:
    """Messages of a rank to itself: they stay in memory, in order, by tag."""

    # Nothing that leads back to the Messages: they and their group have to go with their last reference.
    def __init__(self) -> None:
        self._sent: dict[int, deque[Tensor]] = defaultdict(deque)
        self._asked: dict[int, deque[_Room]] = defaultdict(deque)

    def send(self, by: Messages, x: Tensor, tag: int) -> None:
        """Keep a copy of `x`, or put it where an earlier irecv wants it."""
        if self._asked[tag]:
            self._fill(by, self._asked[tag].popleft(), x)
        else:
            self._sent[tag].append(x.clone())

    def recv(self, by: Messages, out: Tensor | None, tag: int) -> Tensor:
        """The oldest message with this tag, which must have been sent."""
        if not self._sent[tag]:
            raise CommunicationError(
                f"{by.where('recv')}: this rank has sent itself nothing, and would wait for ever",
                given=f"src={by.coord}, own coord {by.coord}, tag {tag}",
                expected="an earlier send to itself with this tag",
                hint="send first, or irecv before the send",
            )
        x = self._sent[tag].popleft()
        if out is None:
            return x
        room = _Room(out)
        self._fill(by, room, x)
        return out

    def irecv(self, by: Messages, out: Tensor, tag: int, call: str) -> Handle[Tensor]:
        """`out` with the oldest message, also with one that is sent before the wait."""
        room = _Room(out)
        if self._sent[tag]:
            self._fill(by, room, self._sent[tag].popleft())
        else:
            self._asked[tag].append(room)
        return Handle((room,), by, call, result=out, source=by.coord)

    def _fill(self, by: Messages, room: _Room, x: Tensor) -> None:
        out = room.out
        if out.dtype != x.dtype or out.numel() != x.numel():
            raise ShapeError(
                f"{by.where('recv')}: a message to itself does not fit",
                given=f"sent {tuple(x.shape)}, {x.dtype}; out {tuple(out.shape)}, {out.dtype}",
                expected="the same dtype and number of elements at both ends",
                hint="out=torch.empty_like(x)",
            )
        into(out, x.view(out.shape))
        room.filled = True


@final
class _Room:
    """Where a message to itself goes; a Work for its handle."""

    def __init__(self, out: Tensor) -> None:
        self.out = out
        self.filled = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """True where the message was sent; it cannot be sent while this rank waits."""
        if not self.filled:
            raise RuntimeError("this rank waits for a message that it has not sent itself")
        return True

    def is_completed(self) -> bool:
        """Whether the message was sent."""
        return self.filled
