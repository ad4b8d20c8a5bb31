"""Do the simulated ranks of a group make the same calls in each step? Compared whenever one ends a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

from meshcomm.comm.desync import error_of, find_desync, last_common
from meshcomm.comm.recorder import Recorder
from meshcomm.errors import CallMismatchError
from meshcomm.simulator.scheduler import Scheduler


@final
class SimulatedSteps:
    """The steps of all ranks of a simulation, by mesh and group, then by rank."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._coords: dict[tuple[str, int], Mapping[str, int]] = {}
        self._groups: dict[tuple[str, str], dict[int, Recorder]] = {}

    def add(self, prefix: str, rank: int, coords: Mapping[str, int], recorder: Recorder) -> None:
        """One more group of `rank`, on the mesh with this prefix."""
        self._coords[prefix, rank] = coords
        self._groups.setdefault((prefix, recorder.label), {})[rank] = recorder

    def noted(self, prefix: str, recorders: Sequence[Recorder]) -> None:
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
        histories = {
            rank: group[rank].steps.told() for rank in next(iter(group.values())).ranks if rank in group
        }
        found = find_desync(label, histories, {rank: self._coords[prefix, rank] for rank in group})
        return None if found is None else error_of(found)
