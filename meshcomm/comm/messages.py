"""Messages between coords of one dim: sends, receives, sets of them, and the ring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter as clock
from typing import Final, TypeAlias, final

import torch
from torch import Tensor

from meshcomm.comm import straight_messages
from meshcomm.comm.checks import (
    OWN_TAGS,
    check_envelopes,
    check_in_place,
    check_offset,
    check_peer,
    check_tag,
    check_tensor,
    check_written,
)
from meshcomm.comm.handle import Handle
from meshcomm.comm.message_log import Awaited, End, Message
from meshcomm.comm.recorder import Recorder
from meshcomm.comm.shapes import buffer_for, into, leaving, materialised
from meshcomm.comm.straight import Straight
from meshcomm.comm.straight_messages import Prepared
from meshcomm.errors import MeshcommError, ShapeError, UnsupportedOp
from meshcomm.transport import Transport, Work
from meshcomm.transport.profile import labelled, profiling
from meshcomm.transport.support import name_of
from meshcomm.transport.torch_private import written

Envelope: TypeAlias = tuple[Tensor, int] | tuple[Tensor, int, int]
Parcel: TypeAlias = tuple[Tensor, int, int]

_MOST_AXES: Final = 14

# A fixed order, the same on every rank of one torch version: a dtype travels as its index.
_DTYPES = sorted((d for d in vars(torch).values() if isinstance(d, torch.dtype)), key=str)
_DTYPES = [dtype for i, dtype in enumerate(_DTYPES) if dtype not in _DTYPES[:i]]


@final
class Messages:
    """Point to point along `name`; a communicator has one. Peers are coords."""

    __slots__ = ("_coord", "_kinds", "_name", "_recorder", "_size", "_straight", "_transport", "_who")

    def __init__(
        self, name: str, transport: Transport, who: str, recorder: Recorder, straight: Straight
    ) -> None:
        self._name = name
        self._transport = transport
        self._kinds = transport.kinds
        self._size = transport.size
        self._coord = transport.coord
        self._who = who
        self._recorder = recorder
        self._straight = straight

    def send(self, x: Tensor, dst: int, tag: int = 0, handshake: bool = False) -> None:
        """Send `x` to coord `dst`. See `Mesh.send`."""
        if (
            type(dst) is int
            and type(tag) is int
            and not handshake
            and (ready := self._straight.find(("send", dst, tag), x)) is not None
        ):
            straight_messages.at_once(self, ready, x)
            return
        if handshake:
            self.isend(x, dst, tag, True, at_once=True).wait()
            return
        check_peer(dst, self._coord, self._size, "dst", lambda: self.where("send"))
        check_tensor(x, self._kinds, lambda: self.where("send"))
        dense = leaving(x)
        message = self._begin("send", [("send", dst, tag, dense)])
        self._keep(message, [dense], [x])
        self._now(message, lambda: [self._transport.send(dense, dst, tag)], f"send to {dst}")

    def isend(
        self, x: Tensor, dst: int, tag: int = 0, handshake: bool = False, at_once: bool = False
    ) -> Handle[None]:
        """Start sending `x` to coord `dst`. See `Mesh.isend`; at_once: it is waited for at once."""
        if (
            type(dst) is int
            and type(tag) is int
            and not (handshake or at_once)
            and (ready := self._straight.find(("send", dst, tag), x)) is not None
        ):
            return straight_messages.later(self, ready, x, None)
        check_peer(dst, self._coord, self._size, "dst", lambda: self.where("send"))
        check_tensor(x, self._kinds, lambda: self.where("send"))
        dense = leaving(x)
        going = [_describe(dense, self.where("send")), dense] if handshake else [dense]
        message = self._begin("send", [("send", dst, tag, each) for each in going], nbytes=dense.nbytes)
        if not handshake:
            self._keep(message, [dense], [x])
        works = self._start(
            message,
            lambda: [self._transport.send(each, dst, tag) for each in going],
            f"send to {dst}",
            at_once,
        )
        # Holds the copies until the message has left.
        return Handle(works, self, f"send to {dst}", held=going)

    def irecv(
        self, out: Tensor, src: int, tag: int = 0, at_once: bool = False, header: bool = False
    ) -> Handle[Tensor]:
        """Start receiving into `out` from coord `src`. See `Mesh.irecv`.

        at_once: it is waited for at once. header: it counts with the receive that follows.
        """
        if (
            type(src) is int
            and type(tag) is int
            and not (at_once or header)
            and (ready := self._straight.find(("recv", src, tag), out)) is not None
        ):
            written([out])
            return straight_messages.later(self, ready, out, out, src)
        check_peer(src, self._coord, self._size, "src", lambda: self.where("recv"))
        self._door(out, "recv")
        dense = buffer_for(out)
        message = self._begin("recv", [("recv", src, tag, out)], header)
        self._keep(message, [dense], [out])
        works = self._start(
            message, lambda: [self._transport.recv(dense, src, tag)], f"recv from {src}", at_once
        )
        return Handle(works, self, f"recv from {src}", lambda: into(out, dense), source=src)

    def recv(self, out: Tensor | None, src: int, tag: int = 0) -> Tensor:
        """Receive from coord `src`; without `out`, a message that was sent with its handshake."""
        if (
            type(src) is int
            and type(tag) is int
            and out is not None
            and (ready := self._straight.find(("recv", src, tag), out)) is not None
        ):
            written([out])
            straight_messages.at_once(self, ready, out)
            return out
        if out is not None:
            check_peer(src, self._coord, self._size, "src", lambda: self.where("recv"))
            self._door(out, "recv")
            dense = buffer_for(out)
            message = self._begin("recv", [("recv", src, tag, out)])
            self._keep(message, [dense], [out])
            self._now(message, lambda: [self._transport.recv(dense, src, tag)], f"recv from {src}")
            return into(out, dense)
        header = self.irecv(_blank(self._transport.device), src, tag, at_once=True, header=True).wait()
        return self.irecv(_described(header), src, tag, at_once=True).wait()

    def recv_any(self, out: Tensor | None, tag: int = 0) -> tuple[Tensor, int]:
        """Receive from whoever sends first, and say who it was. See `Mesh.recv_any`."""
        if self._size == 1:
            raise UnsupportedOp(
                f"{self.where('recv_any')}: there is nobody to receive from",
                given="a dim of size 1",
                expected="a dim with another rank",
                hint="guard the call by mesh.size(dims) > 1",
            )
        if not self._transport.any_source:
            raise UnsupportedOp(
                f"{self.where('recv_any')}: {self._transport.name} cannot receive from any source",
                given=f"backend {self._transport.name}",
                expected="a Gloo dim",
                hint="name the source: mesh.recv(dims, out, src)",
            )
        first = _blank(self._transport.device) if out is None else out
        self._door(first, "recv_any")
        dense = buffer_for(first)
        message = self._begin("recv_any", [("recv", None, tag, first)], out is None)
        started: list[Work] = []

        def start() -> list[Work]:
            started.append(self._transport.recv_any(dense, tag))
            return started

        Handle(self._start(message, start, "recv_any", True), self, "recv_any").wait()
        src = self._transport.source_of(started[0])
        self._recorder.messages.arrived(message, src, tag)
        if out is not None:
            return into(out, dense), src
        return self.irecv(_described(dense), src, tag, at_once=True).wait(), src

    def exchange(
        self,
        sends: Sequence[Envelope] = (),
        recvs: Sequence[Envelope] = (),
        call: str = "exchange",
        header: bool = False,
    ) -> list[Tensor]:
        """Send and receive a set of messages at once. See `Mesh.exchange`; `call` names it in errors.

        header: it counts with the call that follows.
        """
        if not header and (ends := self._ready(sends, recvs)) is not None:
            came = [x for _, x in ends[1]]
            written(came)
            straight_messages.all_at_once(self, self._recorder, self._name, call, *ends)
            return came
        going, coming, message = self._prepared(sends, recvs, call, header)
        if message is not None:
            self._now(message, lambda: self._transport.exchange(going, coming), call)
        return [into(each[0], dense) for each, (dense, _, _) in zip(recvs, coming, strict=True)]

    def iexchange(
        self, sends: Sequence[Envelope] = (), recvs: Sequence[Envelope] = ()
    ) -> Handle[list[Tensor]]:
        """`exchange`, started only."""
        if (ends := self._ready(sends, recvs)) is not None:
            came = [x for _, x in ends[1]]
            written(came)
            works = straight_messages.all_later(self, self._recorder, self._name, "exchange", *ends)
            return Handle(works, self, "exchange", result=came, held=ends)
        going, coming, message = self._prepared(sends, recvs, "exchange", False)
        works = []
        if message is not None:
            works = self._start(message, lambda: self._transport.exchange(going, coming), "exchange", False)

        def finish() -> list[Tensor]:
            return [into(each[0], dense) for each, (dense, _, _) in zip(recvs, coming, strict=True)]

        return Handle(works, self, "exchange", finish, held=going)

    def _ready(
        self, sends: Sequence[Envelope], recvs: Sequence[Envelope]
    ) -> tuple[list[Prepared], list[Prepared]] | None:
        """What leaves and where what comes is put, with what each is prepared by; None where one is not."""
        if self._transport.together or not (sends or recvs):
            return None
        found: tuple[list[Prepared], list[Prepared]] = ([], [])
        for direction, ends, kept in (("send", sends, found[0]), ("recv", recvs, found[1])):
            for each in ends if type(ends) is list or type(ends) is tuple else (None,):
                # What is no message is refused by name where nothing is prepared.
                if (type(each) is not tuple and type(each) is not list) or not 2 <= len(each) <= 3:
                    return None
                x, peer, *rest = each
                tag = rest[0] if rest else 0
                if type(peer) is not int or type(tag) is not int:
                    return None
                ready = self._straight.find((direction, peer, tag), x)
                if ready is None:
                    return None
                kept.append((ready, x))
        return found

    def _prepared(
        self, sends: Sequence[Envelope], recvs: Sequence[Envelope], call: str, header: bool
    ) -> tuple[list[Parcel], list[Parcel], Message | None]:
        """What leaves, where what comes is put, both dense, and the call; None where there is nothing."""
        check_envelopes(sends, "sends", lambda: self.where(call))
        check_envelopes(recvs, "recvs", lambda: self.where(call))
        for x, dst, *_tag in sends:
            check_tensor(x, self._kinds, lambda: self.where(call))
            check_peer(dst, self._coord, self._size, "dst", lambda: self.where(call))
        for out, src, *_tag in recvs:
            check_peer(src, self._coord, self._size, "src", lambda: self.where(call))
            self._door(out, call)
        going = [(leaving(x), dst, tag[0] if tag else 0) for x, dst, *tag in sends]
        coming = [(buffer_for(out), src, tag[0] if tag else 0) for out, src, *tag in recvs]
        if not going and not coming:
            return going, coming, None
        ends: list[End] = [("send", dst, tag, x) for x, dst, tag in going]
        ends += [("recv", src, tag, out) for out, src, tag in coming]
        message = self._begin(call, ends, header)
        given = [each[0] for each in (*sends, *recvs)]
        self._keep(message, [x for x, _, _ in (*going, *coming)], given)
        return going, coming, message

    def shift(self, x: Tensor, offset: int = 1, wrap: bool = True, handshake: bool = False) -> Tensor | None:
        """Send `x` `offset` coords further, return what came from as far behind. See `Mesh.shift`."""
        check_offset(offset, lambda: self.where("shift"))
        target, source = self._coord + offset, self._coord - offset
        if wrap:
            target, source = target % self._size, source % self._size
        goes, comes = 0 <= target < self._size, 0 <= source < self._size
        if (
            goes
            and comes
            and type(offset) is int
            and not handshake
            and not self._transport.together
            and (sent := self._straight.find(("send", target, 0), x)) is not None
        ):
            came = torch.empty_like(x)
            if (room := self._straight.find(("recv", source, 0), came)) is not None:
                name, recorder = self._name, self._recorder
                straight_messages.all_at_once(self, recorder, name, "shift", [(sent, x)], [(room, came)])
                return came
        self._door(x, "shift")
        if target == self._coord:
            return x.detach().clone()
        buffer = torch.empty_like(x, memory_format=torch.contiguous_format)
        if handshake:
            header = _describe(materialised(x.detach()), self.where("shift"))
            blank = _blank(self._transport.device)
            self.exchange(
                [(header, target)] if goes else [], [(blank, source)] if comes else [], "shift", True
            )
            buffer = _described(blank) if comes else buffer
        received = self.exchange([(x, target)] if goes else [], [(buffer, source)] if comes else [], "shift")
        return received[0] if received else None

    def announce(self, x: Tensor | None, src: int, problem: MeshcommError | None = None) -> Tensor:
        """Tell every rank shape and dtype of coord src's `x`: new memory like it, everywhere.

        problem: why coord src has no `x`, which the others are told of and src raises.
        """
        header = _blank(self._transport.device)
        try:
            if x is not None:
                header = _describe(x, self.where("scatter"))
        except ShapeError as error:
            problem = error
        if problem is not None:
            header[0] = -1
        try:
            work = self._transport.broadcast(header, src, True)
            if work is not None:
                work.wait()
        except RuntimeError as error:
            # Part of a collective, whose call the recorder has.
            raise self.failed("scatter", error) from error
        if problem is not None:
            raise problem
        if header[0] < 0:
            raise ShapeError(
                f"{self.where('scatter')}: coord {src} has nothing that can be scattered",
                given=f"what coord {src}, the source, was called with",
                expected=f"a tensor there whose axis can be cut into {self._size}",
                hint=f"look at the error of coord {src}",
            )
        return _described(header)

    def _keep(self, message: Message, dense: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        """Make messages like these, of which `dense` is what moves for `given`, straight away from now on."""
        log = self._recorder.messages
        for (lane, _), moves, x in zip(message.parts, dense, given, strict=True):
            # The library's own tags stay refused where a user gives them.
            if moves is x and lane.tag < OWN_TAGS and log.settled(lane):
                call = self._transport.message_call(lane.direction, x.dtype)
                found = None if call is None else (call, lane)
                self._straight.keep((lane.direction, lane.peer, lane.tag), x, found)

    def _door(self, x: Tensor, call: str) -> None:
        check_tensor(x, self._kinds, lambda: self.where(call))
        check_in_place(x, lambda: self.where(call), "shift")
        if call != "shift":  # whose x only leaves
            check_written(x, lambda: self.where(call))

    def where(self, call: str) -> str:
        return f'{call} along "{self._name}" on {self._who}'

    def _begin(
        self, call: str, ends: Sequence[End], header: bool = False, nbytes: int | None = None
    ) -> Message:
        for end in ends:
            # The library's own calls, on a line of its own, may use the tags above.
            if type(end[2]) is not int or end[2] < 0 or (end[2] >= OWN_TAGS and not self._recorder.inside):
                check_tag(end[2], lambda: self.where(call))
        calls, nbytes = (0, 0) if header else (1, nbytes)
        try:
            return self._recorder.messages.begin(self._name, call, ends, calls=calls, nbytes=nbytes)
        except RuntimeError as error:  # the store, where messages are still compared
            raise self.failed(call, error) from error

    def _now(self, message: Message, start: Callable[[], Sequence[Work]], call: str) -> None:
        """Start the messages of a call and wait for them."""
        log = self._recorder.messages
        log.waiting = message
        try:
            works = self._started(message, start)
            # Messages of a collective that is done step by step are a part of it.
            later = log.left(message, None if self._recorder.inside else message.call)
            later.at_once()
            since = clock()
            try:
                for work in works:
                    work.wait()
            finally:
                later.waited(since)
        except RuntimeError as error:
            raise self.failed(call, error) from error
        log.waiting = None

    def _started(self, message: Message, start: Callable[[], Sequence[Work]]) -> Sequence[Work]:
        if not profiling():
            return start()
        with labelled(f"meshcomm::{message.call} {self._name}{self._recorder.plan}"):
            return start()

    def _start(
        self, message: Message, start: Callable[[], Sequence[Work]], call: str, at_once: bool
    ) -> list[Awaited]:
        log = self._recorder.messages
        # A backend may block, or fail, before there is anything to wait for.
        log.waiting = message
        try:
            works = self._started(message, start)
        except RuntimeError as error:
            raise self.failed(call, error) from error
        log.waiting = None
        # Messages of a collective that is done step by step are a part of it.
        later = log.left(message, None if self._recorder.inside else message.call)
        if at_once:
            later.at_once()
        return [Awaited(work, log, message, later) for work in works]

    def failed(self, call: str, error: BaseException) -> MeshcommError:
        found = self._recorder.inquire(self._recorder, self.where(call), error)
        self._recorder.messages.waiting = None
        return found


def _blank(device: torch.device) -> Tensor:
    return torch.zeros(_MOST_AXES + 2, dtype=torch.int64, device=device)


def _describe(x: Tensor, where: str) -> Tensor:
    """dtype, number of axes, sizes: what a receiver needs to make room."""
    if x.ndim > _MOST_AXES:
        raise ShapeError(
            f"{where}: a handshake cannot tell {x.ndim} axes",
            given=f"x of shape {tuple(x.shape)}, {name_of(x.dtype)}",
            expected=f"at most {_MOST_AXES} axes",
            hint="x.flatten()",
        )
    header = _blank(x.device)
    facts = [_DTYPES.index(x.dtype), x.ndim, *x.shape]
    header[: len(facts)] = torch.tensor(facts, dtype=torch.int64, device="cpu")
    return header


def _described(header: Tensor) -> Tensor:
    index, ndim, *sizes = header.tolist()
    return torch.empty(sizes[:ndim], dtype=_DTYPES[index], device=header.device)
