"""Lists of tensors that travel together: one message per dtype instead of one per tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, final

import torch
from torch import Tensor

from meshcomm.comm.checks import (
    check_coord,
    check_divisible,
    check_in_place,
    check_tensor,
    check_written,
    normal_axis,
)
from meshcomm.comm.communicator import Communicator
from meshcomm.comm.fast_path import usable
from meshcomm.comm.handle import Handle, failure
from meshcomm.comm.shapes import join, materialised, pack, split, unpack, unwatched
from meshcomm.errors import CommunicationError, ShapeError
from meshcomm.transport.torch_private import copy_all

# One message holds at most this much; the packed copy is all the memory that a list costs.
_MOST_BYTES = 256 * 1024 * 1024


def all_reduce(
    comm: Communicator, tensors: Sequence[Tensor], op: str, async_op: bool, factor: float | None
) -> list[Tensor] | Handle[list[Tensor]]:
    """Reduce each tensor in place; see `Mesh.all_reduce`."""
    return _in_place(
        comm, tensors, "all_reduce", async_op, lambda flat: comm.all_reduce(flat, op, True, factor)
    )


def broadcast(
    comm: Communicator, tensors: Sequence[Tensor], src: int, async_op: bool
) -> list[Tensor] | Handle[list[Tensor]]:
    """Overwrite each tensor with that of coord `src`; see `Mesh.broadcast`."""
    check_coord(src, comm.size, "src", lambda: _where(comm, "broadcast"))
    return _in_place(comm, tensors, "broadcast", async_op, lambda flat: comm.broadcast(flat, src, True))


def _in_place(
    comm: Communicator,
    tensors: Sequence[Tensor],
    call: str,
    async_op: bool,
    send: Callable[[Tensor], Any],
) -> list[Tensor] | Handle[list[Tensor]]:
    _check_list(comm, tensors, call)
    kinds, device = comm.transport.kinds, comm.transport.device
    for x in tensors:
        # Mostly nothing is to be asked, and lists are long.
        if not usable(x, device) or x.is_quantized:
            check_tensor(x, kinds, lambda: _where(comm, call))
            check_in_place(x, lambda: _where(comm, call), call)
            check_written(x, lambda: _where(comm, call))
    under_way: list[tuple[Handle[Tensor], list[Tensor]]] = []
    for group in _messages(tensors):
        flat = pack(group)
        under_way.append((send(flat), group))

    def finish() -> list[Tensor]:
        for handle, group in under_way:
            values = unpack(handle.wait(), group)
            with unwatched(*group):
                _fill(group, values)
        return list(tensors)

    return _later(comm, call, [handle for handle, _ in under_way], finish, async_op)


def all_gather(
    comm: Communicator, tensors: Sequence[Tensor], axis: int, async_op: bool
) -> list[Tensor] | Handle[list[Tensor]]:
    """Each tensor gathered along `axis`; see `Mesh.all_gather`."""
    _check_list(comm, tensors, "all_gather")
    sources, axes = [], []
    for x in tensors:
        check_tensor(x, comm.transport.kinds, lambda: _where(comm, "all_gather"))
        check_in_place(x, lambda: _where(comm, "all_gather"), "all_gather")
        sources.append(materialised(x.unsqueeze(0) if x.ndim == 0 else x))
        axes.append(normal_axis(sources[-1], axis, lambda: _where(comm, "all_gather")))
    results: list[Tensor | None] = [None] * len(sources)
    under_way: list[tuple[Handle[Tensor], list[int]]] = []
    for places in _places(sources):
        flat = pack([sources[i] for i in places])
        handle: Any = comm.all_gather(flat.unsqueeze(0), 0, True)
        under_way.append((handle, places))

    def finish() -> list[Tensor]:
        for handle, places in under_way:
            columns = handle.wait().split([sources[i].numel() for i in places], 1)
            for i, column in zip(places, columns, strict=True):
                results[i] = join(column.reshape(comm.size, *sources[i].shape), axes[i])
        return [x for x in results if x is not None]

    return _later(comm, "all_gather", [handle for handle, _ in under_way], finish, async_op)


def reduce_scatter(
    comm: Communicator,
    tensors: Sequence[Tensor],
    axis: int,
    op: str,
    async_op: bool,
    factor: float | None,
) -> list[Tensor] | Handle[list[Tensor]]:
    """Each tensor reduced and sliced along `axis`; see `Mesh.reduce_scatter`."""
    _check_list(comm, tensors, "reduce_scatter")
    parts = []
    for x in tensors:
        check_tensor(x, comm.transport.kinds, lambda: _where(comm, "reduce_scatter"))
        check_in_place(x, lambda: _where(comm, "reduce_scatter"), "reduce_scatter")
        own = normal_axis(x, axis, lambda: _where(comm, "reduce_scatter"))
        check_divisible(x, own, comm.size, lambda: _where(comm, "reduce_scatter"), lambda: comm.who)
        parts.append(split(x, own, comm.size))
    results: list[Tensor | None] = [None] * len(parts)
    under_way: list[tuple[Handle[Tensor], list[int]]] = []
    for places in _places(parts):
        flat = torch.cat([parts[i].reshape(comm.size, -1) for i in places], 1)
        handle: Any = comm.reduce_scatter(flat, 0, op, True, None, factor)
        under_way.append((handle, places))

    def finish() -> list[Tensor]:
        for handle, places in under_way:
            pieces = unpack(handle.wait().view(-1), [parts[i][0] for i in places])
            for i, piece in zip(places, pieces, strict=True):
                results[i] = piece
        return [x for x in results if x is not None]

    return _later(comm, "reduce_scatter", [handle for handle, _ in under_way], finish, async_op)


def _fill(tensors: list[Tensor], values: list[Tensor]) -> None:
    """Copy each value into its tensor: at once, where the memory of all holds their values."""
    if any(x.is_neg() or x.is_conj() for x in tensors):
        for x, value in zip(tensors, values, strict=True):
            x.copy_(value)
    else:
        copy_all(tensors, values)


def _check_list(comm: Communicator, tensors: object, call: str) -> None:
    if not isinstance(tensors, (list, tuple)):
        raise ShapeError(
            f'{call} along "{comm.name}" on {comm.who} was given a {type(tensors).__name__}',
            given=type(tensors).__name__,
            expected="a tensor, or a list of tensors",
            hint="torch.as_tensor(x), or mesh.objects for plain Python objects",
        )


def _messages(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    return [[tensors[i] for i in places] for places in _places(tensors)]


def _places(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Which tensors share a message: equal dtype and device, in order, up to a size."""
    messages: list[list[int]] = []
    open_at: dict[tuple[torch.dtype, torch.device], tuple[int, int]] = {}
    for i, x in enumerate(tensors):
        kind = (x.dtype, x.device)
        at, used = open_at.get(kind, (-1, 0))
        if at < 0 or used + x.nbytes > _MOST_BYTES:
            messages.append([])
            at, used = len(messages) - 1, 0
        messages[at].append(i)
        open_at[kind] = (at, used + x.nbytes)
    return messages


def _later(
    comm: Communicator,
    call: str,
    handles: Sequence[Handle[Tensor]],
    finish: Callable[[], list[Tensor]],
    async_op: bool,
) -> list[Tensor] | Handle[list[Tensor]]:
    if not async_op:
        for handle in handles:
            handle.at_once()
        return finish()
    return Handle([_AsWork(handle) for handle in handles], _OfLists(comm), call, finish)


@final
class _OfLists:
    """Whose call it is, for the handle of a list: the handles of its parts ask who has not come."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def where(self, call: str) -> str:
        return _where(self._comm, call)

    def failed(self, call: str, error: BaseException) -> CommunicationError:
        return failure(self.where(call), error)


@final
class _AsWork:
    """A handle where a Work is wanted."""

    def __init__(self, handle: Handle[Tensor]) -> None:
        self._handle = handle

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._handle.wait(None if timeout is None else timeout.total_seconds())
        return True

    def is_completed(self) -> bool:
        return self._handle.is_completed()


def _where(comm: Communicator, call: str) -> str:
    return f'{call} of a list along "{comm.name}" on {comm.who}'
