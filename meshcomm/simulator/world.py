"""What `meshcomm.init` finds in a simulated rank: launcher, store, device and groups without a network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

import torch
import torch.distributed as dist

from meshcomm.comm.desync import error_of, find_desync
from meshcomm.comm.flight_recorder import FlightRecorder
from meshcomm.comm.handle import failure
from meshcomm.errors import CallMismatchError
from meshcomm.layout import Group
from meshcomm.mesh.environment import Launch
from meshcomm.mesh.runtime import Watching
from meshcomm.simulator.scheduler import Actor, Scheduler
from meshcomm.simulator.start_order import StartOrder
from meshcomm.simulator.store import InMemoryStore, SimulatedStore
from meshcomm.simulator.transport import SimulatedGroup, SimulatorTransport
from meshcomm.transport import Transport
from meshcomm.transport.support import backend_on

_CPU = torch.device("cpu")


@final
@dataclass(slots=True, eq=False)
class SharedState:
    """What the ranks of one simulation share.

    timeout_s: of the mesh.
    groups:    by prefix of the mesh, name and ranks; in the order of their first use.
    recorders: coords and recorder of each rank, by prefix and group.
    """

    scheduler: Scheduler
    timeout_s: float
    store: InMemoryStore = field(default_factory=InMemoryStore)
    start_order: StartOrder = field(default_factory=StartOrder)
    groups: dict[tuple[str, str, tuple[int, ...]], SimulatedGroup] = field(default_factory=dict)
    recorders: dict[tuple[str, str], dict[int, tuple[Mapping[str, int], FlightRecorder]]] = field(
        default_factory=dict
    )

    def desync(self, prefix: str, label: str) -> CallMismatchError | None:
        """The error for the first step in which ranks of a group differ, as far as they have come."""
        of_group = self.recorders[prefix, label]
        ranks = [rank for rank in next(iter(of_group.values()))[1].ranks if rank in of_group]
        histories = {rank: of_group[rank][1].steps.told() for rank in ranks}
        found = find_desync(label, histories, {rank: coords for rank, (coords, _) in of_group.items()})
        return None if found is None else error_of(found)


@final
class SimulatedWorld:
    """One rank's World; see meshcomm.mesh.runtime."""

    def __init__(self, shared: SharedState, actor: Actor) -> None:
        size = len(shared.scheduler.actors)
        self.launch = Launch("simulator", actor.rank, size, actor.rank, size)
        self.store: dist.Store = SimulatedStore(shared.scheduler, actor, shared.store)
        self._shared = shared
        self._actor = actor

    def place(self, wanted: str) -> tuple[torch.device, str]:
        """Tensors are the host's, whatever the job's device; what its backend refuses stays refused."""
        device = "cpu" if wanted == "auto" else wanted
        return _CPU, str(dist.get_default_backend_for_device(device))

    def open(self, group: Group, prefix: str) -> SimulatorTransport:
        shared, key = self._shared, (prefix, group.name, group.ranks)
        if key not in shared.groups:
            shared.groups[key] = SimulatedGroup(shared.scheduler, group)
        backend = backend_on(group.options.backend, _CPU)
        order = shared.start_order if "nccl" in backend else None
        return SimulatorTransport(self._actor, shared.groups[key], backend, order)

    def watch(self, coords: Mapping[str, int], prefix: str) -> SimulatedWatch:
        if not self._actor.coords:
            self._actor.coords = dict(coords)
        return SimulatedWatch(self._shared, self._actor.rank, coords, prefix)


@final
class SimulatedWatch(Watching):
    """Recorders for the groups of a simulated rank. The scheduler knows what it does: no thread answers."""

    timed = False

    def __init__(self, shared: SharedState, rank: int, coords: Mapping[str, int], prefix: str) -> None:
        self._shared = shared
        self._rank = rank
        self._coords = coords
        self._prefix = prefix
        self._labels: list[str] = []

    def record(self, label: str, ranks: list[int], transport: Transport) -> FlightRecorder:
        recorder = FlightRecorder(label, ranks, lambda _, where, error: failure(where, error))
        self._labels.append(label)
        self._shared.recorders.setdefault((self._prefix, label), {})[self._rank] = self._coords, recorder
        return recorder

    def noted(self, step: int) -> None:
        """The last rank of a group to end a step compares those of all."""
        for label in self._labels:
            group = [recorder for _, recorder in self._shared.recorders[self._prefix, label].values()]
            if len(group) == len(group[0].ranks) and all(each.steps.step >= step for each in group):
                error = self._shared.desync(self._prefix, label)
                if error is not None:
                    self._shared.scheduler.fail(error)
