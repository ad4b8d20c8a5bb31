"""Who comes late to the calls that the ranks make together? From when each rank began its last calls."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from meshcomm.comm.communicator import Communicator
from meshcomm.comm.recorder import KEPT, Recorder

if TYPE_CHECKING:
    from rich.console import RenderableType

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Along:
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


@dataclass(frozen=True, slots=True)
class Straggler:
    """The rank of the whole mesh that came latest along a dim, on average."""

    rank: int
    mean_s: float


@dataclass(frozen=True, slots=True)
class Lateness:
    """What `Mesh.lateness` found.

    groups:     by dim, this rank's own group.
    stragglers: by dim, over all groups of the mesh; the same on every rank.
    hosts:      1: one clock for all. More: their wall clocks were compared, as good as they are set.
    """

    groups: Mapping[str, Along]
    stragglers: Mapping[str, Straggler]
    hosts: int

    def __rich__(self) -> RenderableType:
        """A table, a line for each coord of each dim."""
        from meshcomm.show.lateness import lateness_table

        return lateness_table(self.groups, {dim: (s.rank, s.mean_s) for dim, s in self.stragglers.items()})

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=100, color_system=None)
        with console.capture() as capture:
            console.print(self.__rich__())
        return capture.get()


def arrivals(numbers: Sequence[Sequence[int]], came: Sequence[Sequence[int]], ranks: Sequence[int]) -> Along:
    """Compare when the ranks came. `numbers[c][i]` is the number of a call, `came[c][i]` its nanosecond.

    Only calls that every rank still remembers count; number 0 is an empty place.

    >>> found = arrivals([[1, 2, 0], [2, 1, 3]], [[0, 0, 0], [10**6, 3 * 10**6, 9]], ranks=[4, 5])
    >>> found.mean_s, found.worst_s, found.last, found.calls
    ((0.0, 0.002), (0.0, 0.003), (0.0, 1.0), 2)
    """
    times = [dict(zip(own, when, strict=True)) for own, when in zip(numbers, came, strict=True)]
    shared = set.intersection(*(set(each) for each in times)) - {0}
    late: list[list[float]] = [[] for _ in ranks]
    last = [0] * len(ranks)
    for number in sorted(shared):
        when = [each[number] for each in times]
        first = min(when)
        for coord, moment in enumerate(when):
            late[coord].append((moment - first) / 1e9)
        last[when.index(max(when))] += 1
    count = len(shared)
    return Along(
        tuple(ranks),
        tuple(sum(each) / count if count else 0.0 for each in late),
        tuple(max(each, default=0.0) for each in late),
        tuple(each / count if count else 0.0 for each in last),
        count,
    )


def measure(named: Mapping[str, Communicator], base: Sequence[Communicator]) -> Lateness:
    """Compare the arrivals along each of `named`, then over the whole mesh along `base`.

    named: one communicator for each group of this rank, in the same order on all ranks.
    base:  the base dims'. Called by every rank of the mesh.
    """
    # All of it before the first call below, which is recorded as well.
    told = {dim: _told(comm.recorder) for dim, comm in named.items()}
    groups, hosts = {}, 1
    for dim, comm in named.items():
        rows = _gathered(comm, told[dim])
        one_host = len({row[0][0] for row in rows}) == 1
        hosts = max(hosts, len({row[0][0] for row in rows}))
        numbers = [[number for number, _ in row[1:]] for row in rows]
        # On one host the monotonic clock is the same for all; across hosts only the wall clock is.
        came = [[when + (0 if one_host else row[0][1]) for _, when in row[1:]] for row in rows]
        groups[dim] = arrivals(numbers, came, comm.recorder.ranks)
    own = torch.tensor(
        [[float(along.ranks[along.latest]), max(along.mean_s)] for along in groups.values()] or [[0.0, 0.0]],
        dtype=torch.float64,
        device="cpu",
    )
    seen = torch.tensor([hosts], device="cpu")
    for comm in base:
        if comm.size > 1:
            every = _all(comm, own)
            own = every[every[:, :, 1].argmax(0), torch.arange(own.shape[0], device="cpu")]
            seen = _all(comm, seen).max(0).values
    return Lateness(
        groups,
        {dim: Straggler(int(row[0]), float(row[1])) for dim, row in zip(groups, own.tolist(), strict=False)},
        int(seen.item()),
    )


def _told(recorder: Recorder) -> Tensor:
    """(calls + 1, 2): first which host and by how much its wall clock is ahead, then number and time."""
    rows = [[host(), time.time_ns() - time.perf_counter_ns()]]
    rows += [[number, round(recorder.began(number) * 1e9)] for number in recorder.remembered()]
    rows += [[0, 0]] * (KEPT + 1 - len(rows))
    return torch.tensor(rows, dtype=torch.int64, device="cpu")


def host() -> int:
    """Equal for two processes that share a monotonic clock: those of one boot of one kernel."""
    try:
        return uuid.UUID(_BOOT.read_text().strip()).int >> 65
    except (OSError, ValueError):
        return uuid.getnode()


def _gathered(comm: Communicator, x: Tensor) -> list[list[list[int]]]:
    rows: list[list[list[int]]] = _all(comm, x).tolist()
    return rows


def _all(comm: Communicator, x: Tensor) -> Tensor:
    """(size, ...): every rank's x."""
    found = comm.all_gather(x.unsqueeze(0).to(comm.transport.device))
    assert isinstance(found, Tensor)
    return found.cpu()
