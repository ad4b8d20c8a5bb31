"""What `meshcomm.init` finds in a simulated rank: launcher, store, device and groups without a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
import torch.distributed as dist

from meshcomm.comm.desync import error_of, find_desync, last_common
from meshcomm.comm.flight_recorder import FlightRecorder
from meshcomm.comm.handle import failure
from meshcomm.errors import CallMismatchError
from meshcomm.layout import Group
from meshcomm.mesh.devices import backend_on
from meshcomm.mesh.launch_environment import Launch
from meshcomm.simulator.group import SimulatedGroup
from meshcomm.simulator.scheduler import Actor, Scheduler
from meshcomm.simulator.start_order import StartOrder
from meshcomm.simulator.store import InMemoryStore, SimulatedStore
from meshcomm.simulator.traffic import Traffic
from meshcomm.simulator.transport import SimulatorTransport
from meshcomm.transport import Transport

_CPU = torch.device("cpu")


@final
class SharedState:
    """What the ranks of one simulation share.

    groups: by prefix of the mesh, name and ranks; in the order of their first use.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.store = InMemoryStore()
        self.traffic = Traffic()
        self.start_order = StartOrder()
        self.steps = SimulatedSteps(scheduler)
        self.groups: dict[tuple[str, str, tuple[int, ...]], SimulatedGroup] = {}


@final
class SimulatedSteps:
    """The calls of each step of all ranks: compared when the last rank of a group ends the step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._coords: dict[tuple[str, int], Mapping[str, int]] = {}
        # By mesh and group, then by rank.
        self._groups: dict[tuple[str, str], dict[int, FlightRecorder]] = {}

    def add(self, prefix: str, rank: int, coords: Mapping[str, int], recorder: FlightRecorder) -> None:
        """One more group of `rank`, on the mesh with this prefix."""
        self._coords[prefix, rank] = coords
        self._groups.setdefault((prefix, recorder.label), {})[rank] = recorder

    def noted(self, prefix: str, recorders: Sequence[FlightRecorder]) -> None:
        """A rank has ended a step: ends the simulation where it is the last of a group, and ranks differ."""
        for recorder in recorders:
            group = self._groups[prefix, recorder.label].values()
            mine = recorder.steps
            if len(group) < len(recorder.ranks) or any(other.steps.step < mine.step for other in group):
                continue
            sums = [other.steps.sums for other in group]
            common = [last_common(mine.sums, each) for each in sums]
            if all(mine.sums.get(at) == each.get(at) for at, each in zip(common, sums, strict=True)):
                continue
            error = self._error_of(prefix, recorder.label)
            if error is not None:
                self._scheduler.stop(error)
                self._scheduler.check()

    def error(self) -> CallMismatchError | None:
        """Where ranks differ already, though not all have come as far: for ranks that can go no further."""
        return next(filter(None, (self._error_of(*key) for key in self._groups)), None)

    def _error_of(self, prefix: str, label: str) -> CallMismatchError | None:
        group = self._groups[prefix, label]
        ranks = next(iter(group.values())).ranks
        histories = {rank: group[rank].steps.told() for rank in ranks if rank in group}
        found = find_desync(label, histories, {rank: self._coords[prefix, rank] for rank in group})
        return None if found is None else error_of(found)


@final
class SimulatedWorld:
    """One rank's World; see meshcomm.mesh.runtime."""

    def __init__(self, shared: SharedState, actor: Actor, size: int) -> None:
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
        return SimulatorTransport(
            shared.scheduler, self._actor, shared.groups[key], shared.traffic, backend, order
        )

    def watch(self, coords: Mapping[str, int], prefix: str) -> SimulatedWatch:
        if not self._actor.coords:
            self._actor.coords = dict(coords)
        return SimulatedWatch(self._shared.steps, self._actor.rank, coords, prefix)


@final
class SimulatedWatch:
    """Recorders for the groups of a simulated rank. The scheduler knows what it does: no thread answers."""

    timed = False

    def __init__(self, steps: SimulatedSteps, rank: int, coords: Mapping[str, int], prefix: str) -> None:
        self._steps = steps
        self._rank = rank
        self._coords = coords
        self._prefix = prefix
        self._recorders: list[FlightRecorder] = []

    def record(self, label: str, ranks: list[int], transport: Transport) -> FlightRecorder:
        recorder = FlightRecorder(label, ranks, lambda _, where, error: failure(where, error))
        self._recorders.append(recorder)
        self._steps.add(self._prefix, self._rank, self._coords, recorder)
        return recorder

    def noted(self, step: int) -> None:
        self._steps.noted(self._prefix, self._recorders)

    def explain(self, error: BaseException) -> None:
        return None

    def before_leaving(self) -> None:
        return None

    def statuses(self, ranks: list[int]) -> dict[int, dict[str, Any]]:
        return {}

    def close(self) -> None:
        return None
