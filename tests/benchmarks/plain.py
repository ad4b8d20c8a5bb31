"""The built-in transformer as one writes it in plain PyTorch: what `meshcomm bench --train` measures torch's ways with."""

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
    """Ranks that have other tokens of the same samples. seen: (tokens here, tokens of all), whether a query meets a
    key, with keys in the order of the ranks.
    """

    group: dist.ProcessGroup
    seen: Tensor


class _Gathered(torch.autograd.Function):
    """(...) -> (ranks, ...), everybody's; gradients are added up where they belong."""

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


class _Exchanged(torch.autograd.Function):
    """Rows by rank, sent[0] of them for the first; -> those that arrive, received[0] from the first."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, group: dist.ProcessGroup, sent: list[int], received: list[int]
    ) -> Tensor:
        ctx.back = group, received, sent
        found = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(found, rows.contiguous(), received, sent, group)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _Exchanged.forward(ctx, grad, *ctx.back), None, None, None


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


class _Weights(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        count, width, ff = config.experts, config.hidden_size, config.intermediate_size
        self.w1 = nn.Parameter(torch.empty(count, ff, width))
        self.w3 = nn.Parameter(torch.empty(count, ff, width))
        self.w2 = nn.Parameter(torch.empty(count, width, ff))


@final
class PlainExperts(nn.Module):
    """The most probable experts of each token, without a capacity: rows sorted by expert, and where experts are spread
    two all_to_all, as torchtitan does it (torchtitan/models/moe.py).

    balance: of the last forward pass, what `meshcomm.parallel.expert.routing.balance` gives.
    """

    balance: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.slots, self.count = min(config.experts_per_token, config.experts), config.experts
        self.router = nn.Linear(config.hidden_size, config.experts, bias=False)
        self.experts = _Weights(config)
        self.group: dist.ProcessGroup | None = None

    def spread(self, group: dist.ProcessGroup) -> None:
        """Keep this rank's experts alone, those of its place in `group`."""
        self.group, own = group, self.count // group.size()
        for name, weight in list(self.experts.named_parameters()):
            mine = weight.detach()[group.rank() * own :][:own].clone()
            setattr(self.experts, name, nn.Parameter(mine))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) -> the same shape."""
        probabilities = self.router(x).softmax(-1)
        weights, chosen = probabilities.topk(self.slots)
        if self.slots > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        each = F.one_hot(chosen, self.count).sum((1, 2))
        fractions = each.to(x.dtype) / (x.shape[1] * self.slots)
        self.balance = self.count * (fractions * probabilities.mean(1)).sum(-1).mean()
        often, order = each.sum(0), chosen.flatten().argsort(stable=True)
        rows = x.flatten(0, 1)[order // self.slots]
        if self.group is None:
            done = self._through(rows, often.tolist())
        else:
            theirs = torch.empty_like(often)
            dist.all_to_all_single(theirs, often, group=self.group)
            sides = torch.stack([often, theirs]).unflatten(1, (self.group.size(), -1))
            sent, received = sides.sum(2).tolist()
            arrived: Any = _Exchanged.apply(rows, self.group, sent, received)
            # By sender and within it by expert; together by expert.
            own = torch.arange(sides.shape[2]).repeat(self.group.size())
            sorts = own.repeat_interleave(theirs).argsort(stable=True)
            made = self._through(arrived[sorts], sides[1].sum(0).tolist())
            done = _Exchanged.apply(made[sorts.argsort()], self.group, received, sent)
        spread = done[order.argsort()].unflatten(0, (-1, self.slots))
        out: Tensor = (spread * weights.flatten(0, 1).unsqueeze(-1)).sum(1).view(x.shape)
        return out

    def _through(self, rows: Tensor, often: list[int]) -> Tensor:
        held = self.experts
        parts = zip(rows.split(often), held.w1.unbind(), held.w3.unbind(), held.w2.unbind(), strict=True)
        return torch.cat([F.linear(F.silu(F.linear(x, a)) * F.linear(x, b), c) for x, a, b, c in parts])


class Block(nn.Module):
    """x + attention(norm x), then x + feed-forward(norm x), or experts in its place."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.attn = Attention(config)
        self.ff_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.ff = PlainExperts(config) if config.has_experts(layer) else FeedForward(config)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        """(batch, sequence, width) -> the same shape."""
        x = x + self.attn(self.attn_norm(x), rotary)
        out: Tensor = x + self.ff(self.ff_norm(x))
        return out


@final
class Plain(nn.Module):
    """Some consecutive layers of it, with the embedding before the first and the head behind the last.

    Parameters have the names and shapes of `meshcomm.models.transformer.Transformer`'s. No dropout, no capacity.
    """

    rotary: Tensor

    def __init__(self, config: ModelConfig, seq_len: int, layers: Sequence[int]) -> None:
        super().__init__()
        first, last = layers[0] == 0, layers[-1] == config.num_layers - 1
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size) if first else None
        self.layers = nn.ModuleDict({str(layer): Block(config, layer) for layer in layers})
        self.norm = nn.RMSNorm(config.hidden_size, config.norm_eps) if last else None
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False) if last else None
        table = rotary_table(seq_len, config.head_size, config.rope_theta)
        self.register_buffer("rotary", table.to(torch.get_default_dtype()), persistent=False)

    def forward(self, x: Any) -> Any:
        """(batch, sequence) int64, or hidden states behind the first layer -> hidden states, or logits."""
        if self.embed is not None:
            x = self.embed(x)
        for block in self.layers.values():
            x = block(x, self.rotary)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def split_sequence(module: Plain, group: dist.ProcessGroup, positions: Sequence[Tensor]) -> None:
    """Let ranks with other tokens of the same samples attend to each other's: keys and values are gathered, as for
    Llama 3 (Grattafiori et al. 2024); torch's ring attention, of `context_parallel`, has no kernel for a CPU (2.15).

    positions: of every rank's tokens in their samples, this one's among them.
    """
    here = positions[group.rank()]
    seen = here[:, None] >= torch.cat(list(positions))
    module.rotary = module.rotary[:, here]
    for block in module.layers.values():
        block.attn.around = Around(group, seen)  # type: ignore[union-attr]


def split_by_torch(module: Plain, over: DeviceMesh, sequence_parallel: bool, split_logits: bool) -> None:
    """`parallelize_module` as torch's own examples apply it. split_logits: for `loss_parallel`."""
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
            # One gather for all columns that read it.
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
