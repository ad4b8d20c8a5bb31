"""The tokens of a sequence that each rank holds, and their order."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from meshcomm.errors import LayoutError, ShapeError, UnsupportedOp

Order: TypeAlias = Literal["zigzag", "contiguous"]


def check_order(order: object) -> None:
    """Raise UnsupportedOp for an unknown order."""
    if order not in get_args(Order):
        raise UnsupportedOp(
            f"a sequence cannot be split in the order {order!r}",
            given=f"order={order!r}",
            expected='order="zigzag" or order="contiguous"',
            hint='order="zigzag", which balances causal attention',
        )


def sequence_positions(
    seq_len: int, n: int, coord: int, order: Order, device: torch.device | None = None
) -> Tensor:
    """Return, in order, the full-sequence positions of the tokens that coord `coord` of `n` holds.

    "contiguous": coord c has slice c of n. "zigzag": the sequence is cut into 2n chunks, and coord c has chunks c and
    2n - 1 - c. Each rank then has equally many pairs of a query and an earlier key. This is the balance of Brandon et al.
    2023, in the layout used for Llama 3 (Dubey et al. 2024).

    >>> sequence_positions(12, 3, 1, "contiguous").tolist(), sequence_positions(12, 3, 1, "zigzag").tolist()
    ([4, 5, 6, 7], [2, 3, 8, 9])

    Returns: int64 (sequence / n,), ascending, created on `device`, so that the host does not wait for a copy.
    Raises:  ShapeError if the sequence length is not divisible by n (by 2n in zig-zag order if n > 1); LayoutError for a coord
             outside 0 .. n - 1.
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
            + (
                ', or order="contiguous", as in ContextSplit(mesh, dim, "ulysses")'
                if order == "zigzag" and seq_len % n == 0
                else ""
            ),
        )
    length = seq_len // chunks
    mine = [coord] if chunks == n else [coord, chunks - 1 - coord]
    return torch.cat([torch.arange(c * length, (c + 1) * length, device=device) for c in mine])
