"""Batch norm with the mean and variance of the samples on all ranks, instead of each rank's samples.

torch.nn.SyncBatchNorm does the same but needs CUDA. This module's batch norm runs on any device and computes in float64 if x
is float64.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn

from meshcomm.layout import Dims
from meshcomm.mesh import Mesh
from meshcomm.parallel.tensor import local

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def batch_norms(module: nn.Module) -> list[str]:
    """Return the names of the batch norms in `module`."""
    return [name for name, part in module.named_modules() if isinstance(part, BATCH_NORMS)]


def synchronise(module: nn.Module, mesh: Mesh, dims: Dims | None) -> None:
    """Make every batch norm in `module` use the samples on all ranks along `dims`. If None, nothing changes. Module objects
    are kept.

    Called by: every rank along `dims`, with equally many channels. In training, forward and backward are collective calls too.
    """
    if dims is None:
        return
    norms: list[Any] = [part for part in module.modules() if isinstance(part, BATCH_NORMS)]
    for norm in norms:
        norm.forward = _SynchronisedForward(norm, mesh, dims)


def is_synchronised(part: nn.Module) -> bool:
    """Return whether `part` uses statistics over all ranks."""
    return isinstance(part.forward, _SynchronisedForward)


@final
class _SynchronisedForward:
    """The forward of a batch norm. A copy of the module has a separate copy of this object."""

    def __init__(self, norm: Any, mesh: Mesh, dims: Dims) -> None:
        self._norm, self._mesh, self._dims = norm, mesh, dims
        self.plain: Any = norm.forward.plain if is_synchronised(norm) else norm.forward

    def __call__(self, x: Tensor) -> Tensor:
        """(samples, channels, ...) -> the same shape. Runs one all_gather in forward and one reduce_scatter in backward.

        Means and sums of squared distances are combined as in Chan, Golub, LeVeque 1979.
        """
        norm = self._norm
        if not norm.training and norm.running_mean is not None:
            y: Tensor = self.plain(x)
            return y
        kind = torch.promote_types(x.dtype, torch.float32)
        axes, channels = [0, *range(2, x.ndim)], (1, -1, *(1,) * (x.ndim - 2))
        wide = x.to(kind)
        own = wide.mean(axes)
        distance = (wide - own.view(channels)).square().sum(axes)
        count = torch.full_like(own, x.numel() // x.shape[1])
        facts = torch.stack([own, distance, count])[None]
        facts = self._mesh.functional.all_gather(self._dims, facts, 0, grad="reduce_scatter")
        means, distances, counts = facts.unbind(1)
        total = counts.sum(0)
        mean = (means * counts).sum(0) / total
        squares = distances.sum(0) + (counts * (means - mean).square()).sum(0)
        if norm.track_running_stats and norm.training:
            self._follow(mean.detach(), squares.detach() / (total - 1))
        y = (wide - mean.view(channels)) * (squares / total + norm.eps).rsqrt().view(channels)
        if norm.affine:
            weight, bias = (local(each).to(kind).view(channels) for each in (norm.weight, norm.bias))
            y = y * weight + bias
        return y.to(x.dtype)

    @torch.no_grad()
    def _follow(self, mean: Tensor, variance: Tensor) -> None:
        """Update the running statistics, with the unbiased variance as in torch."""
        norm = self._norm
        norm.num_batches_tracked += 1
        often = norm.num_batches_tracked.to(norm.running_mean.dtype)
        share = often.reciprocal() if norm.momentum is None else norm.momentum
        norm.running_mean.lerp_(mean.to(norm.running_mean), share)
        norm.running_var.lerp_(variance.to(norm.running_var), share)
