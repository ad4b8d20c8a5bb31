"""Sharded data parallelism: torch's FSDP2 over dims of the mesh."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from meshcomm.errors import TrainingError
from meshcomm.mesh import Mesh
from meshcomm.parallel.tensor import local


@final
class Sharded:
    """Parameters, gradients and optimiser state of modules, sharded along one dim by FSDP2.

    Each of `blocks` is gathered before it is used and let go after; its gradients are summed and
    scattered as soon as backward is through it. With `replicate` there are copies of the shards along
    that dim (hybrid sharding), and gradients are summed over them too. Along `context` ranks have
    other tokens of the same samples and the same shards: what remains of the gradients there is
    summed once a step.

    Args:
        mesh: an open mesh.
        modules: the root modules of this rank's stages; changed in place.
        blocks: parts of them that are gathered one at a time.
        shard, replicate, context: dims of the mesh; None: not used.
        keep_gathered: blocks stay gathered from a step's first forward pass to its last backward
            pass. Needed where a backward pass runs in halves (zero_bubble): the second half looks
            for the very parameters that the forward pass used.
    """

    def __init__(
        self,
        mesh: Mesh,
        modules: Sequence[nn.Module],
        blocks: Iterable[nn.Module],
        *,
        shard: str,
        replicate: str | None,
        context: str | None,
        keep_gathered: bool = False,
    ) -> None:
        self._mesh = mesh
        self._context = context if context is not None and mesh.size(context) > 1 else None
        over = mesh[shard] if replicate is None else mesh[replicate, shard]
        self._roots: list[FSDPModule] = []
        for block in blocks:
            _sum(fully_shard(block, mesh=over, reshard_after_forward=not keep_gathered))
        for module in modules:
            self._roots.append(_sum(fully_shard(module, mesh=over)))
        self._parameters = {
            name: parameter for module in modules for name, parameter in module.named_parameters()
        }

    def start(self) -> None:
        """Begin a step: no gradient is there."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def microbatch(self, last: bool) -> None:
        """Before a forward pass without a pipeline: gradients are summed over ranks in the last one."""
        for root in self._roots:
            root.set_requires_gradient_sync(last)

    def finish(self) -> None:
        """Every `.grad` is this rank's shard of the sum. Call after the last backward.

        Raises TrainingError, naming the parameters, where some got no gradient in this step.
        """
        missing = [name for name, parameter in self._parameters.items() if parameter.grad is None]
        if missing:
            raise TrainingError(
                f"{len(missing)} of {len(self._parameters)} parameters got no gradient",
                given=", ".join(missing[:8]) + (", ..." if len(missing) > 8 else ""),
                expected="every parameter of the model to take part in the loss",
                hint="remove them, use them in forward, or set requires_grad = False",
            )
        if self._context is not None:
            grads = [local(p.grad) for p in self._parameters.values() if p.grad is not None]
            self._mesh.all_reduce(self._context, grads)

    def zero(self) -> None:
        """Gradients of zero, for an optimiser that is to make its state."""
        for parameter in self._parameters.values():
            parameter.grad = torch.zeros_like(parameter)


def _sum(module: Any) -> FSDPModule:
    """Gradients are summed, as those of whole tensors are; torch divides them by the ranks."""
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    # Gloo has no reduction that multiplies first, which torch would choose for float32.
    module.set_force_sum_reduction_for_comms(True)
    return module
