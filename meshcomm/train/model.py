"""What the model is: a decoder-only transformer over bytes, written for one stage of a pipeline."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshcomm.config import ModelConfig
from meshcomm.parallel.pipeline import Stage
from meshcomm.parallel.tensor import (
    ColumnParallel,
    RowParallel,
    TensorSplit,
    VocabParallelEmbedding,
    assign,
    local,
)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis. Equal on all ranks of the split, so not split."""

    def __init__(self, split: TensorSplit, width: int, eps: float) -> None:
        super().__init__()
        self.weight = split.parameter(width, axis=None)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width)."""
        return F.rms_norm(x, (x.shape[-1],), local(self.weight), self.eps)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions; heads are split."""

    def __init__(self, split: TensorSplit, config: ModelConfig) -> None:
        super().__init__()
        self.head = config.head_size
        split.share(config.kv_heads, "the key and value heads")
        self.wq = ColumnParallel(split, config.width, config.heads * self.head)
        self.wk = ColumnParallel(split, config.width, config.kv_heads * self.head)
        self.wv = ColumnParallel(split, config.width, config.kv_heads * self.head)
        self.wo = RowParallel(split, config.heads * self.head, config.width)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        """(batch, sequence, width) -> the same shape; rotary (2, sequence, head / 2)."""
        q, k, v = (w(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(
            rotate(q, rotary), rotate(k, rotary), v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        out: Tensor = self.wo(y.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x); the inner axis is split."""

    def __init__(self, split: TensorSplit, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = ColumnParallel(split, config.width, config.ff)
        self.w3 = ColumnParallel(split, config.width, config.ff)
        self.w2 = RowParallel(split, config.ff, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width)."""
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    """x + attention(norm x), then x + feed-forward(norm x)."""

    def __init__(self, split: TensorSplit, config: ModelConfig) -> None:
        super().__init__()
        self.split = split
        self.attn_norm = RMSNorm(split, config.width, config.norm_eps)
        self.attn = Attention(split, config)
        self.ff_norm = RMSNorm(split, config.width, config.norm_eps)
        self.ff = FeedForward(split, config)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        """(batch, sequence, width) -> the same shape."""
        x = x + self.attn(self.split.enter(self.attn_norm(x)), rotary)
        y: Tensor = self.ff(self.split.enter(self.ff_norm(x)))
        return x + y


class Transformer(nn.Module):
    """A stage's contiguous run of layers; the embedding on the first, norm and head on the last.

    Parameters have the same names on every mesh, such as layers.3.attn.wq.weight, because layers
    are numbered through the whole model.
    """

    rotary: Tensor

    def __init__(self, split: TensorSplit, config: ModelConfig, stage: Stage, sequence: int) -> None:
        super().__init__()
        self.split = split
        vocab, width = config.vocabulary, config.width
        self.embed = VocabParallelEmbedding(split, vocab, width) if stage.is_first else None
        self.layers = nn.ModuleDict({str(layer): Block(split, config) for layer in stage.layers})
        self.norm = RMSNorm(split, width, config.norm_eps) if stage.is_last else None
        self.head = ColumnParallel(split, width, vocab) if stage.is_last else None
        table = rotary_table(sequence, config.head_size, config.rope_theta)
        self.register_buffer("rotary", table.to(split.device, split.dtype), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence) int64, or hidden (batch, sequence, width) behind the first stage ->
        hidden, or on the last stage this rank's logits (batch, sequence, 256 / ranks)."""
        if self.embed is not None:
            x = self.embed(x)
        for block in self.layers.values():
            x = block(x, self.rotary)
        if self.norm is not None and self.head is not None:
            x = self.head(self.split.enter(self.norm(x)))
        return x


def rotary_table(sequence: int, head: int, theta: float) -> Tensor:
    """cos and sin of position * theta^(-2i / head), float64 (2, sequence, head / 2). Su et al. 2021."""
    angle = torch.outer(
        torch.arange(sequence, dtype=torch.float64),
        theta ** -(torch.arange(0, head, 2, dtype=torch.float64) / head),
    )
    return torch.stack([angle.cos(), angle.sin()])


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + head / 2]) by its position's angle: (..., sequence, head)."""
    (cos, sin), (a, b) = rotary, x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def initialise(model: Transformer, layers: int, seed: int) -> None:
    """Draw every whole parameter from (seed, its name) and keep this rank's part of it.

    So weights are the same on every mesh. One whole parameter is in memory at a time. Norms are 1.
    The rest is normal, with standard deviation 1 in the embedding and 1 / sqrt(inputs) in matrices;
    less by sqrt(2 * layers) in those that write to the residual stream, and less by 5 in the head,
    so that all bytes start out about equally likely and the first loss is about ln 256 = 5.55.
    """
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if len(shape) == 1:
            assign(parameter, torch.ones(shape, dtype=model.split.dtype))
            continue
        std = 1.0 if name.startswith("embed") else shape[1] ** -0.5
        if name.endswith(("attn.wo.weight", "ff.w2.weight")):
            std /= (2 * layers) ** 0.5
        elif name.startswith("head"):
            std /= 5
        # NumPy's generators give the same numbers on every kind of processor; torch's need not.
        key = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:16])
        values = np.random.default_rng(key).standard_normal(shape, dtype=np.float32) * np.float32(std)
        assign(parameter, torch.from_numpy(values))
