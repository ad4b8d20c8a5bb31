"""The process groups that a program creates through torch.distributed, as seen on a simulated rank."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from functools import partial
from typing import Any, final

from torch.distributed.device_mesh import DeviceMesh

from meshcomm.errors import MeshcommError
from meshcomm.layout import Layout
from meshcomm.layout.sizes import fold
from meshcomm.mesh.outside import OF_A_DIM, OWN
from meshcomm.transport.torch_changes import on_new_groups
from meshcomm.transport.torch_private import (
    GroupHooks,
    default_group,
    forget_device_meshes,
    group_named,
    ranks_of,
    without_modes,
)
from meshcomm.watching.hooks import hooked
from meshcomm.watching.recorder import FlightRecorder
from meshcomm.watching.spans import Spans


@final
class TorchGroups:
    """A context manager that records in `spans` the calls on every group outside the mesh.

    ranks: the ranks of each group with calls, by label. Each of this rank's groups has a unique label.
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
        # Otherwise DTensor would confuse these DeviceMeshes with those of the next simulated rank.
        forget_device_meshes(self._made)

    def made(self, mesh: DeviceMesh) -> None:
        """Record a DeviceMesh. The layout is taken from the first DeviceMesh that spans all ranks; if there are several,
        from the one with the most dims.
        """
        self._made.append(mesh)
        with without_modes():
            names = mesh.mesh_dim_names or ()
            if len(names) > (0 if self._mesh is None else len(self._mesh[0])) and mesh.size() == self._world:
                self._mesh = names, list(mesh.shape), mesh.mesh.flatten().tolist()

    @property
    def layout(self) -> Layout:
        """The layout of the program's DeviceMesh, or a single dim of all ranks if there is no DeviceMesh."""
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
        """Return a group's recorder. It is created at the group's first call, when the ranks of the group are known."""
        if name not in self._recorders:
            group = group_named(name)
            ranks = ranks_of(group)
            label = base = f"{_lane(group, ranks)} of ranks {fold(ranks)}"
            while label in self.ranks:
                label = f"{base}, {len(self.ranks)}"
            self.ranks[label] = list(ranks)
            recorder = FlightRecorder(label, list(ranks))
            recorder.trace(self._spans)
            self._recorders[name] = recorder
        return self._recorders[name] if len(self._recorders[name].ranks) > 1 else None


def _lane(group: Any, ranks: Collection[int]) -> str:
    """Return the DeviceMesh dim that the group belongs to, or the group's description.

    Groups that have neither share one lane per group size.
    """
    described = str(group.group_desc)
    if described.startswith(OF_A_DIM):
        return described.removeprefix(OF_A_DIM)
    if described in ("default_pg", "mesh_default"):
        return "default group"
    return described if described not in ("", "undefined") else f"groups of {len(ranks)}"
