"""nn.MultiheadAttention with its heads split."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from meshcomm.errors import ShapeError, UnsupportedOp
from meshcomm.parallel.tensor.fused import joined
from meshcomm.parallel.tensor.modules import held
from meshcomm.parallel.tensor.split import TensorSplit


class Attention:
    """nn.MultiheadAttention of which each rank computes num_heads / ranks heads.

    query, key, value and the result are whole, or split along the sequence, as around any column and
    row. Of the weights only their mean over all heads is known, and computing it costs what it costs
    there: pass need_weights=False. With sequence_parallel no gradient flows through them.
    """

    meshcomm_split: TensorSplit
    meshcomm_entry: Callable[[Tensor], Tensor]
    out_proj: torch.nn.Module
    embed_dim: int
    num_heads: int
    head_dim: int
    dropout: float
    batch_first: bool
    training: bool

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As nn.MultiheadAttention, for (batch, sequence, width) or batch_first=False's order."""
        split = self.meshcomm_split
        heads = self.num_heads // split.size
        if query.ndim != 3:
            raise ShapeError(
                f"attention with split heads cannot take this query on {split.mesh.label}",
                given=f"a query of shape {tuple(query.shape)}",
                expected="3 axes: batch, sequence and width",
                hint="query.unsqueeze(0) and batch_first=True",
            )
        if is_causal and attn_mask is None:
            raise ShapeError(
                f"attention was told is_causal without the mask on {split.mesh.label}",
                given="is_causal=True, attn_mask=None",
                expected="the mask as well: in torch is_causal only says what the mask is",
                hint="attn_mask=nn.Transformer.generate_square_subsequent_mask(length)",
            )
        if need_weights and not average_attn_weights:
            raise UnsupportedOp(
                "attention with split heads does not give the weights of each head",
                given="need_weights=True, average_attn_weights=False",
                expected="average_attn_weights=True, or no weights",
                hint="need_weights=False",
            )
        width = self.embed_dim
        weight, bias = joined(held(self, "in_proj_weight"), [width] * 3).chunk(3), held(self, "in_proj_bias")
        biases = [None] * 3 if bias is None else joined(bias, [width] * 3).chunk(3)
        q, k, v = (
            F.linear(self.meshcomm_entry(x), w, b)
            for x, w, b in zip((query, key, value), weight, biases, strict=True)
        )
        if not self.batch_first:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        q, k, v = (x.unflatten(-1, (heads, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        mask = self._mask(q, attn_mask, key_padding_mask)
        dropout = self.dropout if self.training else 0.0
        # torch's is_causal is a hint about the mask, and needs the mask to be given.
        causal = is_causal and key_padding_mask is None and not need_weights
        if causal:
            mask = None
        averaged = None
        if need_weights:
            scores = q @ k.mT / self.head_dim**0.5
            weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            averaged, y = weights.sum(1) / self.num_heads, weights @ v
            if split.sequence_parallel:
                # What lies around works on slices: which of its gradients would be summed is unknown.
                averaged = averaged.detach()
            averaged = split.mesh.functional.all_reduce(split.dim, averaged, grad="identity")
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
        y = y.transpose(1, 2).flatten(2)
        out: Tensor = self.out_proj(y if self.batch_first else y.transpose(0, 1))
        return out, averaged

    def _mask(self, q: Tensor, attn: Tensor | None, padding: Tensor | None) -> Tensor | None:
        """Both masks as one that is added to the scores of this rank's heads."""
        split = self.meshcomm_split

        def added(mask: Tensor) -> Tensor:
            if mask.dtype != torch.bool:
                return mask.to(q.dtype)
            return torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, -torch.inf)

        found = None
        if attn is not None:
            found = added(attn)
            if found.ndim == 3:
                # (batch * all heads, ...): this rank's heads of each sample.
                found = found.unflatten(0, (-1, self.num_heads))
                found = found.chunk(split.size, 1)[split.coord]
        if padding is not None:
            rows = added(padding)[:, None, None]
            found = rows if found is None else found + rows
        return found
