"""The transport of a group of one: nothing moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from meshcomm.transport.base import Done, Transport, Work

_DONE = Done()


@final
class SoloTransport(Transport):
    """A group of one rank. Collectives are copies; a rank can only message itself by `exchange`."""

    name = "solo"
    size = 1
    coord = 0
    any_source = False
    group_name = ""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def all_reduce_call(
        self, op: str, blocking: bool = True
    ) -> tuple[Callable[[list[Tensor], Any], Work | None], Any]:
        return (_nothing if blocking else _over), None

    def reduce(self, x: Tensor, dst: int, op: str, blocking: bool) -> Work:
        return _DONE

    def gather(self, out: Tensor | None, x: Tensor, dst: int, blocking: bool) -> Work:
        assert out is not None
        out.view(-1).copy_(x.view(-1))
        return _DONE

    def scatter(self, out: Tensor, x: Tensor | None, src: int, blocking: bool) -> Work:
        assert x is not None
        out.copy_(x[0])
        return _DONE

    def all_to_all_uneven(
        self, out: Tensor, x: Tensor, out_lengths: list[int], x_lengths: list[int], blocking: bool
    ) -> Work:
        out.copy_(x)
        return _DONE

    def recv_any(self, x: Tensor, tag: int) -> Work:
        raise AssertionError("the communicator refuses a message from a rank to itself")

    def source_of(self, work: Work) -> int:
        raise AssertionError("the communicator refuses a message from a rank to itself")

    def all_reduce(self, x: Tensor, op: str, blocking: bool) -> Work:
        return _DONE

    def broadcast(self, x: Tensor, src: int, blocking: bool) -> Work:
        return _DONE

    def all_gather(self, out: Tensor, x: Tensor, blocking: bool) -> Work:
        out.view(-1).copy_(x.view(-1))
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


def _nothing(tensors: list[Tensor], options: Any) -> None:
    return None


def _over(tensors: list[Tensor], options: Any) -> Work:
    return _DONE
