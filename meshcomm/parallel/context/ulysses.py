"""Ulysses: the split changes from the sequence to the heads for the time of attention, and back.

Jacobs et al. 2023, "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long
Sequence Transformer Models".
"""

from __future__ import annotations

from math import lcm

import torch
from torch import Tensor

from meshcomm.errors import ShapeError
from meshcomm.mesh import Mesh
from meshcomm.parallel.context.block import check_window, prepared, whole_attention
from meshcomm.parallel.context.order import Order, natural, zigzag
from meshcomm.transport.torch_private import outside_graphs


@outside_graphs
def ulysses_attention(
    mesh: Mesh,
    dim: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    order: Order = "contiguous",
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """softmax(q k^T * scale) v over the whole sequence, of which each rank along `dim` holds a part.

    Each rank attends with the whole sequence for its n-th part of the heads. Where n does not divide
    the kv heads, each is repeated up to their least common multiple; its gradients are summed.

    Shape:      q (batch, heads, sequence / n, head), k and v (batch, kv heads, sequence / n, head)
                -> like q. heads is a multiple of n and of kv heads.
    order:      how the sequence lies on the ranks, see `split_sequence`; without causal both are the same.
    scale:      None: 1 / sqrt(head).
    window:     with causal, keys that a query meets at most, its own the last; None: all before it.
    Called by:  every rank along `dim` with equal shapes, in the same program order; backward too.
    Gradient:   exact, for this rank's q, k, v.
    Sent:       two all_to_all, of q, k and v together and of the result; two in backward.
    Raises:     ShapeError, UnknownDim, UnsupportedOp; CommunicationError.
    """
    where, q, k, v = prepared(mesh, dim, "ulysses_attention", q, k, v, True, order)
    check_window(where, causal, window)
    n, heads = mesh.size(dim), q.shape[1]
    if heads % n:
        fit = " or ".join(str(size) for size in range(1, n) if heads % size == 0)
        raise ShapeError(
            f"{where}: the heads cannot be shared out",
            given=f"{heads} heads in q, {n} ranks along {dim}",
            expected=f"a multiple of {n} heads; {heads} % {n} = {heads % n}",
            hint=f"{fit} along {dim}, or ring_attention, which takes any number of heads",
        )
    k, v = (x.repeat_interleave(lcm(k.shape[1], n) // k.shape[1], 1) for x in (k, v))
    # One exchange for all three: each rank's heads of q, k and v stand together.
    packed = torch.cat([x.unflatten(1, (n, -1)) for x in (q, k, v)], 2).flatten(1, 2)
    packed = mesh.functional.all_to_all(dim, packed, 1, 2)
    reorder = causal and order == "zigzag" and n > 1
    if reorder:
        packed = natural(packed, 2, n)
    q, k, v = packed.split([heads // n, k.shape[1] // n, k.shape[1] // n], 1)
    out = whole_attention(q, k, v, causal, scale, window)
    if reorder:
        out = zigzag(out, 2, n)
    return mesh.functional.all_to_all(dim, out, 2, 1)
