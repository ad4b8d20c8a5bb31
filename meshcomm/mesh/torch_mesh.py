"""A mesh as torch objects: process groups, and DeviceMeshes over the same groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshcomm.layout import Layout
from meshcomm.transport import ProcessGroupTransport, Transport
from meshcomm.transport.torch_private import (
    SoloGroup,
    flattened,
    forget_device_meshes,
    side_by_side,
    without_modes,
)


@final
@dataclass(eq=False, slots=True)
class TorchMesh:
    """Torch objects over a mesh's groups. Each object is created on first use, without communication.

    All slices that keep the dims' order share one root mesh. FSDP and tensor parallelism require one root mesh for
    all meshes of a model.
    """

    layout: Layout
    _rank: int
    _device: torch.device
    _transports: Mapping[str, Transport]
    _prefix: str
    _solo: dict[str, SoloGroup] = field(default_factory=dict)
    _device_meshes: dict[tuple[str, ...], DeviceMesh] = field(default_factory=dict)

    def group(self, name: str) -> dist.ProcessGroup:
        """Return the group along `name`. A group of one rank only copies data."""
        transport = self._transports[name]
        if isinstance(transport, ProcessGroupTransport):
            return transport.group
        if name not in self._solo:
            self._solo[name] = SoloGroup(f"{self._prefix}/{name}/solo{self._rank}", self._rank)
        return self._solo[name]

    def device_mesh(self, names: tuple[str, ...]) -> DeviceMesh:
        """Return a DeviceMesh with these dims, in this order. Raises UnknownDim."""
        self.layout.digits(names)
        for name in names:
            self.layout.digits(name)
        if names not in self._device_meshes:
            # torch reads the values of its rank grid, which modes for tensors without values would prevent.
            with without_modes():
                self._device_meshes[names] = self._device_mesh(names)
        return self._device_meshes[names]

    def _device_mesh(self, names: tuple[str, ...]) -> DeviceMesh:
        layout = self.layout
        for whole in (tuple(layout.dims), *(tuple(sizes) for sizes in layout.views.values())):
            if names != whole and names == tuple(name for name in whole if name in names):
                return self.device_mesh(whole)[names if len(names) > 1 else names[0]]
        runs = {name: layout.merge.get(name, (name,)) for name in names}
        # Slices of one root mesh can be combined with shards along the root's other dims, as FSDP does.
        ascend = all(run == tuple(dim for dim in layout.dims if dim in run) for run in runs.values())
        if names != tuple(layout.dims) and ascend:
            slices = [
                self.device_mesh(run)
                if len(run) == 1
                else flattened(self.device_mesh(run), name, self.group(name))
                for name, run in runs.items()
            ]
            return side_by_side(slices)
        if len(names) == 1:
            return DeviceMesh.from_group(self.group(names[0]), self._device.type, mesh_dim_names=names)
        # The grid of ranks that share this rank's coords along all other dims. It has an axis for each name.
        grid = layout.group_of(self._rank, names).reshape([layout.size(name) for name in names])
        return DeviceMesh.from_group(
            [self.group(name) for name in names],
            self._device.type,
            mesh=torch.tensor(grid.tolist(), device="cpu"),
            mesh_dim_names=names,
        )

    def close(self) -> None:
        """Release the meshes and the groups of size 1."""
        if self._device_meshes:
            forget_device_meshes(self._device_meshes.values())
        self._device_meshes.clear()
        for group in self._solo.values():
            group.close()
        self._solo.clear()
