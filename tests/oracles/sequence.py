"""Models from sequences to sequences: an encoder and a decoder that share one embedding."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracles.kind import SAMPLES, Kind

PAD, VOCABULARY, SOURCE, TARGET = 0, 24, 9, 6


class RMSNorm(nn.Module):
    """A norm without a mean."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width)."""
        return self.weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


class Attention(nn.Module):
    """Attention of x to y, without a scale."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head = width // heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """(samples, tokens, width), (samples, others, width), bool (samples, others) -> the shape of x."""
        q, k, v = (
            each(z).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for each, z in ((self.query, x), (self.key, y), (self.value, y))
        )
        kept = None if mask is None else mask[:, None, None]
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=kept, is_causal=causal, scale=1.0)
        attended: Tensor = self.out(found.transpose(1, 2).flatten(2))
        return attended


class Layer(nn.Module):
    """A layer of the encoder, or with cross attention, of the decoder."""

    def __init__(self, width: int, heads: int, decodes: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(RMSNorm(width) for _ in range(3 if decodes else 2))
        self.itself = Attention(width, heads)
        self.cross = Attention(width, heads) if decodes else None
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor | None = None) -> Tensor:
        """mask: bool (samples, source tokens). memory: (samples, source tokens, width)."""
        y = self.norms[0](x)
        x = x + (self.itself(y, y, mask) if memory is None else self.itself(y, y, causal=True))
        if memory is not None and self.cross is not None:
            x = x + self.cross(self.norms[1](x), memory, mask)
        down: Tensor = self.down(F.relu(self.up(self.norms[-1](x))))
        return x + down


class EncoderDecoder(nn.Module):
    """Raffel et al. 2019, small: one embedding for source, targets and head."""

    def __init__(self, width: int = 16, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.places = nn.Parameter(torch.randn(SOURCE, width) * 0.1)
        self.encoder = nn.ModuleList(Layer(width, heads, False) for _ in range(layers))
        self.decoder = nn.ModuleList(Layer(width, heads, True) for _ in range(layers))
        self.between, self.norm = RMSNorm(width), RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, source: Tensor, target_in: Tensor, source_mask: Tensor) -> Tensor:
        """(samples, SOURCE), (samples, TARGET), bool (samples, SOURCE) -> (samples, TARGET, VOCABULARY)."""
        x = self.embedding(source) + self.places
        for layer in self.encoder:
            x = layer(x, source_mask)
        memory, y = self.between(x), self.embedding(target_in) + self.places[: target_in.shape[1]]
        for layer in self.decoder:
            y = layer(y, source_mask, memory)
        logits: Tensor = self.head(self.norm(y) * y.shape[-1] ** -0.5)
        return logits


def translation(step: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return (source, target_in, source_mask) and targets, of other lengths in each sample."""
    generator = torch.Generator().manual_seed(300 + step)
    source = torch.randint(1, VOCABULARY, (SAMPLES, SOURCE), generator=generator)
    targets = torch.randint(1, VOCABULARY, (SAMPLES, TARGET), generator=generator)
    lengths = torch.randint(2, SOURCE + 1, (SAMPLES, 1), generator=generator)
    mask = torch.arange(SOURCE) < lengths
    targets = targets.where(torch.arange(TARGET) < lengths.clamp(max=TARGET), PAD)
    inputs = {"source": source.where(mask, PAD), "target_in": F.pad(targets[:, :-1], (1, 0), value=PAD)}
    return {**inputs, "source_mask": mask}, targets


def of_tokens(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum over the targets that are not padding, and their count."""
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="sum")
    return total, (targets != PAD).sum()


def named(module: nn.Module, inputs: Any) -> Any:
    return module(**inputs)


ENCODER_DECODER = Kind(EncoderDecoder, translation, of_tokens, named)
