"""Sizes that differ from rank to rank: exchanged first, then everything in its own size."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meshcomm.comm.handle import Handle
from meshcomm.comm.shapes import cut, filled, materialised
from meshcomm.errors import MeshcommError, ShapeError

if TYPE_CHECKING:
    from meshcomm.comm.calls import Calls


def gather(
    comm: Calls, source: Tensor, axis: int, dst: int | None, async_op: bool, out: Tensor | None
) -> Tensor | Handle[Tensor]:
    """Sizes first; then everything to everyone who gets it, each rank's x in its own size."""
    call = "all_gather" if dst is None else "gather"
    sizes = _sizes(comm, source.shape[axis], source)
    comm.recorder.is_of(sum(sizes) * _rows(source, axis) * source.element_size())
    gets = dst is None or comm.coord == dst
    rows = _rows(source, axis)
    lengths = [size * rows if gets else 0 for size in sizes]
    moved = materialised(source.movedim(axis, 0)).view(-1)
    sent = [moved.numel() if dst is None or c == dst else 0 for c in range(comm.size)]
    x = moved.repeat(comm.size) if dst is None else moved
    buffer = source.new_empty(sum(lengths))
    rest = [s for i, s in enumerate(source.shape) if i != axis]

    def finish() -> Tensor:
        if problem is not None:  # of this rank alone, maybe: the others have their part of the call by now
            raise problem
        whole = buffer.view(sum(sizes), *rest).movedim(0, axis)
        return filled(out, whole if out is not None else whole.contiguous())

    problem = None
    if out is not None:
        shape = list(source.shape)
        shape[axis] = sum(sizes)
        problem = comm.misfit(out, shape, source, call)
    comm.recorder.resume()  # after the sizes, the data
    found: Tensor | Handle[Tensor] = comm.run(
        call,
        lambda b: comm.transport.all_to_all_uneven(buffer, x, lengths, sent, b),
        finish if gets else lambda: None,  # type: ignore[arg-type,return-value]
        async_op,
    )
    return found


def checked_splits(comm: Calls, x: Tensor, axis: int, splits: Sequence[int]) -> list[int]:
    """`splits` as plain sizes, which must cut axis `axis` of `x` into one part for each coord."""
    try:
        sizes = [index(size) for size in splits]
    except TypeError:
        sizes = []
    if len(sizes) != comm.size or sum(sizes) != x.shape[axis] or min(sizes) < 0:
        raise ShapeError(
            f"{comm.where('all_to_all')}: splits do not cut axis {axis}",
            given=f"splits={splits}, x of shape {tuple(x.shape)}",
            expected=f"{comm.size} sizes of 0 or more whose sum is {x.shape[axis]}",
            hint=f"splits={[x.shape[axis] // comm.size] * comm.size}"
            if x.shape[axis] % comm.size == 0
            else "one size for each coord",
        )
    return sizes


def all_to_all(
    comm: Calls,
    x: Tensor,
    axis: int,
    concat: int,
    splits: list[int],
    async_op: bool,
    out: Tensor | None,
) -> Tensor | Handle[Tensor]:
    leaving = cut(x, axis, splits)
    # What arrives has the sender's other axes; only the split axis differs from rank to rank.
    mine = torch.tensor(splits, dtype=torch.int64, device=x.device)
    theirs = torch.empty_like(mine)
    comm.run("all_to_all", lambda b: comm.transport.all_to_all(theirs, mine, b), lambda: None, False)
    coming = [(*x.shape[:axis], size, *x.shape[axis + 1 :]) for size in theirs.tolist()]
    # What is wrong for this rank alone is said when the others have their part of the call.
    problem: MeshcommError | None = None
    if concat != axis and len({shape[axis] for shape in coming}) > 1:
        problem = ShapeError(
            f"{comm.where('all_to_all')}: parts of unequal size cannot be joined along axis {concat}",
            given=f"sizes {theirs.tolist()} of axis {axis} from coords 0 to {comm.size - 1}",
            expected=f"equal sizes, or concat_axis={axis}",
            hint=f"concat_axis={axis}",
        )
    lengths = [int(torch.Size(shape).numel()) for shape in coming]
    sent = [part.numel() for part in leaving]
    flat = torch.cat([part.view(-1) for part in leaving])
    buffer = flat.new_empty(sum(lengths))

    if out is not None and problem is None:
        shape = list(coming[0])
        shape[concat] = sum(each[concat] for each in coming)
        problem = comm.misfit(out, shape, x, "all_to_all")

    def finish() -> Tensor:
        if problem is not None:
            raise problem
        pieces = buffer.split(lengths)
        whole = torch.cat([p.view(s) for p, s in zip(pieces, coming, strict=True)], concat)
        return filled(out, whole)

    comm.recorder.resume()  # after the sizes, the data
    return comm.run(
        "all_to_all",
        lambda b: comm.transport.all_to_all_uneven(buffer, flat, lengths, sent, b),
        finish,
        async_op,
    )


def _sizes(comm: Calls, mine: int, like: Tensor) -> list[int]:
    """Everyone's `mine`, by coord."""
    own = torch.tensor([mine], dtype=torch.int64, device=like.device)
    found = own.new_empty(comm.size)
    comm.run("all_gather", lambda b: comm.transport.all_gather(found, own, b), lambda: None, False)
    sizes: list[int] = found.tolist()
    return sizes


def _rows(x: Tensor, axis: int) -> int:
    """Elements for each index of `axis`, also where x is empty."""
    count = 1
    for i, size in enumerate(x.shape):
        if i != axis:
            count *= size
    return count
