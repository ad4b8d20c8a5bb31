"""What `meshcomm.init` finds in a simulated rank: launcher, store, device and groups without a network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
import torch.distributed as dist

from meshcomm.comm.handle import failure
from meshcomm.comm.recorder import Recorder
from meshcomm.layout import Group
from meshcomm.mesh.devices import backend_on
from meshcomm.mesh.launch_environment import Launch
from meshcomm.simulator.desync import SimulatedSteps
from meshcomm.simulator.mailbox import Mailbox
from meshcomm.simulator.rendezvous import Rendezvous
from meshcomm.simulator.scheduler import Actor, Scheduler
from meshcomm.simulator.starts import Starts
from meshcomm.simulator.store import Shelf, SimulatedStore
from meshcomm.simulator.traffic import Ledger
from meshcomm.simulator.transport import SimulatorTransport
from meshcomm.transport import Transport

_CPU = torch.device("cpu")


@final
class Ground:
    """What the ranks of one simulation share."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.shelf = Shelf()
        self.ledger = Ledger()
        self.starts = Starts()
        self.steps = SimulatedSteps(scheduler)
        # By prefix of the mesh, name and ranks; in the order of their first use.
        self.groups: dict[tuple[str, str, tuple[int, ...]], tuple[Group, Rendezvous, Mailbox]] = {}

    def group(self, prefix: str, group: Group) -> tuple[Rendezvous, Mailbox]:
        """The one group that all its ranks mean."""
        key = (prefix, group.name, group.ranks)
        if key not in self.groups:
            meets = Rendezvous(self.scheduler, group.name, group.label, group.ranks)
            self.groups[key] = (group, meets, Mailbox(self.scheduler, group.label, group.ranks))
        return self.groups[key][1:]


@final
class SimulatedWorld:
    """One rank's World; see meshcomm.mesh.runtime."""

    def __init__(self, ground: Ground, actor: Actor, size: int) -> None:
        self.launch = Launch("simulator", actor.rank, size, actor.rank, size)
        self.store: dist.Store = SimulatedStore(ground.scheduler, actor, ground.shelf)
        self._ground = ground
        self._actor = actor

    def place(self, wanted: str) -> tuple[torch.device, str]:
        """Tensors are the host's, whatever the job's device; what its backend refuses stays refused."""
        device = "cpu" if wanted == "auto" else wanted
        return _CPU, str(dist.get_default_backend_for_device(device))

    def open(self, group: Group, prefix: str) -> SimulatorTransport:
        meets, box = self._ground.group(prefix, group)
        backend = backend_on(group.options.backend, _CPU)
        starts = self._ground.starts if "nccl" in backend else None
        return SimulatorTransport(
            self._ground.scheduler, self._actor, meets, box, self._ground.ledger, backend, starts
        )

    def watch(self, coords: Mapping[str, int], prefix: str) -> SimulatedWatch:
        if not self._actor.coords:
            self._actor.coords = dict(coords)
        return SimulatedWatch(self._ground.steps, self._actor.rank, coords, prefix)


@final
class SimulatedWatch:
    """Recorders for the groups of a simulated rank. The scheduler knows what it does: no thread answers."""

    timed = False

    def __init__(self, steps: SimulatedSteps, rank: int, coords: Mapping[str, int], prefix: str) -> None:
        self._steps = steps
        self._rank = rank
        self._coords = coords
        self._prefix = prefix
        self._recorders: list[Recorder] = []

    def record(self, label: str, ranks: list[int], transport: Transport) -> Recorder:
        recorder = Recorder(label, ranks, _failed)
        self._recorders.append(recorder)
        self._steps.add(self._prefix, self._rank, self._coords, recorder)
        return recorder

    def noted(self, step: int) -> None:
        self._steps.noted(self._prefix, self._recorders)

    def before_leaving(self) -> None:
        return None

    def statuses(self, ranks: list[int]) -> dict[int, dict[str, Any]]:
        return {}

    def close(self) -> None:
        return None


def _failed(recorder: Recorder, where: str, error: BaseException) -> Any:
    return failure(where, error)
