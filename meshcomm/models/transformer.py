"""The built-in model: a decoder-only transformer over bytes, written for one stage of a pipeline."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshcomm.config import DataConfig, ModelConfig, TrainConfig
from meshcomm.models.spec import normal
from meshcomm.parallel.context.documents import places, within
from meshcomm.parallel.dropout import Dropout, Drops
from meshcomm.parallel.expert import Experts
from meshcomm.parallel.memory import on_meta
from meshcomm.parallel.model import Model
from meshcomm.parallel.pipeline import Stage
from meshcomm.parallel.recompute import ActivationCheckpointing, compile_blocks, run
from meshcomm.parallel.splits import Splits
from meshcomm.parallel.tensor import (
    ColumnParallel,
    RowParallel,
    TensorSplit,
    VocabParallelEmbedding,
    assign,
    columns,
    local,
)
from meshcomm.predict.stages import PartCosts, part_costs


@final
class BuiltIn(Model):
    """The transformer that `[model]` describes. Its weights depend only on the seed and their names, not on the mesh."""

    draws = False

    def __init__(self, config: ModelConfig, data: DataConfig, train: TrainConfig) -> None:
        self.num_layers, self.hidden_size, self.vocab_size = (
            config.num_layers,
            config.hidden_size,
            config.vocab_size,
        )
        self.tied = "embed.weight" if config.tied_embeddings else ""
        self.drops = config.dropout > 0
        self._config, self._seq_len, self._train = config, data.seq_len, train
        self.packed = data.document_mask

    def costs(self, seq_len: int) -> PartCosts:
        """See Model."""
        return part_costs(self._config, seq_len)

    def stage(self, splits: Splits, stage: Stage) -> nn.Module:
        """See Model."""
        train = self._train
        with on_meta():
            module = Transformer(splits, self._config, stage, self._seq_len, train, packed=self.packed)
        if train.compile:
            setting = train.activation_checkpointing
            module.activation_checkpointing = compile_blocks(module.layers.values(), setting)
        return module

    def fill(self, module: nn.Module, stage: Stage) -> None:
        """See Model."""
        initialise(module, self._config, self._train.seed)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """(..., width), (width,) -> (..., width), in x's dtype. Zhang and Sennrich 2019."""
    narrow = x.dtype not in (torch.float32, torch.float64)
    if x.device.type != "cpu" or narrow or torch.compiler.is_compiling() or weight.dtype != x.dtype:
        return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), eps).to(x.dtype)
    y: Tensor = _RMSNormOnCPU.apply(x, weight, eps)
    return y


class _RMSNormOnCPU(torch.autograd.Function):
    """rms_norm with few passes over memory. torch 2.15 has no CPU kernel for it, and takes three times as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = torch.linalg.vector_norm(x, 2, -1, True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        y: Tensor = (x * inverse).mul_(weight)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight, inverse = ctx.saved_tensors
        normal = x * inverse
        dweight = (dy * normal).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, dweight, None
        dx = dy * weight
        mean = (dx * normal).mean(-1, keepdim=True)
        return dx.addcmul_(normal, mean, value=-1).mul_(inverse), dweight, None


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis. The weight is not split: all ranks have the same weight."""

    def __init__(self, split: TensorSplit, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = split.parameter(hidden_size, axis=None)
        self.eps = eps
        split.partial(self, "weight")

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width)."""
        # Computed in x's dtype, in which FSDP gathers the weight, because rounding must not depend on the mesh.
        return rms_norm(x, local(self.weight), self.eps)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions. Heads are split along tensor, the sequence along context."""

    def __init__(self, splits: Splits, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_size
        self.context = splits.context
        split = splits.tensor
        kv_heads = config.num_kv_heads
        if not split.shares_heads(kv_heads):
            split.share(kv_heads, "the key and value heads")
        self.wq = ColumnParallel(split, config.hidden_size, config.num_heads * self.head_dim)
        self.wk = ColumnParallel(split, config.hidden_size, kv_heads * self.head_dim, heads=kv_heads)
        self.wv = ColumnParallel(split, config.hidden_size, kv_heads * self.head_dim, heads=kv_heads)
        self.wo = RowParallel(split, config.num_heads * self.head_dim, config.hidden_size)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        """(batch, sequence, width), full or split along the sequence -> the same shape. rotary: (2, sequence, head)
        for these tokens, or (2, batch, 1, sequence, head).
        """
        q, k, v = (
            y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for y in columns(x, self.wq, self.wk, self.wv)
        )
        y = self.context.attend(rotate(q, rotary), rotate(k, rotary), v)
        out: Tensor = self.wo(y.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x); the inner axis is split."""

    def __init__(self, split: TensorSplit, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = ColumnParallel(split, config.hidden_size, config.intermediate_size)
        self.w3 = ColumnParallel(split, config.hidden_size, config.intermediate_size)
        self.w2 = RowParallel(split, config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width)."""
        gate, up = columns(x, self.w1, self.w3)
        out: Tensor = self.w2(F.silu(gate) * up)
        return out


class Block(nn.Module):
    """x + attention(norm x), then x + feed-forward(norm x). Experts may replace the feed-forward block."""

    def __init__(self, splits: Splits, config: ModelConfig, layer: int) -> None:
        super().__init__()
        split = splits.tensor
        self.attn_norm = RMSNorm(split, config.hidden_size, config.norm_eps)
        self.attn = Attention(splits, config)
        self.ff_norm = RMSNorm(split, config.hidden_size, config.norm_eps)
        self.ff: FeedForward | Experts
        if config.has_experts(layer):
            self.ff = Experts(
                splits.mesh,
                splits.expert,
                split,
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                experts=config.experts,
                experts_per_token=config.experts_per_token,
                capacity_factor=config.capacity_factor,
                context=splits.context.dim or None,
                balance_weight=splits.balance_weight,
                biased=config.bias_update_speed > 0,
            )
        else:
            self.ff = FeedForward(split, config)
        self.drop_attn = Dropout(config.dropout, f"{layer}.attn")
        self.drop_ff = Dropout(config.dropout, f"{layer}.ff")

    def forward(self, x: Tensor, rotary: Tensor, positions: Tensor, drops: Drops | None = None) -> Tensor:
        """(batch, sequence, width) -> the same shape. positions: token positions before sequence_parallel splits x."""
        x = x + self.drop_attn(self.attn(self.attn_norm(x), rotary), drops)
        y = self.ff_norm(x)
        y = self.ff(y, positions) if isinstance(self.ff, Experts) else self.ff(y)
        out: Tensor = x + self.drop_ff(y, drops)
        return out


class Transformer(nn.Module):
    """One stage's contiguous layers, with the embedding on the first stage, and the norm and the head on the last stage.

    Parameters have the same names on every mesh, such as layers.3.attn.wq.weight, because layers
    are numbered across all stages.

    Args:
        splits: how the model is split.
        config, stage: the full model's configuration, and the stage that this module computes.
        seq_len: number of tokens in a full sample.
        train: provides the seed, which determines dropout together with `step` and the sample numbers; compute_dtype, for
            matmuls and for activations from the embedding to the logits, also when they are sent; and
            activation_checkpointing.
        packed: whether samples may be packed documents; forward then receives the document numbers.
    """

    rotary: Tensor
    table: Tensor | None
    positions: Tensor

    def __init__(
        self,
        splits: Splits,
        config: ModelConfig,
        stage: Stage,
        seq_len: int,
        train: TrainConfig,
        *,
        packed: bool = False,
    ) -> None:
        super().__init__()
        self.splits = splits
        self.split = split = splits.tensor
        self.seed, self.step = train.seed, 0
        self.dropout = config.dropout
        compute = None if train.compute_dtype is None else getattr(torch, train.compute_dtype)
        self.compute: torch.dtype | None = compute
        self.activation_checkpointing: ActivationCheckpointing = train.activation_checkpointing
        vocab, hidden_size = config.vocab_size, config.hidden_size
        self.embed = (
            VocabParallelEmbedding(split, vocab, hidden_size, dtype=compute) if stage.is_first else None
        )
        self.layers = nn.ModuleDict({str(layer): Block(splits, config, layer) for layer in stage.layers})
        self.norm = RMSNorm(split, hidden_size, config.norm_eps) if stage.is_last else None
        self.head = ColumnParallel(split, hidden_size, vocab, uneven=True) if stage.is_last else None
        self.tied = config.tied_embeddings
        if self.tied and self.embed is not None and self.head is not None:
            self.head.weight = self.embed.weight
        positions = splits.context.positions(seq_len)
        table = rotary_table(seq_len, config.head_size, config.rope_theta)
        rotary = table[:, positions.cpu()].to(split.device, split.dtype)
        self.register_buffer("rotary", rotary, persistent=False)
        self.register_buffer(
            "table", table.to(split.device, split.dtype) if packed else None, persistent=False
        )
        self.register_buffer("positions", positions, persistent=False)

    @property
    def tied_weight(self) -> nn.Parameter | None:
        """The weight that the embedding and the head share, or None if this stage does not have it."""
        holder = self.embed or self.head if self.tied else None
        return None if holder is None else holder.weight

    def forward(self, x: Tensor, samples: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """(batch, sequence) int64, or hidden states (batch, sequence, width) after the first stage ->
        hidden states, or this rank's logits (batch, sequence, 256 / ranks) on the last stage.

        The sequence is this rank's part along context. With sequence_parallel, hidden states cover only this rank's slice of
        that part. samples: int64 (batch,), the samples' indices in the global batch; required with dropout, which also depends
        on the attribute `step`. documents: int64 (batch, full sequence), the document number of each token.
        """
        kind = x.device.type
        mixed = torch.autocast(kind, self.compute) if self.compute else contextlib.nullcontext()
        with mixed:
            if self.embed is not None:
                x = self.embed(x)
            drops = None
            if self.dropout and self.training and samples is not None:
                positions = self.positions[self.split.positions(x.shape[1])]
                drops = Drops.at(self.seed, self.step, samples, positions)
            rotary = self.rotary
            if documents is not None and self.table is not None:
                # (2, batch, 1 for all heads, sequence, head)
                rotary = self.table[:, places(documents)[:, self.positions]].unsqueeze(2)
            for layer, block in self.layers.items():
                # No random number generator is used: an element's position determines whether it is dropped.
                call: Callable[..., Tensor] = within(documents, block)
                x = run(self.activation_checkpointing, int(layer), call, x, rotary, self.positions, drops)
            if self.norm is not None and self.head is not None:
                (x,) = columns(self.norm(x), self.head)
        return x


def rotary_table(seq_len: int, head_dim: int, theta: float) -> Tensor:
    """Return cos and sin of position * theta^(-2i / head), float64 (2, sequence, head). The second half of the head repeats
    the first half, in which sin is negated. Su et al. 2021.
    """
    angle = torch.outer(
        torch.arange(seq_len, dtype=torch.float64),
        theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim),
    )
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)])


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + head / 2]) by its position's angle. x: (..., sequence, head).

    The rotation is computed in rotary's dtype and returned in x's dtype.
    """
    if torch.compiler.is_compiling():
        # Compiled code does not keep x for the backward pass either, and torch 2.11 loses the gradient of such a Function.
        return _turned(x, rotary, 1)
    y: Tensor = _Rotate.apply(x, rotary)
    return y


class _Rotate(torch.autograd.Function):
    """The backward pass rotates the gradient back by the same angles, so x is not kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rotary: Tensor) -> Tensor:
        ctx.save_for_backward(rotary)
        return _turned(x, rotary, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (rotary,) = ctx.saved_tensors
        return _turned(dy, rotary, -1), None


def _turned(x: Tensor, rotary: Tensor, sign: int) -> Tensor:
    cos, sin = rotary
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin, value=sign).to(x.dtype)


def initialise(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Generate every full parameter from the seed and its name, and keep this rank's part.

    Weights are therefore the same on every mesh. Only one full parameter is in memory at a time. Norm weights
    are 1. All other weights are normally distributed. Their standard deviation is 1 in the embedding and
    1 / sqrt(inputs) in matrices. It is divided by sqrt(2 * layers) in matrices that write to the residual stream, and by
    5 in the head. At the start, all bytes are therefore about equally likely, and the loss is about ln 256 = 5.55. A
    weight that the embedding and the head share is generated like the head's weight.
    """
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if len(shape) == 1:
            assign(parameter, torch.ones(shape, dtype=parameter.dtype))
            continue
        if name == "embed.weight" and config.tied_embeddings:
            name = "head.weight"
        std = 1.0 if name.startswith("embed") else shape[-1] ** -0.5
        if name.endswith(("attn.wo.weight", "ff.w2.weight", "ff.experts.w2")):
            std /= (2 * config.num_layers) ** 0.5
        elif name.startswith("head"):
            std /= 5
        assign(parameter, normal(seed, name, shape, std))
