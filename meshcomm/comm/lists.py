"""Lists of tensors that travel together: one message per dtype instead of one per tensor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from meshcomm.collectives import Collective
from meshcomm.comm.checks import (
    all_usable,
    check_apart,
    check_coord,
    check_divisible,
    check_in_place,
    check_tensor,
    check_written,
    normal_axis,
)
from meshcomm.comm.communicator import Communicator
from meshcomm.comm.handle import Handle
from meshcomm.comm.shapes import join, materialised, pack, split, unpack, unwatched
from meshcomm.errors import ShapeError, UnsupportedOp
from meshcomm.transport.torch_private import copy_all

# One message holds at most this much; the packed copy is all the memory that a list costs.
_MOST_BYTES = 256 * 1024 * 1024
# What a call of a list takes besides its axis.
_TAKEN: Final = ("op", "root", "factor")


def collective(
    comm: Communicator,
    row: Collective,
    tensors: Sequence[Tensor],
    async_op: bool,
    axis: int = 0,
    **options: Any,
) -> list[Tensor] | Handle[list[Tensor]]:
    """What `Communicator.collective` does, with each tensor of a list: in place, or an all_gather or a reduce_scatter."""
    call = f"{row.name} of a list"
    where = partial(comm.where, call)
    options = _checked_options(comm, row, tensors, options)
    if row.root is not None:
        check_coord(options["root"], comm.size, row.root, where)
    # Mostly nothing is to be asked, and lists are long.
    dense = all_usable(tensors, comm.transport.device)
    for x in tensors if not dense else ():
        check_tensor(x, comm.kinds, where)
        check_in_place(x, where, row.with_gradient)
        if row.in_place:
            check_written(x, where)
    sources, axes = (list(tensors), []) if row.in_place else _sources(comm, row, tensors, axis)
    messages = _messages(sources, dense)
    if row.in_place and len(messages) > 1:
        check_apart(sources, (), where, lambda one, other: one.dtype == other.dtype)
    under_way: list[tuple[Handle[Tensor], list[int]]] = []
    for places in messages:
        group = [sources[i] for i in places]
        # Of what is split, the parts of each coord lie together.
        flat = torch.cat([x.reshape(comm.size, -1) for x in group], 1).view(-1) if row.splits else pack(group)
        under_way.append((comm.collective(row, flat, True, **options), places))

    def finish() -> list[Tensor]:
        results = list(tensors)
        for handle, places in under_way:
            flat, group = handle.wait(), [sources[i] for i in places]
            if row.joins:
                columns = flat.view(comm.size, -1).split([x.numel() for x in group], 1)
                for i, column in zip(places, columns, strict=True):
                    results[i] = join(column.reshape(comm.size, *sources[i].shape), axes[i])
            elif row.splits:
                for i, piece in zip(places, unpack(flat, [x[0] for x in group]), strict=True):
                    results[i] = piece
            else:
                with unwatched(*group):
                    _fill(group, unpack(flat, group), dense)
        return results

    handles = [handle for handle, _ in under_way]
    if async_op:
        return Handle(handles, comm, call, finish)
    for handle in handles:
        handle.at_once()
    return finish()


def _checked_options(
    comm: Communicator, row: Collective, tensors: object, options: dict[str, Any]
) -> dict[str, Any]:
    """The options that were given. Refuses what is no list, and options that lists do not take."""
    if not isinstance(tensors, (list, tuple)):
        raise ShapeError(
            f"{comm.where(row.name)} was given a {type(tensors).__name__}",
            given=type(tensors).__name__,
            expected="a tensor, or a list of tensors",
            hint="torch.as_tensor(x), or mesh.objects for plain Python objects",
        )
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    for name in given:
        if name not in _TAKEN:
            raise UnsupportedOp(
                f"{row.name} of a list on {comm.who}: {name} has no effect",
                given=f"a list of tensors and {name}",
                expected=f"{name} beside a single tensor",
                hint="one call for each tensor",
            )
    return given


def _sources(
    comm: Communicator, row: Collective, tensors: Sequence[Tensor], axis: int
) -> tuple[list[Tensor], list[int]]:
    """What travels for each tensor, dense, the parts of each coord in front; and the axis that is cut or joined."""
    where = partial(comm.where, f"{row.name} of a list")
    sources, axes = [], []
    for x in tensors:
        x = x.unsqueeze(0) if row.joins and x.ndim == 0 else x
        axes.append(normal_axis(x, axis, where))
        if row.splits:
            check_divisible(x, axes[-1], comm.size, where, comm.who)
            x = split(x, axes[-1], comm.size)
        sources.append(materialised(x))
    return sources, axes


def _fill(tensors: list[Tensor], values: list[Tensor], dense: bool) -> None:
    """Copy each value into its tensor: at once, where the memory of all holds their values."""
    if (not dense or tensors[0].is_complex()) and any(x.is_neg() or x.is_conj() for x in tensors):
        for x, value in zip(tensors, values, strict=True):
            x.copy_(value)
    else:
        copy_all(tensors, values)


def _messages(tensors: Sequence[Tensor], one_device: bool) -> list[list[int]]:
    """Which tensors share a message: equal dtype and device, in order, up to a size."""
    if (
        one_device
        and len({x.dtype for x in tensors}) == 1
        and sum([x.nbytes for x in tensors]) <= _MOST_BYTES
    ):
        return [list(range(len(tensors)))]
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
