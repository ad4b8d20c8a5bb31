"""In-place collectives on lists of tensors: one message per dtype instead of one per tensor."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
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
    factor_of,
    lie_apart,
)
from meshcomm.comm.communicator import Communicator
from meshcomm.comm.handle import Handle
from meshcomm.comm.request import NO_OPTIONS, Options
from meshcomm.comm.shapes import materialised, pack, unpack, unwatched
from meshcomm.errors import ShapeError
from meshcomm.transport.support import check_reduce
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
    """Run an in-place collective on a list of tensors, through `Communicator.collective`.

    The first message's comparison is that of the whole list, so that nothing has been sent if lists differ. Of memory that
    several tensors share, each element is reduced once: every message is packed before any result is written.
    """
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
    # Two at a time: one is packed while the other is on its way. Each needs its packed copy only until it completes.
    most = len(messages) if async_op else 2
    if len(messages) > 1 and not (dense and lie_apart(tensors)):
        check_apart(tensors, (), where, lambda one, other: one.dtype == other.dtype)
        most = len(messages)
    if len(messages) > most and row.reduces:
        # A list is reduced as a whole or not at all, and the first result is written before the last message is checked.
        for group in messages:
            check_reduce(comm.transport.name, op or "", group[0].dtype, partial(comm.where, row.name))
            if options is not None:
                factor_of(options.factor, op or "", group[0].dtype, partial(comm.where, row.name))

    def started(group: list[Tensor], later: bool = True) -> Any:
        whole = group or [torch.empty(0, device=comm.transport.device)]
        x = pack(whole if dense else [materialised(x) for x in whole])
        chosen = packed(comm, tensors, group, options, not async_op, group is not messages[0])
        result = comm.collective(row, x, later, op, root=root, options=chosen)
        if comm.recorder.span is not None:
            comm.recorder.span.of(group)
        return result

    if not async_op and len(messages) == 1:
        _write(started(messages[0], False), messages[0], dense)
        return list(tensors)
    under_way: deque[tuple[Handle[Tensor], list[Tensor]]] = deque()
    try:
        for group in messages:
            if len(under_way) == most:
                _finish([], [under_way[0]], dense)
                under_way.popleft()
            under_way.append((started(group), group))
        if not async_op:
            return _finish(list(tensors), under_way, dense)
    except BaseException:
        # The program never sees these handles.
        for handle, _ in under_way:
            handle._abandon()
        raise
    handles = [handle for handle, _ in under_way]
    return Handle(handles, comm, call, partial(_finish, list(tensors), under_way, dense))


def packed(
    comm: Communicator,
    tensors: Sequence[Tensor],
    message: Sequence[Tensor] | None = None,
    options: Options | None = None,
    waits: bool = False,
    told: bool = False,
) -> Options | None:
    """Return the options of a call whose tensor packs others: their facts are compared, while calls are.

    message: those of the tensors that it packs; None for all. options: the other options. waits, told: see Options.
    """
    if comm.recorder.check is None:
        return options
    facts = facts_of_list(tensors, message or tensors)
    return (options or NO_OPTIONS)._replace(packed=facts, waits=waits, told=told)


def _finish(
    tensors: list[Tensor], under_way: Iterable[tuple[Handle[Tensor], list[Tensor]]], dense: bool
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
