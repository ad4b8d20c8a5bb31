"""Exchanges plain records among all ranks of a mesh: failures, call totals, stragglers."""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from meshcomm.errors import CallMismatchError, CommunicationError, MeshcommError, TrainingError
from meshcomm.layout.sizes import ranks_text
from meshcomm.show.page import Cells, Line, as_text, page_view
from meshcomm.show.stats import spread_page
from meshcomm.watching.callsite import caller, is_ours
from meshcomm.watching.recorder import FlightRecorder
from meshcomm.watching.spans import host
from meshcomm.watching.verdict import alike, majority

if TYPE_CHECKING:
    from rich.console import RenderableType

    from meshcomm.mesh.mesh import Mesh

T = TypeVar("T")


def ranks_of(mesh: Mesh) -> list[int]:
    """Return the ranks of the mesh, in the order of the layout's grid."""
    return [int(rank) for rank in mesh.layout.ranks.flat]


def is_first(mesh: Mesh) -> bool:
    """Return whether this is the lowest rank of the mesh, which writes the files of a run."""
    return mesh.rank == min(ranks_of(mesh))


def of_every_rank(mesh: Mesh, mine: Any) -> list[Any]:
    """Return each rank's plain data, in the order of `ranks_of`.

    Called by every rank. Gathers objects once per dim.
    Raises CallMismatchError, on every rank, if ranks exchange records in different calls of the program.
    """
    inner, outer = _frames()
    # Paths and lines would make the sizes of messages depend on the host.
    code = zlib.crc32(f"{inner.f_globals.get('__name__')}.{inner.f_code.co_qualname}".encode())
    records = _of_all(mesh, [f"{code:08x}", mine])
    if any(facts != records[0][0] for facts, _ in records):
        raise _differing(mesh, _of_all(mesh, f"{outer.f_code.co_qualname} at {caller()}"))
    return [record for _, record in records]


def _of_all(mesh: Mesh, mine: Any) -> list[Any]:
    records: list[Any] = [mine]
    for dim in reversed(list(mesh.layout.dims)):
        records = [record for part in mesh.objects.all_gather(dim, records) for record in part]
    return records


def _frames() -> tuple[FrameType, FrameType]:
    """Return the frames of the function of meshcomm that exchanges records, and of the function that the program calls."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    assert frame is not None
    inner = outer = frame
    while outer.f_back is not None and is_ours(outer.f_back.f_code.co_filename) > 0:
        outer = outer.f_back
    return inner, outer


def _differing(mesh: Mesh, of_ranks: Sequence[str]) -> CallMismatchError:
    """Return an error that names the calls of up to 8 groups of ranks."""
    calls = dict(zip(ranks_of(mesh), of_ranks, strict=True))
    lines = [f"{ranks_text(sorted(ranks))}: {calls[ranks[0]]}" for ranks in alike(ranks_of(mesh), calls)]
    return CallMismatchError(
        "ranks are in different calls, in which all ranks exchange records",
        given="\n".join(lines[:8]),
        expected="the same calls on every rank of the mesh, in the same order",
        hint="call it on every rank, outside of `if mesh.rank == 0:`; print or write the result on one rank",
        mismatched_ranks=tuple(sorted(majority(calls)[1])),
    )


def on_all_ranks(mesh: Mesh, what: str, action: Callable[[], T]) -> T:
    """Run `action` on this rank and return its result once every rank of the mesh has succeeded.

    what:      completes the text "rank 3 could not ...", as in "resume from runs/x".
    Called by: every rank of the mesh. The action must not communicate, unless it makes its calls also where it fails.
    Raises:    the action's MeshcommError if it fails with one, or TrainingError if it fails with another exception.
               The other ranks raise TrainingError with the same text and the name of the lowest rank that failed.
    """
    failure: MeshcommError | None = None
    result: T | None = None
    could_not = f"{mesh.label} could not {what}"
    try:
        result = action()
    except MeshcommError as error:
        failure = error
    except Exception as error:
        failure = TrainingError(could_not, given=f"{type(error).__name__}: {error}")
        failure.__cause__ = error
    failures: list[Any] = []
    try:
        failures = of_every_rank(
            mesh, failure and [failure.what, failure.given, failure.expected, failure.hint]
        )
    except (CommunicationError, CallMismatchError):
        if failure is None:
            raise
    if failure is not None:
        raise failure from failure.__cause__
    for rank, failed in sorted(zip(ranks_of(mesh), failures, strict=True)):
        if failed:
            words, given, expected, hint = failed
            could_not = f"{mesh.layout.label(rank)} could not {what}"
            words = words if words == could_not else f"{could_not}: {words}"
            raise TrainingError(words, given=given, expected=expected, hint=hint)
    return result  # type: ignore[return-value]


# -- sums of calls ---------------------------------------------------------------------------------------


class Spread(NamedTuple):
    """The calls of one kind along one dim, over all ranks that made them.

    calls, nbytes: totals over the ranks.
    mean_s: the average time in seconds for which the calls blocked a rank.
    fastest, slowest: the ranks that were blocked for the shortest and longest time; the lowest rank if there is a tie.
    Times are None if a rank's time is unknown.
    """

    dim: str
    call: str
    async_op: bool
    ranks: int
    calls: int
    nbytes: int
    mean_s: float | None
    fastest: int
    fastest_s: float | None
    slowest: int
    slowest_s: float | None


@dataclass(frozen=True, slots=True)
class StatsOfAll:
    """The result of `Debug.global_stats`, the same on every rank."""

    seconds: float
    rows: tuple[Spread, ...] = field(repr=False)

    def facts(self) -> dict[str, Any]:
        """Return JSON-serializable data."""
        return {"seconds": self.seconds, "rows": [row._asdict() for row in self.rows]}

    def __rich__(self) -> RenderableType:
        """Return a table with a line for each call on each dim."""
        return page_view(spread_page(self.facts()))

    def __str__(self) -> str:
        return as_text(self.__rich__())


def stats_of_all(records: Iterable[Sequence[Any]], dims: Sequence[str]) -> StatsOfAll:
    """`records` contains (rank, seconds, `Stats.sums`) for each rank, and `dims` lists the dims in display order."""
    by_call: dict[tuple[str, str, bool], dict[int, tuple[int, int, float | None]]] = {}
    longest = 0.0
    for rank, seconds, sums in records:
        longest = max(longest, seconds)
        for dim, call, async_op, calls, nbytes, spent in sums:
            by_call.setdefault((dim, call, async_op), {})[rank] = calls, nbytes, spent
    order = list(dict.fromkeys([*dims, *(key[0] for key in by_call)]))
    rows = [_spread(key, by_rank) for key, by_rank in by_call.items()]
    return StatsOfAll(longest, tuple(sorted(rows, key=lambda row: order.index(row.dim))))


def _spread(key: tuple[str, str, bool], by_rank: Mapping[int, tuple[int, int, float | None]]) -> Spread:
    calls, nbytes = sum(row[0] for row in by_rank.values()), sum(row[1] for row in by_rank.values())
    spent = {rank: seconds for rank, (_, _, seconds) in sorted(by_rank.items()) if seconds is not None}
    if len(spent) < len(by_rank):
        return Spread(*key, len(by_rank), calls, nbytes, None, min(by_rank), None, min(by_rank), None)
    fastest, slowest = min(spent, key=spent.__getitem__), max(spent, key=spent.__getitem__)
    mean_s, least_s, most_s = fmean(spent.values()), spent[fastest], spent[slowest]
    return Spread(*key, len(by_rank), calls, nbytes, mean_s, fastest, least_s, slowest, most_s)


# -- stragglers ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When each coord arrived at the most recent calls in one group.

    mean_s, worst_s: how many seconds the coord arrived after the first rank of the group.
    last: fraction of the calls in which the coord arrived last, from 0 to 1.
    calls: number of compared calls, at most 256.
    """

    ranks: tuple[int, ...]
    mean_s: tuple[float, ...]
    worst_s: tuple[float, ...]
    last: tuple[float, ...]
    calls: int

    @property
    def latest(self) -> int:
        """The coord with the latest average arrival."""
        return max(range(len(self.ranks)), key=self.mean_s.__getitem__)


class Straggler(NamedTuple):
    """The rank that arrives latest on average along a dim of the mesh, and its delay after the first rank in seconds."""

    rank: int
    mean_s: float


@dataclass(frozen=True, slots=True)
class Stragglers:
    """The result of `Debug.stragglers`. Lists, for each dim, this rank's group and the rank of the mesh that arrives latest.

    hosts: number of hosts. If there is one host, all times come from a single clock. With several hosts, the
    wall clocks are compared, and offsets between the clocks add to the times.
    """

    groups: Mapping[str, Arrivals] = field(repr=False)
    latest: Mapping[str, Straggler]
    hosts: int

    def __rich__(self) -> RenderableType:
        """Return a table with a line for each coord of each dim."""
        names = ("dim", "coord", "rank", "mean ms", "worst ms", "last to arrive")
        rows = [
            (
                f"{dim}, {group.calls} calls",
                str(coord),
                str(rank),
                f"{group.mean_s[coord] * 1e3:.3f}",
                f"{group.worst_s[coord] * 1e3:.3f}",
                f"{group.last[coord]:.0%}",
            )
            for dim, group in self.groups.items()
            for coord, rank in enumerate(group.ranks)
        ]
        latest = "; ".join(
            f"{dim}: rank {straggler.rank}, {straggler.mean_s * 1e3:.3f} ms"
            for dim, straggler in self.latest.items()
        )
        below = f"latest of the mesh along {latest}" if latest else "no dim of two ranks or more"
        head = Line("arrival after the first rank of the group")
        return page_view([head, Cells(names, tuple(rows), frozenset(names[1:]), once=1), Line(below)])

    def __str__(self) -> str:
        return as_text(self.__rich__())


def arrivals(began: Sequence[Mapping[int, int]], ranks: Sequence[int]) -> Arrivals:
    """began: for each coord, maps call numbers to start times in nanoseconds. Calls that some rank did not record are ignored.

    >>> found = arrivals([{1: 0, 2: 0}, {2: 10**6, 1: 3 * 10**6, 3: 9}], ranks=[4, 5])
    >>> found.mean_s, found.worst_s, found.last, found.calls
    ((0.0, 0.002), (0.0, 0.003), (0.0, 1.0), 2)
    """
    shared = sorted(set.intersection(*map(set, began)))
    # Indexed by call, then by coord.
    times = [[of_coord[number] for of_coord in began] for number in shared]
    late = [[(when[coord] - min(when)) / 1e9 for when in times] for coord in range(len(ranks))]
    last = [when.index(max(when)) for when in times]
    count = max(1, len(shared))
    return Arrivals(
        tuple(ranks),
        tuple(sum(seconds) / count for seconds in late),
        tuple(max(seconds, default=0.0) for seconds in late),
        tuple(last.count(coord) / count for coord in range(len(ranks))),
        len(shared),
    )


def stragglers(mesh: Mesh, recorders: Mapping[str, FlightRecorder]) -> Stragglers:
    """Compare the arrivals along each dim of `recorders`, then over the whole mesh. Called by every rank of the mesh.

    recorders: the recorders of this rank's groups, in the same order on all ranks.
    """
    ahead = time.time_ns() - time.perf_counter_ns()
    # Collect everything before the first exchange, because the exchange is recorded too.
    began = {
        dim: {number: round(recorder.began(number) * 1e9) for number in recorder.remembered()}
        for dim, recorder in recorders.items()
    }
    hosts = len(set(of_every_rank(mesh, host())))
    # All processes on a host share the monotonic clock. Hosts share only the wall clock.
    shift = ahead if hosts > 1 else 0
    groups = {}
    for dim, recorder in recorders.items():
        begins = {number: when + shift for number, when in began[dim].items()}
        groups[dim] = arrivals(mesh.objects.all_gather(dim, begins), recorder.ranks)
    own_latest = {
        dim: (group.mean_s[group.latest], group.ranks[group.latest]) for dim, group in groups.items()
    }
    records = of_every_rank(mesh, own_latest)
    latest = {dim: max(record[dim] for record in records) for dim in own_latest}
    return Stragglers(groups, {dim: Straggler(rank, mean_s) for dim, (mean_s, rank) in latest.items()}, hosts)
