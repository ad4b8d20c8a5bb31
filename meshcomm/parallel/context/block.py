"""Attention of one block of queries with one block of keys, such that blocks can be put together."""

from __future__ import annotations

import torch
from torch import Tensor

from meshcomm.transport.torch_private import flash_attention, flash_attention_backward, has_flash_attention


def attend_block(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax over the keys of this block alone, and the logarithm of its denominator.

    Shape:   q (batch, heads, s, head), k and v (batch, kv heads, t, head), t = s where causal ->
             (batch, heads, s, head), (batch, heads, s), in q's dtype and `wide` of it, or both wide.
    Memory:  torch's kernel where it has one for the device; elsewhere the s x t scores.
    """
    if has_flash_attention(q):
        return flash_attention(_dense(q), _dense(k), _dense(v), causal, scale)
    return plain_attention(q, k, v, causal, scale)


def block_gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What this block adds to the gradients of q, k, v.

    out and lse are those of the softmax over all keys, dout the gradient of that out: the weights
    of this block within the whole are exp(scores - lse) (Dao et al. 2022).
    """
    if has_flash_attention(q):
        dout, q, k, v, out = (_dense(x) for x in (dout, q, k, v, out))
        return flash_attention_backward(dout, q, k, v, out, lse, causal, scale)
    return plain_gradients(dout, q, k, v, out, lse, causal, scale)


def _dense(x: Tensor) -> Tensor:
    """x, copied where the elements of a head do not lie side by side: torch's kernel takes it for granted."""
    return x if x.stride(-1) == 1 else x.contiguous()


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


def plain_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """`attend_block` by the formula."""
    scores = _scores(q, k, causal, scale)
    lse = scores.logsumexp(-1)
    out = (scores - lse.unsqueeze(-1)).exp() @ _each(v)
    return out.flatten(1, 2), lse.flatten(1, 2)


def plain_gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`block_gradients` by the formula."""
    queries, keys, values = _grouped(q, k), _each(k), _each(v)
    dout, out = _grouped(dout, k), _grouped(out, k)
    weights = (_scores(q, k, causal, scale) - lse.unflatten(1, (k.shape[1], -1)).unsqueeze(-1)).exp()
    dvalues = weights.transpose(-1, -2) @ dout
    dscores = weights * (dout @ values.transpose(-1, -2) - (dout * out).sum(-1, keepdim=True)) * scale
    dqueries = dscores @ keys
    dkeys = dscores.transpose(-1, -2) @ queries
    return dqueries.flatten(1, 2), dkeys.sum(2), dvalues.sum(2)


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    scores: Tensor = _grouped(q, k) @ _each(k).transpose(-1, -2) * scale
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores.masked_fill_(later, -torch.inf)
    return scores


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """(batch, kv heads, heads / kv heads, s, head), wide."""
    grouped: Tensor = x.to(wide(x.dtype)).unflatten(1, (k.shape[1], -1))
    return grouped


def _each(x: Tensor) -> Tensor:
    """(batch, kv heads, 1, t, head), wide."""
    return x.to(wide(x.dtype)).unsqueeze(2)
