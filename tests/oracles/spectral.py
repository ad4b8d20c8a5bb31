"""A Fourier neural operator, with complex weights (Li et al. 2020), and one whose filters are of single channels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracles.kind import SAMPLES, Kind

POINTS, MODES = 8, 3


def _weights(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, dtype=torch.complex128) / shape[-2])


class Mix(nn.Module):
    """Multiplies the lowest MODES frequencies by complex matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = _weights(MODES, width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, points, width) -> the same shape."""
        low = torch.fft.rfft(x, dim=1)[:, :MODES]
        mixed = torch.einsum("bmi,mio->bmo", low, self.weight)
        y: Tensor = torch.fft.irfft(mixed, n=x.shape[1], dim=1)
        return y


class Layer(nn.Module):
    """gelu(mix x + linear x)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix, self.linear = Mix(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, points, width) -> the same shape."""
        return F.gelu(self.mix(x) + self.linear(x))


class Operator(nn.Module):
    """A function at POINTS -> another one."""

    def __init__(self, width: int = 6, layers: int = 2) -> None:
        super().__init__()
        self.lift = nn.Linear(1, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, POINTS, 1) -> the same shape."""
        x = self.lift(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


class Filter(nn.Module):
    """Multiplies the lowest MODES frequencies of each channel by complex numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = _weights(MODES, width)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, points, width) -> the same shape."""
        low = torch.fft.rfft(x, dim=1)[:, :MODES] * self.weight
        y: Tensor = torch.fft.irfft(low, n=x.shape[1], dim=1)
        return y


class Filtered(nn.Module):
    """x + down(filter(up x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.filter, self.down = (
            nn.Linear(width, 2 * width),
            Filter(2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(samples, points, width) -> the same shape."""
        return x + self.down(F.gelu(self.filter(self.up(x))))  # type: ignore[no-any-return]


class Filters(Operator):
    """The same, of filters of single channels."""

    def __init__(self, width: int = 6, layers: int = 2) -> None:
        super().__init__(width, layers)
        self.layers = nn.ModuleList(Filtered(width) for _ in range(layers))


def waves(step: int) -> tuple[Tensor, Tensor]:
    """Functions and their shifted squares, (SAMPLES, POINTS, 1) each."""
    x = torch.randn(SAMPLES, POINTS, 1, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return x, x.roll(1, 1).square()


FNO = Kind(Operator, waves, F.mse_loss)
FILTERS = Kind(Filters, waves, F.mse_loss)
