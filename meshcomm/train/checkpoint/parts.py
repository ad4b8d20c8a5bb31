"""Which boxes of the saved tensors lie on this rank, and how boxes relate to each other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshcomm.parallel.tensor import local
from meshcomm.parallel.tensor.parameters import Kept, Piece
from meshcomm.parallel.torch_private import offsets

# Offsets and sizes of a part of a tensor.
Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
Slices: TypeAlias = tuple[slice, ...]


class Kind(NamedTuple):
    """The dtype and shape of a full tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}"


def kind_of(tensor: Tensor | Kept) -> Kind:
    """Return the kind of the full tensor, as a checkpoint stores it."""
    return Kind(tensor.tensor.dtype if isinstance(tensor, Kept) else tensor.dtype, tuple(tensor.shape))


def memory_of(tensor: Tensor | Kept) -> Tensor:
    """Return this rank's memory for a tensor, without a copy."""
    return local((tensor.tensor if isinstance(tensor, Kept) else tensor).detach())


class Part(NamedTuple):
    """A box of a tensor that lies on this rank. kind: of the full tensor. held: this rank's memory for the box."""

    name: str
    kind: Kind
    box: Box
    held: Tensor | Piece

    def on_host(self, copy: bool = False) -> Tensor:
        """Return the values in host memory. With `copy`, the memory is newly allocated."""
        values = self.held.read() if isinstance(self.held, Piece) else self.held
        if values.device.type != "cuda":
            return values.to("cpu", copy=copy)
        # Copies to pinned memory are asynchronous, and torch reuses that memory for the next copy.
        return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values)


def parts_of(state: Mapping[str, Tensor | Kept]) -> list[Part]:
    """Return the parts of tensors that lie on this rank. A plain tensor is a single part."""
    parts: list[Part] = []
    for name, tensor in state.items():
        kind = kind_of(tensor)
        if isinstance(tensor, Kept):
            pieces = [piece for piece in tensor.pieces() if piece.held.numel()]
            parts += [Part(name, kind, (piece.at, piece.shape), piece) for piece in pieces]
            continue
        at = (0,) * tensor.ndim
        if isinstance(tensor, DTensor):
            if tensor.device_mesh.get_coordinate() is None:
                continue  # a rank outside the DeviceMesh
            at = offsets(tensor)
        held = memory_of(tensor)
        parts.append(Part(name, kind, (at, tuple(held.shape)), held))
    return parts


def overlap(box: Box, other: Box) -> tuple[Slices, Slices] | None:
    """Return what two boxes have in common, as slices of each; None if they have no element in common.

    >>> overlap(((0,), (4,)), ((2,), (6,)))
    ((slice(2, 4, None),), (slice(0, 2, None),))
    """
    of_box, of_other = [], []
    for start, size, other_start, other_size in zip(*box, *other, strict=True):
        begin, end = max(start, other_start), min(start + size, other_start + other_size)
        if begin >= end:
            return None
        of_box.append(slice(begin - start, end - start))
        of_other.append(slice(begin - other_start, end - other_start))
    return tuple(of_box), tuple(of_other)


def untiled(chunks: Sequence[Box], shape: tuple[int, ...]) -> str:
    """Return why the chunks do not cover a tensor of this shape without gaps and overlaps; "" if they do."""
    for begins, sizes in chunks:
        within = len(begins) == len(sizes) == len(shape) and all(
            type(at) is int and type(size) is int and at >= 0 and size >= 0 and at + size <= whole
            for at, size, whole in zip(begins, sizes, shape, strict=True)
        )
        if not within:
            return f"a part of shape {sizes} at {begins}, outside shape {shape},"
    covered, whole = sum(math.prod(sizes) for _, sizes in chunks), math.prod(shape)
    if covered != whole:
        return f"parts of {covered} of {whole} elements"
    boxes = [(at, sizes) for at, sizes in chunks if math.prod(sizes)]
    # Along the axis with the most cuts, each chunk has few neighbors to compare with.
    axis = max(range(len(shape)), key=lambda axis: len({at[axis] for at, _ in boxes}), default=0)
    near: list[Box] = []
    for at, sizes in sorted(boxes, key=lambda box: box[0][axis : axis + 1]):
        near = [box for box in near if box[0][axis] + box[1][axis] > at[axis]] if shape else near
        if any(overlap((at, sizes), other) for other in near):
            return f"parts that overlap at {at}"
        near.append((at, sizes))
    return ""
