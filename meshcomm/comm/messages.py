"""Messages between coords of one dim: sends, receives, sets of them, and the ring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias, TypeVar, final

import torch
from torch import Tensor

from meshcomm.comm.checks import check_in_place, check_peer, check_tensor
from meshcomm.comm.handle import Handle, wait_all
from meshcomm.comm.message_log import Awaited, End, Message
from meshcomm.comm.recorder import Recorder
from meshcomm.comm.shapes import buffer_for, into, materialised
from meshcomm.errors import CommunicationError, ShapeError, UnsupportedOp
from meshcomm.transport import Transport, Work
from meshcomm.transport.profile import labelled
from meshcomm.transport.support import name_of

T = TypeVar("T")
Envelope: TypeAlias = tuple[Tensor, int] | tuple[Tensor, int, int]

_MOST_AXES: Final = 14

# A fixed order, the same on every rank of one torch version: a dtype travels as its index.
_DTYPES = sorted((d for d in vars(torch).values() if isinstance(d, torch.dtype)), key=str)
_DTYPES = [dtype for i, dtype in enumerate(_DTYPES) if dtype not in _DTYPES[:i]]


@final
class Messages:
    """Point to point along `name`; a communicator has one. Peers are coords."""

    __slots__ = ("_coord", "_name", "_recorder", "_size", "_transport", "_who")

    def __init__(self, name: str, transport: Transport, who: str, recorder: Recorder) -> None:
        self._name = name
        self._transport = transport
        self._size = transport.size
        self._coord = transport.coord
        self._who = who
        self._recorder = recorder

    def isend(self, x: Tensor, dst: int, tag: int = 0, handshake: bool = False) -> Handle[None]:
        """Start sending `x` to coord `dst`. See `Mesh.isend`."""
        check_peer(dst, self._coord, self._size, "dst", lambda: self._where("send"))
        check_tensor(x, self._transport.kinds, lambda: self._where("send"))
        dense = materialised(x.detach())
        leaving = [_describe(dense, self._where("send")), dense] if handshake else [dense]
        message = self._begin("send", [("send", dst, tag, each) for each in leaving])
        works = self._start(
            message, lambda: [self._transport.send(each, dst, tag) for each in leaving], f"send to {dst}"
        )

        def sent(_: object = leaving) -> None:  # holds the copies until the message has left
            return None

        return self._handle(works, sent, f"send to {dst}")

    def irecv(self, out: Tensor, src: int, tag: int = 0) -> Handle[Tensor]:
        """Start receiving into `out` from coord `src`. See `Mesh.irecv`."""
        check_peer(src, self._coord, self._size, "src", lambda: self._where("recv"))
        self._door(out, "recv")
        dense = buffer_for(out)
        message = self._begin("recv", [("recv", src, tag, out)])
        works = self._start(message, lambda: [self._transport.recv(dense, src, tag)], f"recv from {src}")
        return self._handle(works, lambda: into(out, dense), f"recv from {src}", lambda: src)

    def recv(self, out: Tensor | None, src: int, tag: int = 0) -> Tensor:
        """Receive from coord `src`; without `out`, a message that was sent with its handshake."""
        if out is not None:
            return self.irecv(out, src, tag).wait()
        header = self.irecv(_blank(self._transport.device), src, tag).wait()
        return self.irecv(_described(header), src, tag).wait()

    def recv_any(self, out: Tensor | None, tag: int = 0) -> tuple[Tensor, int]:
        """Receive from whoever sends first, and say who it was. See `Mesh.recv_any`."""
        if self._size == 1:
            raise UnsupportedOp(
                f"{self._where('recv_any')}: there is nobody to receive from",
                given="a dim of size 1",
                expected="a dim with another rank",
                hint="guard the call by mesh.size(dims) > 1",
            )
        if not self._transport.any_source:
            raise UnsupportedOp(
                f"{self._where('recv_any')}: {self._transport.name} cannot receive from any source",
                given=f"backend {self._transport.name}",
                expected="a Gloo dim",
                hint="name the source: mesh.recv(dims, out, src)",
            )
        first = _blank(self._transport.device) if out is None else out
        self._door(first, "recv_any")
        dense = buffer_for(first)
        message = self._begin("recv_any", [("recv", None, tag, first)])
        started: list[Work] = []

        def start() -> list[Work]:
            started.append(self._transport.recv_any(dense, tag))
            return started

        self._wait(self._start(message, start, "recv_any"), "recv_any")
        src = self._transport.source_of(started[0])
        self._recorder.messages.arrived(src, tag)
        if out is not None:
            return into(out, dense), src
        return self.irecv(_described(dense), src, tag).wait(), src

    def exchange(
        self, sends: Sequence[Envelope] = (), recvs: Sequence[Envelope] = (), call: str = "exchange"
    ) -> list[Tensor]:
        """Send and receive a set of messages at once. See `Mesh.exchange`; `call` names it in errors."""
        works, finish = self._exchange(sends, recvs, call)
        self._wait(works, call)
        return finish()

    def iexchange(
        self, sends: Sequence[Envelope] = (), recvs: Sequence[Envelope] = ()
    ) -> Handle[list[Tensor]]:
        """`exchange`, started only."""
        works, finish = self._exchange(sends, recvs, "exchange")
        return self._handle(works, finish, "exchange")

    def _exchange(
        self, sends: Sequence[Envelope], recvs: Sequence[Envelope], call: str
    ) -> tuple[list[Awaited], Callable[[], list[Tensor]]]:
        for x, dst, *_tag in sends:
            check_tensor(x, self._transport.kinds, lambda: self._where(call))
            check_peer(dst, self._coord, self._size, "dst", lambda: self._where(call))
        for out, src, *_tag in recvs:
            check_peer(src, self._coord, self._size, "src", lambda: self._where(call))
            self._door(out, call)
        leaving = [(materialised(x.detach()), dst, tag[0] if tag else 0) for x, dst, *tag in sends]
        coming = [(buffer_for(out), src, tag[0] if tag else 0) for out, src, *tag in recvs]
        works: list[Awaited] = []
        if leaving or coming:
            ends: list[End] = [("send", dst, tag, x) for x, dst, tag in leaving]
            ends += [("recv", src, tag, out) for out, src, tag in coming]
            message = self._begin(call, ends)
            works = self._start(message, lambda: self._transport.exchange(leaving, coming), call)

        def finish(_: object = leaving) -> list[Tensor]:  # holds the copies until the messages have left
            return [into(each[0], dense) for each, (dense, _, _) in zip(recvs, coming, strict=True)]

        return works, finish

    def shift(self, x: Tensor, offset: int = 1, wrap: bool = True, handshake: bool = False) -> Tensor | None:
        """Send `x` `offset` coords further, return what came from as far behind. See `Mesh.shift`."""
        self._door(x, "shift")
        target, source = self._coord + offset, self._coord - offset
        if wrap:
            target, source = target % self._size, source % self._size
        if target == self._coord:
            return x.detach().clone()
        goes, comes = 0 <= target < self._size, 0 <= source < self._size
        buffer = torch.empty_like(x, memory_format=torch.contiguous_format)
        if handshake:
            header = _describe(materialised(x.detach()), self._where("shift"))
            blank = _blank(self._transport.device)
            self.exchange([(header, target)] if goes else [], [(blank, source)] if comes else [], "shift")
            buffer = _described(blank) if comes else buffer
        received = self.exchange([(x, target)] if goes else [], [(buffer, source)] if comes else [], "shift")
        return received[0] if received else None

    def announce(self, x: Tensor | None, src: int) -> Tensor:
        """Tell every rank shape and dtype of coord src's `x`: new memory like it, everywhere."""
        header = _blank(self._transport.device)
        if x is not None:
            header = _describe(x, self._where("scatter"))
        try:
            work = self._transport.broadcast(header, src, True)
            if work is not None:
                work.wait()
        except RuntimeError as error:
            # Part of a collective, whose call the recorder has.
            raise self._failed("scatter", error) from error
        return _described(header)

    def _door(self, x: Tensor, call: str) -> None:
        check_tensor(x, self._transport.kinds, lambda: self._where(call))
        check_in_place(x, lambda: self._where(call), "shift")

    def _where(self, call: str) -> str:
        return f'{call} along "{self._name}" on {self._who}'

    def _begin(self, call: str, ends: Sequence[End]) -> Message:
        try:
            return self._recorder.messages.begin(self._name, call, ends)
        except RuntimeError as error:  # the store, where messages are still compared
            raise self._failed(call, error) from error

    def _start(self, message: Message, start: Callable[[], Sequence[Work]], call: str) -> list[Awaited]:
        log = self._recorder.messages
        # A backend may block, or fail, before there is anything to wait for.
        log.waiting = message
        try:
            with labelled(f"meshcomm::{message.call} {self._name}"):
                works = start()
        except RuntimeError as error:
            raise self._failed(call, error) from error
        log.waiting = None
        return [Awaited(work, log, message) for work in works]

    def _handle(
        self,
        works: list[Awaited],
        finish: Callable[[], T],
        call: str,
        source: Callable[[], int] | None = None,
    ) -> Handle[T]:
        return Handle(
            works, finish, lambda: self._where(call), source, lambda error: self._failed(call, error)
        )

    def _wait(self, works: list[Awaited], call: str) -> None:
        wait_all(works, lambda: self._where(call), None, lambda error: self._failed(call, error))

    def _failed(self, call: str, error: BaseException) -> CommunicationError:
        found = self._recorder.inquire(self._recorder, self._where(call), error)
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
    header[: len(facts)] = torch.tensor(facts, dtype=torch.int64)
    return header


def _described(header: Tensor) -> Tensor:
    index, ndim, *sizes = header.tolist()
    return torch.empty(sizes[:ndim], dtype=_DTYPES[index], device=header.device)
