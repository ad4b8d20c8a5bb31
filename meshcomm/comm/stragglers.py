"""Which rank comes last to the calls that the ranks make together? From when each rank began its last calls."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from meshcomm.comm.flight_recorder import FlightRecorder

if TYPE_CHECKING:
    from rich.console import RenderableType

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Arrivals at the last calls on one group. Lists are by coord.

    ranks: global ranks. mean_s, worst_s: seconds after the first rank of the group. last: share of
    the calls to which this coord came last, 0 to 1. calls: how many were looked at, 256 at most.
    """

    ranks: tuple[int, ...]
    mean_s: tuple[float, ...]
    worst_s: tuple[float, ...]
    last: tuple[float, ...]
    calls: int

    @property
    def latest(self) -> int:
        """The coord that came latest on average."""
        return max(range(len(self.ranks)), key=self.mean_s.__getitem__)


class Straggler(NamedTuple):
    """The rank of the whole mesh that came latest along a dim, on average, in seconds after the first one."""

    rank: int
    mean_s: float


@dataclass(frozen=True, slots=True)
class Stragglers:
    """What `Mesh.stragglers` found.

    groups: by dim, this rank's own group.
    latest: by dim, over all groups of the mesh; the same on every rank.
    hosts:  1: one clock for all. More: their wall clocks were compared, as good as they are set.
    """

    groups: Mapping[str, Arrivals]
    latest: Mapping[str, Straggler]
    hosts: int

    def __rich__(self) -> RenderableType:
        """A table, a line for each coord of each dim."""
        from meshcomm.show.page import Cells, Line, page_view

        names = ("dim", "coord", "rank", "mean ms", "worst ms", "last to come")
        rows = [
            (
                f"{dim}, {each.calls} calls",
                str(coord),
                str(rank),
                f"{each.mean_s[coord] * 1e3:.3f}",
                f"{each.worst_s[coord] * 1e3:.3f}",
                f"{each.last[coord]:.0%}",
            )
            for dim, each in self.groups.items()
            for coord, rank in enumerate(each.ranks)
        ]
        told = "; ".join(
            f"{dim}: rank {at.rank}, {at.mean_s * 1e3:.3f} ms" for dim, at in self.latest.items()
        )
        below = f"latest of the whole mesh along {told}" if told else "no dim of two ranks or more"
        table = Cells(names, tuple(rows), frozenset(names[1:]), once=1)
        return page_view(
            [Line("arrival after the first rank of the group", heading=True), table, Line(below)]
        )

    def __str__(self) -> str:
        from meshcomm.show.page import as_text

        return as_text(self.__rich__())


def arrivals(came: Sequence[Mapping[int, int]], ranks: Sequence[int]) -> Arrivals:
    """Compare when the ranks came: by coord, the nanosecond by sequence number of the call.

    Only calls that every rank still remembers count.

    >>> found = arrivals([{1: 0, 2: 0}, {2: 10**6, 1: 3 * 10**6, 3: 9}], ranks=[4, 5])
    >>> found.mean_s, found.worst_s, found.last, found.calls
    ((0.0, 0.002), (0.0, 0.003), (0.0, 1.0), 2)
    """
    shared = sorted(set.intersection(*map(set, came)))
    # By call, then by coord.
    times = [[each[number] for each in came] for number in shared]
    late = [[(when[coord] - min(when)) / 1e9 for when in times] for coord in range(len(ranks))]
    last = [when.index(max(when)) for when in times]
    count = max(1, len(shared))
    return Arrivals(
        tuple(ranks),
        tuple(sum(each) / count for each in late),
        tuple(max(each, default=0.0) for each in late),
        tuple(last.count(coord) / count for coord in range(len(ranks))),
        len(shared),
    )


def measure(
    named: Mapping[str, FlightRecorder], dims: Sequence[str], gather: Callable[[str, Any], list[Any]]
) -> Stragglers:
    """Compare the arrivals along each of `named`, then over the whole mesh along `dims`.

    named: of each group of this rank one, in the same order on all ranks. dims: the base dims of two ranks or
    more. gather: (dim, object) -> everyone's along it. Called by every rank of the mesh.
    """
    ahead = time.time_ns() - time.perf_counter_ns()
    # All of it before the first call below, which is recorded as well.
    told = {
        dim: {number: round(recorder.began(number) * 1e9) for number in recorder.remembered()}
        for dim, recorder in named.items()
    }
    groups, hosts = {}, 1
    for dim, recorder in named.items():
        rows = gather(dim, (host(), ahead, told[dim]))
        here = len({at for at, _, _ in rows})
        # On one host the monotonic clock is the same for all; across hosts only the wall clock is.
        came = [
            {number: when + (shift if here > 1 else 0) for number, when in calls.items()}
            for _, shift, calls in rows
        ]
        groups[dim] = arrivals(came, recorder.ranks)
        hosts = max(hosts, here)
    latest = {dim: (each.mean_s[each.latest], each.ranks[each.latest]) for dim, each in groups.items()}
    for dim in dims:
        every = gather(dim, (hosts, latest))
        hosts = max(each for each, _ in every)
        latest = {name: max(found[name] for _, found in every) for name in latest}
    return Stragglers(groups, {dim: Straggler(rank, mean) for dim, (mean, rank) in latest.items()}, hosts)


def host() -> int:
    """Equal for two processes that share a monotonic clock: those of one boot of one kernel."""
    try:
        return uuid.UUID(_BOOT.read_text().strip()).int >> 65
    except (OSError, ValueError):
        return uuid.getnode()
