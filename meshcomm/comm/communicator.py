"""Collectives and messages along one dim, or along several merged into one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeVar, final, overload

import torch
from torch import Tensor

from meshcomm.comm.checks import check_coord, check_divisible, check_in_place, check_peer, normal_axis
from meshcomm.comm.handle import Handle, failure, wait_all
from meshcomm.transport import Transport, Work
from meshcomm.transport.support import check_reduce

T = TypeVar("T")

Message = tuple[Tensor, int]


@final
class Communicator:
    """What talks along `name`. Shape rules live here, once for every transport.

    Args:
        name: the dim or dims, as errors show them.
        transport: the group.
        who: this rank with its coords, for errors, as in `rank 5 (pp=1 dp=0 tp=1)`.
    """

    __slots__ = ("_checked", "coord", "name", "size", "transport", "who")

    def __init__(self, name: str, transport: Transport, who: str) -> None:
        self.name = name
        self.transport = transport
        self.size = transport.size
        self.coord = transport.coord
        self.who = who
        # (op, dtype) pairs that the support table has already accepted here.
        self._checked: set[tuple[str, torch.dtype]] = set()

    # -- collectives ----------------------------------------------------------------------------

    @overload
    def all_reduce(self, x: Tensor, op: str = ..., async_op: Literal[False] = ...) -> Tensor: ...
    @overload
    def all_reduce(self, x: Tensor, op: str, async_op: bool) -> Tensor | Handle[Tensor]: ...

    def all_reduce(self, x: Tensor, op: str = "sum", async_op: bool = False) -> Tensor | Handle[Tensor]:
        """Reduce `x` over the dim, in place. See `Mesh.all_reduce`."""
        if x.requires_grad:
            check_in_place(x, lambda: self._where("all_reduce"), "all_reduce")
        if (op, x.dtype) not in self._checked:
            check_reduce(self.transport.name, op, x.dtype, self._where("all_reduce"))
            self._checked.add((op, x.dtype))
        dense = materialised(x)
        if dense is x:
            return self._run("all_reduce", lambda b: self.transport.all_reduce(x, op, b), lambda: x, async_op)
        return self._run(
            "all_reduce", lambda b: self.transport.all_reduce(dense, op, b), lambda: x.copy_(dense), async_op
        )

    def broadcast(self, x: Tensor, src: int, async_op: bool = False) -> Tensor | Handle[Tensor]:
        """Overwrite `x` with the x of coord `src`. See `Mesh.broadcast`."""
        check_coord(src, self.size, "src", lambda: self._where("broadcast"))
        check_in_place(x, lambda: self._where("broadcast"), "broadcast")
        dense = materialised(x)
        return self._run(
            "broadcast",
            lambda b: self.transport.broadcast(dense, src, b),
            lambda: x if dense is x else x.copy_(dense),
            async_op,
        )

    def all_gather(self, x: Tensor, axis: int = 0, async_op: bool = False) -> Tensor | Handle[Tensor]:
        """Every rank's x, one after the other along `axis`. See `Mesh.all_gather`."""
        check_in_place(x, lambda: self._where("all_gather"), "all_gather")
        source = materialised(x.unsqueeze(0) if x.ndim == 0 else x)
        axis = normal_axis(source, axis, lambda: self._where("all_gather"))
        out = source.new_empty((self.size, *source.shape))
        return self._run(
            "all_gather",
            lambda b: self.transport.all_gather(out, source, b),
            lambda: join(out, axis),
            async_op,
        )

    def reduce_scatter(
        self, x: Tensor, axis: int = 0, op: str = "sum", async_op: bool = False
    ) -> Tensor | Handle[Tensor]:
        """Reduce `x`, keep this rank's slice of `axis`. See `Mesh.reduce_scatter`."""
        check_in_place(x, lambda: self._where("reduce_scatter"), "reduce_scatter")
        check_reduce(self.transport.name, op, x.dtype, self._where("reduce_scatter"))
        parts = self._parts(x, axis, "reduce_scatter")
        out = parts.new_empty(parts.shape[1:])
        return self._run(
            "reduce_scatter",
            lambda b: self.transport.reduce_scatter(out, parts, op, b),
            lambda: out,
            async_op,
        )

    def all_to_all(
        self, x: Tensor, split_axis: int = 0, concat_axis: int = 0, async_op: bool = False
    ) -> Tensor | Handle[Tensor]:
        """Slice c of `split_axis` goes to coord c; what comes in is joined along `concat_axis`."""
        check_in_place(x, lambda: self._where("all_to_all"), "all_to_all")
        concat = normal_axis(x, concat_axis, lambda: self._where("all_to_all"))
        parts = self._parts(x, split_axis, "all_to_all")
        out = torch.empty_like(parts)
        return self._run(
            "all_to_all",
            lambda b: self.transport.all_to_all(out, parts, b),
            lambda: join(out, concat),
            async_op,
        )

    def barrier(self, async_op: bool = False) -> Handle[None] | None:
        """Return when every rank of the group has come."""
        return self._run("barrier", lambda b: self.transport.barrier(b), lambda: None, async_op)

    # -- messages -------------------------------------------------------------------------------

    def isend(self, x: Tensor, dst: int, tag: int = 0) -> Handle[None]:
        """Start sending `x` to coord `dst`."""
        check_peer(dst, self.coord, self.size, "dst", lambda: self._where("send"))
        dense = materialised(x.detach())
        work = self._start("send", lambda: self.transport.send(dense, dst, tag))

        def sent(_: Tensor = dense) -> None:  # holds the copy until the message has left
            return None

        return Handle((work,), sent, lambda: self._where(f"send to {dst}"))

    def irecv(self, out: Tensor, src: int, tag: int = 0) -> Handle[Tensor]:
        """Start receiving into `out` from coord `src`."""
        check_peer(src, self.coord, self.size, "src", lambda: self._where("recv"))
        check_in_place(out, lambda: self._where("recv"), "shift")
        dense = buffer_for(out)
        work = self._start("recv", lambda: self.transport.recv(dense, src, tag))
        return Handle(
            (work,),
            lambda: out if dense is out else out.copy_(dense),
            lambda: self._where(f"recv from {src}"),
        )

    def exchange(self, sends: Sequence[Message] = (), recvs: Sequence[Message] = ()) -> list[Tensor]:
        """Send and receive a set of messages at once; see `Mesh.exchange`."""
        for _, dst in sends:
            check_peer(dst, self.coord, self.size, "dst", lambda: self._where("exchange"))
        for out, src in recvs:
            check_peer(src, self.coord, self.size, "src", lambda: self._where("exchange"))
            check_in_place(out, lambda: self._where("exchange"), "shift")
        leaving = [(materialised(x.detach()), dst, 0) for x, dst in sends]
        coming = [(buffer_for(out), src, 0) for out, src in recvs]
        if leaving or coming:
            try:
                works = self.transport.exchange(leaving, coming)
            except RuntimeError as error:
                raise failure(self._where("exchange"), error) from error
            wait_all(works, lambda: self._where("exchange"))
        return [
            out if out is dense else out.copy_(dense)
            for (out, _), (dense, _, _) in zip(recvs, coming, strict=True)
        ]

    def shift(self, x: Tensor, offset: int = 1, wrap: bool = True) -> Tensor | None:
        """Send `x` `offset` coords further, return what came from as far behind; see `Mesh.shift`."""
        check_in_place(x, lambda: self._where("shift"), "shift")
        target, source = self.coord + offset, self.coord - offset
        if wrap:
            target, source = target % self.size, source % self.size
        if target == self.coord:
            return x.detach().clone()
        sends = [(x, target)] if 0 <= target < self.size else []
        recvs = []
        if 0 <= source < self.size:
            recvs = [(torch.empty_like(x, memory_format=torch.contiguous_format), source)]
        received = self.exchange(sends, recvs)
        return received[0] if received else None

    # -- shared ---------------------------------------------------------------------------------

    def _where(self, call: str) -> str:
        return f'{call} along "{self.name}" on {self.who}'

    def _parts(self, x: Tensor, axis: int, call: str) -> Tensor:
        """`x` as (size, ...), the slices of `axis` in front, contiguous."""
        axis = normal_axis(x, axis, lambda: self._where(call))
        check_divisible(x, axis, self.size, lambda: self._where(call), lambda: self.who)
        return split(x, axis, self.size)

    def _start(self, call: str, start: Callable[[], Work]) -> Work:
        try:
            return start()
        except RuntimeError as error:
            raise failure(self._where(call), error) from error

    def _run(
        self, call: str, start: Callable[[bool], Work], finish: Callable[[], T], async_op: bool
    ) -> T | Handle[T]:
        try:
            work = start(not async_op)
            if async_op:
                return Handle((work,), finish, lambda: self._where(call))
            if work is not None:
                work.wait()
        except RuntimeError as error:
            raise failure(self._where(call), error) from error
        return finish()


def materialised(x: Tensor) -> Tensor:
    """`x` itself where its memory holds its values one after the other, else a copy that does."""
    if x.dtype.is_complex:
        x = x.resolve_conj()
    if x.is_neg():
        x = x.resolve_neg()
    return x.contiguous()


def buffer_for(out: Tensor) -> Tensor:
    """`out` itself where bytes can be received into it, else new memory of its shape."""
    if out.is_contiguous() and not out.is_conj() and not out.is_neg():
        return out
    return out.new_empty(out.shape)


def split(x: Tensor, axis: int, size: int) -> Tensor:
    """(..., size*s, ...) -> (size, ..., s, ...), contiguous; slice c of `axis` is element c."""
    shape = (*x.shape[:axis], size, x.shape[axis] // size, *x.shape[axis + 1 :])
    return materialised(x.reshape(shape).movedim(axis, 0))


def join(parts: Tensor, axis: int) -> Tensor:
    """(size, ..., s, ...) -> (..., size*s, ...): the inverse of `split`; no copy for axis 0."""
    shape = list(parts.shape[1:])
    shape[axis] *= parts.shape[0]
    return parts.movedim(0, axis).reshape(shape)
