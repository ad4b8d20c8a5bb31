"""Ring attention: keys and values travel around a dim while each rank attends with what it has.

Liu, Zaharia, Abbeel 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context":
blocks of keys and values go around, results are put together by their log-sum-exp, and in backward the
gradients of a block travel with it until they are home. Brandon et al. 2023, "Striped Attention", show
that causal attention needs another order of tokens than the natural one to be balanced; here it is
the zig-zag, whose blocks are rectangles without a mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshcomm.comm import Handle
from meshcomm.mesh import Mesh
from meshcomm.parallel.context.block import (
    Band,
    Seen,
    attend_block,
    block_gradients,
    check_window,
    merge,
    prepared,
    whole_attention,
    wide,
)
from meshcomm.parallel.context.order import Order
from meshcomm.parallel.recompute import once
from meshcomm.transport.torch_private import outside_graphs

Block: TypeAlias = tuple[slice, slice, Seen]
"""Which rows of a rank's queries meet which of the keys at hand, and which of these each of them."""


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
) -> Tensor:
    """softmax(q k^T * scale) v over the whole sequence, of which each rank along `dim` holds a part.

    Shape:      q (batch, heads, sequence / n, head), k and v (batch, kv heads, sequence / n, head)
                -> like q. heads is a multiple of kv heads. Without causal, k and v may be of another
                sequence than q.
    order:      how the sequence lies on the ranks, see `split_sequence`; without causal both are the same.
    scale:      None: 1 / sqrt(head).
    window:     with causal, keys that a query meets at most, its own the last; None: all before it. Blocks outside of
                it are neither sent nor computed; those that it cuts are computed by the formula, not by torch's
                kernels, which take no window on every device.
    Called by:  every rank along `dim` with equal shapes, in the same program order; backward too.
    Gradient:   exact, for this rank's q, k, v. Once differentiable. q, k, v, the result and one number
                for each query are kept for it; scores are computed anew.
    Sent:       n - 1 times this rank's k and v to the next coord, each while a block is computed; in
                backward again, and n times their gradients, in float32 or wider. With a window as often as another
                rank needs them, over ranks that do not.
    Numbers:    sums over blocks in float32, for float64 in float64. Under autocast in its dtype.
    Raises:     ShapeError, UnknownDim, UnsupportedOp; CommunicationError.
    """
    where, q, k, v = prepared(mesh, dim, "ring_attention", q, k, v, causal, order)
    check_window(where, causal, window)
    n, coord = mesh.size(dim), mesh.coord(dim)
    if n == 1:
        return whole_attention(q, k, v, causal, scale, window)
    if window is not None and window >= n * q.shape[2]:
        window = None
    ring = _Ring(mesh, dim, n, coord, causal, order, q.shape[-1] ** -0.5 if scale is None else scale, window)
    apply: Any = _RingAttention.apply
    result: Tensor = apply(ring, q, k, v)
    return result


def ring_turns(ranks: int, zigzag: bool, tokens: int, window: int | None) -> list[int]:
    """At which turns of the ring some rank computes something; at turn t each has the keys of the t-th rank before it.

    tokens: of each rank. window: how many keys a query sees. If None, all keys before the query.

    >>> ring_turns(4, False, tokens=8, window=9), ring_turns(8, True, tokens=8, window=4)
    ([0, 1], [0, 1, 7])
    """
    if window is None:
        return list(range(ranks))
    size = tokens // 2 if zigzag else tokens
    # The farthest chunk of which a query of this one meets a key. The next one even if it meets none: keys go somewhere.
    far = max(1, (window + size - 2) // size)
    return [turn for turn in range(ranks) if turn <= far or (zigzag and ranks - turn <= far)]


def blocks_at(
    turn: int,
    n: int,
    coord: int,
    order: Order,
    causal: bool,
    queries: int,
    keys: int,
    window: int | None = None,
) -> tuple[Block, ...]:
    """What coord `coord` of `n` computes at `turn`, of so many queries and keys on each rank.

    A ring passes keys upwards, so those at hand are of coord `coord - turn`. At turn 0 each query meets some, first of
    all its own. In zig-zag order and without a window it is, at each turn and on each rank, as much as a half of a
    rank's queries by all of a rank's keys.
    """
    source = (coord - turn) % n
    every_query, every_key = slice(0, queries), slice(0, keys)
    if window is not None:
        return tuple(_within(window, source, n, coord, order, queries))
    if not causal or not turn:
        return ((every_query, every_key, causal),)
    if order == "contiguous":
        return ((every_query, every_key, False),) if source < coord else ()
    # The source has chunks source and 2n - 1 - source, this rank coord and 2n - 1 - coord.
    if source < coord:
        return ((every_query, slice(0, keys // 2), False),)
    return ((slice(queries // 2, queries), every_key, False),)


def _within(window: int, source: int, n: int, coord: int, order: Order, count: int) -> Iterator[Block]:
    """Each chunk of the queries with each chunk of the source's keys, without rows and keys that the window hides."""
    chunks = [(rank,) if order == "contiguous" else (rank, 2 * n - 1 - rank) for rank in (coord, source)]
    size = count // len(chunks[0])
    for row, mine in enumerate(chunks[0]):
        # A query's own chunk first.
        for column, theirs in sorted(enumerate(chunks[1]), key=lambda each: -each[1]):
            offset = (mine - theirs) * size
            if offset < 0 or offset - (size - 1) >= window:
                continue
            rows = min(size, size - 1 + window - offset)
            hidden = max(0, offset - window + 1)
            seen: Seen = Band(offset - hidden, window)
            if offset == 0 and window >= size:
                seen = True
            elif offset and offset + size - 1 < window:
                seen = False
            yield (
                slice(row * size, row * size + rows),
                slice(column * size + hidden, (column + 1) * size),
                seen,
            )


class _Ring(NamedTuple):
    mesh: Mesh
    dim: str
    n: int
    coord: int
    causal: bool
    order: Order
    scale: float
    window: int | None = None

    def pass_on(self, x: Tensor, by: int) -> Handle[list[Tensor]]:
        """Start sending `x` to the coord that is `by` higher; the wait returns what comes from one as much lower."""
        coming = [(torch.empty_like(x), (self.coord - by) % self.n)]
        return self.mesh.exchange(self.dim, [(x, (self.coord + by) % self.n)], coming, async_op=True)

    def turns(self, q: Tensor) -> Iterator[tuple[int, int, bool]]:
        """Each turn, how far keys and values go on behind it, and whether it is the last, behind which they are home."""
        turns = ring_turns(self.n, self.order == "zigzag", q.shape[2], self.window)
        for turn, after in pairwise([*turns, self.n]):
            yield turn, after - turn, after == self.n

    def blocks(self, turn: int, q: Tensor, k: Tensor) -> tuple[Block, ...]:
        shape = q.shape[2], k.shape[2]
        return blocks_at(turn, self.n, self.coord, self.order, self.causal, *shape, self.window)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ring: _Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            out, lse = once(lambda: _forward(ring, q, k, v), q)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        with torch.autocast(dout.device.type, enabled=False):
            return None, *_backward(ctx.ring, dout, *ctx.saved_tensors)


def _forward(ring: _Ring, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    kv = torch.stack([k, v])
    sum_out, sum_lse = torch.empty(0), torch.empty(0)
    for turn, by, last in ring.turns(q):
        coming = None if last else ring.pass_on(kv, by)
        for mine, theirs, seen in ring.blocks(turn, q, k):
            keys, values = kv[:, :, :, theirs]
            out, lse = attend_block(q[:, :, mine], keys, values, seen, ring.scale)
            if out.shape == q.shape and turn == 0:
                sum_out, sum_lse = out.to(wide(q.dtype)), lse.contiguous()
                continue
            if not sum_out.numel():
                sum_out = torch.zeros_like(q, dtype=wide(q.dtype))
                sum_lse = sum_out.new_full(q.shape[:3], -torch.inf)
            merge(sum_out[:, :, mine], sum_lse[:, :, mine], out, lse)
        if coming is not None:
            (kv,) = coming.wait()
    return sum_out.to(q.dtype), sum_lse


def _backward(
    ring: _Ring, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    kv = torch.stack([k, v])
    sum_dq = torch.zeros_like(q, dtype=wide(q.dtype))
    # What the ranks before have found of the gradients of the keys and values at hand.
    sum_dkv = torch.zeros_like(kv, dtype=wide(q.dtype))
    coming_dkv: Handle[list[Tensor]] | None = None
    for turn, by, last in ring.turns(q):
        coming = None if last else ring.pass_on(kv, by)
        found = []
        for mine, theirs, seen in ring.blocks(turn, q, k):
            keys, values = kv[:, :, :, theirs]
            dout_, q_, out_, lse_ = (x[:, :, mine] for x in (dout, q, out, lse))
            dq, dk, dv = block_gradients(dout_, q_, keys, values, out_, lse_, seen, ring.scale)
            sum_dq[:, :, mine] += dq
            found.append((theirs, dk, dv))
        if coming_dkv is not None:
            (sum_dkv,) = coming_dkv.wait()
        for theirs, dk, dv in found:
            sum_dkv[0, :, :, theirs] += dk
            sum_dkv[1, :, :, theirs] += dv
        # On their way while the next block is computed; after the last turn they come home.
        coming_dkv = ring.pass_on(sum_dkv, by)
        if coming is not None:
            (kv,) = coming.wait()
    assert coming_dkv is not None
    ((dk, dv),) = coming_dkv.wait()
    return sum_dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
