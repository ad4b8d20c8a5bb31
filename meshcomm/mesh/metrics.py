"""The records of this rank's calls: by group, by step, and of a trace that is being taken."""

from __future__ import annotations

import time
from collections.abc import Collection
from types import CodeType
from typing import final

from meshcomm.comm.flight_recorder import FlightRecorder
from meshcomm.comm.spans import Spans


@final
class Metrics:
    """`mesh.metrics`: what `mesh.stats()`, `mesh.step()` and `mesh.trace()` read and write.

    recorders: of the groups, by the id of the transport: names that share a group share its record.
    opened: when the mesh was opened, on this host's monotonic clock. steps: how many are over; number: of
    the last one, by the program's count. spans: of the trace that is being taken, if any.
    """

    def __init__(self) -> None:
        self.recorders: dict[int, FlightRecorder] = {}
        self.opened = time.perf_counter()
        self.steps = self.number = 0
        self.spans: Spans | None = None

    def step(self, number: int, excluded: Collection[int], ended_at: tuple[CodeType, int]) -> None:
        """The step `number` is over. excluded: ids of recorders that are not compared. See `Mesh.step`."""
        self.steps, self.number = self.steps + 1, number
        for recorder in self.recorders.values():
            recorder.note(self.steps, number, id(recorder) in excluded, ended_at)
        if self.spans is not None:
            self.spans.step(number)

    def trace_into(self, spans: Spans | None) -> None:
        """Add every call to `spans` until the next `trace_into`; None ends it."""
        self.spans = spans
        for recorder in self.recorders.values():
            recorder.trace(spans)

    @property
    def groups(self) -> dict[str, list[int]]:
        """The global ranks of this rank's groups, by label as errors show it."""
        return {recorder.label: recorder.ranks for recorder in self.recorders.values()}
