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
from dataclasses import dataclass, field
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

# A launcher needs this long to see that a process has ended, and to announce the next generation.
ANNOUNCED_S: Final = 5.0
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
    """Which one the mesh is of. number: 0 before any rank was lost.

    replaced: the ranks whose processes are new in it, each with how the one before ended.
    """

    number: int = 0
    replaced: Mapping[int, str] = field(default_factory=dict)


def announce(store: Any, generation: Generation) -> None:
    """Have the ranks of the job meet again. Called by a launcher, before it starts the new processes.

    store: the job's, as `of_this_attempt` has it. generation: the number of the last one and one.
    """
    store.set(_KEY.format(generation.number), json.dumps(dict(generation.replaced)))


def have_met(store: Any, number: int) -> bool:
    """Whether the ranks of the job, old and new, have all come to the generation. Called by a launcher."""
    return bool(store.check([_MET.format(number)]))


class Generations:
    """What one rank knows of the generations of its job: joined, the one that its meshes are of, and newer ones.

    number: of the generation that its process was started for. lost: of each generation until then, from 1 on.
    """

    def __init__(self, number: int, lost: Sequence[Mapping[int, str]]) -> None:
        self._lost: list[Mapping[int, str]] = [{}, *lost]
        # The last one in which this process has opened a mesh.
        self._opened = number - 1
        self.joined = Generation(number, self._lost[number])

    @property
    def latest(self) -> int:
        """The number of the last one that was announced."""
        return len(self._lost) - 1

    def join(self) -> Generation:
        """The latest generation: what is opened from now on is of it."""
        if self.latest > self.joined.number:
            self.joined = Generation(self.latest, self._lost_since(self._opened))
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

    def add(self, lost: Mapping[int, str]) -> None:
        """One more generation is announced."""
        self._lost.append(lost)

    def newer(self, within_s: float = 0.0) -> bool:
        """Whether there is a newer generation than the joined one, or one is announced within so many seconds."""
        return self.latest > self.joined.number

    def lost(self, what: str, waits: bool) -> RankLost | None:
        """The error where ranks were lost since this process joined. waits: a peer is gone; the launcher may still see it.

        what: the call that this ends, and the rank that makes it.
        """
        if not self.newer(ANNOUNCED_S if waits else 0.0):
            return None
        ranks = self._lost_since(self.joined.number)
        return RankLost(
            f"{what}: {ranks_text(sorted(ranks))} {'was' if len(ranks) == 1 else 'were'} lost and replaced",
            given="\n".join(f"rank {rank} {why}" for rank, why in sorted(ranks.items())),
            expected="every rank to meet the new processes, and to make the unfinished step again",
            hint="except RankLost as error: mesh.reopen(error); a Trainer does so by itself",
            missing=tuple(sorted(ranks)),
        )

    def cuts(self, connections: Connections) -> None:
        """Cut `connections` when a newer generation is announced, again and again until it is joined.

        What opens a mesh makes one connection after the other.
        """

    def _lost_since(self, number: int) -> dict[int, str]:
        return {rank: why for lost in self._lost[number + 1 :] for rank, why in lost.items()}


@final
class AnnouncedGenerations(Generations):
    """Those that a launcher announces in the job's store, where a connection of its own waits for them."""

    def __init__(self, store: dist.Store, number: int) -> None:
        self._store: Any = store
        self._changed = threading.Condition()
        self._connections: list[Connections] = []
        self._since = math.inf
        super().__init__(number, [_read(store, each) for each in range(1, number + 1)])
        interruptible_waits(self._given_up)
        interrupted.append(self.newer)
        self._waits = Connections(known=())
        with self._waits.making():
            waits = self._store.clone()
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

    def cuts(self, connections: Connections) -> None:
        self._connections.append(connections)

    def met(self) -> None:
        if self.joined.number and self.is_opening:
            self._store.set(_MET.format(self.joined.number), "")

    def _at_exit(self) -> None:
        # A thread that comes back from C++ while Python ends would end this process by SIGABRT.
        self._waits.cut()
        self._waiting.join(_LEAVES_S)

    def _wait(self, store: Any) -> None:
        while True:
            try:
                store.wait([_KEY.format(self.latest + 1)], _FOREVER)
                lost = _read(store, self.latest + 1)
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


def _read(store: Any, number: int) -> dict[int, str]:
    return {int(rank): why for rank, why in json.loads(store.get(_KEY.format(number))).items()}


_HERE: dict[str, Generations] = {}


def generations_of(store: dist.Store) -> Generations | None:
    """Those of this process; None where its launcher does not replace ranks. store: the job's."""
    number = os.environ.get(VARIABLE, "")
    if not number.isdecimal():
        return None
    if number not in _HERE:
        _HERE[number] = AnnouncedGenerations(store, int(number))
    return _HERE[number]
