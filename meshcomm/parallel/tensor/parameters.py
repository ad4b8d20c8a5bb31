"""Split parameters: DTensors whose local parts are used by layers, and the assembly of full tensors from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshcomm.errors import LayoutError, MeshClosed
from meshcomm.mesh import Mesh
from meshcomm.mesh.watchdog import explained
from meshcomm.parallel.torch_private import dtensor_of, parts_of_dtensor
from meshcomm.transfer.fused import Kept, joined
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


class SplitGroup(NamedTuple):
    """A group along which ranks hold different parts. dim: its name in the DeviceMesh, the same on all ranks."""

    dim: str
    device: torch.device
    group: dist.ProcessGroup

    @staticmethod
    def of(where: DeviceMesh, axis: int) -> SplitGroup:
        names = where.mesh_dim_names
        return SplitGroup(
            names[axis] if names else str(axis), torch.device(where.device_type), where.get_group(axis)
        )


def split_groups(tensors: Iterable[Tensor]) -> dict[str, SplitGroup]:
    """Return the groups along which tensors are split, by their names, sorted by dim: the same order on all ranks."""
    groups = [
        SplitGroup.of(tensor.device_mesh, axis)
        for tensor in tensors
        if isinstance(tensor, DTensor)
        for axis in split_axes(tensor)
    ]
    return {found.group.group_name: found for found in sorted(groups, key=lambda found: found.dim)}


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
    if not isinstance(tensor, Tensor):
        raise LayoutError(
            "only a tensor can be gathered",
            given=f"a {type(tensor).__name__}",
            expected="a parameter, a gradient or another tensor",
            hint="whole(module.weight); unsplit_state(module) for all",
        )
    values = tensor.detach()
    with as_mesh_errors():
        return values.full_tensor() if isinstance(values, DTensor) else values


@torch.no_grad()
def assign(parameter: Tensor | Kept, value: Any) -> None:
    """Write this rank's part of the full `value` into `parameter`. Does not communicate.

    value: a tensor of the parameter's full shape, or an object that returns slices, such as safetensors' get_slice, from which
           only the part is read.
    Raises LayoutError, before it writes, for another shape, for a DTensor, and for complex values of a real parameter.
    """
    check_assigned(parameter, value, "the parameter")
    for region in own_regions(parameter):
        box = region.box
        region.write(box.begin, box.end, value[box.slices])


def check_assigned(parameter: Tensor | Kept, value: Any, name: str) -> None:
    """Raise LayoutError if `value` cannot be assigned to `parameter`. name: of the parameter, for the error."""
    shape, given = getattr(value, "shape", None), f"a {type(value).__name__}"
    if shape is None and hasattr(value, "get_shape"):
        shape = value.get_shape()
    if shape is not None:
        given = f"{given} of shape {tuple(shape)}"
    complex_values = isinstance(value, Tensor) and value.is_complex() and not parameter.dtype.is_complex
    if (
        isinstance(value, DTensor)
        or complex_values
        or shape is None
        or tuple(shape) != tuple(parameter.shape)
    ):
        raise LayoutError(
            f"{name} cannot take this value",
            given=f"{given}, {value.dtype}" if complex_values else given,
            expected=f"a full, plain tensor of shape {tuple(parameter.shape)}, for {parameter.dtype}",
            hint="whole(x) makes a DTensor full; load_unsplit_state takes the state of a plain model",
        )


@contextmanager
def as_mesh_errors() -> Iterator[None]:
    """Turn torch's errors of calls on a mesh's groups into meshcomm's, as at the end of the mesh's `with` block."""
    try:
        yield
    except RuntimeError as error:
        if "Could not resolve the process group" in str(error):
            raise MeshClosed(
                "the tensors are split along a mesh that is closed",
                given=str(error).strip(),
                expected="an open mesh",
                hint="move the call before mesh.close(), or into the with block",
            ) from error
        told = explained(error)
        if told is error:
            raise
        raise told from error
