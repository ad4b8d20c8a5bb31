"""Generations of a job: each time that ranks are lost and their processes replaced, the ranks meet again in a new one.

A launcher that starts a new process for a rank that was lost announces a generation in the job's store and tells the
process its number. Everything that belongs to one generation lies under its prefix.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any, Final, final

import torch.distributed as dist

from meshcomm.errors import RankLost
from meshcomm.layout.sizes import ranks_text
from meshcomm.mesh.store import interrupted
from meshcomm.transport.connections import Connections
from meshcomm.transport.torch_private import interruptible_waits

VARIABLE: Final = "MESHCOMM_GENERATION"
"""Set by a launcher that replaces lost ranks: "0" for the first processes, for others the generation that they join."""

_KEY: Final = "meshcomm/generation/{}"
_MET: Final = "meshcomm/generation/{}/met"
# Set by a process that waits for a generation: its number, and the process's.
WAITS: Final = "meshcomm/waits/{}/{}"
# What comes after a generation: a larger mesh, or the end of the program.
_NEXT: Final = "meshcomm/next/{}"

ANNOUNCED_VARIABLE: Final = "MESHCOMM_ANNOUNCED_S"
"""How many seconds a launcher may take to see that a process has ended, and to announce the next generation."""

_ANNOUNCED_S: Final = 5.0
# How long from one cut to the next, while a newer generation is not joined.
_CUTS_S: Final = 0.02
_CUTS_MOST_S: Final = 0.5
# How long a backend may hold a call whose connections were cut.
_HOLDS_S: Final = 1.0
_FOREVER: Final = timedelta(days=30)
# What the thread that waits for announcements may take to end.
_LEAVES_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Generation:
    """The generation of the job that a mesh belongs to. It changes each time that ranks are lost and replaced.

    number: 0 before any rank was lost. replaced: the ranks with new processes, each with how the previous
            process
    ended. processes: the launcher's number of the process of each rank, which is RANK in its environment; if
    empty, these are the ranks. dims: the sizes that differ from the configuration.
    """

    number: int = 0
    replaced: Mapping[int, str] = field(default_factory=dict)
    processes: tuple[int, ...] = ()
    dims: Mapping[str, int] = field(default_factory=dict)

    def process_of(self, rank: int) -> int:
        """The launcher's number of the process of a rank."""
        return self.processes[rank] if self.processes else rank

    def ranks_of(self, processes: Mapping[int, str]) -> dict[int, str]:
        """By rank, what is said of processes; without those that have none."""
        if not self.processes:
            return dict(processes)
        return {rank: processes[each] for rank, each in enumerate(self.processes) if each in processes}


@dataclass(frozen=True, slots=True)
class Announcement:
    """The next generation, as a launcher says it. processes, dims: as of Generation.

    lost: the processes that have ended since the last one, each with how. new: those that take part for the first time, each
    with how the one before it ended.
    """

    lost: Mapping[int, str] = field(default_factory=dict)
    new: Mapping[int, str] = field(default_factory=dict)
    processes: tuple[int, ...] = ()
    dims: Mapping[str, int] = field(default_factory=dict)


def announce(store: Any, number: int, announcement: Announcement) -> None:
    """Have the ranks of the job meet again. Called by a launcher, before it starts the new processes.

    store: the job's, as `of_this_attempt` has it. number: that of the last one and one.
    """
    store.set(_KEY.format(number), json.dumps(asdict(announcement)))


def is_waiting(store: Any, number: int, process: int) -> bool:
    """Whether a process that was started for a generation to come is there, and waits for it."""
    return bool(store.check([WAITS.format(number, process)]))


def may_grow(store: Any, number: int) -> bool:
    """Whether the ranks meet in a generation in which nobody was lost; not once they have said `all_done` of the one before.

    Called by a launcher, which then announces it.
    """
    return bool(store.compare_set(_NEXT.format(number), "", "grows") == b"grows")


def have_met(store: Any, number: int) -> bool:
    """Whether the ranks of the job, old and new, have all come to the generation. Called by a launcher."""
    return bool(store.check([_MET.format(number)]))


def all_done(store: Any, number: int) -> bool:
    """Whether a generation is the last one, as its ranks have nothing more to do; not once `may_grow` of the next was true."""
    return bool(store.compare_set(_NEXT.format(number + 1), "", "done") == b"done")


class Generations:
    """What one rank knows of the generations of its job: joined, the one that its meshes are of, and newer ones.

    process: the number by which the launcher knows this one. number: of the generation that it was started for.
    announced: each one until then, from 1 on.
    """

    announced_s = _ANNOUNCED_S
    """How long a rank that has lost a peer waits for the next one."""

    def __init__(self, process: int, number: int, announced: Sequence[Announcement]) -> None:
        self._process = process
        self._announced = [Announcement(), *announced]
        # The last one in which this process has opened a mesh.
        self._opened = number - 1
        self.joined = self._generation(number)

    @property
    def latest(self) -> int:
        """The number of the last one that was announced."""
        return len(self._announced) - 1

    def join(self) -> Generation:
        """The latest generation: what is opened from now on is of it. Returns when this process takes part in one."""
        if self.latest > self.joined.number or not self._takes_part():
            self._await_part()
            self.joined = self._generation(self.latest)
        return self.joined

    @property
    def is_opening(self) -> bool:
        """Whether no mesh is open yet in the joined generation."""
        return self._opened < self.joined.number

    def met(self) -> None:
        """All ranks have come to the joined generation."""

    def opened(self) -> None:
        """A mesh is open in the joined generation: ranks that are lost from now on are others."""
        self._opened = self.joined.number

    def add(self, announcement: Announcement) -> None:
        """One more generation is announced."""
        self._announced.append(announcement)

    def newer(self, within_s: float = 0.0) -> bool:
        """Whether there is a newer generation than the joined one, or one is announced within so many seconds."""
        return self.latest > self.joined.number

    def lost(self, what: str, waits: bool) -> RankLost | None:
        """The error where ranks were lost since this process joined. waits: a peer is gone; the launcher may still see it.

        what: the call that this ends, and the rank that makes it.
        """
        if not self.newer(self.announced_s if waits else 0.0):
            return None
        joined, latest = self.joined, self._announced[-1]
        ended = {each: why for one in self._announced[joined.number + 1 :] for each, why in one.lost.items()}
        ranks = joined.ranks_of(ended)
        sizes = ", ".join(f"{name}={size}" for name, size in (latest.dims or joined.dims).items())
        lost = f"{ranks_text(sorted(ranks))} {'was' if len(ranks) == 1 else 'were'} lost"
        if not ranks:
            text = "new processes have come, and the mesh grows"
        elif latest.dims == joined.dims:
            text = f"{lost} and replaced"
        else:
            text = f"{lost}, and the others go on {f'with {sizes}' if latest.dims else 'with new ones'}"
        return RankLost(
            f"{what}: {text}",
            given="\n".join(f"rank {rank} {why}" for rank, why in sorted(ranks.items()))
            or f"{len(latest.new)} new processes",
            expected="every rank to meet the new processes, and to make the unfinished step again"
            if latest.new
            else "every other rank to meet again, and to make the unfinished step again",
            hint="except RankLost as error: mesh.reopen(error); a Trainer does so by itself",
            missing=tuple(sorted(ranks)),
        )

    def all_done(self) -> bool:
        """Whether the mesh is the last one, as the program has nothing more to do; False where it is about to grow.

        Called by: one rank.
        """
        return True

    def cuts(self, connections: Connections) -> None:
        """Cut `connections` when a newer generation is announced, again and again until it is joined.

        What opens a mesh makes one connection after the other.
        """

    def _generation(self, number: int) -> Generation:
        latest = self._announced[number]
        found = Generation(number, {}, tuple(latest.processes), latest.dims)
        new = {
            each: why
            for one in self._announced[self._opened + 1 : number + 1]
            for each, why in one.new.items()
        }
        return replace(found, replaced=found.ranks_of(new))

    def _takes_part(self) -> bool:
        processes = self._announced[-1].processes
        return not processes or self._process in processes

    def _await_part(self) -> None:
        """Return when the latest generation has this process."""


@final
class AnnouncedGenerations(Generations):
    """Those that a launcher announces in the job's store, where a connection of its own waits for them."""

    def __init__(self, store: dist.Store, process: int, number: int) -> None:
        self._store: Any = store
        self._changed = threading.Condition()
        self._connections: list[Connections] = []
        self._since = math.inf
        self.announced_s = float(os.environ.get(ANNOUNCED_VARIABLE, _ANNOUNCED_S))
        if number:
            self._store.set(WAITS.format(number, process), "")
        for each in range(1, number + 1):
            self._store.wait([_KEY.format(each)], _FOREVER)
        super().__init__(process, number, [announcement_of(store, each) for each in range(1, number + 1)])
        interruptible_waits(self._given_up)
        interrupted.append(self.newer)
        self._waits = Connections()
        waits = self._waits.own(self._store.clone)
        name = "meshcomm-generation"
        self._waiting = threading.Thread(target=self._wait, args=(waits,), name=name, daemon=True)
        self._waiting.start()
        threading.Thread(target=self._cut, name=name, daemon=True).start()
        atexit.register(self._at_exit)

    def newer(self, within_s: float = 0.0) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.latest > self.joined.number, within_s)

    def join(self) -> Generation:
        if self.newer():
            self._connections = []
        return super().join()

    def met(self) -> None:
        if self.joined.number and self.is_opening:
            self._store.set(_MET.format(self.joined.number), "")

    def all_done(self) -> bool:
        return all_done(self._store, self.joined.number)

    def cuts(self, connections: Connections) -> None:
        self._connections.append(connections)

    def _await_part(self) -> None:
        with self._changed:
            self._changed.wait_for(self._takes_part)

    def _at_exit(self) -> None:
        # A thread that comes back from C++ while Python ends would end this process by SIGABRT.
        self._waits.cut()
        self._waiting.join(_LEAVES_S)

    def _wait(self, store: Any) -> None:
        while True:
            try:
                store.wait([_KEY.format(self.latest + 1)], _FOREVER)
                lost = announcement_of(store, self.latest + 1)
            except RuntimeError:
                return  # the job has ended
            with self._changed:
                self._since = time.monotonic()
                self.add(lost)
                self._changed.notify_all()

    def _given_up(self) -> bool:
        return self.latest > self.joined.number and time.monotonic() - self._since > _HOLDS_S

    def _cut(self) -> None:
        while True:
            pause_s = _CUTS_S
            with self._changed:
                self._changed.wait_for(lambda: self.latest > self.joined.number)
                number = self.latest
            while self.joined.number < number:
                for each in [*self._connections]:
                    each.cut()
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _CUTS_MOST_S)


def announcement_of(store: Any, number: int) -> Announcement:
    """What a launcher has announced of a generation."""
    found = json.loads(store.get(_KEY.format(number)))
    lost, new = ({int(each): why for each, why in found[name].items()} for name in ("lost", "new"))
    return Announcement(lost, new, tuple(found["processes"]), found["dims"])


_HERE: dict[str, Generations] = {}


def generations_of(store: dist.Store, process: int) -> Generations | None:
    """Those of this process; None where its launcher does not replace ranks. store: the job's. process: its rank there."""
    number = os.environ.get(VARIABLE, "")
    if not number.isdecimal():
        return None
    if number not in _HERE:
        _HERE[number] = AnnouncedGenerations(store, process, int(number))
    return _HERE[number]
