"""How long does a call take beside another? Both in turn, round by round, on real ranks: ratios that a noisy machine cannot fake."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Final, NamedTuple

import torch

from meshcomm.bench.calls import Call, device_of, pair
from meshcomm.errors import UnsupportedOp
from meshcomm.mesh import Mesh
from meshcomm.predict.times import Operation

# How long a round of one way should last, for the clock and the start of the calls not to matter.
ROUND_S: Final = 0.02
_MOST_CALLS: Final = 10_000


class Item(NamedTuple):
    """One operation of one size along one dim. size_bytes: as `counted_bytes` gives it."""

    dim: str
    operation: Operation
    size_bytes: int


class Skipped(NamedTuple):
    """What is not measured, and why. operation: None for all of them."""

    dim: str
    operation: str | None
    why: str


def in_turn(
    ways: Mapping[str, Callable[[], object]],
    rounds: int,
    calls: int,
    align: Callable[[], object] | None = None,
    finish: Callable[[], object] | None = None,
) -> dict[str, list[float]]:
    """Seconds per call of each way: `rounds` times `calls` calls of one, then of the next.

    Every other round goes through the ways backwards, so that none always has the same one before it.
    align: called before each block, so that all ranks start together. finish: called after each, before
        the clock stops: returns when what the calls have begun is done.
    One round before the others is not counted.
    """
    found: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways.items())
    for number in range(rounds + 1):
        for name, call in order if number % 2 else order[::-1]:
            if align is not None:
                align()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            if finish is not None:
                finish()
            seconds = (time.perf_counter() - start) / calls
            if number > 0:
                found[name].append(seconds)
    return found


class Measured(NamedTuple):
    """Seconds per call of the slowest rank, round by round; equal on all ranks. calls: of each round."""

    item: Item
    calls: int
    ours_s: tuple[float, ...]
    torch_s: tuple[float, ...]


def sweep(
    mesh: Mesh,
    items: Sequence[Item],
    rounds: int,
    *,
    alone: bool = False,
    round_s: float = ROUND_S,
    advance: Callable[[Item], None] = lambda _: None,
) -> tuple[list[Measured], list[Skipped]]:
    """Measure every item; what a backend lacks is skipped, with the reason that it gives.

    All groups along a dim run at the same time, as in a training step; alone: only the group of the
    mesh's first rank, while the others wait. advance: told of each item before it begins.

    Called by: every rank of the mesh.
    """
    found: list[Measured] = []
    skipped: list[Skipped] = []
    lacking: set[tuple[str, str]] = set()
    for item in items:
        advance(item)
        if (item.dim, item.operation) in lacking:
            continue
        try:
            found.append(_measure(mesh, item, rounds, alone, round_s))
        except UnsupportedOp as error:
            # Raised on all ranks alike, before a byte moves.
            lacking.add((item.dim, item.operation))
            skipped.append(Skipped(item.dim, item.operation, f"{error.what}: {error.expected}"))
    return found, skipped


def _measure(mesh: Mesh, item: Item, rounds: int, alone: bool, round_s: float) -> Measured:
    calls = pair(mesh, item.dim, item.operation, item.size_bytes)
    # All groups connect, and all ranks hear alike of what the backend lacks.
    calls.ours()
    calls.torch()
    first = int(mesh.layout.ranks.min())
    running = not alone or first in mesh.ranks(item.dim)
    ways: dict[str, Call] = calls._asdict() if running else dict.fromkeys(calls._fields, _nothing)
    device = device_of(mesh, item.dim)

    def together() -> None:
        mesh.barrier()
        _finish(device)

    def times(rounds: int, calls: int) -> list[tuple[float, ...]]:
        found = in_turn(ways, rounds, calls, align=together, finish=lambda: _finish(device))
        return slowest(mesh, list(found.values()))

    # One call says roughly how many fill a quarter of a round, and these how many fill one.
    count = 1
    for share in (0.25, 1.0):
        least = min(map(min, times(1, count)))
        count = min(max(1, ceil(share * round_s / max(least, 1e-9))), _MOST_CALLS)
        if count == 1:
            break
    return Measured(item, count, *times(rounds, count))


def _nothing() -> None:
    pass


def _finish(device: torch.device) -> None:
    """Return when the device has done all that was enqueued; on a CPU it has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def slowest(mesh: Mesh, seconds: Sequence[Sequence[float]]) -> list[tuple[float, ...]]:
    """The largest of all ranks' times, one by one: equal on all of them."""
    worst = torch.tensor(seconds, dtype=torch.float64, device=mesh.device)
    for dim in mesh.dims:
        mesh.all_reduce(dim, worst, "max")
    return [tuple(row) for row in worst.tolist()]
