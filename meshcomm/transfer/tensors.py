"""The placement of a torch tensor on a mesh, and this rank's memory for its boxes, whatever order the memory has."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Final, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshcomm.comm.checks import Where, check_input, value_of
from meshcomm.errors import LayoutError, ShapeError
from meshcomm.layout import Layout
from meshcomm.transfer.fused import Kept
from meshcomm.transfer.placement import Axis, Box, Located, Placement, Section, Split

# Names of the axes of a tensor whose placement nobody wrote.
_NAMES = "nkabcdefgh"
# NumPy has 64 axes at most, and the pieces of a plan have two more than the tensor.
_MOST_AXES: Final = 62


def placement_of(tensor: Parted, layout: Layout, rank: int) -> Placement:
    """Return how a tensor of this rank is split over the mesh. A plain tensor is whole on every rank.

    Raises LayoutError for a DTensor on other dims than the layout's, and ShapeError for one that is a partial sum.
    """
    if isinstance(tensor, Cutout):
        placement = placement_of(tensor.tensor, layout, rank).cut(*tensor.cut)
        regions(tensor, Located(placement, layout), layout.position(rank))
        return placement
    held = tensor.tensor if isinstance(tensor, Kept) else tensor
    splits: list[list[Split]] = [[] for _ in held.shape]
    if isinstance(held, DTensor):
        _read_splits(held, layout, rank, splits)
    axes: list[Axis] = []
    units_axis = tensor.parts.axis if isinstance(tensor, Kept) else None
    for axis, (size, own) in enumerate(zip(held.shape, splits, strict=True)):
        if units_axis is not None and axis == units_axis + 1:
            continue  # in the full tensor, it is one axis with the units
        name = _NAMES[len(axes) % len(_NAMES)] + str(len(axes) // len(_NAMES) or "")
        if isinstance(tensor, Kept) and axis == units_axis:
            sections = [
                Section(f"{name}{number}", rows, tuple(own), rows // tensor.parts.units)
                for number, rows in enumerate(tensor.parts.sizes)
            ]
        else:
            sections = [Section(name, size, tuple(own))]
        axes.append(tuple(sections))
    placement = Placement(tuple(axes))
    regions(tensor, Located(placement, layout), layout.position(rank))
    return placement


def _read_splits(tensor: DTensor, layout: Layout, rank: int, splits: list[list[Split]]) -> None:
    """Add the splits of a DTensor to those of each axis."""
    mesh = tensor.device_mesh
    if mesh.get_coordinate() is None:
        raise LayoutError(
            "a DTensor lies on a DeviceMesh without this rank",
            given=f"{mesh} on rank {rank}",
            expected="a DeviceMesh of the mesh, which all its ranks are on",
        )
    # A shard with a split factor splits parts that dims to its right have split before, FSDP's of tensor parallel parts. Going
    # from right to left, each dim's place among the splits so far is known.
    for number in reversed(range(mesh.ndim)):
        placement = tensor.placements[number]
        if placement.is_replicate() or mesh.size(number) == 1:
            continue
        if placement.is_partial():
            raise ShapeError(
                "a DTensor of partial sums has no parts to transfer",
                given=f"placements {tensor.placements}",
                expected="placements Shard and Replicate",
                hint="tensor.redistribute(...) to one of these first",
            )
        axis, factor = placement.dim % tensor.ndim, getattr(placement, "split_factor", 1)  # type: ignore[attr-defined]
        earlier, place = 1, 0
        while earlier < factor and place < len(splits[axis]):
            earlier *= layout.size(splits[axis][place].dim)
            place += 1
        splits[axis].insert(place, Split(_dim_of(tensor, number, layout, rank)))
        if earlier != factor:
            raise LayoutError(
                "the shards of a DTensor do not follow the dims of its DeviceMesh",
                given=f"placements {tensor.placements} on {mesh}",
                expected="a split factor that is the number of parts along the dims to its right",
            )


def _dim_of(tensor: DTensor, number: int, layout: Layout, rank: int) -> str:
    """Return the name in the layout of a dim of a DTensor's DeviceMesh. Raises LayoutError."""
    mesh = tensor.device_mesh
    name = (mesh.mesh_dim_names or ("",) * mesh.ndim)[number]
    ranks = mesh.get_group(number)
    names = [name] if name in layout.names else [*layout.names]
    members = dist.get_process_group_ranks(ranks)
    for known in names:
        if layout.size(known) == len(members) and layout.group_of(rank, known).tolist() == members:
            return known
    raise LayoutError(
        "a DTensor is split along a dim that the mesh does not have",
        given=f"{f'dim {name}' if name else f'dim {number}'} of {mesh}, ranks {members}",
        expected=f"a dim of the mesh with these ranks: {', '.join(layout.names)}",
        hint='a DeviceMesh of the mesh, such as mesh["tp"]; or write the placement: link.transfer(x, out, "n/tp k -> n k")',
    )


class Region(NamedTuple):
    """The memory of one box.

    held:  of the box's shape; if `units` is given, the axis `units` of the box is two axes of `held`, (units, rows of a unit).
    """

    box: Box
    held: Tensor
    units: int | None = None

    def read(self, begin: Sequence[int], end: Sequence[int]) -> Tensor:
        """Return the values of a box within this one. They may share its memory."""
        held, first = self._covering(begin, end)
        return held[first]

    def write(self, begin: Sequence[int], end: Sequence[int], values: Tensor) -> None:
        """Write the values of a box within this one."""
        # torch refuses to write an inference tensor outside of inference mode.
        with torch.inference_mode() if self.held.is_inference() else nullcontext():
            whole, inside = self._covering(begin, end)
            whole[inside].copy_(values)
            if self.units is None:
                return
            first, last = self._units(begin, end)
            held = self.held.narrow(self.units, first, last - first)
            # The rows of a single unit are not a copy.
            if held.data_ptr() != whole.data_ptr():
                held.copy_(whole.unflatten(self.units, held.shape[self.units : self.units + 2]))

    def _units(self, begin: Sequence[int], end: Sequence[int]) -> tuple[int, int]:
        """Return the first unit that a box touches, and the one after the last."""
        assert self.units is not None
        rows, origin = self.held.shape[self.units + 1], self.box.begin[self.units]
        return (begin[self.units] - origin) // rows, -(-(end[self.units] - origin) // rows)

    def _covering(self, begin: Sequence[int], end: Sequence[int]) -> tuple[Tensor, tuple[slice, ...]]:
        """Return memory that covers a box, and where the box lies in it. With `units`, the memory may be a copy."""
        origin, held = [*self.box.begin], self.held
        if self.units is not None:
            first, last = self._units(begin, end)
            held = held.narrow(self.units, first, last - first).flatten(self.units, self.units + 1)
            origin[self.units] += first * self.held.shape[self.units + 1]
        return held, tuple(slice(a - o, b - o) for a, b, o in zip(begin, end, origin, strict=True))


class Cut(NamedTuple):
    """A box of a tensor, without the axes of length 1 that are not in `axes`, and with the others in this order."""

    begin: tuple[int, ...]
    end: tuple[int, ...]
    axes: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.end[axis] - self.begin[axis] for axis in self.axes)

    def of(self, region: Region) -> Region | None:
        """Return what a region of the tensor has of the cut, in the same memory; None if it has no element of it.

        Raises LayoutError if the cut would divide the rows of a unit.
        """
        common, units = region.box.common(Box(self.begin, self.end)), region.units
        if common is None:
            return None
        slices = [slice(a - o, b - o) for a, b, o in zip(*common[:2], region.box.begin, strict=True)]
        order = [*self.axes]
        if units is not None:
            if units not in order or common.shape[units] != region.box.shape[units]:
                raise LayoutError(
                    "a tensor is cut from a weight of several parts, but not along these parts",
                    given=f"rows {self.begin[units]} to {self.end[units]} of its axis {units}",
                    expected="all rows of one or several parts",
                )
            # In memory, this axis is two axes.
            slices[units : units + 1] = [slice(None)] * 2
            order = [axis + (axis > units) for axis in order]
            order.insert(order.index(units) + 1, units + 1)
        held = region.held[tuple(slices)]
        rest = [axis for axis in range(held.ndim) if axis not in order]
        held = held.permute((*order, *rest))
        for _ in rest:
            held = held[..., 0]
        ends = (tuple(at[axis] - self.begin[axis] for axis in self.axes) for at in common[:2])
        return Region(Box(*ends), held, None if units is None else self.axes.index(units))


class Cutout(NamedTuple):
    """A tensor that lies in a part of another one's memory, such as the weight of an expert, or the rows of one of two weights."""

    tensor: Tensor | Kept
    cut: Cut

    @property
    def shape(self) -> tuple[int, ...]:
        return self.cut.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def is_held(self) -> bool:
        """Whether this rank has the index of the axes that are left out, such as the expert. Its part may be empty."""
        begin, _, axes = self.cut
        return any(
            all(
                region.box.begin[axis] <= begin[axis] < region.box.end[axis] or axis in axes
                for axis in range(len(begin))
            )
            for region in own_regions(self.tensor)
        )


Parted: TypeAlias = Tensor | Kept | Cutout
"""A tensor that knows where this rank's part of it lies. A plain tensor is whole."""


def base_of(tensor: Parted) -> Tensor:
    """Return the torch tensor that has the values."""
    while not isinstance(tensor, Tensor):
        tensor = tensor.tensor
    return tensor


def checked_memory(
    tensor: Any, where: Where, kinds: tuple[str, ...] | None = None, *, written: bool
) -> Tensor:
    """Return this rank's memory for a tensor that enters a link, see `memory_of`.

    kinds: types of devices, by default that of the tensor. written: whether the link writes to it.
    Raises ShapeError and UnsupportedOp if it is no tensor that can be carried.
    """
    base = base_of(tensor) if isinstance(tensor, Kept | Cutout) else tensor
    with torch.no_grad():
        local = base.to_local() if isinstance(base, DTensor) else base
    if kinds is None:
        kinds = (local.device.type,) if isinstance(local, Tensor) and not local.is_meta else ()
    check_input(local, kinds, where, None, written)
    if local.ndim > _MOST_AXES:
        raise ShapeError(
            f"{where()} cannot carry a tensor of so many axes",
            given=f"{local.ndim} axes",
            expected=f"at most {_MOST_AXES} axes",
            hint="x.flatten(...) of some axes",
        )
    return memory_of(tensor)


def memory_of(tensor: Parted) -> Tensor:
    """Return this rank's memory for a tensor, without a copy; of a cutout, for the tensor that it is cut from."""
    held = base_of(tensor)
    with torch.no_grad():  # a DTensor then gives its memory without an operator
        memory: Tensor = value_of(held.to_local() if isinstance(held, DTensor) else held).detach()
    return memory


def own_regions(tensor: Parted) -> list[Region]:
    """Return the regions of a tensor on this rank, as the tensor knows them. A rank outside a DTensor's DeviceMesh has none."""
    if isinstance(tensor, Cutout):
        parts = map(tensor.cut.of, own_regions(tensor.tensor))
        return [part for part in parts if part is not None]
    held, whole = memory_of(tensor), base_of(tensor)
    begin: Sequence[int] = (0,) * held.ndim
    if isinstance(whole, DTensor):
        if whole.device_mesh.get_coordinate() is None:
            return []
        chunks = whole.__create_chunk_list__()
        begin = chunks[0].offsets if chunks else begin
    if isinstance(tensor, Tensor):
        return [Region(Box.at(begin, held.shape), held)]
    # Within a part, the rows of the rank's units are adjacent.
    axis, pieces, first, column = tensor.parts.axis, [], 0, 0
    for size in tensor.parts.sizes:
        rows = size // tensor.parts.units
        at = (*begin[:axis], first + begin[axis] * rows, *begin[axis + 2 :])
        shape = (*held.shape[:axis], held.shape[axis] * rows, *held.shape[axis + 2 :])
        pieces.append(Region(Box.at(at, shape), held.narrow(axis + 1, column, rows), axis))
        first, column = first + size, column + rows
    return pieces


def regions(tensor: Parted, where: Located, position: int) -> list[Region]:
    """Return the regions of the tensor of the rank at a position. Raises ShapeError if its shape does not fit the placement."""
    boxes = where.boxes(position)
    if not isinstance(tensor, Tensor):
        own = own_regions(tensor)
        if {region.box[:2] for region in own if 0 not in region.box.shape} != {
            box[:2] for box in boxes if 0 not in box.shape
        }:
            raise _unfit([region.box for region in own], where, position)
        return own
    memory = memory_of(tensor)
    if tuple(memory.shape) != where.local_shape(position) or not boxes:
        raise _unfit(tuple(memory.shape), where, position)
    return [
        Region(box, memory[tuple(slice(a, a + n) for a, n in zip(box.local, box.shape, strict=True))])
        for box in boxes
    ]


def _unfit(given: object, where: Located, position: int) -> ShapeError:
    coords = ", ".join(
        f"{dim}={coord}" for dim, coord in where.layout.coords(where.layout.rank_of(position)).items()
    )
    expected = f"a part of shape {where.local_shape(position)}" if where.holds(position) else "no part"
    return ShapeError(
        f'this rank\'s part does not fit the placement "{where.placement}"',
        given=f"{given}, of the full shape {where.placement.shape}",
        expected=f"{expected} at {coords}",
        hint="uneven parts follow torch.chunk; the text names the dims that split each axis, outermost first",
    )
