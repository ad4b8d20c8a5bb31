"""Models of images: a vision transformer, and a network with batch norms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracles.kind import SAMPLES, Kind


def images(step: int, channels: int = 3, size: int = 8) -> Tensor:
    """(SAMPLES, channels, size, size)."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES, channels, size, size, generator=generator, dtype=torch.float64)


def classes(step: int, count: int = 10) -> Tensor:
    """(SAMPLES,)."""
    return torch.randint(count, (SAMPLES,), generator=torch.Generator().manual_seed(100 + step))


class Block(nn.Module):
    """Attention over patches, then an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, patches, width) -> the same shape."""
        y = self.before(x)
        # The number of heads follows from the width, because a rank may have some of the heads.
        head = x.shape[-1] // self.heads
        q, k, v = (
            each(y).unflatten(-1, (-1, head)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        down: Tensor = self.down(F.gelu(self.up(self.after(x))))
        return x + down


class ViT(nn.Module):
    """Patches of 2 x 2 with a class token (Dosovitskiy et al. 2020)."""

    def __init__(self, width: int = 16, heads: int = 4, layers: int = 2, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 2, 2)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.places = nn.Parameter(torch.randn(1, 17, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, 3, 8, 8) -> (samples, classes)."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(self.norm(x[:, 0]))
        return y


VIT = Kind(ViT, lambda step: (images(step), classes(step)), F.cross_entropy)


class ConvNet(nn.Module):
    """Residual blocks with batch norms (He et al. 2015)."""

    def __init__(self, width: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, 3, height, width) -> (samples, classes)."""
        x = F.relu(self.norms[0](self.stem(x)))
        y = F.relu(self.norms[1](self.convs[0](x)))
        x = F.relu(x + self.norms[2](self.convs[1](y)))
        found: Tensor = self.head(x.mean((2, 3)))
        return found


CONVNET = Kind(ConvNet, lambda step: (images(step), classes(step)), F.cross_entropy)
