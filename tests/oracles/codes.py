"""An autoencoder with vector quantization, whose prototypes are moving means (van den Oord et al. 2017)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracles.kind import SAMPLES, Kind


def alone(x: Tensor) -> Tensor:
    """The sum over all processes, on one process."""
    return x


class Codebook(nn.Module):
    """Replaces each vector by the nearest prototype. A prototype is the moving mean of the vectors that are nearest to it.

    total: sums a tensor over the processes that have other samples.
    """

    vectors: Tensor
    sizes: Tensor
    sums: Tensor

    def __init__(self, count: int, width: int, total: Callable[[Tensor], Tensor] = alone) -> None:
        super().__init__()
        self.register_buffer("vectors", torch.randn(count, width))
        self.register_buffer("sizes", torch.ones(count))
        self.register_buffer("sums", self.vectors.clone())
        self.total = total

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """(samples, width) -> prototypes of the same shape, and the mean squared distance to them."""
        nearest = torch.cdist(z.detach(), self.vectors).argmin(1)
        found = self.vectors[nearest]
        if self.training:
            with torch.no_grad():
                chosen = F.one_hot(nearest, len(self.sizes)).to(z.dtype)
                self.sizes.lerp_(self.total(chosen.sum(0)), 0.1)
                self.sums.lerp_(self.total(chosen.T @ z.detach()), 0.1)
                self.vectors.copy_(self.sums / self.sizes[:, None])
        return z + (found - z).detach(), F.mse_loss(z, found)


class Autoencoder(nn.Module):
    """Encoder, codebook, decoder."""

    def __init__(self, total: Callable[[Tensor], Tensor] = alone, width: int = 12, code: int = 4) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(10, width), nn.Linear(width, code)
        self.codes = Codebook(6, code, total)
        self.back, self.out = nn.Linear(code, width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """(samples, 10) -> the reconstruction, and the mean distance from the prototypes."""
        z, distance = self.codes(self.down(F.gelu(self.up(x))))
        return {"x": self.out(F.gelu(self.back(z))), "distance": distance}


def loss(outputs: dict[str, Tensor], targets: Tensor) -> dict[str, Any]:
    """The reconstruction's squared error, and a quarter of the distance."""
    error = F.mse_loss(outputs["x"], targets)
    return {"loss": error + 0.25 * outputs["distance"], "error": error, "distance": outputs["distance"]}


def rows(step: int) -> tuple[Tensor, Tensor]:
    """Vectors, and the same vectors."""
    x = torch.randn(SAMPLES, 10, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return x, x


VQ = Kind(Autoencoder, rows, loss)
