"""The process groups that a program creates with torch.distributed, on a simulated rank."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from functools import partial
from typing import Any, final

from torch.distributed.device_mesh import DeviceMesh

from meshcomm.comm.flight_recorder import FlightRecorder, hooked
from meshcomm.comm.handle import failure
from meshcomm.comm.spans import Spans
from meshcomm.errors import MeshcommError
from meshcomm.layout import Layout
from meshcomm.layout.sizes import fold
from meshcomm.mesh.outside import OF_A_DIM, OWN
from meshcomm.transport.torch_private import (
    GroupHooks,
    default_group,
    forget_device_meshes,
    group_named,
    on_new_groups,
    ranks_of,
    without_modes,
)


@final
class TorchGroups:
    """While it is entered, records the calls on every group outside the mesh in `spans`.

    ranks: the ranks of each group with calls, by label. Labels of this rank's groups are unique.
    """

    def __init__(self, spans: Spans, rank: int, world: int) -> None:
        self.ranks: dict[str, list[int]] = {}
        self._spans, self._rank, self._world = spans, rank, world
        self._hooks: list[GroupHooks] = []
        self._recorders: dict[str, FlightRecorder] = {}
        self._made: list[DeviceMesh] = []
        self._mesh: tuple[tuple[str, ...], list[int], list[int]] | None = None

    def __enter__(self) -> TorchGroups:
        self._ended = on_new_groups(self._see)
        self._see(default_group())
        return self

    def __exit__(self, *error: object) -> None:
        self._ended()
        for hooks in self._hooks:
            hooks.remove()
        # Otherwise DTensor would confuse them with the DeviceMeshes of the next simulated rank.
        forget_device_meshes(self._made)

    def made(self, mesh: DeviceMesh) -> None:
        """Record a DeviceMesh. The layout comes from the DeviceMesh that spans all ranks and has the most dims, the first of several."""
        self._made.append(mesh)
        with without_modes():
            names = mesh.mesh_dim_names or ()
            if len(names) > (0 if self._mesh is None else len(self._mesh[0])) and mesh.size() == self._world:
                self._mesh = names, list(mesh.shape), mesh.mesh.flatten().tolist()

    @property
    def layout(self) -> Layout:
        """The dims of the program's DeviceMesh, or one dim of all ranks."""
        if self._mesh is not None:
            names, sizes, order = self._mesh
            with suppress(MeshcommError):
                return Layout(dict(zip(names, sizes, strict=True)), order)
        return Layout({"world": self._world})

    def _see(self, group: Any) -> None:
        name = str(group.group_name)
        if not name.startswith(OWN):
            recorder, who = partial(self._recorder, name), f"rank {self._rank}"
            self._hooks.append(hooked(group, recorder, _lane(group, range(group.size())), who))

    def _recorder(self, name: str) -> FlightRecorder | None:
        """Return the recorder of a group. It is created at the first call, when the ranks of the group are known."""
        if name not in self._recorders:
            group = group_named(name)
            ranks = ranks_of(group)
            label = base = f"{_lane(group, ranks)} of ranks {fold(ranks)}"
            while label in self.ranks:
                label = f"{base}, {len(self.ranks)}"
            self.ranks[label] = list(ranks)
            made = FlightRecorder(label, list(ranks), lambda _, where, error: failure(where, error))
            made.trace(self._spans)
            self._recorders[name] = made
        return self._recorders[name] if len(self._recorders[name].ranks) > 1 else None


def _lane(group: Any, ranks: Collection[int]) -> str:
    """Return the dim of a DeviceMesh, or the group's description.

    Groups without either share one lane for each group size.
    """
    described = str(group.group_desc)
    if described.startswith(OF_A_DIM):
        return described.removeprefix(OF_A_DIM)
    if described in ("default_pg", "mesh_default"):
        return "default group"
    return described if described not in ("", "undefined") else f"groups of {len(ranks)}"
