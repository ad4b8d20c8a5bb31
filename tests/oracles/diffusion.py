"""Diffusion models: a U-Net with skip connections, and a transformer of patches. Both predict the noise in their input."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracles.kind import SAMPLES, Kind
from tests.oracles.vision import classes, images

TIMES = 100


def noisy(step: int, clean: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Return ((noisy, times, labels), noise) for clean samples, (SAMPLES, ...)."""
    generator = torch.Generator().manual_seed(200 + step)
    times = torch.randint(TIMES, (SAMPLES,), generator=generator)
    noise = torch.randn(clean.shape, generator=generator, dtype=clean.dtype)
    kept = torch.cos(times.double() / TIMES * torch.pi / 2).view(-1, *[1] * (clean.ndim - 1))
    return (kept * clean + (1 - kept**2).sqrt() * noise, times, classes(step)), noise


def waves(times: Tensor, width: int) -> Tensor:
    """(samples,) -> (samples, width): sines and cosines of the times."""
    rates = torch.exp(-torch.arange(width // 2, device=times.device, dtype=torch.float64) / width * 8)
    angles = times.double()[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], 1)


class Residual(nn.Module):
    """Group norm and convolution, twice, with a shift from the time and the class between them."""

    def __init__(self, inputs: int, outputs: int, width: int) -> None:
        super().__init__()
        self.before, self.after = nn.GroupNorm(2, inputs), nn.GroupNorm(2, outputs)
        self.first, self.second = (nn.Conv2d(each, outputs, 3, padding=1) for each in (inputs, outputs))
        self.shift = nn.Linear(width, outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """(samples, inputs, height, width) -> (samples, outputs, height, width)."""
        y = self.first(F.silu(self.before(x))) + self.shift(condition)[..., None, None]
        found: Tensor = self.skip(x) + self.second(F.silu(self.after(y)))
        return found


class UNet(nn.Module):
    """Ho et al. 2020, small."""

    def __init__(self, width: int = 8, labels: int = 10) -> None:
        super().__init__()
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.label = nn.Embedding(labels, width)
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList([Residual(width, width, width), Residual(width, 2 * width, width)])
        self.middle = Residual(2 * width, 2 * width, width)
        self.up = nn.ModuleList([Residual(4 * width, width, width), Residual(2 * width, width, width)])
        self.norm, self.out = nn.GroupNorm(2, width), nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """(samples, 3, height, width), (samples,), (samples,) -> the shape of x."""
        condition = F.silu(self.time(waves(times, self.width).to(x.dtype)) + self.label(labels))
        x, kept = self.stem(x), []
        for block in self.down:
            x = block(x, condition)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x, condition)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([x, kept.pop()], 1), condition)
        noise: Tensor = self.out(F.silu(self.norm(x)))
        return noise


UNET = Kind(UNet, lambda step: noisy(step, images(step)), F.mse_loss, lambda module, x: module(*x))


class DiTBlock(nn.Module):
    """Attention and an MLP, each scaled, shifted and gated by the condition (Peebles and Xie 2022, adaLN)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head = width // heads
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = nn.Linear(width, 6 * width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(samples, heads, patches, head) -> the shape of q."""
        return F.scaled_dot_product_attention(q, k, v)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """(samples, patches, width), (samples, width) -> the shape of x."""
        shift, scale, gate, shift2, scale2, gate2 = self.modulation(condition)[:, None].chunk(6, -1)
        y = self.norm(x) * (1 + scale) + shift
        q, k, v = (
            each(y).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        x = x + gate * self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        y = self.down(F.gelu(self.up(self.norm(x) * (1 + scale2) + shift2)))
        found: Tensor = x + gate2 * y
        return found


class DiT(nn.Module):
    """A diffusion transformer of patches."""

    def __init__(
        self, patch: int = 12, width: int = 16, heads: int = 4, layers: int = 2, labels: int = 10
    ) -> None:
        super().__init__()
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.label = nn.Embedding(labels, width)
        self.enter, self.places = nn.Linear(patch, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList(DiTBlock(width, heads) for _ in range(layers))
        self.leave = nn.Linear(width, patch)

    def forward(self, x: Tensor, times: Tensor, labels: Tensor, positions: Tensor | None = None) -> Tensor:
        """(samples, patches, patch), (samples,), (samples,) -> the shape of x. positions: (1, patches)."""
        condition = F.silu(self.time(waves(times, self.width).to(x.dtype)) + self.label(labels))
        positions = torch.arange(x.shape[1], device=x.device)[None] if positions is None else positions
        x = self.enter(x) + self.places(positions)
        for block in self.blocks:
            x = block(x, condition)
        noise: Tensor = self.leave(x)
        return noise


def patches(step: int) -> Tensor:
    """(SAMPLES, 16, 12)."""
    return F.pixel_unshuffle(images(step), 2).flatten(2).transpose(1, 2)


DIT = Kind(DiT, lambda step: noisy(step, patches(step)), F.mse_loss, lambda module, x: module(*x))
