"""What a mesh stands on: real processes, or a world that somebody else provides for this context."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Protocol

import torch
import torch.distributed as dist

from meshcomm.comm.flight_recorder import FlightRecorder
from meshcomm.errors import CallMismatchError, MeshcommError
from meshcomm.layout import Group
from meshcomm.mesh.launch_environment import Launch
from meshcomm.transport import Transport


class Watching(Protocol):
    """Gives a mesh the recorders of its groups, and answers for this rank while the mesh lives.

    timed: whether the ranks run at the same time, so that it means something when they do what.
    """

    timed: bool

    def record(self, label: str, ranks: list[int], transport: Transport) -> FlightRecorder:
        """A recorder for one more group, which `transport` carries."""
        ...

    def noted(self, step: int) -> None:
        """All recorders have noted `step`. Raises CallMismatchError where ranks were found to differ in one."""
        ...

    def before_leaving(self) -> CallMismatchError | None:
        """The error where ranks differ in a step and this rank has not raised it; may wait for seconds."""
        ...

    def explain(self, error: BaseException) -> MeshcommError | None:
        """The error to raise from `error`, where that is a backend's about a call past the mesh; may wait for seconds."""
        ...

    def statuses(self, ranks: list[int]) -> dict[int, dict[str, Any]]:
        """What each of `ranks` that answers is doing; may wait for seconds. Nothing where nobody can be asked."""
        ...

    def close(self) -> None:
        """Stop answering. Harmless when repeated."""
        ...


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


def prefixed(prefix: str, store: dist.Store) -> dist.Store:
    """`store` under a prefix of its own; a store that can do that itself does."""
    own = getattr(store, "prefixed", None)
    found: dist.Store = dist.PrefixStore(prefix, store) if own is None else own(prefix)
    return found
