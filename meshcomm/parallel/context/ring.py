"""Ring attention: keys and values travel around a dim while each rank attends with what it has.

Liu, Zaharia, Abbeel 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context":
blocks of keys and values go around, results are put together by their log-sum-exp, and in backward the
gradients of a block travel with it until they are home. Brandon et al. 2023, "Striped Attention", show
that causal attention needs another order of tokens than the natural one to be balanced; here it is
the zig-zag, whose blocks are rectangles without a mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshcomm.comm import Handle
from meshcomm.mesh import Mesh
from meshcomm.parallel.context.block import (
    Attention,
    Band,
    Queries,
    Visible,
    attend_block,
    block_gradients,
    merge,
    wide,
)
from meshcomm.parallel.context.order import Order
from meshcomm.parallel.recompute import once
from meshcomm.transport.torch_private import outside_graphs

Block: TypeAlias = tuple[slice, slice, Visible]
"""Rows of a rank's queries, the keys at hand that some of them meet, and which of these each of them meets."""


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
    ring = _Ring("ring_attention", mesh, dim, causal, order, scale, window)
    q, k, v = ring.checked(q, k, v, same_length=causal)
    if ring.n == 1:
        return ring.whole(q, k, v)
    ring = replace(
        ring,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        window=None if window is None or window >= ring.n * q.shape[2] else window,
    )
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


@dataclass(frozen=True)
class _Ring(Attention):
    """Keys and values are passed upwards; at turn t those of the rank t below are at hand."""

    def pass_on(self, x: Tensor, by: int) -> Handle[list[Tensor]]:
        """Start sending `x` to the coord that is `by` higher; the wait returns what the one `by` lower has sent."""
        n, coord = self.n, self.mesh.coord(self.dim)
        coming = [(torch.empty_like(x), (coord - by) % n)]
        return self.mesh.exchange(self.dim, [(x, (coord + by) % n)], coming, async_op=True)

    def turns(self, q: Tensor) -> Iterator[tuple[int, int, bool]]:
        """Each turn, how far keys and values travel after it, and whether it is the last, after which they are home."""
        n = self.n
        turns = ring_turns(n, self.order == "zigzag", q.shape[2], self.window)
        for turn, after in pairwise([*turns, n]):
            yield turn, after - turn, after == n

    def blocks(self, turn: int, queries: int, keys: int) -> tuple[Block, ...]:
        """What this rank computes at `turn`, of so many queries and keys on each rank.

        At turn 0 each query meets some keys, its own first. In zig-zag order and without a window a turn is, on each
        rank, as much work as half of a rank's queries with all of a rank's keys.
        """
        coord = self.mesh.coord(self.dim)
        source = (coord - turn) % self.n
        every_query, every_key = slice(0, queries), slice(0, keys)
        if self.window is not None:
            return tuple(self._within(self.window, (coord, source), queries))
        if not self.causal or not turn:
            return ((every_query, every_key, self.causal),)
        if self.order == "contiguous":
            return ((every_query, every_key, False),) if source < coord else ()
        # The source has chunks source and 2n - 1 - source, this rank coord and 2n - 1 - coord.
        if source < coord:
            return ((every_query, slice(0, keys // 2), False),)
        return ((slice(queries // 2, queries), every_key, False),)

    def _within(self, window: int, coords: tuple[int, int], count: int) -> Iterator[Block]:
        """Each chunk of the first coord's queries with each of the second's keys, without those that the window hides."""
        last = 2 * self.n - 1
        chunks = [(coord,) if self.order == "contiguous" else (coord, last - coord) for coord in coords]
        size = count // len(chunks[0])
        for row, mine in enumerate(chunks[0]):
            # A query's own chunk first.
            for column, theirs in reversed(list(enumerate(chunks[1]))):
                offset = (mine - theirs) * size
                if offset < 0 or offset - (size - 1) >= window:
                    continue
                rows = min(size, size - 1 + window - offset)
                hidden = max(0, offset - window + 1)
                seen: Visible = Band(offset - hidden, window)
                if offset == 0 and window >= size:
                    seen = True
                elif offset and offset + size - 1 < window:
                    seen = False
                first = column * size
                yield slice(row * size, row * size + rows), slice(first + hidden, first + size), seen


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
        q, k, v, out, lse = ctx.saved_tensors
        with torch.autocast(dout.device.type, enabled=False):
            return None, *_backward(ctx.ring, Queries(q, out, lse, dout), k, v)


def _forward(ring: _Ring, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    assert ring.scale is not None
    kv = torch.stack([k, v])
    sum_out, sum_lse = torch.empty(0), torch.empty(0)
    for turn, by, last in ring.turns(q):
        coming = None if last else ring.pass_on(kv, by)
        for mine, theirs, seen in ring.blocks(turn, q.shape[2], k.shape[2]):
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


def _backward(ring: _Ring, queries: Queries, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    assert ring.scale is not None
    q, kv = queries.q, torch.stack([k, v])
    sum_dq = torch.zeros_like(q, dtype=wide(q.dtype))
    # The terms of earlier ranks in the gradients of the keys and values at hand.
    sum_dkv = torch.zeros_like(kv, dtype=wide(q.dtype))
    coming_dkv: Handle[list[Tensor]] | None = None
    for turn, by, last in ring.turns(q):
        coming = None if last else ring.pass_on(kv, by)
        found = []
        for mine, theirs, seen in ring.blocks(turn, q.shape[2], k.shape[2]):
            keys, values = kv[:, :, :, theirs]
            some = Queries(*(x[:, :, mine] for x in queries))
            dq, dk, dv = block_gradients(some, keys, values, seen, ring.scale)
            sum_dq[:, :, mine] += dq
            found.append((theirs, dk, dv))
        if coming_dkv is not None:
            (sum_dkv,) = coming_dkv.wait()
        for theirs, dk, dv in found:
            sum_dkv[0, :, :, theirs] += dk
            sum_dkv[1, :, :, theirs] += dv
        # They travel while the next block is computed; after the last turn they are sent home.
        coming_dkv = ring.pass_on(sum_dkv, by)
        if coming is not None:
            (kv,) = coming.wait()
    assert coming_dkv is not None
    ((dk, dv),) = coming_dkv.wait()
    return sum_dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
