"""Retrieval and recommendation: two towers that are trained against each other, and clicks from sparse tables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracles.kind import SAMPLES, Kind


@dataclass
class Pairs:
    """Unit vectors of both towers, (samples, width), and the logarithm of the inverse temperature."""

    images: Tensor
    texts: Tensor
    scale: Tensor


class Tower(nn.Module):
    """An MLP, to a unit vector."""

    def __init__(self, inputs: int, hidden: int, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(inputs, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, inputs) -> (samples, width)."""
        return F.normalize(self.down(F.gelu(self.up(x))), dim=-1)


class TwoTowers(nn.Module):
    """Radford et al. 2021, small."""

    def __init__(self, width: int = 8, axes: int = 1) -> None:
        super().__init__()
        self.image, self.text = Tower(12, 32, width), Tower(16, 32, width)
        self.words = nn.Embedding(20, 16)
        self.scale = nn.Parameter(torch.ones([1] * axes))

    def forward(self, image: Tensor, words: Tensor) -> Pairs:
        """(samples, 12), (samples, words) -> Pairs."""
        return Pairs(self.image(image), self.text(self.words(words).mean(1)), self.scale)


def pairs(step: int) -> tuple[dict[str, Tensor], None]:
    """Return images and words. There are no targets."""
    generator = torch.Generator().manual_seed(400 + step)
    image = torch.randn(SAMPLES, 12, generator=generator, dtype=torch.float64)
    words = torch.randint(20, (SAMPLES, 5), generator=generator)
    return {"image": image, "words": words}, None


def contrast(images: Tensor, texts: Tensor, found: Pairs, first: int = 0) -> Tensor:
    """Return the mean over the pairs of `found`, which are among all images and texts from place `first`."""
    places = first + torch.arange(len(found.images))
    factor = found.scale.exp()
    to_texts, to_images = factor * found.images @ texts.T, factor * found.texts @ images.T
    return (F.cross_entropy(to_texts, places) + F.cross_entropy(to_images, places)) / 2


def among_all(found: Pairs, targets: None) -> Tensor:
    """The loss of a program on one process."""
    return contrast(found.images, found.texts, found)


def named(module: nn.Module, inputs: Any) -> Any:
    return module(**inputs)


def scalar() -> TwoTowers:
    """With a temperature without axes."""
    return TwoTowers(axes=0)


TWO_TOWERS = Kind(TwoTowers, pairs, among_all, named)
SCALAR_TOWERS = Kind(scalar, pairs, among_all, named)

TABLES, WIDTH = (30, 12, 50), 6


class Clicks(nn.Module):
    """Naumov et al. 2019 (DLRM), small: tables, a bag of earlier items, and products of all pairs of their vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, WIDTH, sparse=True) for rows in TABLES)
        self.earlier = nn.EmbeddingBag(40, WIDTH, mode="sum", sparse=True, padding_idx=0)
        self.bottom = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, WIDTH))
        self.top = nn.Sequential(nn.Linear(WIDTH + 10, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, numbers: Tensor, ids: Tensor, earlier: Tensor) -> Tensor:
        """(samples, 4), (samples, 3), (samples, items), padded with 0 -> logits, (samples,)."""
        dense = self.bottom(numbers)
        vectors = [table(column) for table, column in zip(self.tables, ids.unbind(1), strict=True)]
        each = torch.stack([dense, *vectors, self.earlier(earlier)], 1)
        above = torch.triu_indices(each.shape[1], each.shape[1], 1)
        crosses = (each @ each.transpose(1, 2))[:, above[0], above[1]]
        clicks: Tensor = self.top(torch.cat([dense, crosses], 1)).squeeze(1)
        return clicks


def clicks(step: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return inputs of Clicks, and whether there was a click."""
    generator = torch.Generator().manual_seed(500 + step)
    numbers = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)
    ids = torch.stack([torch.randint(rows, (SAMPLES,), generator=generator) for rows in TABLES], 1)
    earlier = torch.randint(1, 40, (SAMPLES, 7), generator=generator)
    earlier = earlier.where(torch.arange(7) < torch.randint(1, 8, (SAMPLES, 1), generator=generator), 0)
    found = torch.randint(2, (SAMPLES,), generator=generator).double()
    return {"numbers": numbers, "ids": ids, "earlier": earlier}, found


def plain_sgd(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


class Lazily(torch.optim.Optimizer):
    """SparseAdam for tables, whose other rows do not move, and Adam for the rest."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        given = list(parameters)
        every = [
            each for group in given for each in (group["params"] if isinstance(group, dict) else [group])
        ]
        tables = [each for each in every if each.ndim == 2 and each.shape[1] == WIDTH]
        rest = [each for each in every if not any(each is table for table in tables)]
        super().__init__(every, {"lr": 0.01})
        self.lazy = torch.optim.SparseAdam(tables, lr=0.01)
        self.dense = torch.optim.Adam(rest, lr=0.01)
        self.param_groups = [*self.lazy.param_groups, *self.dense.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Run both."""
        self.lazy.step()
        self.dense.step()


CLICKS = Kind(Clicks, clicks, F.binary_cross_entropy_with_logits, named, plain_sgd)
LAZY_CLICKS = Kind(Clicks, clicks, F.binary_cross_entropy_with_logits, named, Lazily)
