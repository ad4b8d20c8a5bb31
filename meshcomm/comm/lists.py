"""In-place collectives on lists of tensors: one message per dtype instead of one per tensor."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from meshcomm.collectives import Collective
from meshcomm.comm.checks import (
    all_plain,
    check_apart,
    check_coord,
    check_input,
    lie_apart,
)
from meshcomm.comm.communicator import Communicator
from meshcomm.comm.handle import Handle
from meshcomm.comm.request import NO_OPTIONS, Options
from meshcomm.comm.shapes import materialised, pack, unpack, unwatched
from meshcomm.errors import ShapeError
from meshcomm.transport.torch_private import copy_all
from meshcomm.watching.facts import facts_of_list

# One message holds at most this many bytes; the packed copy is the only extra memory that a list needs.
_MOST_BYTES = 256 * 1024 * 1024
_DTYPE, _NBYTES = attrgetter("dtype"), attrgetter("nbytes")


def collective(
    comm: Communicator,
    row: Collective,
    tensors: Sequence[Tensor],
    async_op: bool,
    op: str | None = None,
    root: int = -1,
    options: Options | None = None,
) -> list[Tensor] | Handle[list[Tensor]]:
    """Run an in-place collective on a list of tensors, through `Communicator.collective`."""
    call = f"{row.name} of a list"
    where = partial(comm.where, call)
    if not isinstance(tensors, (list, tuple)):
        raise ShapeError(
            f"{comm.where(row.name)} was given a {type(tensors).__name__}",
            given=type(tensors).__name__,
            expected="a tensor, or a list of tensors",
            hint="torch.as_tensor(x), or mesh.objects for plain Python objects",
        )
    if row.root is not None:
        check_coord(root, comm.size, row.root, where)
    # A fast check for the common case, as lists are long.
    dense = all_plain(tensors, comm.transport.device)
    if not dense:
        tensors = [check_input(x, comm.kinds, where, row.functional, written=True) for x in tensors]
    # An empty list is a call, too: another rank may pass one that is not empty.
    messages = _messages(tensors, dense) or [[]]
    if len(messages) > 1 and not (dense and lie_apart(tensors)):
        check_apart(tensors, (), where, lambda one, other: one.dtype == other.dtype)

    def started(group: list[Tensor], async_op: bool = False) -> Any:
        whole = group or [torch.empty(0, device=comm.transport.device)]
        x = pack(whole if dense else [materialised(x) for x in whole])
        chosen = packed(comm, tensors, group, options)
        result = comm.collective(row, x, async_op, op, root=root, options=chosen)
        if comm.recorder.span is not None:
            comm.recorder.span.of(group)
        return result

    if not async_op:
        if len(messages) == 1:
            _write(started(messages[0]), messages[0], dense)
            return list(tensors)
        # Two at a time: one is packed while the other is on its way. Each needs its packed copy only until it completes.
        two: deque[tuple[Handle[Tensor], list[Tensor]]] = deque()
        for group in messages:
            two.append((started(group, True), group))
            if len(two) == 2:
                _finish([], [two.popleft()], dense)
        return _finish(list(tensors), two, dense)
    under_way = [(started(group, True), group) for group in messages]
    handles = [handle for handle, _ in under_way]
    return Handle(handles, comm, call, partial(_finish, list(tensors), under_way, dense))


def packed(
    comm: Communicator,
    tensors: Sequence[Tensor],
    message: Sequence[Tensor] | None = None,
    options: Options | None = None,
) -> Options | None:
    """Return the options of a call whose tensor packs others: their facts are compared, while calls are.

    message: those of the tensors that it packs; None for all. options: the other options.
    """
    if comm.recorder.check is None:
        return options
    return (options or NO_OPTIONS)._replace(packed=facts_of_list(tensors, message or tensors))


def _finish(
    tensors: list[Tensor], under_way: Sequence[tuple[Handle[Tensor], list[Tensor]]], dense: bool
) -> list[Tensor]:
    for handle, group in under_way:
        _write(handle.wait(), group, dense)
    return tensors


def _write(packed: Tensor, group: list[Tensor], dense: bool) -> None:
    if not group:
        return
    values = unpack(packed, group)
    with unwatched(*group):
        # Written separately if a tensor's memory does not hold its values.
        if (not dense or group[0].is_complex()) and any(x.is_neg() or x.is_conj() for x in group):
            for x, value in zip(group, values, strict=True):
                x.copy_(value)
        else:
            copy_all(group, values)


def _messages(tensors: Sequence[Tensor], one_device: bool) -> list[list[Tensor]]:
    """Group the tensors by message: equal dtype and device, in order, up to a size limit."""
    if one_device and sum(map(_NBYTES, tensors)) <= _MOST_BYTES:
        dtypes = dict.fromkeys(map(_DTYPE, tensors))
        return [[x for x in tensors if x.dtype is dtype] for dtype in dtypes]
    messages: list[list[Tensor]] = []
    open_at: dict[tuple[torch.dtype, torch.device], tuple[int, int]] = {}
    for x in tensors:
        kind = (x.dtype, x.device)
        index, used = open_at.get(kind, (-1, 0))
        if index < 0 or used + x.nbytes > _MOST_BYTES:
            messages.append([])
            index, used = len(messages) - 1, 0
        messages[index].append(x)
        open_at[kind] = (index, used + x.nbytes)
    return messages
