"""Every call of this rank during a trace: when it began, returned, and was waited for."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter as clock
from typing import Final, final

from torch import Tensor

from meshcomm.transport.support import name_of
from meshcomm.watching.callsite import caller

# The lane of forward and backward passes, and the lane of `mesh.step`.
PASSES: Final = "passes"
STEPS: Final = "steps"
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
# The number of calls that a trace keeps, at about 500 bytes each.
MOST: Final = 200_000


@final
@dataclass(slots=True)
class Span:
    """One call, or one named section of the program. Times are in seconds on the monotonic clock.

    group: the group's label; "" for a section. lane: the dim or the section's lane. number: a collective's sequence number.
    left: when the call returned to the program. waits: (begin, end) of each wait. at_once: whether the call waits immediately.
    parts: for messages, (direction, peer's coord, tag, sequence number). listed: the shapes of the tensors of a list. root: a coord, or -1 if there is none.
    """

    group: str
    lane: str
    call: str
    site: str
    began: float
    number: int = 0
    nbytes: int = 0
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    parts: Sequence[tuple[str, int | None, int, int]] = ()
    listed: str = ""
    op: str | None = None
    root: int = -1
    left: float | None = None
    at_once: bool = False
    waits: list[tuple[float, float]] = field(default_factory=list)

    def of(self, tensors: Sequence[Tensor]) -> None:
        """Record the shape and dtype of the call's tensor if there is only one, and the shapes of several."""
        if len(tensors) > 1:
            self.listed = " ".join(f"({', '.join(map(str, x.shape))})" for x in tensors)
        if len(tensors) == 1:
            self.shape, self.dtype = tuple(tensors[0].shape), name_of(tensors[0].dtype)


class Spans:
    """The trace of one rank. dropped: the number of calls not kept. step_began: when this step or the trace began."""

    def __init__(self, most: int = MOST) -> None:
        self.found: list[Span] = []
        self.dropped = 0
        self.step_began = clock()
        self._most = most

    def step(self, number: int) -> None:
        """Record that a step has ended. The step's section begins where the previous step ended or where the trace began."""
        span = self.keep(Span("", STEPS, f"step {number}", caller(), self.step_began))
        span.left = self.step_began = clock()

    def keep(self, span: Span) -> Span:
        """Record the start of a call; later facts about it are written to the span."""
        if len(self.found) < self._most:
            self.found.append(span)
        else:
            self.dropped += 1
        return span


@contextmanager
def stretch(spans: Spans | None, lane: str, name: str) -> Iterator[None]:
    """Record the block as a span. Does nothing if `spans` is None, because no trace is being recorded."""
    if spans is None:
        yield
        return
    span = spans.keep(Span("", lane, name, caller(), clock()))
    try:
        yield
    finally:
        span.left = clock()


def host() -> int:
    """Return a number that is equal in all processes on the same kernel boot, which share a monotonic clock."""
    try:
        return uuid.UUID(_BOOT.read_text().strip()).int >> 65
    except (OSError, ValueError):
        return uuid.getnode()
