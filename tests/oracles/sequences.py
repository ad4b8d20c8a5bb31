"""Recurrent networks: a language model of LSTMs, and a tagger that packs sentences of different lengths."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.oracles.kind import SAMPLES, Kind

WORDS, TAGS, LENGTH, PADDED = 32, 5, 8, -100


def texts(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and the next ones, (SAMPLES, LENGTH) each. Samples end at different places, after which targets do not count."""
    generator = torch.Generator().manual_seed(step)
    drawn = torch.randint(WORDS, (SAMPLES, LENGTH + 1), generator=generator)
    lengths = torch.randint(1, LENGTH + 1, (SAMPLES, 1), generator=generator)
    return drawn[:, :-1], drawn[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, PADDED)


def of_tokens(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of cross-entropies, and the number of targets that count."""
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PADDED, reduction="sum")
    return total, (targets != PADDED).sum()


class Layer(nn.Module):
    """x + LSTM(norm x)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.lstm = nn.LayerNorm(width), nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, tokens, width) -> the same shape."""
        y, _ = self.lstm(self.norm(x))
        return x + y  # type: ignore[no-any-return]


class LanguageModel(nn.Module):
    """Embedding, LSTMs, logits."""

    def __init__(self, width: int = 8, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, tokens) int64 -> (samples, tokens, WORDS)."""
        x = self.tokens(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


class Bare(LanguageModel):
    """The same, with the residual and the unpacking outside of its layers."""

    def __init__(self, width: int = 8, layers: int = 2) -> None:
        super().__init__(width, layers)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """(samples, tokens) int64 -> (samples, tokens, WORDS)."""
        x = self.tokens(x)
        for layer in self.layers:
            y, _ = layer(x)
            x = x + y
        return self.head(x)  # type: ignore[no-any-return]


LSTM = Kind(LanguageModel, texts, of_tokens)
BARE_LSTM = Kind(Bare, texts, of_tokens)


class Tagger(nn.Module):
    """A tag for each word, from GRUs in both directions over packed sentences."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width, padding_idx=0)
        self.gru = nn.GRU(width, width, num_layers=2, bidirectional=True, batch_first=True)
        self.up, self.down = nn.Linear(2 * width, 4 * width), nn.Linear(4 * width, TAGS)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        """(samples, words) int64, (samples,) -> (samples, words, TAGS)."""
        x = self.words(words)
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        y, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True, total_length=words.shape[1])
        return self.down(F.gelu(self.up(y)))  # type: ignore[no-any-return]


def sentences(step: int) -> tuple[dict[str, Tensor], Tensor]:
    """Words with their lengths, and tags."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(1, LENGTH + 1, (SAMPLES,), generator=generator)
    gone = torch.arange(LENGTH) >= lengths[:, None]
    words = torch.randint(1, WORDS, (SAMPLES, LENGTH), generator=generator).masked_fill(gone, 0)
    tags = torch.randint(TAGS, (SAMPLES, LENGTH), generator=generator).masked_fill(gone, PADDED)
    return {"words": words, "lengths": lengths}, tags


def by_name(module: nn.Module, inputs: dict[str, Any]) -> Any:
    """Call a module with named arguments."""
    return module(**inputs)


TAGGER = Kind(Tagger, sentences, of_tokens, by_name)
