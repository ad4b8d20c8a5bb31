"""The parts of the saved tensors that lie on this rank, and whether parts make a whole."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshcomm.transfer.fused import Kept
from meshcomm.transfer.placement import Box
from meshcomm.transfer.tensors import Region, own_regions


class Kind(NamedTuple):
    """The dtype and shape of a full tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}"


def kind_of(tensor: Tensor | Kept) -> Kind:
    """Return the kind of the full tensor, as a checkpoint stores it."""
    return Kind(tensor.dtype, tuple(tensor.shape))


class Part(NamedTuple):
    """A region of a tensor on this rank. kind: of the full tensor."""

    name: str
    kind: Kind
    region: Region

    @property
    def box(self) -> Box:
        """Where the part lies in the full tensor."""
        return self.region.box

    def on_host(self, copy: bool = False) -> Tensor:
        """Return the values in host memory. With `copy`, the memory is newly allocated."""
        values = self.region.read(self.box.begin, self.box.end)
        if values.device.type != "cuda":
            return values.to("cpu", copy=copy)
        # Copies to pinned memory are asynchronous, and torch reuses that memory for the next copy.
        return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values)


def parts_of(state: Mapping[str, Tensor | Kept]) -> list[Part]:
    """Return the parts of tensors that lie on this rank. A plain tensor is a single part."""
    return [
        Part(name, kind_of(tensor), region)
        for name, tensor in state.items()
        for region in own_regions(tensor)
        # A rank has an empty piece of each part of a multi-part weight of which it has no unit.
        if isinstance(tensor, Tensor) or region.held.numel()
    ]


def untiled(chunks: Sequence[Box], shape: tuple[int, ...]) -> str:
    """Return why the chunks do not cover a tensor of this shape without gaps and overlaps; "" if they do."""
    for chunk in chunks:
        within = len(chunk.begin) == len(chunk.end) == len(shape) and all(
            type(begin) is int and type(end) is int and 0 <= begin <= end <= whole
            for begin, end, whole in zip(*chunk[:2], shape, strict=True)
        )
        if not within:
            return f"a part of shape {chunk.shape} at {chunk.begin}, outside shape {shape},"
    covered, whole = sum(math.prod(chunk.shape) for chunk in chunks), math.prod(shape)
    if covered != whole:
        return f"parts of {covered} of {whole} elements"
    boxes = [chunk for chunk in chunks if math.prod(chunk.shape)]
    # Along the axis with the most cuts, each chunk has few neighbors to compare with.
    axis = max(range(len(shape)), key=lambda axis: len({box.begin[axis] for box in boxes}), default=0)
    near: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.begin[axis : axis + 1]):
        near = [other for other in near if other.end[axis] > box.begin[axis]] if shape else near
        if any(box.common(other) for other in near):
            return f"parts that overlap at {box.begin}"
        near.append(box)
    return ""
