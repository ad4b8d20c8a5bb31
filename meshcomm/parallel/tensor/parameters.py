"""Split parameters: DTensors whose local parts are used by layers, and the assembly of full tensors from them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshcomm.errors import LayoutError
from meshcomm.mesh import Mesh
from meshcomm.parallel.torch_private import dtensor_of, parts_of_dtensor
from meshcomm.transfer.fused import Kept, fused_parts, joined, unfused
from meshcomm.transfer.tensors import own_regions


def parameter_of(
    mesh: Mesh, data: Tensor, axes: Mapping[str, int | None], shape: Sequence[int] | None = None
) -> nn.Parameter:
    """Return a parameter whose part on this rank is `data`. axes: maps dims of one view to the axis that is split along
    each dim, or to None if the ranks along the dim hold equal data. Dims of one rank do not count. shape: the full shape, which
    is required if the parts differ in size.
    """
    axes = {dim: axis for dim, axis in axes.items() if mesh.size(dim) > 1}
    if axes:
        placements = [Replicate() if axis is None else Shard(axis) for axis in axes.values()]
        full = None if shape is None else torch.Size(shape)
        stride = None if full is None else torch.empty(full, device="meta").stride()
        data = DTensor.from_local(
            data, mesh[tuple(axes)], placements, run_check=False, shape=full, stride=stride
        )
    return nn.Parameter(data)


def split_parameter(mesh: Mesh, old: Tensor, axes: Mapping[str, int | None]) -> nn.Parameter:
    """Return a parameter with a copy of this rank's part of `old`, which every rank holds in full. axes: as for `parameter_of`."""
    value = old.detach()
    for dim, axis in axes.items():
        if axis is not None:
            value = value.chunk(mesh.size(dim), axis)[mesh.coord(dim)]
    split = parameter_of(mesh, value.clone(memory_format=torch.contiguous_format), axes, old.shape)
    split.requires_grad_(old.requires_grad)
    return split


def split_dims(parameter: Tensor) -> tuple[str, ...]:
    """Return the dims that shard a DTensor, as GradientNorm needs them, and () for a plain tensor.

    Raises LayoutError for a DTensor on a DeviceMesh without dim names, which meshcomm never creates.
    """
    if not isinstance(parameter, DTensor):
        return ()
    where = parameter.device_mesh
    if where.mesh_dim_names is None:
        raise LayoutError(
            "the dims of a parameter's DeviceMesh have no names",
            given=f"a DTensor of shape {tuple(parameter.shape)} on {where}",
            expected='a DeviceMesh such as mesh["tp"]',
        )
    return tuple(where.mesh_dim_names[axis] for axis in split_axes(parameter))


def split_axes(parameter: Tensor) -> list[int]:
    """Return the axes of size above 1 of a DTensor's DeviceMesh along which it is split, and none for a plain tensor."""
    if not isinstance(parameter, DTensor):
        return []
    # A placement that is neither replicated nor partial is a shard. FSDP uses a separate type for a shard of a shard.
    return [
        axis
        for axis, placement in enumerate(parameter.placements)
        if not (placement.is_replicate() or placement.is_partial()) and parameter.device_mesh.size(axis) > 1
    ]


def local(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter, in the parameter's memory. Gradients flow back into the parameter."""
    if not isinstance(parameter, DTensor):
        return parameter
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and parameter.requires_grad):
        return parameter.to_local()
    held: Tensor = _Local.apply(parameter)
    return held


class _Local(torch.autograd.Function):
    """`to_local` for a parameter whose gradient has the same layout. torch's general function costs ten times as much."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        held, ctx.where = parts_of_dtensor(parameter)
        return held.view_as(held)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if torch.is_grad_enabled():
            # The gradient is itself differentiated.
            where = ctx.where
            full = {"shape": where.tensor_meta.shape, "stride": where.tensor_meta.stride}
            return DTensor.from_local(gradient, where.mesh, where.placements, run_check=False, **full)
        # The gradient needs the parameter's strides, because a fused optimizer reads both in memory order.
        return dtensor_of(DTensor, gradient.contiguous(), ctx.where)


def whole(tensor: Tensor | Kept) -> Tensor:
    """Return the full tensor in its original layout, gathered if it is split. Every rank that holds a part calls this.

    All ranks receive all, so this is an all_gather, not a transfer of pieces.
    """
    if isinstance(tensor, Kept):
        return joined(whole(tensor.tensor), tensor.parts)
    values = tensor.detach()
    return values.full_tensor() if isinstance(values, DTensor) else values


@torch.no_grad()
def assign(parameter: Tensor | Kept, value: Any) -> None:
    """Write this rank's part of the full `value` into `parameter`. Does not communicate.

    value: a tensor, or an object that returns slices, such as safetensors' get_slice, from which only the part is read.
    """
    for region in own_regions(parameter):
        box = region.box
        region.write(box.begin, box.end, value[box.slices])


def unsplit_state(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of the tensors in the module's `state_dict()`, as full, plain tensors in the layout from before the split.

    Called by: every rank that holds a part. Each rank receives the full dict.
    """
    state = unfused(module.state_dict(keep_vars=True), module)
    return {name: whole(tensor).clone() for name, tensor in state.items()}


def unsplit_optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return a copy of the optimizer's `state_dict()` with full, plain tensors, in the layout from before the split.

    An optimizer of the unsplit module loads it with `load_state_dict`, if it was created from the parameters in the same order.

    Called by: every rank that holds a part. Each rank receives the full dict.

    Raises LayoutError for parameters that the module does not have, for state of a split parameter that is not a DTensor, and for
    state of a multi-part weight, such as q, k and v in one, that has another shape than the weight.
    """
    fused = fused_parts(module)
    named = {id(tensor): name for name, tensor in module.named_parameters(remove_duplicate=False)}
    parameters = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    if foreign := [tuple(tensor.shape) for tensor in parameters if id(tensor) not in named]:
        raise LayoutError(
            "the optimizer has parameters that the module does not have",
            given=f"{len(foreign)} of {len(parameters)}, the first of shape {foreign[0]}",
            expected="an optimizer of this module's parameters",
            hint="create the optimizer after tensor_parallel and fully_shard, which replace parameters",
        )

    def full(index: int, key: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        parameter = parameters[index]
        if value.ndim == 0:
            # The number of steps, for example.
            return value.clone()
        parts = fused.get(name := named[id(parameter)])
        is_local = isinstance(parameter, DTensor) and not isinstance(value, DTensor)
        if is_local or (parts is not None and value.shape != parameter.shape):
            raise LayoutError(
                f'nothing says how the optimizer\'s "{key}" of {name} is split',
                given=f"{key} of shape {tuple(value.shape)} for a {type(parameter).__name__} of shape {tuple(parameter.shape)}",
                expected="state of the parameter's own type and shape, as of AdamW or SGD with momentum",
                hint="save each rank's optimizer.state_dict(), or use an optimizer whose state has the parameter's shape",
            )
        return whole(value if parts is None else Kept(value, parts)).clone()

    with torch.no_grad():
        state = optimizer.state_dict()
        held = {
            index: {key: full(index, key, value) for key, value in entries.items()}
            for index, entries in state["state"].items()
        }
    return {**copy.deepcopy({key: value for key, value in state.items() if key != "state"}), "state": held}
