"""Whole tensors of a mesh on one of its ranks, one after another: a transfer to a target of one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import final

import torch
from torch import Tensor

from meshcomm.mesh import Mesh
from meshcomm.transfer.agree import agree_on_source
from meshcomm.transfer.placement import Box
from meshcomm.transfer.plan import BUCKET_BYTES, Entry, Plan, located
from meshcomm.transfer.run import Room, Run, Schedule
from meshcomm.transfer.sides import Sides
from meshcomm.transfer.tensors import Parted, Region, regions
from meshcomm.transfer.weights import rows_of


@final
class Gathered:
    """Whole tensors on one rank of a mesh, in host memory.

    tensors: this rank's, by name. Ranks may have different names, as the stages of a pipeline do.
    rank:    the rank that receives them.
    bucket_bytes: smaller tensors are sent together, up to so many bytes.
    Called by: every rank of the mesh. Creates a group of all ranks if the mesh has none.
    Raises:    TransferMismatch on every rank, if the ranks' parts do not make whole tensors.

    Attributes:
        kinds: the dtype and the shape of each tensor that a rank has, by name. Equal on all ranks.
    """

    def __init__(
        self, mesh: Mesh, tensors: Mapping[str, Parted], rank: int, *, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self._mesh, self._sides = mesh, Sides.to_rank(mesh, rank)
        self._tensors, self._bucket_bytes = tensors, bucket_bytes
        self._sources = agree_on_source(self._sides, rows_of(tensors, mesh))
        self.kinds = {name: (dtype, placement.shape) for name, (dtype, placement) in self._sources.items()}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor with its name, in the order of `kinds`. On other ranks than the receiving one, it is empty.

        Called by: every rank, to the end: a rank sends its parts while it iterates. Raises CommunicationError.
        """
        together: list[Entry] = []
        used = 0
        for name, (dtype, placement) in self._sources.items():
            target = placement.whole
            entry = Entry(name, dtype.itemsize, placement, target)
            nbytes = located(target, self._sides.ends.target).most * dtype.itemsize
            if together and used + nbytes > self._bucket_bytes:
                yield from self._received(together)
                together, used = [], 0
            together.append(entry)
            used += nbytes
        yield from self._received(together)

    def _received(self, entries: list[Entry]) -> Iterator[tuple[str, Tensor]]:
        """Transfer some tensors together, and yield them."""
        sides, sources, targets = self._sides, {}, {}
        position = sides.ends.source.position(self._mesh.rank)
        arrived: list[Tensor] = []
        for number, entry in enumerate(entries):
            dtype, where = self._sources[entry.name][0], located(entry.source, sides.ends.source)
            if where.holds(position):
                sources[number] = Room(regions(self._tensors[entry.name], where, position), dtype)
            shape = (0,) if sides.target is None else entry.target.shape
            arrived.insert(0, torch.empty(shape, dtype=dtype, device="cpu"))
            if sides.target is not None:
                targets[number] = Room([Region(Box.at((0,) * len(shape), shape), arrived[0])], dtype)
        plan = Plan(sides.ends, entries, bucket_bytes=self._bucket_bytes)
        Run(Schedule(plan, sides), sources, targets)()
        # A tensor that has been yielded is not kept.
        targets.clear()
        for entry in entries:
            yield entry.name, arrived.pop()
