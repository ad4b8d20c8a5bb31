"""Messages along dims: between two ranks, a set of them at once, around a ring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

from torch import Tensor

from meshcomm.comm.along.base import Along
from meshcomm.comm.handle import Handle
from meshcomm.comm.messages import Envelope
from meshcomm.layout import Dims
from meshcomm.transport.torch_private import outside_graphs


@outside_graphs
class MessagesAlong(Along):
    """send, recv, exchange, shift and their kin. See AlongDims."""

    def send(self, dims: Dims, x: Tensor, dst: int, tag: int = 0, *, handshake: bool = False) -> None:
        """Send `x` to coord `dst` along `dims`; returns when `x` may be changed.

        handshake: send shape and dtype first, for a receiver that gives no buffer.
        tag:       only messages with equal tags meet (Gloo; NCCL matches by order).
        """
        self._at.along(dims).messages.send(x, dst, tag, handshake)

    def recv(self, dims: Dims, out: Tensor | None = None, *, src: int, tag: int = 0) -> Tensor:
        """Receive from coord `src` along `dims` into `out`, and return it.

        out: of the sender's shape and dtype; None: the message has a handshake, the result is new.
        """
        return self._at.along(dims).messages.recv(out, src, tag)

    def recv_any(self, dims: Dims, out: Tensor | None = None, *, tag: int = 0) -> tuple[Tensor, int]:
        """Receive from whichever coord sends first; returns the tensor and that coord. Gloo only."""
        return self._at.along(dims).messages.recv_any(out, tag)

    def isend(
        self, dims: Dims, x: Tensor, dst: int, tag: int = 0, *, handshake: bool = False
    ) -> Handle[None]:
        """Start a send; `x` must not change before the handle's wait() returns."""
        return self._at.along(dims).messages.isend(x, dst, tag, handshake)

    def irecv(self, dims: Dims, out: Tensor, src: int | None, tag: int = 0) -> Handle[Tensor]:
        """Start a receive; the handle's wait() returns `out`, which must not be used before.

        src: None receives from whichever coord sends first, on Gloo; `handle.source` tells which.
        """
        return self._at.along(dims).messages.irecv(out, src, tag)

    @overload
    def exchange(
        self,
        dims: Dims,
        sends: Sequence[Envelope] = ...,
        recvs: Sequence[Envelope] = ...,
        *,
        async_op: Literal[False] = ...,
    ) -> list[Tensor]: ...

    @overload
    def exchange(
        self,
        dims: Dims,
        sends: Sequence[Envelope] = ...,
        recvs: Sequence[Envelope] = ...,
        *,
        async_op: Literal[True],
    ) -> Handle[list[Tensor]]: ...
    @overload
    def exchange(
        self, dims: Dims, sends: Sequence[Envelope] = ..., recvs: Sequence[Envelope] = ..., *, async_op: bool
    ) -> list[Tensor] | Handle[list[Tensor]]: ...

    def exchange(
        self,
        dims: Dims,
        sends: Sequence[Envelope] = (),
        recvs: Sequence[Envelope] = (),
        *,
        async_op: bool = False,
    ) -> list[Tensor] | Handle[list[Tensor]]:
        """A set of messages at once: sends as (x, dst), receives as (out, src), coords along `dims`.

        All are started before any is waited for, so no order of them can deadlock. Between two
        ranks, messages of one tag meet in the order in which they are listed; a tag may follow the
        coord: (x, dst, tag).
        Returns: the received tensors, in the order of `recvs`; with async_op a handle whose wait()
                 returns them, until which no tensor of the call may be used.
        """
        messages = self._at.along(dims).messages
        return messages.iexchange(sends, recvs) if async_op else messages.exchange(sends, recvs)

    @overload
    def shift(
        self, dims: Dims, x: Tensor, offset: int = ..., *, wrap: Literal[True] = ..., handshake: bool = ...
    ) -> Tensor: ...
    @overload
    def shift(
        self, dims: Dims, x: Tensor, offset: int = ..., *, wrap: bool, handshake: bool = ...
    ) -> Tensor | None: ...
    def shift(
        self, dims: Dims, x: Tensor, offset: int = 1, *, wrap: bool = True, handshake: bool = False
    ) -> Tensor | None:
        """Send `x` to the coord `offset` further along `dims`, return what came from as far behind.

        wrap=True: a ring. wrap=False: an open line; the ranks at the edge get None. The semantics
        are those of MPI_Cart_shift followed by MPI_Sendrecv.
        Shape:   equal on all ranks, or any with handshake=True; new memory.
        """
        return self._at.along(dims).messages.shift(x, offset, wrap, handshake)
