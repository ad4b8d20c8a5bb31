"""A mesh as torch's own objects: process groups, and DeviceMeshes over the same groups."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshcomm.errors import UnsupportedOp
from meshcomm.layout import Dims
from meshcomm.mesh.topology_queries import TopologyQueries
from meshcomm.transport import ProcessGroupTransport, Transport
from meshcomm.transport.torch_private import (
    SoloGroup,
    flattened,
    forget_device_meshes,
    side_by_side,
    without_modes,
)


class TorchMesh(TopologyQueries):
    """torch's objects over the groups of a mesh, each made when first asked for, without communication.

    All slices that keep the dims' order share one root, which is what torch's FSDP and tensor
    parallelism ask of meshes that are used on one model.
    """

    device: torch.device
    _prefix: str
    _transports: dict[str, Transport]

    def __init__(self) -> None:
        self._solo: dict[str, SoloGroup] = {}
        self._device_meshes: dict[tuple[str, ...], DeviceMesh] = {}

    def group(self, dims: Dims) -> dist.ProcessGroup:
        """The torch process group along `dims`; group rank == coord. For size 1: one that copies."""
        self._usable()
        if self.layout.digits(dims).size > 1 and isinstance(dims, tuple):
            name = self._family_of(dims)
        else:
            name = dims if isinstance(dims, str) else dims[0]
        transport = self._transports[name]
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
            self._solo[name] = SoloGroup(f"{self._prefix}/{name}/solo{self.rank}", self.rank)
        return self._solo[name]

    @property
    def device_mesh(self) -> DeviceMesh:
        """All base dims as one torch DeviceMesh over this mesh's groups."""
        return self[tuple(self.layout.dims)]

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """`mesh["tp"]`, `mesh["dp", "tp"]`: a torch DeviceMesh with these dims, in this order.

        Dims, merged dims, or dims of one view. Slices that keep the dims' order share one root, and so do merged dims
        whose own are of the base, in its order.
        """
        self._member()
        chosen = (names,) if isinstance(names, str) else names
        self.layout.digits(chosen)
        for name in chosen:
            self.layout.digits(name)
        if chosen not in self._device_meshes:
            # torch reads its grid of ranks, which a mode for tensors without values would not let it.
            with without_modes():
                self._device_meshes[chosen] = self._device_mesh(chosen)
        return self._device_meshes[chosen]

    def _device_mesh(self, names: tuple[str, ...]) -> DeviceMesh:
        layout = self.layout
        for whole in (tuple(layout.dims), *(tuple(sizes) for sizes in layout.views.values())):
            if names != whole and names == tuple(name for name in whole if name in names):
                return self[whole][names if len(names) > 1 else names[0]]
        runs = {name: layout.merge.get(name, (name,)) for name in names}
        # Slices of one root can be joined with what is split along others of them, as FSDP does it.
        if names != tuple(layout.dims) and all(self._ascend(run) for run in runs.values()):
            slices = [
                self[run] if len(run) == 1 else flattened(self[run], name, self.group(name))
                for name, run in runs.items()
            ]
            return side_by_side(slices)
        if len(names) == 1:
            return DeviceMesh.from_group(self.group(names[0]), self.device.type, mesh_dim_names=names)
        # The ranks that share this rank's other coords, with an axis for each name.
        grid = layout.group_of(self.rank, names).reshape([layout.size(name) for name in names])
        return DeviceMesh.from_group(
            [self.group(name) for name in names],
            self.device.type,
            mesh=torch.tensor(grid.tolist(), device="cpu"),
            mesh_dim_names=names,
        )

    def _ascend(self, dims: tuple[str, ...]) -> bool:
        """Whether these are dims of the base, in its order."""
        return dims == tuple(dim for dim in self.layout.dims if dim in dims)

    def _family_of(self, dims: Dims) -> str:
        """The name whose groups are those of `dims`. Raises UnknownDim where no group was declared."""
        raise NotImplementedError

    def _forget(self) -> None:
        """Let go of the meshes and of the groups of size 1."""
        if self._device_meshes:
            forget_device_meshes(self._device_meshes.values())
        self._device_meshes.clear()
        for group in self._solo.values():
            group.close()
        self._solo.clear()
