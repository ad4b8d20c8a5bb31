"""Generations of a job: each time ranks are lost and replaced, all ranks meet again in a new generation.

When a launcher starts a new process for a lost rank, it announces a generation in the job's store and passes the
generation's number to the process. All of a generation's keys are stored under its prefix.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, Final, final

from meshcomm.errors import RankLost, StoreError
from meshcomm.layout.sizes import ranks_text
from meshcomm.rendezvous import keys
from meshcomm.rendezvous.store import interrupted, within
from meshcomm.transport.connections import Connections
from meshcomm.transport.torch_changes import interruptible_waits

VARIABLE: Final = "MESHCOMM_GENERATION"
"""Set by a launcher that replaces lost ranks: "0" for the first processes, otherwise the generation to join."""

ANNOUNCED_VARIABLE: Final = "MESHCOMM_ANNOUNCED_S"
"""How many seconds a launcher may take to notice that a process has ended and to announce the next generation."""

_ANNOUNCED_S: Final = 5.0
# The pause between two rounds of cutting connections, until a newer generation is joined.
_CUTS_S: Final = 0.02
_CUTS_MOST_S: Final = 0.5
# How long a backend may keep a call after its connections were cut.
_HOLDS_S: Final = 1.0
FOREVER: Final = timedelta(days=30)
# How long the thread that waits for announcements may take to end.
_LEAVES_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Generation:
    """The generation of the job that a mesh belongs to. A new generation begins each time ranks are lost and replaced.

    number: 0 before any rank was lost.
    replaced: maps each rank with a new process to how the previous process ended.
    processes: the launcher's number for each rank's process, which is RANK in the process's environment. If empty,
            each process's number equals its rank.
    dims: the sizes that differ from the configuration.
    """

    number: int = 0
    replaced: Mapping[int, str] = field(default_factory=dict)
    processes: tuple[int, ...] = ()
    dims: Mapping[str, int] = field(default_factory=dict)

    def process_of(self, rank: int) -> int:
        """Return the launcher's number for a rank's process."""
        return self.processes[rank] if self.processes else rank

    def ranks_of(self, processes: Mapping[int, str]) -> dict[int, str]:
        """Return the facts about `processes`, keyed by rank. Ranks without facts are omitted."""
        if not self.processes:
            return dict(processes)
        return {
            rank: processes[process] for rank, process in enumerate(self.processes) if process in processes
        }


@dataclass(frozen=True, slots=True)
class Announcement:
    """The next generation, as a launcher announces it.

    processes, dims: as in Generation.
    lost: maps each process that has ended since the last generation to how it ended.
    new: maps each process that joins to how the previous process ended.
    """

    lost: Mapping[int, str] = field(default_factory=dict)
    new: Mapping[int, str] = field(default_factory=dict)
    processes: tuple[int, ...] = ()
    dims: Mapping[str, int] = field(default_factory=dict)


def announce(store: Any, number: int, announcement: Announcement) -> None:
    """Make the job's ranks meet again. Called by a launcher before it starts the new processes.

    store: the job's SignedStore, under the prefix of `of_this_attempt`.
    number: the last generation's number plus one.
    """
    store.set(keys.GENERATION.format(number), json.dumps(asdict(announcement)))


def announcement_of(store: Any, number: int) -> Announcement:
    """Return a launcher's announcement of a generation."""
    announced = json.loads(store.get(keys.GENERATION.format(number)))
    lost, new = ({int(process): why for process, why in announced[name].items()} for name in ("lost", "new"))
    return Announcement(lost, new, tuple(announced["processes"]), announced["dims"])


def is_waiting(store: Any, number: int, process: int) -> bool:
    """Return whether a process that was started for a future generation is running and waiting for that generation."""
    return bool(store.check([keys.WAITS.format(number, process)]))


def have_met(store: Any, number: int) -> bool:
    """Return whether all ranks of the job, old and new, have arrived in the generation."""
    return bool(store.check([keys.MET.format(number)]))


def hung_in(store: Any, number: int) -> dict[int, str]:
    """Return the processes that ranks of the generation have reported as hung, with what each does."""
    key = keys.HUNG.format(number)
    lines = store.get(key).decode().splitlines() if store.check([key]) else []
    return {int(process): what for process, what in map(json.loads, lines)}


def may_grow(store: Any, number: int) -> bool:
    """Return whether the ranks will meet in generation `number` although no rank was lost. Returns False once
    `all_done` has returned True for the previous generation.
    """
    return bool(store.compare_set(keys.NEXT.format(number), "", "grows") == b"grows")


def all_done(store: Any, number: int) -> bool:
    """Return whether a generation is the last one because its ranks are done. Returns False once `may_grow` has
    returned True for the next generation.
    """
    return bool(store.compare_set(keys.NEXT.format(number + 1), "", "done") == b"done")


def has_ended(store: Any) -> bool:
    """Return whether all ranks have called `Elastic.finish`."""
    return bool(store.check([keys.ENDED]))


class Generations:
    """One rank's view of its job's generations: `joined`, the generation of its meshes, and newer generations.

    process: the launcher's number for this process.
    number: the generation that the process was started for.
    announced: the announcements of generations 1 to `number`.
    """

    announced_s = _ANNOUNCED_S
    """How long a rank that has lost a peer waits for the next generation."""

    def __init__(self, process: int, number: int, announced: Sequence[Announcement]) -> None:
        self._process = process
        self._announced = [Announcement(), *announced]
        # The last generation in which this process has opened a mesh.
        self._opened = number - 1
        self.joined = self._generation(number)

    @property
    def latest(self) -> int:
        """The number of the last announced generation."""
        return len(self._announced) - 1

    def join(self) -> Generation:
        """Join the latest generation, to which new meshes belong. Block until a generation includes this process."""
        if self.latest > self.joined.number or not self._takes_part():
            self._await_part()
            self.joined = self._generation(self.latest)
        return self.joined

    @property
    def is_opening(self) -> bool:
        """Whether no mesh is open yet in the joined generation."""
        return self._opened < self.joined.number

    def met(self) -> None:
        """Record that all ranks have arrived in the joined generation."""

    def opened(self) -> None:
        """Record that a mesh is open in the joined generation. Ranks lost from now on count for the next generation."""
        self._opened = self.joined.number

    def add(self, announcement: Announcement) -> None:
        """Record that another generation has been announced."""
        self._announced.append(announcement)

    def newer(self, within_s: float = 0.0) -> bool:
        """Return whether a generation newer than the joined one exists, or is announced within `within_s` seconds."""
        return self.latest > self.joined.number

    def lost(self, what: str, waits: bool, confirms: bool = False) -> RankLost | None:
        """Return the error if ranks were lost since this process joined.

        what: the call that the error ends, and the calling rank.
        waits: whether a peer is gone and the launcher may not have noticed yet.
        confirms: whether the caller uses a value if no rank was lost. Raises StoreError if that cannot be known.
        """
        if not self.newer(self.announced_s if waits else 0.0):
            return None
        joined, latest, ended = self.joined, self._announced[-1], dict[int, str]()
        for announcement in self._announced[joined.number + 1 :]:
            ended |= announcement.lost
        ranks = joined.ranks_of(ended)
        sizes = ", ".join(f"{name}={size}" for name, size in (latest.dims or joined.dims).items())
        lost = f"{ranks_text(sorted(ranks))} {'was' if len(ranks) == 1 else 'were'} lost"
        if not ranks:
            text = "new processes have joined, and the mesh grows"
        elif latest.dims == joined.dims:
            text = f"{lost} and replaced"
        else:
            text = f"{lost}, and the others continue {f'with {sizes}' if latest.dims else 'with new ones'}"
        return RankLost(
            f"{what}: {text}",
            given="\n".join(f"rank {rank} {why}" for rank, why in sorted(ranks.items()))
            or f"{len(latest.new)} new processes",
            expected="every rank to meet the new processes, and to repeat the unfinished step"
            if latest.new
            else "every other rank to meet again, and to repeat the unfinished step",
            hint="except RankLost as error: mesh.elastic.reopen(error); a Trainer does this itself",
            missing=tuple(sorted(ranks)),
        )

    def hung(self, ranks: Mapping[int, str]) -> None:
        """Report ranks that did not arrive before the timeout. ranks: what each of them does.

        The launcher ends their processes. They are then lost like others.
        """

    def all_done(self, ends: bool) -> bool:
        """Return True if this mesh is the program's last one, or False if the mesh is about to grow.

        Called by: one rank. ends: whether the program's work is done.
        """
        return True

    @property
    def has_ended(self) -> bool:
        """Whether the program's work is done."""
        return False

    def cuts(self, connections: Connections) -> None:
        """Once a newer generation is announced, keep cutting `connections` until this process joins it.

        One cut is not enough, because opening a mesh creates several connections in turn.
        """

    def _generation(self, number: int) -> Generation:
        new: dict[int, str] = {}
        for announcement in self._announced[self._opened + 1 : number + 1]:
            new |= announcement.new
        latest = self._announced[number]
        joined = Generation(number, {}, latest.processes, latest.dims)
        return replace(joined, replaced=joined.ranks_of(new))

    def _takes_part(self) -> bool:
        processes = self._announced[-1].processes
        return not processes or self._process in processes

    def _await_part(self) -> None:
        """Block until the latest generation includes this process."""


@final
class AnnouncedGenerations(Generations):
    """Generations that a launcher announces in the job's store. A thread with its own connection waits for announcements."""

    def __init__(self, store: Any, process: int, number: int) -> None:
        self._store = store
        self._changed = threading.Condition()
        # Connections, each with the generation in which it was made.
        self._connections: list[tuple[int, Connections]] = []
        self._since = math.inf
        self.announced_s = float(os.environ.get(ANNOUNCED_VARIABLE, _ANNOUNCED_S))
        if number:
            self._store.set(keys.WAITS.format(number, process), "")
        for joined in range(1, number + 1):
            self._store.wait([keys.GENERATION.format(joined)], FOREVER)
        super().__init__(process, number, [announcement_of(store, joined) for joined in range(1, number + 1)])
        interruptible_waits(self._given_up)
        interrupted.append(self.newer)
        self._waits = Connections()
        waits: Any = self._waits.own(self._store.clone)
        self._asks: Any = self._waits.own(self._store.clone)
        name = "meshcomm-generation"
        self._waiting = threading.Thread(target=self._wait, args=(waits,), name=name, daemon=True)
        self._waiting.start()
        threading.Thread(target=self._cut, name=name, daemon=True).start()
        atexit.register(self._at_exit)

    def newer(self, within_s: float = 0.0) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.latest > self.joined.number, within_s)

    def lost(self, what: str, waits: bool, confirms: bool = False) -> RankLost | None:
        """See Generations. Also checks the store, because a queued call may have succeeded with data from a rank that has
        already dropped its calls. Such a rank has read the announcement, which this process may not have received yet.
        """
        if not self.newer():
            with self._changed:
                next_keys = [keys.GENERATION.format(self.latest + 1)]
            try:
                # A store that the network has cut off never answers.
                waits = within(self.announced_s, partial(self._asks.check, next_keys)) or waits
            except (TimeoutError, RuntimeError) as error:
                if confirms:
                    raise StoreError(
                        f"{what}: the job's store does not answer, so it is unknown whether ranks were lost",
                        given=str(error).partition("\n")[0],
                        expected=f"an answer within {self.announced_s:g} s",
                        hint="check the launcher, and the network between its host and this host",
                    ) from error
        return super().lost(what, waits)

    def hung(self, ranks: Mapping[int, str]) -> None:
        joined = self.joined
        lines = [json.dumps([joined.process_of(rank), what]) + "\n" for rank, what in ranks.items()]
        # Without an answer, nobody is replaced.
        with contextlib.suppress(TimeoutError, RuntimeError):
            key = keys.HUNG.format(joined.number)
            within(self.announced_s, partial(self._asks.append, key, "".join(lines)))

    def join(self) -> Generation:
        if self.newer():
            self._connections = []
        return super().join()

    def met(self) -> None:
        if self.joined.number and self.is_opening:
            self._store.set(keys.MET.format(self.joined.number), "")

    def all_done(self, ends: bool) -> bool:
        last = all_done(self._store, self.joined.number)
        if last and ends:
            self._store.set(keys.ENDED, "")
        return last

    @property
    def has_ended(self) -> bool:
        return has_ended(self._store)

    def cuts(self, connections: Connections) -> None:
        self._connections.append((self.joined.number, connections))

    def _await_part(self) -> None:
        with self._changed:
            self._changed.wait_for(self._takes_part)

    def _at_exit(self) -> None:
        # A thread that returns from C++ while Python shuts down would abort this process with SIGABRT.
        self._waits.cut()
        self._waiting.join(_LEAVES_S)

    def _wait(self, store: Any) -> None:
        refused = ""
        while True:
            try:
                store.wait([keys.GENERATION.format(self.latest + 1)], FOREVER)
                lost = announcement_of(store, self.latest + 1)
            except RuntimeError:
                return  # the job has ended
            except StoreError as error:
                # The launcher's own announcement may still follow.
                if error.what != refused:
                    print(f"meshcomm: process {self._process} {error}", file=sys.stderr)
                refused = error.what
                time.sleep(_CUTS_MOST_S)
                continue
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
                # This process may have joined just now, and its new connections may be on the list.
                for made_in, connection in [*self._connections]:
                    if made_in < number:
                        connection.cut()
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _CUTS_MOST_S)


_HERE: dict[str, Generations] = {}


def generations_of(store: Any, process: int) -> Generations | None:
    """Return the generations of this process, or None if its launcher does not replace ranks.

    store: the job's store.
    process: the rank of the process in this store.
    """
    number = os.environ.get(VARIABLE, "")
    if not number.isdecimal():
        return None
    if number not in _HERE:
        _HERE[number] = AnnouncedGenerations(store, process, int(number))
    return _HERE[number]
