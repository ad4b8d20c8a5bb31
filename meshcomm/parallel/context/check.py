"""Do the queries, keys and values of this rank fit together, and the split?"""

from __future__ import annotations

import torch
from torch import Tensor

from meshcomm.comm.checks import check_tensor
from meshcomm.errors import ShapeError
from meshcomm.mesh import Mesh
from meshcomm.parallel.context.order import Order, check_order


def prepared(
    mesh: Mesh, dim: str, call: str, q: Tensor, k: Tensor, v: Tensor, same_length: bool, order: Order
) -> tuple[str, Tensor, Tensor, Tensor]:
    """How errors name the call; q, k and v, under autocast in its dtype.

    Raises: ShapeError or UnsupportedOp for what `call` cannot attend to.
    """
    check_order(order)
    where = f'{call} along "{dim}" on {mesh.label}'
    for x in (q, k, v):
        check_tensor(x, (mesh.device.type,), lambda: where)
    q, k, v = (_as_autocast(x) for x in (q, k, v))
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if (
        q.ndim != 4
        or k.ndim != 4
        or k.shape != v.shape
        or q.shape[0] != k.shape[0]
        or q.shape[3] != k.shape[3]
    ):
        raise ShapeError(
            f"{where}: q, k and v do not fit together",
            given=shapes,
            expected="q (batch, heads, sequence / n, head), k and v (batch, kv heads, sequence / n, head)",
            hint="x.unflatten(-1, (heads, head)).transpose(1, 2)",
        )
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ShapeError(
            f"{where}: the heads of q cannot be shared out to those of k and v",
            given=shapes,
            expected=f"a multiple of {k.shape[1]} heads in q, got {q.shape[1]}"
            if k.shape[1]
            else "a head in k and v",
            hint="as many heads in each, or fewer in k and v that divide those of q",
        )
    if not q.dtype == k.dtype == v.dtype or not q.dtype.is_floating_point:
        raise ShapeError(
            f"{where}: q, k and v need one floating-point dtype",
            given=f"q {q.dtype}, k {k.dtype}, v {v.dtype}",
            expected="the same floating-point dtype for each",
            hint="k.to(q.dtype), v.to(q.dtype)",
        )
    if same_length and q.shape[2] != k.shape[2]:
        raise ShapeError(
            f"{where}: q and k are of different length",
            given=shapes,
            expected="the same part of the sequence on a rank for q, k and v",
            hint="ring_attention(..., causal=False), which takes keys of another sequence",
        )
    if order == "zigzag" and mesh.size(dim) > 1 and (q.shape[2] % 2 or k.shape[2] % 2):
        raise ShapeError(
            f"{where}: an odd number of tokens cannot be two chunks of a zig-zag",
            given=shapes,
            expected="an even number of tokens on each rank",
            hint=f'a sequence of a multiple of {2 * mesh.size(dim)}, or order="contiguous"',
        )
    return where, q, k, v


def _as_autocast(x: Tensor) -> Tensor:
    """What autocast does to the arguments of scaled_dot_product_attention."""
    kind = x.device.type
    if x.dtype == torch.float64 or not x.is_floating_point() or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))
