"""Attention on one rank: its settings, the checks of q, k and v, and attention of a block of queries to a block of keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meshcomm.comm.checks import check_tensor, value_of
from meshcomm.errors import ShapeError, UnsupportedOp
from meshcomm.mesh import Mesh
from meshcomm.parallel.context.documents import runs_of
from meshcomm.parallel.context.order import Order, check_order
from meshcomm.parallel.context.torch_private import (
    attention_kernel,
    kernel_alignment,
    kernel_attention,
    kernel_attention_backward,
)
from meshcomm.parallel.tensor.split import as_autocast, wide_dtype

# The number of score elements that the formula computes at a time.
_SCORES = 1 << 24
# The smallest number of queries that are computed together within a window. Fewer would mean many small products.
_ROWS = 128


class Queries(NamedTuple):
    """Queries and their data for backward: the result and the log-sum-exp over all keys, and the result's gradient."""

    q: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor


@dataclass(frozen=True)
class Attention:
    """One call of attention over a sequence that is split along `dim`. See `ring_attention` for the settings."""

    name: str
    mesh: Mesh
    dim: str
    causal: bool
    order: Order
    scale: float | None = None
    window: int | None = None
    documents: Tensor | None = None

    @property
    def n(self) -> int:
        """The number of ranks along the dim."""
        return self.mesh.size(self.dim)

    @property
    def where(self) -> str:
        """The name of the call in error messages."""
        return f'{self.name} along "{self.dim}" on {self.mesh.label}'

    def whole(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute torch's scaled_dot_product_attention over a full sequence on this rank.

        Shape: q (batch, heads, s, head), k and v (batch, kv heads, t, head) -> like q.

        Within a window, attention is computed for a few queries at a time, with only their keys, so the work grows as s * window. On
        a CPU, documents are computed one by one, so the work grows as the sum of their squared lengths; otherwise, a mask is used.
        """
        documents, count = self.documents, q.shape[2]
        if (
            documents is not None
            and q.device.type == "cpu"
            and not (self.mesh.is_fake or torch.compiler.is_compiling())
        ):
            alone = replace(self, documents=None)
            samples = []
            for row, runs in enumerate(runs_of(documents)):
                of_runs = [[x[row : row + 1, :, run] for x in (q, k, v)] for run in runs]
                samples.append(torch.cat([alone.whole(*of_run) for of_run in of_runs], 2))
            return torch.cat(samples)
        if documents is None and (self.window is None or self.window >= count):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=self.causal, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        window = count if self.window is None else self.window
        outs, step = [], max(window, _ROWS)
        for first in range(0, count, step):
            end, begin = min(first + step, count), max(0, first - window + 1)
            keys_seen = slice(begin, end if self.causal else k.shape[2])
            # No fused CUDA kernel supports both a mask and fewer key heads than query heads.
            keys, values = k[:, :, keys_seen], v[:, :, keys_seen]
            if (repeats := q.shape[1] // k.shape[1]) > 1:
                keys, values = (x.repeat_interleave(repeats, 1) for x in (keys, values))
            seen = seen_keys(
                slice(first, end), keys_seen, window if self.causal else None, documents, q.device
            )
            outs.append(
                F.scaled_dot_product_attention(
                    q[:, :, first:end], keys, values, attn_mask=seen, scale=self.scale
                )
            )
        return torch.cat(outs, 2)

    def checked(self, q: Tensor, k: Tensor, v: Tensor, same_length: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v, cast to autocast's dtype if autocast is on.

        Raises ShapeError or UnsupportedOp for invalid inputs.
        """
        check_order(self.order)
        q, k, v = (value_of(x) for x in (q, k, v))
        for x in (q, k, v):
            check_tensor(x, (self.mesh.device.type,), lambda: self.where)
        q, k, v = (as_autocast(x) for x in (q, k, v))
        given = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        fit = q.ndim == k.ndim == 4 and k.shape == v.shape and q.shape[0] == k.shape[0]
        wrong = ""
        if not fit or q.shape[3] != k.shape[3]:
            wrong = "q, k and v do not fit together"
            expected = "q (batch, heads, sequence / n, head), k and v (batch, kv heads, sequence / n, head)"
            hint = "x.unflatten(-1, (heads, head)).transpose(1, 2)"
        elif not (heads := k.shape[1]) or q.shape[1] % heads:
            wrong = "the heads of q cannot be divided among the heads of k and v"
            expected = f"a multiple of {heads} heads in q, got {q.shape[1]}" if heads else "a head in k and v"
            hint = "use equally many heads in q, k and v, or a number of heads in k and v that divides the number in q"
        elif not q.dtype == k.dtype == v.dtype or not q.dtype.is_floating_point:
            wrong, given = (
                "q, k and v need one floating-point dtype",
                f"q {q.dtype}, k {k.dtype}, v {v.dtype}",
            )
            expected, hint = "the same floating-point dtype for each", "k.to(q.dtype), v.to(q.dtype)"
        elif same_length and q.shape[2] != k.shape[2]:
            wrong = "q and k have different lengths"
            expected = "q, k and v for the same part of the sequence on each rank"
            hint = "ring_attention(..., causal=False), for keys of another sequence"
        elif self.order == "zigzag" and self.n > 1 and (q.shape[2] % 2 or k.shape[2] % 2):
            wrong = "an odd number of tokens cannot be divided into the two chunks of a zig-zag"
            expected = "an even number of tokens on each rank"
            hint = (
                f"a sequence length that is a multiple of {2 * self.n}, or "
                'order="contiguous", as in ContextSplit(mesh, dim, "ulysses")'
            )
        if wrong:
            raise ShapeError(f"{self.where}: {wrong}", given=given, expected=expected, hint=hint)
        check_window(self.where, self.causal, self.window)
        return q, k, v


def check_window(call: str, causal: bool, window: int | None) -> None:
    """Raise UnsupportedOp for an invalid window."""
    if window is not None and (not causal or window < 1):
        raise UnsupportedOp(
            f"{call}: the window is invalid",
            given=f"window={window}, causal={causal}",
            expected="1 or more keys for each query, including its own, with causal=True",
            hint="window=None for all keys",
        )


def seen_keys(
    queries: slice, keys: slice, window: int | None, documents: Tensor | None, device: torch.device
) -> Tensor:
    """Return which keys the queries attend to: bool, (queries, keys), or (batch, 1, queries, keys) with documents."""
    seen = torch.ones((), dtype=torch.bool, device=device)
    if window is not None:
        places = torch.arange(max(queries.stop, keys.stop), device=device)
        before = places[queries, None] - places[keys]
        seen = (before >= 0) & (before < window)
    if documents is not None:
        seen = seen & same_document(documents[:, queries], documents[:, keys])[:, None]
    return seen


def same_document(queries: Tensor, keys: Tensor) -> Tensor:
    """(batch, s), (batch, t) document numbers -> bool (batch, s, t): whether the two numbers are equal."""
    return queries[:, :, None] == keys[:, None, :]


def attend_block(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, seen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute attention over the keys of this block only, and the logarithm of the softmax's denominator.

    seen: bool (batch, s, t): the keys that each query attends to. For a query without keys, the results are 0 and -inf.

    Shape:  q (batch, heads, s, head), k and v (batch, kv heads, t, head), t = s if causal ->
            (batch, heads, s, head), (batch, heads, s), in q's dtype and `wide_dtype(q.dtype)`, or both in `wide_dtype(q.dtype)`.
    Memory: what torch's kernel needs, if there is one; otherwise, the scores of a few queries at a time.
    """
    inputs = _fitted(q), _fitted(k), _fitted(v)
    kernel = attention_kernel(*inputs, causal) if seen is None else None
    if kernel is None:
        return plain_attention(q, k, v, causal, scale, seen)
    out, lse = kernel_attention(kernel, inputs, causal, scale)
    return out[..., : q.shape[-1]], lse


def block_gradients(
    queries: Queries, k: Tensor, v: Tensor, causal: bool, scale: float, seen: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this block's contributions to the gradients of q, k and v.

    This block's weights in the softmax over all keys are exp(scores - lse) (Dao et al. 2022).
    """
    inputs = _fitted(queries.q), _fitted(k), _fitted(v)
    kernel = attention_kernel(*inputs, causal) if seen is None else None
    if kernel is None:
        return plain_gradients(queries, k, v, causal, scale, seen)
    of_forward = _fitted(queries.out), queries.lse, _fitted(queries.dout)
    dq, dk, dv = kernel_attention_backward(kernel, inputs, of_forward, causal, scale)
    head = queries.q.shape[-1]
    return dq[..., :head], dk[..., :head], dv[..., :head]


def _fitted(x: Tensor) -> Tensor:
    """Return x as torch's kernels require it: with the elements of each head contiguous and aligned.

    Heads of other sizes are padded with zeros, which change neither the scores nor the other columns.
    """
    multiple = kernel_alignment(x.device)
    if x.shape[-1] % multiple:
        return F.pad(x, (0, -x.shape[-1] % multiple))
    *strides, last = x.stride()
    aligned = last == 1 and not any(place % multiple for place in (*strides, x.storage_offset()))
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge one more block of keys into out (wide) and lse, in place.

    The block's share of the new denominator, exp(b) / (exp(b) + exp(a)), is sigmoid(b - a).
    """
    share = torch.sigmoid(block_lse - lse).unsqueeze(-1)
    out.lerp_(block_out.to(out.dtype), share)
    torch.logaddexp(lse, block_lse, out=lse)


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, seen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `attend_block` by the formula, a few queries at a time."""
    keys, values = _each(k), _each(v)
    outs, lses = [], []
    for rows, met in _runs(q, k, causal):
        some = None if seen is None else seen[:, rows, met]
        scores = _scores(_grouped(q[:, :, rows], k), keys[..., met, :], rows, causal, scale, some)
        lse = scores.logsumexp(-1)
        lses.append(lse.flatten(1, 2))
        if seen is not None:
            lse = lse.masked_fill(lse == -torch.inf, 0.0)
        outs.append((scores.sub_(lse.unsqueeze(-1)).exp_() @ values[..., met, :]).flatten(1, 2))
    return torch.cat(outs, 2), torch.cat(lses, 2)


def plain_gradients(
    queries: Queries, k: Tensor, v: Tensor, causal: bool, scale: float, seen: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `block_gradients` by the formula, a few queries at a time."""
    keys, values = _each(k), _each(v)
    dkeys, dvalues = torch.zeros_like(keys), torch.zeros_like(values)
    dqueries = []
    for rows, met in _runs(queries.q, k, causal):
        q, out, dout = (_grouped(x[:, :, rows], k) for x in (queries.q, queries.out, queries.dout))
        some = None if seen is None else seen[:, rows, met]
        scores = _scores(q, keys[..., met, :], rows, causal, scale, some)
        weights = scores.sub_(queries.lse[:, :, rows].unflatten(1, (k.shape[1], -1)).unsqueeze(-1)).exp_()
        dvalues[..., met, :] += (weights.transpose(-1, -2) @ dout).sum(2, keepdim=True)
        dscores = dout @ values[..., met, :].transpose(-1, -2)
        dscores = dscores.sub_((dout * out).sum(-1, keepdim=True)).mul_(weights).mul_(scale)
        dkeys[..., met, :] += (dscores.transpose(-1, -2) @ q).sum(2, keepdim=True)
        dqueries.append((dscores @ keys[..., met, :]).flatten(1, 2))
    return torch.cat(dqueries, 2), dkeys.squeeze(2), dvalues.squeeze(2)


def _runs(q: Tensor, k: Tensor, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Yield runs of queries whose scores fit into `_SCORES` elements, each with the keys that the run attends to."""
    batch, heads, count = q.shape[:3]
    most = max(1, _SCORES // max(1, batch * heads * k.shape[2]))
    for first in range(0, max(1, count), most):
        end = min(first + most, count)
        yield slice(first, end), slice(0, end if causal else k.shape[2])


def _scores(
    queries: Tensor, keys: Tensor, rows: slice, causal: bool, scale: float, seen: Tensor | None
) -> Tensor:
    scores: Tensor = (queries @ keys.transpose(-1, -2)).mul_(scale)
    if causal:
        every = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        scores.masked_fill_(every.triu(rows.start + 1), -torch.inf)
    if seen is not None:
        scores.masked_fill_(~seen[:, None, None], -torch.inf)
    return scores


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """Return x as (batch, kv heads, heads / kv heads, s, head) in the wide dtype."""
    grouped: Tensor = x.to(wide_dtype(x.dtype)).unflatten(1, (k.shape[1], -1))
    return grouped


def _each(x: Tensor) -> Tensor:
    """Return x as (batch, kv heads, 1, t, head) in the wide dtype."""
    return x.to(wide_dtype(x.dtype)).unsqueeze(2)
