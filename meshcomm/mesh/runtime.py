"""The parts and call records of a mesh, and worlds without real processes in which a mesh can be opened."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from contextvars import ContextVar
from types import CodeType
from typing import TYPE_CHECKING, Any, Protocol, final

import torch
import torch.distributed as dist

from meshcomm.errors import MeshcommError
from meshcomm.layout import Group
from meshcomm.rendezvous.generation import Generations
from meshcomm.rendezvous.launcher import Launch
from meshcomm.transport import Transport
from meshcomm.watching.compare import Shared
from meshcomm.watching.recorder import FlightRecorder
from meshcomm.watching.spans import Spans

if TYPE_CHECKING:
    from meshcomm.mesh.mesh import Mesh
    from meshcomm.mesh.source import Settings


class Watching(ABC):
    """Provides the recorders of a mesh's groups, and answers for this rank while the mesh is open.

    timed: whether the ranks run at the same time, so that the times of their calls are meaningful.
    shared: what calls are compared through if they do not wait for other ranks; None if the ranks are no processes.
    outside: returns the recorder of a group outside the mesh by name, also before the group's first call; None if it has none.
    """

    timed: bool
    shared: Shared | None = None
    outside: Callable[[str], FlightRecorder | None] = staticmethod(lambda name: None)

    @abstractmethod
    def record(self, label: str, ranks: list[int], transport: Transport) -> FlightRecorder:
        """Return a recorder for an additional group that uses `transport`."""

    def forget(self, recorder: FlightRecorder) -> None:
        """Record that a group has been released."""
        return

    @abstractmethod
    def noted(self, step: int) -> None:
        """Record that all recorders have noted `step`. Raises CallMismatchError if a difference between ranks was found."""

    def before_leaving(self) -> MeshcommError | None:
        """Return the error if ranks differ in a step and this rank has not raised the error. May wait for seconds."""
        return None

    def explain(self, error: BaseException) -> MeshcommError | None:
        """Return the error that explains `error`, the exception with which the program leaves the mesh. May wait for seconds.

        None if `error` is not a backend's error, or if no call outside the mesh in one of its groups failed or is running.
        """
        return None

    def drain(self) -> None:
        """Wait until all queued calls of all groups have completed. Calls that hang are still detected during the wait."""
        return

    def statuses(self, ranks: list[int]) -> dict[int, dict[str, Any]]:
        """Return the status of each rank in `ranks` that answers. May wait for seconds. Empty if no rank can be asked."""
        return {}

    def gone(self, ranks: list[int]) -> list[int]:
        """Return those of some ranks that are lost, or have closed the mesh. May wait for seconds."""
        return []

    def close(self, *, abandons: bool = False) -> None:
        """Stop answering. Later questions receive this rank's last status. Further calls have no effect.

        abandons: whether the mesh will be reopened, so that no rank will ask.
        """
        return


class World(Protocol):
    """Replaces the launcher, device, store and process groups, without any change to `meshcomm.init`.

    launch: information about this rank, as a launcher provides it.
    store: shared by all ranks of the world.
    generations: None if no rank is ever lost.
    """

    launch: Launch
    store: dist.Store
    generations: Generations | None

    def place(self, wanted: str) -> tuple[torch.device, str]:
        """Return the device of the mesh and the backend for "auto". `wanted` is the configured device."""
        ...

    def start(self, rank: int, world_size: int, backend: str, resources: ExitStack) -> None:
        """Start torch's default group, unless the program has started it. `resources` end it."""
        ...

    def over(self, group: Any) -> Transport:
        """Return the transport of a process group that exists."""
        ...

    def open(self, group: Group, prefix: str) -> Transport:
        """Return one group of a plan. Called by the group's ranks. Groups with the same name and prefix are the same group."""
        ...

    def watch(self, coords: Mapping[str, int], prefix: str) -> Watching:
        """Return this rank's watch for one mesh; `coords` are this rank's coords, and `prefix` is the mesh's prefix."""
        ...


# A context variable, because ranks may be threads of one process, each with its own context.
WORLD: ContextVar[World | None] = ContextVar("meshcomm_world", default=None)


class Pretended(Protocol):
    """A world in which only this rank exists, unknown to the program."""

    def settings(self, asked: Settings) -> Settings:
        """Return the settings to use in place of `asked` when a mesh is opened."""
        ...

    def opened(self, mesh: Mesh) -> None:
        """Record that the program has opened a mesh."""
        ...


PRETENDED: ContextVar[Pretended | None] = ContextVar("meshcomm_pretended", default=None)


@final
class Metrics:
    """`mesh.debug.metrics`: what `mesh.stats()`, `mesh.step()` and `mesh.debug.trace()` read and write.

    recorders: the groups' recorders, by the transport's id.
    steps: the number of completed steps.
    number: the program's number for the last step.
    spans: the spans of the active trace, if any.
    """

    def __init__(self) -> None:
        self.recorders: dict[int, FlightRecorder] = {}
        self.opened = time.perf_counter()
        self.steps = self.number = 0
        self.spans: Spans | None = None

    def step(self, number: int, excluded: Collection[int], ended_at: tuple[CodeType, int]) -> None:
        """Record that the step `number` is over. `excluded` contains the ids of uncompared recorders. See `Mesh.step`."""
        self.steps, self.number = self.steps + 1, number
        for recorder in self.recorders.values():
            recorder.note(self.steps, number, id(recorder) in excluded, ended_at)
        if self.spans is not None:
            self.spans.step(number)

    def trace_into(self, spans: Spans | None) -> None:
        """Add every call to `spans` until the next `trace_into`. None ends the trace."""
        self.spans = spans
        for recorder in self.recorders.values():
            recorder.trace(spans)

    @property
    def groups(self) -> dict[str, list[int]]:
        """The global ranks in each of this rank's groups, by the label that errors show."""
        return {recorder.label: recorder.ranks for recorder in self.recorders.values()}
