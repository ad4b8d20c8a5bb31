"""Ring attention: keys and values are passed around a dim while each rank computes attention over its current block.

Liu, Zaharia, Abbeel 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context":
blocks of keys and values are passed around, results are merged by their log-sum-exp, and in backward the
gradients of each block travel with the block back to its rank. Brandon et al. 2023, "Striped Attention",
show that causal attention is balanced only if tokens are reordered. This module uses zig-zag order, in
which blocks are rectangles without a mask.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshcomm.comm import Handle
from meshcomm.errors import UnsupportedOp
from meshcomm.mesh import Mesh
from meshcomm.parallel.context.block import (
    Attention,
    Queries,
    attend_block,
    block_gradients,
    merge,
    same_document,
)
from meshcomm.parallel.context.order import Order, sequence_positions
from meshcomm.parallel.recompute import once
from meshcomm.parallel.tensor.split import wide_dtype
from meshcomm.transport.torch_private import outside_graphs

# The rows of a rank's queries, the received keys that they attend to, and whether attention between the two is causal.
Block = tuple[slice, slice, bool]


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
    window: int | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """Compute softmax(q k^T * scale) v over the full sequence, of which each rank along `dim` holds a part.

    Shape:      q (batch, heads, sequence / n, head), k and v (batch, kv heads, sequence / n, head)
                -> like q. heads is a multiple of kv heads. Without causal, k and v may belong to a different
                sequence than q.
    order:      the order in which ranks hold the sequence (see `split_sequence`); irrelevant without causal.
    scale:      the factor by which scores are multiplied. If None, 1 / sqrt(head).
    window:     with causal, the largest number of keys that a query attends to, ending with its own. If None, a
                query attends to all earlier keys. With several ranks, the window must cover the sequence;
                `ulysses_attention` supports shorter windows.
    documents:  int64 (batch, sequence), equal on all ranks: a query attends only to keys of its own document.
                Fully visible blocks are computed by torch's kernel, partly visible blocks by the formula, and
                invisible blocks are skipped.
    Called by:  every rank along `dim` with equal shapes, in the same program order. Every rank must also run backward.
    Gradient:   exact, for this rank's q, k and v, and differentiable only once. q, k, v, the result and one
                number per query are kept for backward; scores are recomputed.
    Sent:       one rank's k and v to the next coord, n - 1 times, while blocks are computed. Backward sends the same data, and
                sends the gradients of k and v n times, in float32 or wider.
    Numbers:    sums over blocks are computed in float32, or in float64 for float64 inputs. Under autocast, q, k and v are cast
                to autocast's dtype.
    Raises:     ShapeError, UnknownDim, UnsupportedOp; CommunicationError.
    """
    ring = _Ring("ring_attention", mesh, dim, causal, order, scale, window, documents)
    q, k, v = ring.checked(q, k, v, same_length=causal)
    if ring.n == 1:
        return ring.whole(q, k, v)
    if window is not None and window < ring.n * q.shape[2]:
        raise UnsupportedOp(
            f"{ring.where}: ring attention does not support a sliding window",
            given=f"window={window}, {ring.n} ranks of {q.shape[2]} tokens",
            expected="a window that covers the full sequence, or none",
            hint='use parallel.options.attention = "ulysses", or ulysses_attention, which split the heads',
        )
    ring = replace(ring, scale=q.shape[-1] ** -0.5 if scale is None else scale)
    apply: Any = _RingAttention.apply
    result: Tensor = apply(ring, q, k, v)
    return result


@dataclass(frozen=True)
class _Ring(Attention):
    """Passes keys and values to the next coord. At turn t, coord c holds the keys and values of coord c - t, modulo n."""

    def pass_on(self, x: Tensor) -> Handle[list[Tensor]]:
        """Start sending `x` to the next coord. Waiting on the handle returns the tensor from the previous coord."""
        n, coord = self.n, self.mesh.coord(self.dim)
        coming = [(torch.empty_like(x), (coord - 1) % n)]
        return self.mesh.exchange(self.dim, [(x, (coord + 1) % n)], coming, async_op=True)

    def seen(self, turn: int, block: Block) -> tuple[bool, Tensor | None]:
        """Return whether any of the block's queries attends to any of its keys, and a mask of each query's keys. The mask
        is None if every query attends to all keys that causal attention allows.
        """
        if self.documents is None:
            return True, None
        mine, theirs, _ = block
        coord = self.mesh.coord(self.dim)
        documents, length = self.documents, self.documents.shape[1]
        queries, keys = (
            documents[:, sequence_positions(length, self.n, at, self.order, documents.device)][:, some]
            for at, some in ((coord, mine), ((coord - turn) % self.n, theirs))
        )
        same = same_document(queries, keys)
        if documents.device.type != "cpu" or self.mesh.is_fake:
            return True, same
        return bool(same.any()), None if same.all() else same

    def block(self, turn: int, queries: int, keys: int) -> Block | None:
        """Return this rank's computation at `turn`, given the number of queries and keys per rank, or None if it has none.

        At turn 0, each query attends at least to its own key. In zig-zag order, each later turn costs every rank as much
        as attention of half of its queries to all keys of a rank.
        """
        coord = self.mesh.coord(self.dim)
        source = (coord - turn) % self.n
        every_query, every_key = slice(0, queries), slice(0, keys)
        if not self.causal or not turn:
            return every_query, every_key, self.causal
        if self.order == "contiguous":
            return (every_query, every_key, False) if source < coord else None
        # The source has chunks source and 2n - 1 - source. This rank has chunks coord and 2n - 1 - coord.
        if source < coord:
            return every_query, slice(0, keys // 2), False
        return slice(queries // 2, queries), every_key, False


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ring: _Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            out, lse = once(partial(_forward, ring, q, k, v), q)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        with torch.autocast(dout.device.type, enabled=False):
            return None, *_backward(ctx.ring, Queries(q, out, lse, dout), k, v)


def _forward(ring: _Ring, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    assert ring.scale is not None
    kv = torch.stack([k, v])
    sum_out, sum_lse = torch.empty(0), torch.empty(0)
    for turn in range(ring.n):
        coming = ring.pass_on(kv) if turn < ring.n - 1 else None
        if (block := ring.block(turn, q.shape[2], k.shape[2])) and (seen := ring.seen(turn, block))[0]:
            mine, theirs, causal = block
            keys, values = kv[:, :, :, theirs]
            out, lse = attend_block(q[:, :, mine], keys, values, causal, ring.scale, seen[1])
            if turn == 0:
                sum_out, sum_lse = out.to(wide_dtype(q.dtype)), lse.contiguous()
            else:
                merge(sum_out[:, :, mine], sum_lse[:, :, mine], out, lse)
        if coming is not None:
            (kv,) = coming.wait()
    return sum_out.to(q.dtype), sum_lse


def _backward(ring: _Ring, queries: Queries, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    assert ring.scale is not None
    q, kv = queries.q, torch.stack([k, v])
    sum_dq = torch.zeros_like(q, dtype=wide_dtype(q.dtype))
    # The contributions of earlier ranks to the gradients of the current keys and values.
    sum_dkv = torch.zeros_like(kv, dtype=wide_dtype(q.dtype))
    coming_dkv: Handle[list[Tensor]] | None = None
    for turn in range(ring.n):
        coming = ring.pass_on(kv) if turn < ring.n - 1 else None
        gradients: list[Tensor] = []
        theirs = slice(0)
        if (block := ring.block(turn, q.shape[2], k.shape[2])) and (seen := ring.seen(turn, block))[0]:
            mine, theirs, causal = block
            keys, values = kv[:, :, :, theirs]
            some = Queries(*(x[:, :, mine] for x in queries))
            dq, *gradients = block_gradients(some, keys, values, causal, ring.scale, seen[1])
            sum_dq[:, :, mine] += dq
        if coming_dkv is not None:
            (sum_dkv,) = coming_dkv.wait()
        for total, gradient in zip(sum_dkv, gradients, strict=False):
            total[:, :, theirs] += gradient
        # These gradients are sent while the next block is computed. After the last turn, they return to their rank.
        coming_dkv = ring.pass_on(sum_dkv)
        if coming is not None:
            (kv,) = coming.wait()
    assert coming_dkv is not None
    ((dk, dv),) = coming_dkv.wait()
    return sum_dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
