"""The mesh as torch's own DeviceMesh, over the same groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshcomm.errors import UnsupportedOp
from meshcomm.layout import Dims, Layout
from meshcomm.transport import ProcessGroupTransport, Transport
from meshcomm.transport.torch_private import SoloGroup, forget_device_meshes


@final
class TorchMeshes:
    """DeviceMeshes of one mesh, each made when first asked for; making one communicates nothing.

    All slices that keep the dims' order share one root, which is what torch's FSDP and tensor
    parallelism ask of meshes that are used on one model.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        device: torch.device,
        prefix: str,
        transport: Callable[[str], Transport],
    ) -> None:
        self._layout = layout
        self._rank = rank
        self._device = device
        self._prefix = prefix
        self._transport = transport
        self._solo: dict[str, SoloGroup] = {}
        self._made: dict[tuple[str, ...], DeviceMesh] = {}

    def group(self, name: str) -> dist.ProcessGroup:
        """The process group of one name; for size 1 a group that copies."""
        transport = self._transport(name)
        if isinstance(transport, ProcessGroupTransport):
            return transport.group
        if transport.size > 1 or not dist.is_initialized():
            raise UnsupportedOp(
                f'no torch process group along "{name}": torch.distributed has no part in this mesh',
                given=f"a group that {type(transport).__name__} carries",
                expected="the mesh's own collectives and messages in the simulator",
                hint=f'mesh.all_reduce("{name}", x); what needs torch\'s groups: meshcomm run',
            )
        if name not in self._solo:
            self._solo[name] = SoloGroup(f"{self._prefix}/{name}/solo{self._rank}", self._rank)
        return self._solo[name]

    def over(self, names: tuple[str, ...]) -> DeviceMesh:
        """The DeviceMesh whose dims are `names`, in this order."""
        if names not in self._made:
            self._made[names] = self._make(names)
        return self._made[names]

    def relayout(self, layout: Layout) -> None:
        """Know the names of a layout that only adds names."""
        self._layout = layout

    def close(self) -> None:
        """Forget the meshes and the groups of size 1."""
        if self._made:
            forget_device_meshes()
        self._made.clear()
        for group in self._solo.values():
            group.close()
        self._solo.clear()

    def _make(self, names: tuple[str, ...]) -> DeviceMesh:
        layout = self._layout
        base = tuple(layout.dims)
        for whole in (base, *(tuple(sizes) for sizes in layout.views.values())):
            ordered = tuple(name for name in whole if name in names)
            if ordered == names and names != whole:
                root = self.over(whole)
                return root[names if len(names) > 1 else names[0]]
        grid = _subgrid(layout, self._rank, names)
        return DeviceMesh.from_group(
            [self.group(name) for name in names] if len(names) > 1 else self.group(names[0]),
            self._device.type,
            mesh=torch.tensor(grid, device="cpu") if len(names) > 1 else None,
            mesh_dim_names=names,
        )


def _subgrid(layout: Layout, rank: int, names: tuple[str, ...]) -> list[object]:
    """The ranks that share this rank's other coords, as nested lists with one level per name."""
    merged: Dims = names if len(names) > 1 else names[0]
    ranks = layout.group_of(rank, merged).reshape([layout.size(name) for name in names])
    grid: list[object] = ranks.tolist()
    return grid
