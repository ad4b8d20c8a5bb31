"""`mesh.trace(...)`: what every rank did inside a block, brought together in one file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from os import PathLike
from pathlib import Path
from time import perf_counter as clock
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

from meshcomm.comm.spans import Spans
from meshcomm.comm.stragglers import host
from meshcomm.errors import StoreError, UnsupportedOp
from meshcomm.mesh.chrome import part_of, write

if TYPE_CHECKING:
    from meshcomm.mesh.metrics import Metrics

# Of all ranks together; one rank's part has some 20 bytes a call.
_MAX_BYTES: Final = 1 << 40


class _Clock(NamedTuple):
    """One rank's monotonic clock: when it entered and left an exchange that all ranks made.

    host: equal for ranks that share the clock. opened: when the block began. dropped: calls not kept.
    """

    rank: int
    host: int
    entered: float
    left: float
    opened: float
    dropped: int


def offsets(clocks: Sequence[_Clock]) -> dict[int, tuple[float, float]]:
    """By rank, the seconds to add to its clock for that of the first one, and how far that may be off.

    Nobody leaves the exchange before all have entered it, which bounds the offset from both sides: the middle is
    off by half of their distance at most. Ranks of one host share a clock, and the tightest bounds.
    """
    at: dict[int, list[_Clock]] = {}
    for each in clocks:
        at.setdefault(each.host, []).append(each)
    here = at[clocks[0].host]
    found = {each.rank: (0.0, 0.0) for each in here}
    for there in at.values():
        if there is not here:
            least = max(each.entered for each in here) - min(each.left for each in there)
            most = min(each.left for each in here) - max(each.entered for each in there)
            found |= {each.rank: ((least + most) / 2, (most - least) / 2) for each in there}
    return found


@final
class Trace:
    """A block in which every call of this rank along the mesh is kept; see `Mesh.trace`.

    path: of the file. dropped: calls of this rank that were too many to keep; known after the block.
    """

    def __init__(self, mesh: Metrics, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self.dropped = 0
        self._mesh = mesh
        self._dims = [dim for dim, size in mesh.layout.dims.items() if size > 1][::-1]
        self._spans = Spans()
        self._opened = 0.0

    def __enter__(self) -> Trace:
        if self._mesh.spans is not None:
            raise UnsupportedOp(
                f"a trace inside a trace on {self._mesh.label}",
                given=f"mesh.trace({str(self.path)!r}) while another is taken",
                expected="one trace at a time of each mesh",
                hint="end the outer block first",
            )
        self._opened = self._spans.step_began = clock()
        self._mesh.trace_into(self._spans)
        return self

    def stretch(self, name: str, lane: str = "program") -> AbstractContextManager[None]:
        """A block shown under `name` in a lane of its own, as in `with trace.stretch("data"):`."""
        return self._spans.stretch(lane, name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        closed = clock()
        self._mesh.trace_into(None)
        self.dropped = self._spans.dropped
        for span in self._spans.found:
            span.left = closed if span.left is None else span.left
        facts: dict[str, Any] = {"meshcomm": dict(self._mesh.dims)}
        if error is not None:
            # The others may never come: what this rank did stands alone, and must not hide the error.
            path = self.path.with_suffix(f".rank{self._mesh.rank}{self.path.suffix}")
            with suppress(OSError):
                write(path, [self._part(-self._opened)], {**facts, "alone": True})
            return
        # The second time nobody is late, which is what makes the bounds tight.
        self._all(None)
        entered = clock()
        self._all(None)
        mine = _Clock(self._mesh.rank, host(), entered, clock(), self._opened, self.dropped)
        clocks = [_Clock(*each) for each in self._all(tuple(mine))]
        ahead = offsets(clocks)
        origin = min(each.opened + ahead[each.rank][0] for each in clocks)
        parts = self._gathered(self._part(ahead[self._mesh.rank][0] - origin))
        facts |= {
            "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "dropped": {str(each.rank): each.dropped for each in clocks if each.dropped},
            "clock_error_s": {str(rank): error_s for rank, (_, error_s) in ahead.items() if error_s},
        }
        problem = ""
        if parts is not None:
            try:
                write(self.path, parts, facts)
            except OSError as failed:
                problem = str(failed)
        problem = "".join(self._all(problem))
        if problem:
            raise StoreError(
                f"the trace {self.path} could not be written",
                given=problem,
                expected="a path on the first rank's host that can be written",
                hint='mesh.trace("trace.json")',
            )

    def _part(self, shift_s: float) -> bytes:
        mesh, spans = self._mesh, self._spans.found
        coords = " ".join(f"{dim}={coord}" for dim, coord in mesh.coords.items())
        lanes = [family.name for family in mesh.plan.families]
        for span in spans:
            assert span.left is not None
            span.began, span.left = span.began + shift_s, span.left + shift_s
            span.waits = [(since + shift_s, now + shift_s) for since, now in span.waits]
        return part_of(mesh.rank, f"rank {mesh.rank} ({coords})", lanes, spans, mesh.groups_by_label)

    def _all(self, mine: Any) -> list[Any]:
        """What every rank of the mesh gives, in the order of their coords."""
        found = [mine]
        for dim in self._dims:
            found = [each for part in self._mesh.objects.all_gather(dim, found) for each in part]
        return found

    def _gathered(self, mine: bytes) -> list[bytes] | None:
        """All parts, in the order of their ranks' coords, on the first rank of the mesh; None on the others."""
        found = [mine]
        for dim in self._dims:
            parts = self._mesh.objects.gather(dim, found, 0, max_bytes=_MAX_BYTES)
            if parts is None:
                return None
            found = [each for part in parts for each in part]
        return found
