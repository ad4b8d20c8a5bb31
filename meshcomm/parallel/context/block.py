"""q, k and v of one rank: do they fit, and attention of a block of queries with one of keys, to be put together."""

from __future__ import annotations

import torch
from torch import Tensor

from meshcomm.comm.checks import check_tensor
from meshcomm.errors import ShapeError
from meshcomm.mesh import Mesh
from meshcomm.parallel.context.order import Order, check_order
from meshcomm.transport.torch_private import flash_attention, flash_attention_backward, has_flash_attention


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
