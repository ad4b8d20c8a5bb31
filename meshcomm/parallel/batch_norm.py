"""Batch norm with the mean and variance of the samples on all ranks, instead of each rank's samples.

torch.nn.SyncBatchNorm does the same but needs CUDA. This module's batch norm runs on any device and computes in float64 if x
is float64.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, Final, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshcomm.errors import UnsupportedOp
from meshcomm.layout import Dims
from meshcomm.mesh import Mesh
from meshcomm.parallel.tensor import local

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
# The forwards that follow no statistics of their own.
_TORCHS: Final = frozenset(kind.forward for kind in BATCH_NORMS)
# Of torch.batch_norm, in order.
_ARGUMENTS: Final = (
    *("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps"),
    "cudnn_enabled",
)


def batch_norms(module: nn.Module) -> list[str]:
    """Return the names of the batch norms in `module`."""
    return [name for name, part in module.named_modules() if isinstance(part, BATCH_NORMS)]


def synchronise(module: nn.Module, mesh: Mesh, dims: Dims | None) -> None:
    """Make every batch norm in `module` use the samples on all ranks along `dims`. If None, nothing changes. Module objects
    and their forwards are kept: F.batch_norm, as called in them, uses the samples on all ranks.

    Called by: every rank along `dims`, with equally many channels. In training, forward and backward are collective calls too.
    Raises:    UnsupportedOp for a subclass of nn.SyncBatchNorm with a forward of its own.
    """
    if dims is None:
        return
    norms: list[Any] = [part for part in module.modules() if isinstance(part, BATCH_NORMS)]
    for norm in norms:
        plain: Any = norm.forward.plain if isinstance(norm.forward, _Forward) else norm.forward
        is_torchs = getattr(plain, "__self__", None) is norm and plain.__func__ in _TORCHS
        if isinstance(norm, nn.SyncBatchNorm):
            if not is_torchs:
                raise UnsupportedOp(
                    f"the batch norms of {type(norm).__name__} cannot use the samples of all ranks",
                    given="a subclass of nn.SyncBatchNorm with a forward of its own, which communicates itself",
                    expected="nn.SyncBatchNorm, or a subclass of nn.BatchNorm2d",
                    hint=f"derive {type(norm).__name__} from nn.BatchNorm2d; meshcomm synchronises it",
                )
            # SyncBatchNorm communicates itself, on CUDA only.
            plain = MethodType(nn.BatchNorm1d.forward, norm)
        norm.forward = _Forward(norm, plain, mesh, dims, is_torchs)


def is_synchronised(part: nn.Module) -> bool:
    """Return whether all buffers of `part` are equal on all ranks, because they follow statistics over all ranks."""
    return isinstance(part.forward, _Forward) and part.forward.is_torchs


class _Statistics(NamedTuple):
    """float32 or float64 (channels,): the mean, and the variance over all samples, and over one less than all."""

    mean: Tensor
    variance: Tensor
    unbiased: Tensor


def _statistics(x: Tensor, mesh: Mesh, dims: Dims) -> _Statistics:
    """Return the statistics of x (samples, channels, ...) on all ranks. Runs one all_gather in forward and one
    reduce_scatter in backward.

    Means and sums of squared distances are combined as in Chan, Golub, LeVeque 1979.
    """
    axes, channels = [0, *range(2, x.ndim)], _channels(x)
    mean_here = x.mean(axes)
    distance = (x - mean_here.view(channels)).square().sum(axes)
    count = torch.full_like(mean_here, x.numel() // x.shape[1])
    facts = torch.stack([mean_here, distance, count])[None]
    facts = mesh.functional.all_gather(dims, facts, 0, grad="reduce_scatter")
    means, distances, counts = facts.unbind(1)
    total = counts.sum(0)
    mean = (means * counts).sum(0) / total
    squares = distances.sum(0) + (counts * (means - mean).square()).sum(0)
    return _Statistics(mean, squares / total, squares.detach() / (total - 1))


def _channels(x: Tensor) -> tuple[int, ...]:
    return (1, -1, *(1,) * (x.ndim - 2))


@final
class _Forward:
    """Calls the forward of a batch norm. F.batch_norm then uses the samples on all ranks.

    A copy of the module has a separate copy of this object. plain: the forward that it replaces. is_torchs: whether that is torch's.
    """

    def __init__(self, norm: Any, plain: Callable[..., Any], mesh: Mesh, dims: Dims, is_torchs: bool) -> None:
        self._norm, self._mesh, self._dims = norm, mesh, dims
        self.plain, self.is_torchs = plain, is_torchs

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Call the forward. In training, runs one all_gather in forward and one reduce_scatter in backward. Raises UnsupportedOp if
        the forward follows statistics that it computes itself.
        """
        norm = self._norm
        buffers = [buffer for buffer in (norm.running_mean, norm.running_var) if buffer is not None]
        versions = [buffer._version for buffer in buffers]
        mode = _Synchronised(self._mesh, self._dims)
        with mode:
            y = self.plain(*args, **named)
        if not mode.was_called and [buffer._version for buffer in buffers] != versions:
            raise UnsupportedOp(
                f"the batch norms of {type(norm).__name__} cannot use the samples of all ranks",
                given="a forward that changes running_mean or running_var, and does not call F.batch_norm",
                expected="a mean and a variance over the samples of all ranks, which meshcomm computes in F.batch_norm",
                hint="super().forward(x) or F.batch_norm in place of the means; or a module that is no nn.BatchNorm, with "
                "mesh.functional.all_reduce along data and shard",
            )
        return y


@final
class _Synchronised(TorchFunctionMode):
    """In this context, F.batch_norm uses the samples on all ranks along `dims`. was_called: whether it did."""

    def __init__(self, mesh: Mesh, dims: Dims) -> None:
        super().__init__()
        self._mesh, self._dims = mesh, dims
        self.was_called = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See TorchFunctionMode."""
        kwargs = kwargs or {}
        if func is F.batch_norm:
            normalised = self._batch_norm(*args, **kwargs)
        elif func is torch.batch_norm:
            arguments = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
            normalised = self._batch_norm(**{name: arguments[name] for name in _ARGUMENTS[:-1]})
        else:
            return func(*args, **kwargs)
        return func(*args, **kwargs) if normalised is None else normalised

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor | None:
        """Return the result of a call in training, and otherwise None."""
        if not training:
            return None
        self.was_called = True
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        statistics, channels = _statistics(wide, self._mesh, self._dims), _channels(input)
        if running_mean is not None and running_var is not None:
            with torch.no_grad():
                # The unbiased variance, as in torch.
                running_mean.lerp_(statistics.mean.to(running_mean), momentum)
                running_var.lerp_(statistics.unbiased.to(running_var), momentum)
        y = (wide - statistics.mean.view(channels)) * (statistics.variance + eps).rsqrt().view(channels)
        if weight is not None:
            y = y * local(weight).to(wide.dtype).view(channels)
        if bias is not None:
            y = y + local(bias).to(wide.dtype).view(channels)
        return y.to(input.dtype)
