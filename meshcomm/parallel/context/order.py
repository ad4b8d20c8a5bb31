"""The order of a sequence's tokens on the ranks."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from meshcomm.comm.checks import normal_axis
from meshcomm.comm.functional import GatherGrad
from meshcomm.errors import LayoutError, ShapeError, UnsupportedOp
from meshcomm.mesh import Mesh

Order: TypeAlias = Literal["zigzag", "contiguous"]


def zigzag_positions(seq_len: int, n: int, coord: int) -> Tensor:
    """`sequence_positions` in zig-zag order.

    >>> zigzag_positions(12, 3, 1).tolist()
    [2, 3, 8, 9]
    """
    return sequence_positions(seq_len, n, coord, "zigzag")


def sequence_positions(seq_len: int, n: int, coord: int, order: Order) -> Tensor:
    """The positions in the whole sequence of the tokens that coord `coord` of `n` holds, in its order.

    "contiguous": slice `coord` of n. "zigzag": of 2n chunks, chunk c and chunk 2n - 1 - c for coord c. So each rank has
    as many pairs of a query and an earlier key as any other (the balance of Brandon et al. 2023, in the layout used for
    Llama 3, Dubey et al. 2024).

    >>> sequence_positions(12, 3, 1, "contiguous").tolist()
    [4, 5, 6, 7]

    Returns: int64 (sequence / n,), ascending.
    Raises:  ShapeError where n, or for a zig-zag 2n, does not divide the sequence (n = 1 divides any); LayoutError for a
             coord that n ranks do not have.
    """
    check_order(order)
    if not 0 <= coord < n:
        raise LayoutError(
            f"coord {coord} holds no part of the sequence",
            given=f"coord={coord}, n={n}",
            expected=f"a coord from 0 to {n - 1}",
            hint="mesh.coord(dim)",
        )
    chunks = 2 * n if order == "zigzag" and n > 1 else n
    if seq_len % chunks:
        raise ShapeError(
            f"a sequence of {seq_len} cannot be split in {order} order over {n} ranks",
            given=f"{seq_len} tokens, {chunks} chunks",
            expected=f"a multiple of {chunks}; {seq_len} % {chunks} = {seq_len % chunks}",
            hint=f"{-(-seq_len // chunks) * chunks} tokens"
            + (', or order="contiguous"' if order == "zigzag" and seq_len % n == 0 else ""),
        )
    length = seq_len // chunks
    mine = [coord] if chunks == n else [coord, chunks - 1 - coord]
    return torch.cat([torch.arange(c * length, (c + 1) * length) for c in mine])


def split_sequence(x: Tensor, axis: int, mesh: Mesh, dim: str, order: Order) -> Tensor:
    """This rank's tokens of an `x` that every rank along `dim` holds whole; nothing is sent.

    For inputs, targets, masks, tables of positions.

    Shape:    (.., sequence, ..) -> (.., sequence / n, ..), new memory; n = 1: x itself.
    Gradient: this rank's tokens only, zeros for the others'; right for a parameter whose gradients
              are summed along `dim` afterwards.
    Raises:   as `sequence_positions`; ShapeError for an axis that x does not have.
    """
    axis = normal_axis(x, axis, lambda: f'split_sequence along "{dim}" on {mesh.label}')
    n = mesh.size(dim)
    positions = sequence_positions(x.shape[axis], n, mesh.coord(dim), order)
    return x if n == 1 else x.index_select(axis, positions.to(x.device))


def gather_sequence(
    x: Tensor, axis: int, mesh: Mesh, dim: str, order: Order, *, grad: GatherGrad | None = None
) -> Tensor:
    """The whole sequence in its natural order, on every rank: the inverse of `split_sequence`.

    Shape:     (.., sequence / n, ..) -> (.., sequence, ..); n = 1: x itself.
    Called by: every rank along `dim`, in the same program order.
    Gradient:  needs `grad`, "slice" or "reduce_scatter", as in `mesh.functional.all_gather`.
    Raises:    ShapeError where the order does not fit x; AutogradError for a missing or unknown `grad`.
    """
    axis = normal_axis(x, axis, lambda: f'gather_sequence along "{dim}" on {mesh.label}')
    n = mesh.size(dim)
    # For its checks: before anything is sent.
    sequence_positions(x.shape[axis] * n, n, 0, order)
    if n == 1:
        return x
    whole: Tensor
    if grad is None:
        whole = mesh.all_gather(dim, x, axis=axis)
    else:
        whole = mesh.functional.all_gather(dim, x, axis, grad=grad)
    return whole if order == "contiguous" else natural(whole, axis, n)


def natural(x: Tensor, axis: int, n: int) -> Tensor:
    """Parts in zig-zag order, one rank's after the other's -> the sequence in its own order."""
    first, second = x.unflatten(axis, (n, 2, -1)).unbind(axis + 1)
    return torch.cat([first, second.flip(axis)], axis).flatten(axis, axis + 1)


def zigzag(x: Tensor, axis: int, n: int) -> Tensor:
    """The inverse of `natural`."""
    first, second = x.unflatten(axis, (2, n, -1)).unbind(axis)
    return torch.stack([first, second.flip(axis)], axis + 1).flatten(axis, axis + 2)


def check_order(order: object) -> None:
    """Raises UnsupportedOp for an order that there is not."""
    if order not in get_args(Order):
        raise UnsupportedOp(
            f"a sequence cannot be split in the order {order!r}",
            given=f"order={order!r}",
            expected='order="zigzag" or order="contiguous"',
            hint='order="zigzag", which balances causal attention',
        )
