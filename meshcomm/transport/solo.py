"""The transport of a group of one: nothing moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import Tensor

from meshcomm.transport.base import Done, Transport, Work

_DONE = Done()


@final
class SoloTransport(Transport):
    """A group of one rank. Collectives are copies; a rank can only message itself by `exchange`."""

    name = "solo"
    size = 1
    coord = 0

    def all_reduce(self, x: Tensor, op: str, blocking: bool) -> Work:
        return _DONE

    def broadcast(self, x: Tensor, src: int, blocking: bool) -> Work:
        return _DONE

    def all_gather(self, out: Tensor, x: Tensor, blocking: bool) -> Work:
        out[0].copy_(x)
        return _DONE

    def reduce_scatter(self, out: Tensor, x: Tensor, op: str, blocking: bool) -> Work:
        out.copy_(x[0])
        return _DONE

    def all_to_all(self, out: Tensor, x: Tensor, blocking: bool) -> Work:
        out.copy_(x)
        return _DONE

    def barrier(self, blocking: bool) -> Work:
        return _DONE

    def send(self, x: Tensor, dst: int, tag: int) -> Work:
        raise AssertionError("the communicator refuses a message from a rank to itself")

    def recv(self, x: Tensor, src: int, tag: int) -> Work:
        raise AssertionError("the communicator refuses a message from a rank to itself")

    def exchange(
        self, sends: Sequence[tuple[Tensor, int, int]], recvs: Sequence[tuple[Tensor, int, int]]
    ) -> Sequence[Work]:
        return ()

    def close(self) -> None:
        return None
