"""The built-in transformer in plain PyTorch, as a baseline for torch's ways to train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from meshcomm.config import ModelConfig
from meshcomm.models.transformer import rotary_table, rotate


class Around(NamedTuple):
    """Ranks that hold other tokens of the same samples. seen: (tokens here, tokens of all ranks), whether a query sees a
    key. Keys are in rank order.
    """

    group: dist.ProcessGroup
    seen: Tensor


class _Gathered(torch.autograd.Function):
    """(...) -> (ranks, ...), gathered from all ranks. backward sums each rank's gradients on that rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        found = x.new_empty(group.size(), *x.shape)
        dist.all_gather(list(found.unbind()), x, group)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        mine = torch.empty_like(grad[0])
        dist.reduce_scatter(mine, list(grad.contiguous().unbind()), group=ctx.group)
        return mine, None


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    around: Around | None = None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head, self.grouped = config.head_size, config.num_heads != config.num_kv_heads
        inner, few = config.num_heads * self.head, config.num_kv_heads * self.head
        self.wq = nn.Linear(config.hidden_size, inner, bias=False)
        self.wk = nn.Linear(config.hidden_size, few, bias=False)
        self.wv = nn.Linear(config.hidden_size, few, bias=False)
        self.wo = nn.Linear(inner, config.hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        """(batch, sequence, width) -> the same shape."""
        q, k, v = (w(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, rotary), rotate(k, rotary)
        if self.around is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        else:
            both = _Gathered.apply(torch.stack([k, v]), self.around.group)
            k, v = both.permute(1, 2, 3, 0, 4, 5).flatten(3, 4).unbind()
            seen = self.around.seen
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=self.grouped)
        out: Tensor = self.wo(y.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width)."""
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    """x + attention(norm x), then x + feed-forward(norm x)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.attn = Attention(config)
        self.ff_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.ff = FeedForward(config)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        """(batch, sequence, width) -> the same shape."""
        x = x + self.attn(self.attn_norm(x), rotary)
        out: Tensor = x + self.ff(self.ff_norm(x))
        return out


@final
class Plain(nn.Module):
    """Some consecutive layers, with the embedding before the first and the head after the last.

    Parameters have the names and shapes of `meshcomm.models.transformer.Transformer`'s. No dropout, no experts.
    """

    rotary: Tensor

    def __init__(self, config: ModelConfig, seq_len: int, layers: Sequence[int]) -> None:
        super().__init__()
        first, last = layers[0] == 0, layers[-1] == config.num_layers - 1
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size) if first else None
        self.layers = nn.ModuleDict({str(layer): Block(config) for layer in layers})
        self.norm = nn.RMSNorm(config.hidden_size, config.norm_eps) if last else None
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False) if last else None
        table = rotary_table(seq_len, config.head_size, config.rope_theta)
        self.register_buffer("rotary", table.to(torch.get_default_dtype()), persistent=False)

    def forward(self, x: Any) -> Any:
        """(batch, sequence) int64, or hidden states after the first layer -> hidden states, or logits."""
        if self.embed is not None:
            x = self.embed(x)
        for block in self.layers.values():
            x = block(x, self.rotary)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def split_sequence(module: Plain, group: dist.ProcessGroup, positions: Sequence[Tensor]) -> None:
    """Let ranks with other tokens of the same samples attend to each other's. Keys and values are gathered, as for Llama 3
    (Grattafiori et al. 2024), because torch's ring attention in `context_parallel` has no CPU kernel (2.15).

    positions: for each rank, its tokens' positions in their samples.
    """
    here = positions[group.rank()]
    seen = here[:, None] >= torch.cat(list(positions))
    module.rotary = module.rotary[:, here]
    for block in module.layers.values():
        block.attn.around = Around(group, seen)  # type: ignore[union-attr]


def split_by_torch(module: Plain, over: DeviceMesh, sequence_parallel: bool, split_logits: bool) -> None:
    """`parallelize_module` as in torch's own examples. split_logits: for `loss_parallel`."""
    between: Any = Shard(1) if sequence_parallel else Replicate()
    if module.embed is not None:
        plan = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
        parallelize_module(module.embed, over, plan)
    for block in module.layers.values():
        parts: dict[str, Any] = {
            **{f"attn.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
            "attn.wo": RowwiseParallel(output_layouts=between),
            **{f"ff.{name}": ColwiseParallel() for name in ("w1", "w3")},
            "ff.w2": RowwiseParallel(output_layouts=between),
        }
        if sequence_parallel:
            # One gather serves all columns that read the tensor.
            parts["ff"] = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))
            parts["attn"] = PrepareModuleInput(
                input_layouts=(between, None), desired_input_layouts=(Replicate(), None)
            )
            parts |= {"attn_norm": SequenceParallel(), "ff_norm": SequenceParallel()}
        parallelize_module(block, over, parts)
    if module.norm is not None and module.head is not None:
        if sequence_parallel:
            parallelize_module(module.norm, over, SequenceParallel())
        logits: Any = Shard(-1) if split_logits else Replicate()
        head = ColwiseParallel(
            input_layouts=between, output_layouts=logits, use_local_output=not split_logits
        )
        parallelize_module(module.head, over, head)
