"""Batch norm whose mean and variance are those of the samples of all ranks, not of each rank's own.

As torch.nn.SyncBatchNorm, which needs CUDA; this runs on any device, and in float64 exactly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshcomm.layout import Dims
from meshcomm.mesh import Mesh

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def batch_norms(module: nn.Module) -> list[str]:
    """The names of the batch norms in `module`."""
    return [name for name, part in module.named_modules() if isinstance(part, BATCH_NORMS)]


def synchronise(module: nn.Module, mesh: Mesh, dims: Dims | None) -> None:
    """Have every batch norm in `module` use the samples of all ranks along `dims`; None: its own. Names stay.

    Called by: every rank along `dims`, and so are forward and backward in training, with equal channels.
    """
    kinds: dict[type, type] = {}
    for part in module.modules():
        if dims is not None and isinstance(part, BATCH_NORMS) and not isinstance(part, _Synchronised):
            own = type(part)
            kinds.setdefault(own, type(own.__name__, (_Synchronised, own), {"__module__": __name__}))
            part.__class__ = kinds[own]
            part.meshcomm_over = _Over(mesh, dims)  # type: ignore[assignment]


def is_synchronised(part: nn.Module) -> bool:
    """Whether the statistics of `part` are those of all ranks."""
    return isinstance(part, _Synchronised)


class _Over:
    """Where samples are; a copy of a module shares it."""

    def __init__(self, mesh: Mesh, dims: Dims) -> None:
        self.mesh, self.dims = mesh, dims

    def __deepcopy__(self, memo: dict[int, Any]) -> _Over:
        return self


class _Synchronised:
    meshcomm_over: _Over

    def forward(self: Any, x: Tensor) -> Tensor:
        """(samples, channels, ...) -> the same shape. One all_gather forward and one reduce_scatter backward.

        Mean and sum of squared distances from it are put together as Chan, Golub, LeVeque 1979 have it.
        """
        if not self.training and self.running_mean is not None:
            y: Tensor = super().forward(x)  # type: ignore[misc]
            return y
        over, kind = self.meshcomm_over, torch.promote_types(x.dtype, torch.float32)
        axes = [0, *range(2, x.ndim)]
        wide = x.to(kind)
        own = wide.mean(axes)
        distance = (wide - _along(own, x)).square().sum(axes)
        count = torch.full_like(own, x.numel() // x.shape[1])
        facts = over.mesh.functional.all_gather(
            over.dims, torch.stack([own, distance, count])[None], 0, grad="reduce_scatter"
        )
        means, distances, counts = facts.unbind(1)
        total = counts.sum(0)
        mean = (means * counts).sum(0) / total
        squares = distances.sum(0) + (counts * (means - mean).square()).sum(0)
        if self.track_running_stats and self.training:
            self._follow(mean.detach(), squares.detach() / (total - 1))
        y = (wide - _along(mean, x)) * _along((squares / total + self.eps).rsqrt(), x)
        if self.affine:
            y = y * _along(self.weight.to(kind), x) + _along(self.bias.to(kind), x)
        return y.to(x.dtype)

    @torch.no_grad()
    def _follow(self: Any, mean: Tensor, variance: Tensor) -> None:
        """The running statistics, of the unbiased variance as in torch."""
        self.num_batches_tracked += 1
        often = self.num_batches_tracked.to(self.running_mean.dtype)
        share = often.reciprocal() if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean), share)
        self.running_var.lerp_(variance.to(self.running_var), share)


def _along(each: Tensor, x: Tensor) -> Tensor:
    """One value for each channel, to go with x."""
    return each.view(1, -1, *(1,) * (x.ndim - 2))
