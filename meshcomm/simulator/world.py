"""The environment that `meshcomm.init` finds on a simulated rank: launcher, store, device, and groups without a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any, final

import torch
import torch.distributed as dist

from meshcomm.errors import CallMismatchError, CommunicationError, MeshcommError
from meshcomm.layout import Group
from meshcomm.mesh.runtime import Watching
from meshcomm.rendezvous.generation import Generations
from meshcomm.rendezvous.launcher import Launch
from meshcomm.rendezvous.store import Interrupted
from meshcomm.simulator.losses import Losses, SimulatedGenerations
from meshcomm.simulator.process_group import SimulatedProcessGroup, SimulatorTransport, label_of
from meshcomm.simulator.scheduler import Actor, Scheduler
from meshcomm.simulator.start_order import StartOrder
from meshcomm.simulator.torch_private import LAZY, start_default_group
from meshcomm.simulator.transport import SimulatedGroup
from meshcomm.transport import Transport
from meshcomm.transport.torch_private import create_group, give_back
from meshcomm.watching.recorder import FlightRecorder
from meshcomm.watching.steps import find_desync
from meshcomm.watching.verdict import error_of
from meshcomm.watching.words import failure

_CPU = torch.device("cpu")
# Numbers that no two ranks of this process share, also in different simulations.
_NUMBERS = count()


@final
@dataclass(slots=True, eq=False)
class StoreWait:
    """One rank's wait for keys. timeout_s: how long the rank would wait with a real store."""

    actor: Actor
    keys: list[str]
    timeout_s: float
    expired: bool = False
    broken: bool = False


@final
@dataclass(slots=True, eq=False)
class SharedState:
    """The state that the ranks of one simulation share.

    timeout_s: the mesh's timeout.
    values:    the store's values, by key. writers: the ranks that wrote each key. waits: the waits, by missing key.
    groups:    the groups by torch's name, their ranks and description, in the order in which they were created.
    recorders: each rank's coords and recorder, by mesh prefix and group.
    losses:    decides which ranks are lost and replaced; None if no rank is ever lost.
    """

    scheduler: Scheduler
    timeout_s: float
    values: dict[str, bytes] = field(default_factory=dict)
    writers: dict[str, list[int]] = field(default_factory=dict)
    waits: dict[str, list[StoreWait]] = field(default_factory=dict)
    start_order: StartOrder = field(default_factory=StartOrder)
    groups: dict[tuple[str, tuple[int, ...], str], SimulatedGroup] = field(default_factory=dict)
    recorders: dict[tuple[str, str], dict[int, tuple[Mapping[str, int], FlightRecorder]]] = field(
        default_factory=dict
    )
    losses: Losses | None = None

    def break_calls(self) -> None:
        """End all waits, because ranks were lost and the remaining ranks must synchronize again in a new generation."""
        scheduler = self.scheduler
        for group in self.groups.values():
            group.give_up()
        self.groups.clear()
        self.recorders.clear()
        self.waits.clear()
        self.start_order = StartOrder()
        for actor in scheduler.actors:
            actor.unwaited.clear()
            if actor.wait is not None:
                if isinstance(actor.wait, StoreWait):
                    actor.wait.broken = True
                scheduler.wake(actor)

    def wait_for_key(self, actor: Actor, key: str, timeout_s: float) -> None:
        """Let other ranks run until the key is set or `break_calls` ends the wait."""
        self.scheduler.wait(actor, StoreWait(actor, [key], timeout_s))

    def generations_of(self, actor: Actor) -> Generations | None:
        """Return a process's view of the generations, or None if no rank is ever lost."""
        return None if self.losses is None else self.losses.generations.get(actor.process)

    def has_to_wait(self, wait: StoreWait) -> bool:
        """Register `wait` under a missing key. Return False if all keys are set."""
        key = next((key for key in wait.keys if key not in self.values), None)
        if key is not None:
            self.waits.setdefault(key, []).append(wait)
        return key is not None

    def desync(self, prefix: str, label: str) -> CallMismatchError | None:
        """Return the error for the first step in which the ranks of a group made different calls, or None."""
        of_group = self.recorders[prefix, label]
        ranks = [rank for rank in next(iter(of_group.values()))[1].ranks if rank in of_group]
        histories = {rank: of_group[rank][1].steps.data() for rank in ranks}
        difference = find_desync(label, histories, {rank: coords for rank, (coords, _) in of_group.items()})
        return None if difference is None else error_of(difference)


@final
class SimulatedWorld:
    """The World of one rank; see meshcomm.mesh.runtime."""

    def __init__(self, shared: SharedState, actor: Actor) -> None:
        size = len(shared.scheduler.actors)
        self.number = next(_NUMBERS)
        self.launch = Launch("simulator", actor.process, size, actor.process, size)
        self.store: dist.Store = SimulatedStore(shared, actor)
        self._shared = shared
        self._actor = actor
        self.generations: Generations | None = None
        if shared.losses is not None:
            self.generations = SimulatedGenerations(shared.losses, actor, shared.wait_for_key)

    def place(self, wanted: str) -> tuple[torch.device, str]:
        """Place tensors in host memory for every device, but use the device's backend and its supported operations."""
        device = "cpu" if wanted == "auto" else wanted
        return _CPU, str(dist.get_default_backend_for_device(device))

    def start(self, rank: int, world_size: int, backend: str, resources: ExitStack) -> None:
        self._refuse_lost("torch's default group")
        if not dist.is_initialized():
            resources.callback(give_back, start_default_group(rank, world_size, backend, self.store))

    def open(self, group: Group, prefix: str) -> SimulatorTransport:
        label = group.label
        self._refuse_lost(f"the group {label}")
        handle: Any = create_group(
            name=f"{prefix}/{group.name}/{group.index}",
            ranks=group.ranks,
            coord=group.ranks.index(self._actor.rank),
            backend=group.options.backend,
            timeout=timedelta(seconds=group.options.timeout_s),
            store=self.store,
            options=LAZY,
            label=label,
            split=False,
        )
        handle.members.label, handle.members.dims = label, group.dims
        return SimulatorTransport(handle, group.options.backend, _CPU, owned=True)

    def over(self, group: Any) -> SimulatorTransport:
        """See World."""
        return SimulatorTransport(group, group.backend, _CPU, owned=False)

    def group(
        self, name: str, ranks: tuple[int, ...], timeout: timedelta, described: str
    ) -> SimulatedProcessGroup:
        """Return this rank's part of a torch process group."""
        self._refuse_lost("a process group")
        shared = self._shared
        # torch gives names of destroyed groups to new ones.
        group = shared.groups.get((name, ranks, described))
        if group is None:
            group = SimulatedGroup(shared.scheduler, ranks, label_of(described, ranks))
            shared.groups[name, ranks, described] = group
        return SimulatedProcessGroup(self._actor, group, shared.start_order, timeout, self.group)

    def meet(self) -> tuple[dist.Store, int, int]:
        """Return the store, the rank and the number of ranks, as a rendezvous of torch would."""
        return self.store, self.launch.rank, self.launch.world_size

    def _refuse_lost(self, what: str) -> None:
        if self.generations is not None and self.generations.newer():
            raise CommunicationError(f"rank {self._actor.rank} could not create {what}")

    def watch(self, coords: Mapping[str, int], prefix: str) -> SimulatedWatch:
        if not self._actor.coords:
            self._actor.coords = dict(coords)
        return SimulatedWatch(self._shared, self._actor.rank, coords, prefix, self.generations)


@final
@dataclass(eq=False)
class SimulatedWatch(Watching):
    """Creates the recorders for a simulated rank's groups. It needs no thread, because the scheduler knows what ranks do."""

    timed = False

    _shared: SharedState
    _rank: int
    _coords: Mapping[str, int]
    _prefix: str
    _generations: Generations | None
    _labels: list[str] = field(default_factory=list)
    _recorders: list[FlightRecorder] = field(default_factory=list)

    def record(self, label: str, ranks: list[int], transport: Transport) -> FlightRecorder:
        recorder = FlightRecorder(label, ranks, self._failed)
        self._labels.append(label)
        self._recorders.append(recorder)
        self._shared.recorders.setdefault((self._prefix, label), {})[self._rank] = self._coords, recorder
        return recorder

    def _failed(self, recorder: FlightRecorder, where: str, error: BaseException) -> MeshcommError:
        lost = None if self._generations is None else self._generations.lost(where, True)
        return lost or failure(where, error)

    def close(self, *, abandons: bool = False) -> None:
        """See Watching."""
        for recorder in self._recorders:
            recorder.close()

    def noted(self, step: int) -> None:
        """Record the end of a step. In each group, the last rank to end the step compares the calls of all ranks."""
        for label in self._labels:
            of_group = self._shared.recorders.get((self._prefix, label), {})
            group = [recorder for _, recorder in of_group.values()]
            if (
                group
                and len(group) == len(group[0].ranks)
                and all(member.steps.step >= step for member in group)
            ):
                error = self._shared.desync(self._prefix, label)
                if error is not None:
                    self._shared.scheduler.fail(error)


# -- the store -------------------------------------------------------------------------------

# torch's type stubs lack half of the Store's methods.
_Store: Any = dist.Store


@final
class SimulatedStore(_Store):  # type: ignore[misc]
    """One rank's view of the shared values under a prefix. It is a torch Store, so a PrefixStore can wrap it."""

    def __init__(self, shared: SharedState, actor: Actor, prefix: str = "") -> None:
        super().__init__()
        self._shared, self._scheduler, self._actor = shared, shared.scheduler, actor
        self._prefix = prefix
        self._timeout = timedelta(days=1)

    def prefixed(self, prefix: str) -> SimulatedStore:
        """Return the same store with `prefix` added to its keys."""
        return SimulatedStore(self._shared, self._actor, f"{self._prefix}{prefix}/")

    @property
    def timeout(self) -> timedelta:
        """The default timeout of a wait."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        self._read(key)
        self._write(key, _bytes(value))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def add(self, key: str, amount: int) -> int:
        total = int(self._read(key) or b"0") + amount
        self._write(key, str(total).encode())
        return total

    def append(self, key: str, value: str | bytes) -> None:
        self._write(key, (self._read(key) or b"") + _bytes(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        held = self._read(key)
        if held is None and _bytes(expected):
            # The mesh's store reads keys with compare_set.
            self._scheduler.poll(self._actor, self._wait_for([key], timedelta.max))
            return _bytes(expected)
        if held is not None and held != _bytes(expected):
            return held
        self._write(key, _bytes(desired))
        return _bytes(desired)

    def check(self, keys: Sequence[str]) -> bool:
        self._touch()
        present = all(self._prefix + key in self._shared.values for key in keys)
        if not present:
            self._scheduler.poll(self._actor, self._wait_for(keys, timedelta.max))
        return present

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        timeout = self._timeout if timeout is None else timeout
        self._touch()
        wait = self._wait_for(keys, timeout)
        generations = self._shared.generations_of(self._actor)
        if generations is not None and generations.newer():
            raise Interrupted("a wait on the store ended because ranks were lost")
        if self._shared.has_to_wait(wait):
            self._scheduler.wait(self._actor, wait)
        if wait.broken:
            raise Interrupted("a wait on the store ended because ranks were lost")
        if wait.expired:
            raise dist.DistStoreError(
                f"wait timeout after {timeout.total_seconds() * 1000:g}ms, keys: {keys}"
            )

    def delete_key(self, key: str) -> bool:
        self._touch()
        return self._shared.values.pop(self._prefix + key, None) is not None

    # The name under which torch calls it when a PrefixStore deletes a key.
    deleteKey = delete_key

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.wait(keys)
        return [self._shared.values[self._prefix + key] for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def list_keys(self) -> list[str]:
        self._touch()
        keys = [key for key in self._shared.values if key.startswith(self._prefix)]
        return [key.removeprefix(self._prefix) for key in keys]

    def num_keys(self) -> int:
        return len(self.list_keys())

    getNumKeys = num_keys

    def has_extended_api(self) -> bool:
        return True

    # -- inside ---------------------------------------------------------------------------------

    def _touch(self) -> None:
        self._scheduler.operates(self._actor)
        self._scheduler.maybe_pause(self._actor)
        generations = self._shared.generations_of(self._actor)
        if generations is not None and generations.is_opening and generations.newer():
            # While a mesh is being opened, act like a store whose connections were cut.
            raise dist.DistNetworkError("connection reset: a rank was lost")

    def _read(self, key: str) -> bytes | None:
        self._touch()
        return self._shared.values.get(self._prefix + key)

    def _write(self, key: str, value: bytes) -> None:
        self._scheduler.check()
        whole = self._prefix + key
        self._shared.values[whole] = value
        self._shared.writers.setdefault(whole, []).append(self._actor.rank)
        for wait in self._shared.waits.pop(whole, ()):
            # The rank may not be waiting, because the scheduler may have refused its wait.
            if wait.actor.wait is wait and not self._shared.has_to_wait(wait):
                self._scheduler.wake(wait.actor)

    def _wait_for(self, keys: Sequence[str], timeout: timedelta) -> StoreWait:
        return StoreWait(self._actor, [self._prefix + key for key in keys], timeout.total_seconds())


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
