"""The seam between what a collective means and what carries its bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal, Protocol, final

import torch
from torch import Tensor


class Work(Protocol):
    """Something under way. torch's own Work objects have this shape."""

    def wait(self, timeout: timedelta = ...) -> bool: ...

    def is_completed(self) -> bool: ...


@final
class Done:
    """Work that is over."""

    __slots__ = ()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """True, at once."""
        return True

    def is_completed(self) -> bool:
        """True."""
        return True


def as_bytes(flat: Tensor) -> Tensor:
    """The same memory as bytes. `flat`: of one axis, contiguous.

    One element of a slice is contiguous with any stride, and torch then finds no bytes in it.
    """
    if flat.numel() < 2:
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


class Transport(ABC):
    """Moves contiguous tensors between the ranks of one group. Ranks are coords, 0 to size - 1.

    A transport checks nothing and reshapes nothing: the communicator above it has done so, once
    for every transport. Every method starts the operation and returns its Work; `blocking` says
    that the caller will wait at once, which lets NCCL stay on the current stream.
    """

    name: str
    size: int
    coord: int
    device: torch.device
    any_source: bool
    # Whether messages of one call have to be started by `exchange`, as one operation.
    together: bool = False

    @property
    def kinds(self) -> tuple[str, ...]:
        """The device types of tensors that the group carries."""
        return (self.device.type,)

    group_name: str

    def compares(self, name: str, call: str, facts: dict[str, Any]) -> bool:
        """Told of this rank's next call on the dim `name`; whether the transport compares calls itself."""
        return False

    @abstractmethod
    def all_reduce_call(
        self, op: str, blocking: bool = True
    ) -> tuple[Callable[[list[Tensor], Any], Work | None], Any]:
        """What an `all_reduce` of a contiguous tensor of a plain dtype comes down to.

        A function and its second argument; the first is [x]. For callers that make it very often.
        """

    def message_call(
        self, direction: Literal["send", "recv"], dtype: torch.dtype
    ) -> Callable[[list[Tensor], int, int], Work] | None:
        """What a message of a contiguous tensor of `dtype` comes down to: called with [x], coord and tag.

        None: there is no shorter way than `send` and `recv`.
        """
        return None

    def straight(
        self, call: str, dtype: torch.dtype, *, op: str | None = None, root: int | None = None
    ) -> tuple[Callable[..., Work | None], Any] | None:
        """What a blocking call of contiguous tensors of `dtype` comes down to, for callers that make it often.

        A function and its last argument. Those before it are, for "broadcast" and "reduce", [x]; for
        "all_gather" and "reduce_scatter" out, x; for "all_to_all" out, x, [], []; parts lie one after the
        other along axis 0.
        None: there is no shorter way.
        """
        return None

    @abstractmethod
    def all_reduce(self, x: Tensor, op: str, blocking: bool) -> Work:
        """Reduce `x` in place."""

    @abstractmethod
    def reduce(self, x: Tensor, dst: int, op: str, blocking: bool) -> Work:
        """Reduce `x` in place on coord `dst`; what it holds elsewhere is not defined."""

    @abstractmethod
    def broadcast(self, x: Tensor, src: int, blocking: bool) -> Work:
        """Overwrite `x` with that of coord `src`."""

    @abstractmethod
    def all_gather(self, out: Tensor, x: Tensor, blocking: bool) -> Work:
        """`out` holds size times as many elements as x: the c-th part becomes the x of coord c."""

    @abstractmethod
    def gather(self, out: Tensor | None, x: Tensor, dst: int, blocking: bool) -> Work:
        """`out` as in `all_gather` on coord `dst`, None elsewhere."""

    @abstractmethod
    def scatter(self, out: Tensor, x: Tensor | None, src: int, blocking: bool) -> Work:
        """`x` has shape (size, *out.shape) on coord `src`, is None elsewhere: `out` becomes `x[coord]`."""

    @abstractmethod
    def reduce_scatter(self, out: Tensor, x: Tensor, op: str, blocking: bool) -> Work:
        """`x` has shape (size, *out.shape): `out` becomes the reduced `x[coord]`."""

    @abstractmethod
    def all_to_all(self, out: Tensor, x: Tensor, blocking: bool) -> Work:
        """Both have shape (size, ...): `out[c]` becomes `x[coord]` of coord c."""

    @abstractmethod
    def all_to_all_uneven(
        self, out: Tensor, x: Tensor, out_lengths: list[int], x_lengths: list[int], blocking: bool
    ) -> Work:
        """Both flat: the next `x_lengths[c]` elements of x go to coord c, `out_lengths[c]` come from it."""

    @abstractmethod
    def barrier(self, blocking: bool) -> Work:
        """Complete when every rank has come."""

    @abstractmethod
    def send(self, x: Tensor, dst: int, tag: int) -> Work:
        """Send `x` to coord `dst`."""

    @abstractmethod
    def recv(self, x: Tensor, src: int, tag: int) -> Work:
        """Overwrite `x` with what coord `src` sends."""

    @abstractmethod
    def recv_any(self, x: Tensor, tag: int) -> Work:
        """Overwrite `x` with the first message that comes, where `any_source` says it is possible."""

    @abstractmethod
    def source_of(self, work: Work) -> int:
        """The coord that the message of a finished `recv_any` came from."""

    @abstractmethod
    def exchange(
        self, sends: Sequence[tuple[Tensor, int, int]], recvs: Sequence[tuple[Tensor, int, int]]
    ) -> Sequence[Work]:
        """Start all sends and receives, given as (tensor, coord, tag), as one operation."""

    def break_off(self, peers: Sequence[int] | None, connected: bool, over: Callable[[], bool]) -> None:
        """Make a call that blocks this rank fail, if that can be done; the group is of no use afterwards.

        Called from another thread than the blocked one. May itself block, where a store does not answer.
        peers: coords that the call waits for; None: any. connected: also where the peers have connected, and
        data may still move. over: whether the call has returned.
        """
        return  # Most transports have nothing that could be broken off.

    @abstractmethod
    def close(self) -> None:
        """Give the group back. Called once, by every rank of the group, in plan order reversed."""
