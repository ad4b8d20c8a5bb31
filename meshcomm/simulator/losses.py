"""The loss of ranks in a simulation, and the launcher's reaction. As with real processes, `Replacing` makes the decisions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, final

from meshcomm.config.elastic import ElasticConfig
from meshcomm.errors import MeshcommError, RankFailed
from meshcomm.job.replacing import Replacing, Sizes
from meshcomm.layout.sizes import ranks_text
from meshcomm.rendezvous import keys
from meshcomm.rendezvous.generation import Announcement, Generation, Generations, all_done, announcement_of
from meshcomm.simulator.scheduler import Actor, Lost
from meshcomm.simulator.transport import here
from meshcomm.watching.ending import Failure

if TYPE_CHECKING:
    from meshcomm.simulator.world import SharedState

# The simulated launcher notices an event after this many operations on average, or when no rank can continue.
_SEES_ONE_IN: Final = 8


@final
class Losses:
    """Decides which processes are lost, when they are lost, and which processes replace them.

    lose: process -> the number of the operation at which it is lost. elastic, sizes: see Replacing.
    replacement: creates the actor that replaces a process. Replacing's clock counts operations.
    """

    def __init__(
        self,
        shared: SharedState,
        lose: Mapping[int, int],
        replacement: Callable[[int], Actor],
        elastic: ElasticConfig | None = None,
        sizes: Sizes | None = None,
    ) -> None:
        self._shared, self._lose, self._replacement = shared, dict(lose), replacement
        self._clock = 0.0
        self._unseen: dict[int, str] = {}
        self._error: MeshcommError | None = None
        self.lost_at: dict[int, str] = {}
        self.announced: list[Announcement] = []
        self.generations: dict[int, Generations] = {}
        self.replacing = Replacing(
            len(shared.scheduler.actors),
            elastic or ElasticConfig(replace=len(lose)),
            sizes,
            now=lambda: self._clock,
            say=lambda *lines: None,
        )
        self.replacing.store = LaunchersStore(shared.values)

    def loses(self, actor: Actor) -> bool:
        """Return whether `actor` is lost at its current operation. The launcher reacts at a later operation."""
        self._clock += 1
        if self.expects() and self._shared.scheduler.choose(_SEES_ONE_IN) == 0:
            self.look()
            if self._error is not None:
                self._shared.scheduler.fail(self._error)
        is_lost = self._lose.get(actor.process) == actor.operations
        if is_lost:
            del self._lose[actor.process]
            self._unseen[actor.process] = "was lost"
            site = here()
            self.lost_at[actor.process] = f"at its operation {actor.operations}, in {site.call} at {site}"
        return is_lost

    def expects(self) -> bool:
        """Return whether the launcher has something to do, now or later."""
        replacing = self.replacing
        return bool(self._unseen or replacing.due or replacing.coming)

    def look(self, patient: bool = True) -> MeshcommError | None:
        """Act like a launcher that checks its processes. patient: if False, the clock advances until something is due.

        Return the error if the job cannot continue.
        """
        replacing = self.replacing
        actors = self._shared.scheduler.actors
        # A lost rank is handled only once its program has ended. Until then, all of its calls fail.
        lost = {process: self._unseen.pop(process) for process in [*self._unseen] if actors[process].ended}
        if lost:
            failures = {
                process: Failure(process, self._name(process), self._clock, what, code=137, raised=False)
                for process, what in lost.items()
            }
            if not replacing.lost(failures, any(candidate.ended_well for candidate in actors)):
                self._error = self._cannot_be_replaced([*lost])
                return self._error
        if not patient and not lost and replacing.due:
            self._clock = max(self._clock, min(replacing.due.values()))
        for each in replacing.starts():
            number = replacing.started(each)
            made = self._replacement(each)
            made.replaces = number
            self._shared.scheduler.add(made)
        replacing.lose_patience()
        replacing.grow(any(candidate.ended_well for candidate in actors))
        while len(self.announced) < replacing.number:
            self.announced.append(announcement_of(replacing.store, len(self.announced) + 1))
            for generations in self.generations.values():
                if generations.latest < len(self.announced):
                    generations.add(self.announced[-1])
            self._shared.break_calls()
        return None

    def is_over(self) -> bool:
        """Return whether every rank of the mesh has ended. Actors that wait to join would then wait forever."""
        actors = self._shared.scheduler.actors
        return all(actors[process].ended_well for process in self.replacing.places.processes)

    def irreplaceable(self, actor: Actor) -> MeshcommError | None:
        """Return the error if lost ranks cannot be replaced because `actor` or other ranks have ended.

        As under a launcher, a new process must synchronize with all of the other processes.
        """
        actors, lost = self._shared.scheduler.actors, list[int]()
        if actor.lost:
            takes_part = actor.process in self.replacing.places.processes
            lost = [actor.process] if takes_part and any(candidate.ended_well for candidate in actors) else []
        elif actor.ended_well and (generations := self.generations.get(actor.process)) is not None:
            since = [announcement.lost for announcement in self.announced[generations.joined.number :]]
            lost = sorted({process for ended in (*since, self._unseen) for process in ended})
        return self._cannot_be_replaced(lost) if lost else None

    def _name(self, process: int) -> str:
        return self._shared.scheduler.actors[process].name

    def _cannot_be_replaced(self, lost: Sequence[int]) -> MeshcommError:
        actors = self._shared.scheduler.actors
        failed = {candidate.rank: candidate.error for candidate in actors if candidate.error is not None}
        ended = [candidate.rank for candidate in actors if candidate.ended_well]
        who = self._name(lost[0]) if len(lost) == 1 else ranks_text(lost)
        were, have = "was" if len(lost) == 1 else "were", "has" if len(ended) == 1 else "have"
        why = f"{ranks_text(ended)} {have} ended" if ended else "too few processes are left"
        by_rank: dict[int, BaseException] = {rank: Lost(self.lost_at[rank]) for rank in lost}
        return RankFailed(
            f"{who} {were} lost and cannot be replaced: {why}",
            given="\n".join(f"rank {rank} was lost {self.lost_at[rank]}" for rank in lost),
            expected="all other ranks to be still running, because a new process must synchronize with all of them"
            if ended
            else "a new process for each lost rank, by elastic.replace, or enough other processes for elastic.min",
            hint="meshcomm run --replace also ends such a job and names the lost rank; --max-restarts starts it again",
            by_rank={**failed, **by_rank},
        )


@final
class SimulatedGenerations(Generations):
    """The generations that one simulated process knows about."""

    def __init__(self, losses: Losses, actor: Actor, wait: Callable[[Actor, str, float], None]) -> None:
        self._losses, self._actor, self._wait = losses, actor, wait
        number = actor.replaces
        losses.replacing.store.set(keys.WAITS.format(number, actor.process), "")
        while len(losses.announced) < number:
            self._wait_for_next()
        super().__init__(actor.process, number, losses.announced)
        losses.generations[actor.process] = self

    def join(self) -> Generation:
        joined = super().join()
        processes, process = joined.processes, self._actor.process
        self._actor.rank = processes.index(process) if processes else process
        return joined

    def all_done(self, ends: bool) -> bool:
        return all_done(self._losses.replacing.store, self.joined.number)

    def _await_part(self) -> None:
        while not self._takes_part():
            self._wait_for_next()

    def _wait_for_next(self) -> None:
        self._wait(self._actor, keys.GENERATION.format(len(self._losses.announced) + 1), math.inf)


@final
class LaunchersStore:
    """The launcher's access to the shared values of a simulation. Its accesses are not counted as a rank's operations."""

    def __init__(self, values: dict[str, bytes]) -> None:
        self._values = values

    def set(self, key: str, value: str) -> None:
        self._values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self._values[key]

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._values.setdefault(key, desired.encode())
