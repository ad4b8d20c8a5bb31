"""Ring attention: keys and values travel around a dim while each rank attends with what it has.

Liu, Zaharia, Abbeel 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context":
blocks of keys and values go around, results are put together by their log-sum-exp, and in backward the
gradients of a block travel with it until they are home. Brandon et al. 2023, "Striped Attention", show
that causal attention needs another order of tokens than the natural one to be balanced; here it is
the zig-zag, whose blocks are rectangles without a mask.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshcomm.comm import Handle
from meshcomm.mesh import Mesh
from meshcomm.parallel.context.block import attend_block, block_gradients, merge, wide
from meshcomm.parallel.context.check import prepared
from meshcomm.parallel.context.order import Order
from meshcomm.parallel.context.turns import block_at, rows
from meshcomm.transport.torch_private import outside_graphs


@outside_graphs
def ring_attention(
    mesh: Mesh,
    dim: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    order: Order = "zigzag",
    scale: float | None = None,
) -> Tensor:
    """softmax(q k^T * scale) v over the whole sequence, of which each rank along `dim` holds a part.

    Shape:      q (batch, heads, sequence / n, head), k and v (batch, kv heads, sequence / n, head)
                -> like q. heads is a multiple of kv heads. Without causal, k and v may be of another
                sequence than q.
    order:      how the sequence lies on the ranks, see `split_sequence`; without causal both are the same.
    scale:      None: 1 / sqrt(head).
    Called by:  every rank along `dim` with equal shapes, in the same program order; backward too.
    Gradient:   exact, for this rank's q, k, v. Once differentiable. q, k, v, the result and one number
                for each query are kept for it; scores are computed anew.
    Sent:       n - 1 times this rank's k and v to the next coord, each while a block is computed; in
                backward again, and n times their gradients, in float32 or wider.
    Numbers:    sums over blocks in float32, for float64 in float64. Under autocast in its dtype.
    Raises:     ShapeError, UnknownDim, UnsupportedOp; CommunicationError.
    """
    _, q, k, v = prepared(mesh, dim, "ring_attention", q, k, v, causal, order)
    ring = _Ring(mesh, dim, causal, order, q.shape[-1] ** -0.5 if scale is None else scale)
    apply: Any = _RingAttention.apply
    result: Tensor = apply(ring, q, k, v)
    return result


class _Ring(NamedTuple):
    mesh: Mesh
    dim: str
    causal: bool
    order: Order
    scale: float

    def pass_on(self, x: Tensor) -> Handle[list[Tensor]]:
        """Start sending `x` to the next coord; the wait returns what comes from the one before."""
        n, coord = self.mesh.size(self.dim), self.mesh.coord(self.dim)
        coming = torch.empty_like(x)
        return self.mesh.exchange(
            self.dim, [(x, (coord + 1) % n)], [(coming, (coord - 1) % n)], async_op=True
        )

    def block(self, turn: int, queries: int, keys: int) -> tuple[slice, slice, bool] | None:
        """Which rows of queries meet which keys at this turn, and whether by a causal mask."""
        n, coord = self.mesh.size(self.dim), self.mesh.coord(self.dim)
        block = block_at(turn, n, coord, self.order, self.causal)
        if block is None:
            return None
        return rows(block.queries, queries), rows(block.keys, keys), block.causal


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ring: _Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            out, lse = _forward(ring, q, k, v)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        with torch.autocast(dout.device.type, enabled=False):
            return None, *_backward(ctx.ring, dout, *ctx.saved_tensors)


def _forward(ring: _Ring, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    n = ring.mesh.size(ring.dim)
    if n == 1:
        out, lse = attend_block(q, k, v, ring.causal, ring.scale)
        return out.to(q.dtype), lse
    kv = torch.stack([k, v])
    sum_out, sum_lse = torch.empty(0), torch.empty(0)
    for turn in range(n):
        coming = ring.pass_on(kv) if turn < n - 1 else None
        block = ring.block(turn, q.shape[2], k.shape[2])
        if block is not None:
            mine, theirs, causal = block
            keys, values = kv[:, :, :, theirs]
            out, lse = attend_block(q[:, :, mine], keys, values, causal, ring.scale)
            if turn == 0:
                sum_out, sum_lse = out.to(wide(q.dtype)), lse.contiguous()
            else:
                merge(sum_out[:, :, mine], sum_lse[:, :, mine], out, lse)
        if coming is not None:
            (kv,) = coming.wait()
    return sum_out.to(q.dtype), sum_lse


def _backward(
    ring: _Ring, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    n = ring.mesh.size(ring.dim)
    if n == 1:
        dq, dk, dv = block_gradients(dout, q, k, v, out, lse, ring.causal, ring.scale)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
    kv = torch.stack([k, v])
    sum_dq = torch.zeros_like(q, dtype=wide(q.dtype))
    # What the ranks before have found of the gradients of the keys and values at hand.
    sum_dkv = torch.zeros_like(kv, dtype=wide(q.dtype))
    coming_dkv: Handle[list[Tensor]] | None = None
    for turn in range(n):
        coming = ring.pass_on(kv) if turn < n - 1 else None
        block = ring.block(turn, q.shape[2], k.shape[2])
        found: tuple[slice, Tensor, Tensor] | None = None
        if block is not None:
            mine, theirs, causal = block
            keys, values = kv[:, :, :, theirs]
            dq, dk, dv = block_gradients(
                dout[:, :, mine],
                q[:, :, mine],
                keys,
                values,
                out[:, :, mine],
                lse[:, :, mine],
                causal,
                ring.scale,
            )
            sum_dq[:, :, mine] += dq
            found = theirs, dk, dv
        if coming_dkv is not None:
            (sum_dkv,) = coming_dkv.wait()
        if found is not None:
            theirs, dk, dv = found
            sum_dkv[0, :, :, theirs] += dk
            sum_dkv[1, :, :, theirs] += dv
        # On their way while the next block is computed; after the last turn they come home.
        coming_dkv = ring.pass_on(sum_dkv)
        if coming is not None:
            (kv,) = coming.wait()
    assert coming_dkv is not None
    ((dk, dv),) = coming_dkv.wait()
    return sum_dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
