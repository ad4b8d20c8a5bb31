"""q, k and v of one rank: do they fit, and attention of a block of queries with one of keys, to be put together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from meshcomm.comm.checks import check_tensor
from meshcomm.errors import ShapeError, UnsupportedOp
from meshcomm.mesh import Mesh
from meshcomm.parallel.autocast import as_autocast
from meshcomm.parallel.context.order import Order, check_order
from meshcomm.parallel.context.torch_private import (
    attention_kernel,
    kernel_alignment,
    kernel_attention,
    kernel_attention_backward,
)

# Elements of the scores that the formula holds at once.
_SCORES = 1 << 24
# Queries that attend together within a window, at least: fewer would be many small products.
_ROWS = 128


class Band(NamedTuple):
    """A query at place i meets the keys at places i + offset - window + 1 to i + offset, of which there is one at least."""

    offset: int
    window: int


Seen: TypeAlias = bool | Band
"""Which keys of a block a query meets: False all of them, True those at its own place and before."""


def check_window(call: str, causal: bool, window: int | None) -> None:
    """Raises UnsupportedOp for a window that is none."""
    if window is not None and (not causal or window < 1):
        raise UnsupportedOp(
            f"{call}: there is no such window",
            given=f"window={window}, causal={causal}",
            expected="the number of keys that a query meets, its own and those before it: 1 or more, with causal=True",
            hint="window=None, for all of them",
        )


def whole_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, window: int | None
) -> Tensor:
    """torch's scaled_dot_product_attention of a sequence that is not split.

    Shape:  q (batch, heads, s, head), k and v (batch, kv heads, t, head) -> like q.
    window: keys that a query meets at most, its own the last. Some queries at a time, with the keys that they meet:
            the work grows as s * window.
    """
    count = q.shape[2]
    if window is None or window >= count:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    outs, step = [], max(window, _ROWS)
    for first in range(0, count, step):
        end, begin = min(first + step, count), max(0, first - window + 1)
        # No fused kernel of CUDA takes both a mask and fewer heads of keys.
        keys, values = (_repeated(x[:, :, begin:end], q) for x in (k, v))
        places = torch.arange(begin, end, device=q.device)
        before = places[first - begin :, None] - places
        seen = (before >= 0) & (before < window)
        outs.append(
            F.scaled_dot_product_attention(q[:, :, first:end], keys, values, attn_mask=seen, scale=scale)
        )
    return torch.cat(outs, 2)


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
    q, k, v = (as_autocast(x) for x in (q, k, v))
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


def attend_block(q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax over the keys of this block alone, and the logarithm of its denominator.

    Shape:   q (batch, heads, s, head), k and v (batch, kv heads, t, head), t = s where seen is True ->
             (batch, heads, s, head), (batch, heads, s), in q's dtype and `wide` of it, or both wide.
    Memory:  torch's kernel where it has one, see `attention_kernel`; elsewhere, and for a Band, which no kernel on
             every device takes, the scores of some queries at a time.
    """
    fq, fk, fv = (_fitted(x) for x in (q, k, v))
    kernel = None if isinstance(seen, Band) else attention_kernel(fq, fk, fv, seen)
    if kernel is None or isinstance(seen, Band):
        return plain_attention(q, k, v, seen, scale)
    if kernel == "efficient":
        fk, fv = (_repeated(x, q) for x in (fk, fv))
    out, lse = kernel_attention(kernel, fq, fk, fv, seen, scale)
    return out[..., : q.shape[-1]], lse


def block_gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seen: Seen, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What this block adds to the gradients of q, k, v.

    out and lse are those of the softmax over all keys, dout the gradient of that out: the weights
    of this block within the whole are exp(scores - lse) (Dao et al. 2022).
    """
    fq, fk, fv = (_fitted(x) for x in (q, k, v))
    kernel = None if isinstance(seen, Band) else attention_kernel(fq, fk, fv, seen)
    if kernel is None or isinstance(seen, Band):
        return plain_gradients(dout, q, k, v, out, lse, seen, scale)
    if kernel == "efficient":
        fk, fv = (_repeated(x, q) for x in (fk, fv))
    given = (_fitted(dout), fq, fk, fv, _fitted(out), lse)
    dq, dk, dv = kernel_attention_backward(kernel, *given, seen, scale)
    if kernel == "efficient":
        dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))
    head = q.shape[-1]
    return dq[..., :head], dk[..., :head], dv[..., :head]


def _fitted(x: Tensor) -> Tensor:
    """x as torch's kernels take it for granted: the elements of a head side by side, and aligned.

    Heads of another size get zeros behind: they change neither the scores nor the columns before them.
    """
    multiple = kernel_alignment(x.device)
    if x.shape[-1] % multiple:
        return F.pad(x, (0, -x.shape[-1] % multiple))
    *strides, last = x.stride()
    aligned = last == 1 and not any(place % multiple for place in (*strides, x.storage_offset()))
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    """k or v with a head for each of q's."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Put one more block of keys into out (wide) and lse, in place.

    The block's share of the new denominator, exp(b) / (exp(b) + exp(a)), is sigmoid(b - a).
    """
    share = torch.sigmoid(block_lse - lse).unsqueeze(-1)
    out.lerp_(block_out.to(out.dtype), share)
    torch.logaddexp(lse, block_lse, out=lse)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums of values of `dtype` are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def plain_attention(q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float) -> tuple[Tensor, Tensor]:
    """`attend_block` by the formula, some queries at a time."""
    keys, values = _each(k), _each(v)
    outs, lses = [], []
    for rows, met in _runs(q, k, seen):
        scores = _scores(_grouped(q[:, :, rows], k), keys[..., met, :], rows, met, seen, scale)
        lse = scores.logsumexp(-1)
        lses.append(lse.flatten(1, 2))
        outs.append((scores.sub_(lse.unsqueeze(-1)).exp_() @ values[..., met, :]).flatten(1, 2))
    return torch.cat(outs, 2), torch.cat(lses, 2)


def plain_gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seen: Seen, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`block_gradients` by the formula, some queries at a time."""
    keys, values = _each(k), _each(v)
    dkeys, dvalues = torch.zeros_like(keys), torch.zeros_like(values)
    dqueries = []
    for rows, met in _runs(q, k, seen):
        queries, dout_, out_ = (_grouped(x[:, :, rows], k) for x in (q, dout, out))
        scores = _scores(queries, keys[..., met, :], rows, met, seen, scale)
        weights = scores.sub_(lse[:, :, rows].unflatten(1, (k.shape[1], -1)).unsqueeze(-1)).exp_()
        dvalues[..., met, :] += (weights.transpose(-1, -2) @ dout_).sum(2, keepdim=True)
        dscores = dout_ @ values[..., met, :].transpose(-1, -2)
        dscores = dscores.sub_((dout_ * out_).sum(-1, keepdim=True)).mul_(weights).mul_(scale)
        dkeys[..., met, :] += (dscores.transpose(-1, -2) @ queries).sum(2, keepdim=True)
        dqueries.append((dscores @ keys[..., met, :]).flatten(1, 2))
    return torch.cat(dqueries, 2), dkeys.squeeze(2), dvalues.squeeze(2)


def _runs(q: Tensor, k: Tensor, seen: Seen) -> Iterator[tuple[slice, slice]]:
    """Queries whose scores fit into `_SCORES` elements, and the keys that some of them meet."""
    batch, heads, count = q.shape[:3]
    most = max(1, _SCORES // max(1, batch * heads * k.shape[2]))
    for first in range(0, max(1, count), most):
        end = min(first + most, count)
        if isinstance(seen, Band):
            begin = max(0, first + seen.offset - seen.window + 1)
            yield slice(first, end), slice(begin, min(end + seen.offset, k.shape[2]))
        else:
            yield slice(first, end), slice(0, end if seen else k.shape[2])


def _scores(queries: Tensor, keys: Tensor, rows: slice, met: slice, seen: Seen, scale: float) -> Tensor:
    scores: Tensor = (queries @ keys.transpose(-1, -2)).mul_(scale)
    if seen:
        every = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        own = rows.start - met.start + (seen.offset if isinstance(seen, Band) else 0)
        hidden = every.triu(own + 1)
        if isinstance(seen, Band):
            hidden |= every.tril(own - seen.window)
        scores.masked_fill_(hidden, -torch.inf)
    return scores


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """(batch, kv heads, heads / kv heads, s, head), wide."""
    grouped: Tensor = x.to(wide(x.dtype)).unflatten(1, (k.shape[1], -1))
    return grouped


def _each(x: Tensor) -> Tensor:
    """(batch, kv heads, 1, t, head), wide."""
    return x.to(wide(x.dtype)).unsqueeze(2)
