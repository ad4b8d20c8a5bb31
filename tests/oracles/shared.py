"""Models in which one weight has several places: a block that repeats, tied embeddings, tied layers, a transposed weight."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracles.kind import Kind
from tests.oracles.sequences import WORDS, of_tokens, texts
from tests.oracles.vision import images


class Block(nn.Module):
    """x + attention(norm x), then x + mlp(norm x)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before, self.after, self.head = nn.LayerNorm(width), nn.LayerNorm(width), width // heads
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.attend: Callable[..., Tensor] = lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, is_causal=True
        )

    def forward(self, x: Tensor) -> Tensor:
        """(samples, tokens, width) -> the same shape."""
        y = self.before(x)
        q, k, v = (
            each(y).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.after(x))))  # type: ignore[no-any-return]


class LanguageModel(nn.Module):
    """Tokens and their places, blocks, logits. The embedding is also the head."""

    def __init__(self, width: int = 8, heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor, places: Tensor | None = None) -> Tensor:
        """(samples, tokens) int64 -> (samples, tokens, WORDS)."""
        places = torch.arange(x.shape[1], device=x.device) if places is None else places
        x = self.tokens(x) + self.places(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Repeated(LanguageModel):
    """One block runs three times (Lan et al. 2019)."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__(width, heads, 1)

    def forward(self, x: Tensor, places: Tensor | None = None) -> Tensor:
        """(samples, tokens) int64 -> (samples, tokens, WORDS)."""
        places = torch.arange(x.shape[1], device=x.device) if places is None else places
        x = self.tokens(x) + self.places(places)
        for _ in range(3):
            x = self.blocks[0](x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Listed(LanguageModel):
    """One block is in the list twice."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__(width, heads, 1)
        self.blocks = nn.ModuleList([self.blocks[0], self.blocks[0]])


class TiedLayers(LanguageModel):
    """Two blocks have one MLP matrix in common."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__(width, heads, 2)
        first, second = self.blocks
        second.up.weight = first.up.weight  # type: ignore[union-attr]


TIED = Kind(LanguageModel, texts, of_tokens)
REPEATED = Kind(Repeated, texts, of_tokens)
LISTED = Kind(Listed, texts, of_tokens)
TIED_LAYERS = Kind(TiedLayers, texts, of_tokens)


class Transposed(nn.Module):
    """An autoencoder whose decoder has the transposed weight of the encoder."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.up, self.middle = nn.Linear(192, width), nn.Linear(width, 2 * width)
        self.back, self.bias = nn.Linear(2 * width, width), nn.Parameter(torch.zeros(192))

    def forward(self, x: Tensor) -> Tensor:
        """(samples, 3, 8, 8) -> (samples, 192)."""
        y = self.back(F.gelu(self.middle(F.gelu(self.up(x.flatten(1))))))
        return F.linear(y, self.up.weight.t(), self.bias)


def pictures(step: int) -> tuple[Tensor, Tensor]:
    """Images, and their elements."""
    x = images(step)
    return x, x.flatten(1)


TRANSPOSED = Kind(Transposed, pictures, F.mse_loss)
