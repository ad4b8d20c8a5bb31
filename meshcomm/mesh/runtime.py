"""What a mesh stands on: real processes, or a world that somebody else provides for this context."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from meshcomm.comm.flight_recorder import FlightRecorder
from meshcomm.errors import CallMismatchError, MeshcommError
from meshcomm.layout import Group
from meshcomm.mesh.environment import Launch
from meshcomm.transport import Transport

if TYPE_CHECKING:
    from meshcomm.config import TopologyConfig
    from meshcomm.mesh.mesh import Mesh
    from meshcomm.mesh.source import Settings


@dataclass(slots=True)
class Runtime:
    """What one rank has of a mesh when all ranks have agreed on it and its groups exist.

    store: of the job, under `prefix`, which is this mesh's own. topology: how ranks lie on machines, as the
    configuration or the launcher says it. validate_calls: how many calls of each kind are compared; None: all, or
    the world does it itself. create: makes one group; its second argument says whether NCCL may split the world
    for it. resources: gives back all that was made, last first. data_dims: the dims along which
    samples differ, as the configuration's [parallel] says it; None where it says nothing. pretended: no other rank exists.
    """

    launch: Launch
    rank: int
    device: torch.device
    store: dist.Store
    prefix: str
    topology: Callable[[], TopologyConfig]
    transports: dict[str, Transport]
    watch: Watching | None
    validate_calls: int | None
    create: Callable[[Group, bool], Transport]
    resources: ExitStack
    data_dims: tuple[str, ...] | None = None
    pretended: bool = False


class Watching(ABC):
    """Gives a mesh the recorders of its groups, and answers for this rank while the mesh lives.

    timed: whether the ranks run at the same time, so that it means something when they do what.
    """

    timed: bool

    @abstractmethod
    def record(self, label: str, ranks: list[int], transport: Transport) -> FlightRecorder:
        """A recorder for one more group, which `transport` carries."""

    def forget(self, recorder: FlightRecorder) -> None:
        """A group is gone."""
        return

    @abstractmethod
    def noted(self, step: int) -> None:
        """All recorders have noted `step`. Raises CallMismatchError where ranks were found to differ in one."""

    def before_leaving(self) -> CallMismatchError | None:
        """The error where ranks differ in a step and this rank has not raised it; may wait for seconds."""
        return None

    def explain(self, error: BaseException) -> MeshcommError | None:
        """The error to raise from `error`, by which the program leaves the mesh: of a call made past the mesh.

        None where it is no backend's, or no such call on a group of the mesh has failed or is under way. May wait for
        seconds.
        """
        return None

    def drain(self) -> None:
        """Return when all that was queued on any group is over; a call that cannot end is found as ever meanwhile."""
        return

    def statuses(self, ranks: list[int]) -> dict[int, dict[str, Any]]:
        """What each of `ranks` that answers is doing; may wait for seconds. Nothing where nobody can be asked."""
        return {}

    def close(self) -> None:
        """Stop answering; who asks later finds what this rank had done. Harmless when repeated."""
        return


class World(Protocol):
    """Stands in for launcher, device, store and process groups: `meshcomm.init` builds on it unchanged.

    launch: what a launcher would say of this rank. store: seen by all ranks of the world.
    """

    launch: Launch
    store: dist.Store

    def place(self, wanted: str) -> tuple[torch.device, str]:
        """The device that the mesh is told of, and what backend "auto" means, where `wanted` was asked."""
        ...

    def open(self, group: Group, prefix: str) -> Transport:
        """One group of a plan. Called by its ranks; groups of one name and prefix are the same group."""
        ...

    def watch(self, coords: Mapping[str, int], prefix: str) -> Watching:
        """The watch of one mesh on this rank; `coords` are its own in that mesh, `prefix` the mesh's."""
        ...


# A context variable, as ranks that are threads of one process each live in a context of their own.
WORLD: ContextVar[World | None] = ContextVar("meshcomm_world", default=None)


class Pretended(Protocol):
    """A world of which only this rank exists, in which a program runs that knows nothing of it."""

    def settings(self, asked: Settings) -> Settings:
        """What a mesh is made from instead."""
        ...

    def opened(self, mesh: Mesh) -> None:
        """The program has made a mesh."""
        ...


PRETENDED: ContextVar[Pretended | None] = ContextVar("meshcomm_pretended", default=None)
