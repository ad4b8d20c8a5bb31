"""Did the simulated ranks of a group call alike in every step? Compared as soon as all have come to its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final

from meshcomm.comm.recorder import Recorder
from meshcomm.comm.step_verdict import difference, error_of, finding
from meshcomm.errors import CallMismatchError
from meshcomm.simulator.scheduler import Scheduler


@final
class StepGroup:
    """What the ranks of one group have noted. recorders, coords: by rank."""

    def __init__(self, label: str, ranks: list[int]) -> None:
        self.label = label
        self.ranks = ranks
        self.recorders: dict[int, Recorder] = {}
        self.coords: dict[int, Mapping[str, int]] = {}

    def differs_in(self, step: int) -> bool:
        """Whether ranks differ up to `step`; False while some have not come to its end."""
        if any(rank not in self.recorders or self.recorders[rank].steps.step < step for rank in self.ranks):
            return False
        sums = {self.recorders[rank].steps.sums.get(step) for rank in self.ranks}
        return len(sums - {None}) > 1

    def error(self) -> CallMismatchError | None:
        """The error for ranks that differ in a step, as far as they have come."""
        statuses: dict[int, Any] = {
            rank: {
                "coords": self.coords[rank],
                "groups": [{"label": self.label, "steps": recorder.steps.told()}],
            }
            for rank, recorder in self.recorders.items()
        }
        found = difference(self.label, self.ranks, statuses)
        return None if found is None else error_of(finding(found, statuses))


@final
class StepBoard:
    """The notes of all ranks of a simulation, by mesh and group."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._groups: dict[tuple[str, str], StepGroup] = {}

    def add(self, prefix: str, rank: int, coords: Mapping[str, int], recorder: Recorder) -> StepGroup:
        """The group of `recorder`, which is that of `rank`."""
        key = (prefix, recorder.label)
        group = self._groups.setdefault(key, StepGroup(recorder.label, recorder.ranks))
        group.recorders[rank], group.coords[rank] = recorder, coords
        return group

    def noted(self, groups: list[StepGroup], step: int) -> None:
        """A rank has come to the end of `step`; ends the simulation where it is the last and ranks differ."""
        for group in groups:
            if group.differs_in(step):
                error = group.error()
                assert error is not None
                self._scheduler.stop(error)
                self._scheduler.check()

    def errors(self) -> Iterator[CallMismatchError]:
        """Where ranks differ already, though not all have come as far: for ranks that can go no further."""
        for group in self._groups.values():
            error = group.error()
            if error is not None:
                yield error
