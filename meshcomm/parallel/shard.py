"""Sharding: FSDP2 for a model's layers, with experts along dims of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from meshcomm.mesh import Mesh
from meshcomm.parallel.data import check_complete
from meshcomm.parallel.expert.packed import EXPERTS
from meshcomm.parallel.expert.routing import Router
from meshcomm.parallel.tensor import local
from meshcomm.parallel.torch_private import put_shards_back, send_unused
from meshcomm.transfer.fused import fused_parts


@final
class Sharded:
    """Shards the parameters, gradients and optimizer state of modules along one dim, which may be merged, with FSDP2.

    Each of a module's `layers`, a ModuleDict or ModuleList, is gathered before it is used and resharded afterwards. Its
    gradients are reduce-scattered as soon as its backward pass has finished. If the shards are replicated along a second
    dim (hybrid sharding), gradients are also summed over the replicas. A dim whose ranks have different tokens of the
    same samples is merged into the sharding dim. Distributed experts are gathered separately, inside their layer (as in
    torchtitan's apply_fsdp, models/llama4/infra/parallelize.py).

    Args:
        modules: the root modules of this rank's stages; changed in place.
        dims: the sharding dim, or the replication dim followed by the sharding dim. The sharding dim may be merged.
        precision: the dtype of gathered weights, used in forward and backward, and the dtype in which gradients are
            accumulated over microbatches and sent. Routers compute in the weights' original dtype. Shards, their gradients
            and the optimizer state keep that dtype. Inputs are not cast, because some, such as a table of angles, must not be
            rounded.
        experts: the dims along which expert weights' gradients are summed. If None, experts are treated like other weights.
            The last of these dims whose size is above 1 shards the experts, and an earlier one replicates them. If all sizes
            are 1, experts stay unsharded.
        reshard: whether layers are resharded after each pass. If False, weights stay gathered from a step's first forward pass
            to its last backward pass. zero_bubble needs False, because the second half of its backward pass uses the
            forward pass's parameters.
        zeros: whether a parameter without a gradient has a gradient of zeros, also if other ranks have used it.
    """

    def __init__(
        self,
        mesh: Mesh,
        modules: Sequence[nn.Module],
        dims: Sequence[str],
        precision: MixedPrecisionPolicy,
        *,
        experts: Sequence[str] | None = None,
        reshard: bool = True,
        zeros: bool = False,
    ) -> None:
        self._reshard, self._zeros = reshard, zeros
        every = [parameter for module in modules for parameter in module.parameters()]
        layer_dtype = next((parameter for parameter in every if parameter.requires_grad), every[0]).dtype
        spread = None if experts is None else tuple(dim for dim in experts if mesh.size(dim) > 1)
        everywhere: dict[str, Any] = {"mesh": mesh[tuple(dims)], "reshard_after_forward": reshard}
        self._roots: list[FSDPModule] = []
        for module in modules:
            whole: set[nn.Parameter] = set()
            for part in module.modules() if spread is not None else ():
                if hasattr(part, EXPERTS) and spread:
                    place = _expert_axis(part, mesh.size(spread[-1]))
                    over = {**everywhere, "mesh": mesh[spread], "shard_placement_fn": place}
                    _shard(part, mp_policy=precision, **over)
                elif hasattr(part, EXPERTS):
                    whole.update(part.parameters())
            for layer in _blocks(module):
                for part in layer.modules() if precision.param_dtype != layer_dtype else ():
                    if isinstance(part, Router):
                        _shard(part, mp_policy=replace(precision, param_dtype=layer_dtype), **everywhere)
                _shard(layer, mp_policy=precision, ignored_params=whole or None, **everywhere)
            root = {"mesh": everywhere["mesh"], "mp_policy": precision, "ignored_params": whole or None}
            self._roots.append(_shard(module, **root))
            if zeros:
                send_unused(self._roots[-1])
        self._parameters = {
            name: parameter for module in modules for name, parameter in module.named_parameters()
        }

    def start(self) -> None:
        """Begin a step and clear every gradient."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def microbatch(self, last: bool) -> None:
        """Called before each forward pass if there is no pipeline. Gradients are summed over ranks in the last microbatch."""
        for root in self._roots:
            root.set_requires_gradient_sync(last)
            if not self._reshard:
                root.set_reshard_after_backward(last)

    def reshard(self) -> None:
        """Reshard weights that are still gathered after forward passes without a backward pass."""
        for part in self._parts():
            part.reshard()

    def abandon(self) -> None:
        """Put the shards back into the modules after an error interrupted a pass. The modules are not used afterwards."""
        for part in self._parts():
            put_shards_back(part)

    def _parts(self) -> list[FSDPModule]:
        roots = [root for root in self._roots if isinstance(root, nn.Module)]
        return [part for root in roots for part in root.modules() if isinstance(part, FSDPModule)]

    def finish(self, *, raises: bool = True) -> list[str]:
        """Give every parameter a `.grad`: this rank's shard of the summed gradient, or zeros. Call this after the last
        backward pass.

        Returns the parameters that got no gradient in this step, unless zeros are asked for. If `raises`, raises TrainingError that
        names them.
        """
        needed = {name: parameter for name, parameter in self._parameters.items() if parameter.requires_grad}
        missing = [name for name, parameter in needed.items() if parameter.grad is None]
        for name in missing:
            needed[name].grad = torch.zeros_like(needed[name])
        missing = [] if self._zeros else missing
        if raises:
            check_complete(missing, len(needed))
        return missing


def _blocks(module: nn.Module) -> tuple[nn.Module, ...]:
    """Return the parts of `module` that are gathered one at a time. The rest is gathered as one."""
    blocks = getattr(module, "meshcomm_blocks", None)
    if blocks is None:
        layers = getattr(module, "layers", None)
        blocks = layers.children() if isinstance(layers, (nn.ModuleDict, nn.ModuleList)) else ()
    # A block may be in the list several times, or be itself a list, which has no forward.
    lists = (nn.ModuleDict, nn.ModuleList)
    blocks = list(blocks)
    while any(isinstance(block, lists) for block in blocks):
        blocks = [
            layer for block in blocks for layer in (block.children() if isinstance(block, lists) else [block])
        ]
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(part)
    # FSDP2 keeps a weight shared only within what is gathered as one.
    return tuple(
        block
        for block in dict.fromkeys(blocks)
        if all(owners[parameter] <= {*block.modules()} for parameter in block.parameters())
    )


def _expert_axis(part: nn.Module, ranks: int) -> Callable[[nn.Parameter], Shard]:
    """Return a function that chooses the axis along which an expert weight is sharded: the experts' axis if its size is
    divisible by `ranks`, otherwise another axis with a divisible size. FSDP2 pads shards of unequal length, so splitting a
    rank's only expert into two shards along the experts' axis would save no memory.
    """
    # If a weight has several parts, the rows of a unit stay together.
    together = {id(part.get_parameter(name)): parts.axis + 1 for name, parts in fused_parts(part).items()}

    def place(parameter: nn.Parameter) -> Shard:
        sizes = enumerate(local(parameter.detach()).shape)
        skipped = together.get(id(parameter))
        return Shard(next((axis for axis, size in sizes if axis != skipped and size % ranks == 0), 0))

    return place


def _shard(module: nn.Module, **settings: Any) -> FSDPModule:
    """Shard `module` with FSDP2 and return it.

    Its gradients are summed, like the gradients of unsharded tensors; by default, torch averages them.
    """
    sharded = fully_shard(module, **settings)
    assert isinstance(sharded, FSDPModule)
    sharded.set_gradient_divide_factor(1.0)
    # Gloo does not support the premultiplied sum that torch would choose for float32.
    sharded.set_force_sum_reduction_for_comms(True)
    return sharded
