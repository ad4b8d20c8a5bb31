"""Split parameters: DTensors whose local parts are used by layers, and the assembly of full tensors from them.

A weight with several parts, such as q, k and v, has the shape (units, rows of all parts in a unit, ...). Each rank
needs its share of every part, which is not a contiguous slice of the rows. A unit contains an equal share of each part,
and a rank holds a contiguous run of units. The number of units depends only on the parts, and the extra axis shows that the
rows are in a different order. A checkpoint stores such a weight in its original layout, in pieces: see `Kept`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshcomm.errors import LayoutError
from meshcomm.mesh import Mesh
from meshcomm.parallel.torch_private import dtensor_of, offsets, parts_of_dtensor

# The module attribute that maps each multi-part weight to its parts.
FUSED = "meshcomm_fused"


class Parts(NamedTuple):
    """The parts of one weight: their sizes along an axis of the full weight."""

    sizes: tuple[int, ...]
    axis: int = 0

    @property
    def units(self) -> int:
        """The number of equal shares into which every part can be cut. The number of ranks must divide it."""
        return math.gcd(*self.sizes)

    def shape(self, kept: Sequence[int]) -> tuple[int, ...]:
        """Return the full weight's original shape, given its shape `kept` with a units axis."""
        axis = self.axis
        return (*kept[:axis], sum(self.sizes), *kept[axis + 2 :])


def parameter_of(mesh: Mesh, data: Tensor, axes: Mapping[str, int | None]) -> nn.Parameter:
    """Return a parameter whose part on this rank is `data`. axes: maps dims of one view to the axis that is split along
    each dim, or to None if the ranks along the dim hold equal data. Dims of one rank do not count.
    """
    axes = {dim: axis for dim, axis in axes.items() if mesh.size(dim) > 1}
    if axes:
        placements = [Replicate() if axis is None else Shard(axis) for axis in axes.values()]
        data = DTensor.from_local(data, mesh[tuple(axes)], placements, run_check=False)
    return nn.Parameter(data)


def split_parameter(mesh: Mesh, old: Tensor, axes: Mapping[str, int | None]) -> nn.Parameter:
    """Return a parameter with a copy of this rank's part of `old`, which every rank holds in full. axes: as for `parameter_of`."""
    value = old.detach()
    for dim, axis in axes.items():
        if axis is not None:
            value = value.chunk(mesh.size(dim), axis)[mesh.coord(dim)]
    split = parameter_of(mesh, value.clone(memory_format=torch.contiguous_format), axes)
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
    # A placement that is neither replicated nor partial is a shard. FSDP uses a separate type for a shard of a shard.
    return tuple(
        name
        for axis, (name, placement) in enumerate(zip(where.mesh_dim_names, parameter.placements, strict=True))
        if not placement.is_replicate() and not placement.is_partial() and where.size(axis) > 1
    )


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
            return DTensor.from_local(gradient, ctx.where.mesh, ctx.where.placements, run_check=False)
        # The gradient needs the parameter's strides, because a fused optimizer reads both in memory order.
        return dtensor_of(DTensor, gradient.contiguous(), ctx.where)


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor, gathered if it is split. Every rank that holds a part calls this."""
    values = tensor.detach()
    return values.full_tensor() if isinstance(values, DTensor) else values


@torch.no_grad()
def assign(parameter: Tensor, value: Any) -> None:
    """Write this rank's part of the full `value` into `parameter`. Does not communicate.

    value: a tensor, or an object that returns slices, such as safetensors' get_slice, from which only the part is read.
    """
    held = local(parameter)
    first = offsets(parameter) if isinstance(parameter, DTensor) else (0,) * held.ndim
    held.copy_(value[tuple(slice(begin, begin + n) for begin, n in zip(first, held.shape, strict=True))])


class Piece(NamedTuple):
    """A box of a weight in its original layout: the start of the box, and this rank's memory for it.

    held: (..., units, rows of a unit, ...), a view.
    """

    at: tuple[int, ...]
    held: Tensor
    axis: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the box in the original layout."""
        shape, axis = self.held.shape, self.axis
        return (*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])

    def read(self) -> Tensor:
        """Return a copy of the values in the shape of the box."""
        return self.held.flatten(self.axis, self.axis + 1)

    def write(self, values: Tensor) -> None:
        """Write values in the shape of the box into this rank's memory."""
        self.held.copy_(values.unflatten(self.axis, self.held.shape[self.axis : self.axis + 2]))


class Kept(NamedTuple):
    """A tensor in the layout of a multi-part weight: the weight, its gradient, or optimizer state."""

    tensor: Tensor
    parts: Parts

    @property
    def shape(self) -> tuple[int, ...]:
        """The full shape, in the original layout."""
        return self.parts.shape(self.tensor.shape)

    def pieces(self) -> list[Piece]:
        """Return this rank's pieces, one for each part. Within a part, the rows of the rank's units are adjacent."""
        held, axis = local(self.tensor.detach()), self.parts.axis
        begins = offsets(self.tensor) if isinstance(self.tensor, DTensor) else (0,) * held.ndim
        pieces, first, column = [], 0, 0
        for size in self.parts.sizes:
            rows = size // self.parts.units
            begin = (*begins[:axis], first + begins[axis] * rows, *begins[axis + 2 :])
            pieces.append(Piece(begin, held.narrow(axis + 1, column, rows), axis))
            first, column = first + size, column + rows
        return pieces


def kept(whole: Tensor, parts: Parts) -> Tensor:
    """Group rows by unit: (..., sum of sizes, ...) in the parts' order -> (..., units, rows in a unit, ...).

    >>> kept(torch.tensor([0, 1, 2, 3, 10, 11]), Parts((4, 2))).tolist()
    [[0, 1, 10], [2, 3, 11]]
    """
    n, axis = parts.units, parts.axis
    return torch.cat(
        [part.unflatten(axis, (n, -1)) for part in whole.split(list(parts.sizes), axis)], axis + 1
    )


def joined(units_held: Tensor, parts: Parts) -> Tensor:
    """Return the rows of some or all units in the parts' order: the inverse of `kept`."""
    n, axis = parts.units, parts.axis
    rows = units_held.split([size // n for size in parts.sizes], axis + 1)
    return torch.cat([part.flatten(axis, axis + 1) for part in rows], axis)


def fused_parts(module: nn.Module) -> dict[str, Parts]:
    """Return the parts of each multi-part weight, by its name in the state dict."""
    return {
        f"{prefix}.{key}".lstrip("."): parts
        for prefix, part in module.named_modules(remove_duplicate=False)
        for key, parts in getattr(part, FUSED, {}).items()
    }


def unsplit_state(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of the tensors in the module's `state_dict()`, as full, plain tensors in the layout from before the split.

    Called by: every rank along the dim. Each rank receives the full dict.
    """
    fused = fused_parts(module)
    state: dict[str, Tensor] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        tensor = whole(value)
        state[name] = joined(tensor, fused[name]) if name in fused else tensor.clone()
    return state
