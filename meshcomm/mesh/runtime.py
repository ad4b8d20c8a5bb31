"""The parts of a mesh, its records of calls, and the worlds without real processes in which it can be opened."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any, Protocol, final

import torch
import torch.distributed as dist

from meshcomm.comm.flight_recorder import FlightRecorder
from meshcomm.comm.spans import Spans
from meshcomm.errors import CallMismatchError, MeshcommError
from meshcomm.layout import Group, Plan
from meshcomm.mesh.environment import Launch
from meshcomm.mesh.generation import Generation, Generations
from meshcomm.transport import Transport

if TYPE_CHECKING:
    from meshcomm.config import TopologyConfig
    from meshcomm.mesh.mesh import Mesh
    from meshcomm.mesh.source import Settings


@dataclass(slots=True)
class Runtime:
    """One rank's part of a mesh, after all ranks have agreed on it and its groups exist.

    store: the job's store, under `prefix`, which no other mesh has. validate_calls: how many calls of each kind are compared;
    None if all, or if the world compares them. create: creates one group; the second argument says whether NCCL may split
    it from the world. resources: releases everything, last first. data_dims: the dims along which samples differ, if the
    configuration has [parallel]. is_fake: no other rank exists. generations: None if lost ranks are not replaced.
    reopen: opens the mesh again, in the latest generation; None if it did not create the default group. aborts: drop the
    queued calls of its groups, including torch's default group.
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
    reopen: Callable[[], tuple[Plan, Runtime]] | None
    generation: Generation
    generations: Generations | None = None
    data_dims: tuple[str, ...] | None = None
    is_fake: bool = False
    aborts: Sequence[Callable[[], object]] = ()


class Watching(ABC):
    """Gives a mesh the recorders of its groups, and answers for this rank while the mesh is open.

    timed: whether the ranks run at the same time, so that the times of their calls are meaningful.
    """

    timed: bool

    @abstractmethod
    def record(self, label: str, ranks: list[int], transport: Transport) -> FlightRecorder:
        """Return a recorder for another group, which uses `transport`."""

    def forget(self, recorder: FlightRecorder) -> None:
        """Record that a group has been released."""
        return

    @abstractmethod
    def noted(self, step: int) -> None:
        """Record that all recorders have noted `step`. Raises CallMismatchError if ranks were found to differ in a step."""

    def before_leaving(self) -> CallMismatchError | None:
        """Return the error if ranks differ in a step and this rank has not raised it; may wait for seconds."""
        return None

    def explain(self, error: BaseException) -> MeshcommError | None:
        """Return the error that explains `error`, by which the program leaves the mesh; may wait for seconds.

        None if `error` is not a backend's, or if no call outside the mesh on one of its groups has failed or is under way.
        """
        return None

    def drain(self) -> None:
        """Return when all queued calls of all groups have completed. A call that cannot end is still detected meanwhile."""
        return

    def statuses(self, ranks: list[int]) -> dict[int, dict[str, Any]]:
        """Return the status of each of `ranks` that answers; may wait for seconds. Empty if no rank can be asked."""
        return {}

    def close(self, *, abandons: bool = False) -> None:
        """Stop answering. Later questions get this rank's last status. Calling it again has no effect.

        abandons: the mesh is opened again, and no rank will ask.
        """
        return


class World(Protocol):
    """Replaces launcher, device, store and process groups: `meshcomm.init` builds on it unchanged.

    launch: a launcher's facts about this rank. store: shared by all ranks of the world. generations: None if no rank is
    ever lost.
    """

    launch: Launch
    store: dist.Store
    generations: Generations | None

    def place(self, wanted: str) -> tuple[torch.device, str]:
        """Return the device of the mesh, and the backend for "auto", if `wanted` is the configured device."""
        ...

    def open(self, group: Group, prefix: str) -> Transport:
        """Return one group of a plan. Called by its ranks; groups of one name and prefix are the same group."""
        ...

    def watch(self, coords: Mapping[str, int], prefix: str) -> Watching:
        """Return the watch of one mesh on this rank; `coords` are this rank's, `prefix` is the mesh's."""
        ...


# A context variable, as ranks may be threads of one process, each in its own context.
WORLD: ContextVar[World | None] = ContextVar("meshcomm_world", default=None)


class Pretended(Protocol):
    """A world in which only this rank exists, and whose program does not know that."""

    def settings(self, asked: Settings) -> Settings:
        """Return the settings to open a mesh with instead."""
        ...

    def opened(self, mesh: Mesh) -> None:
        """Record that the program has opened a mesh."""
        ...


PRETENDED: ContextVar[Pretended | None] = ContextVar("meshcomm_pretended", default=None)


@final
class Metrics:
    """`mesh.metrics`: the state that `mesh.stats()`, `mesh.step()` and `mesh.trace()` read and write.

    recorders: those of the groups, by the id of the transport. steps: the number of completed steps. number: the
    program's number of the last step. spans: those of the trace under way, if any.
    """

    def __init__(self) -> None:
        self.recorders: dict[int, FlightRecorder] = {}
        self.opened = time.perf_counter()
        self.steps = self.number = 0
        self.spans: Spans | None = None

    def step(self, number: int, excluded: Collection[int], ended_at: tuple[CodeType, int]) -> None:
        """Record that the step `number` is over. excluded: ids of recorders that are not compared. See `Mesh.step`."""
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
        """The global ranks of this rank's groups, by label as errors show it."""
        return {recorder.label: recorder.ranks for recorder in self.recorders.values()}
