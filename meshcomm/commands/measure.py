"""The measurements behind `meshcomm bench`: on a live mesh, each call alternates with torch's equivalent, round by round."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from math import ceil
from statistics import median
from typing import Any, Final, NamedTuple, TypeAlias, assert_never

import torch
import torch.distributed as dist
from torch import Tensor

from meshcomm import __version__
from meshcomm.config import TopologyConfig
from meshcomm.errors import ConfigError, UnsupportedOp
from meshcomm.layout import Family, Plan
from meshcomm.mesh import Mesh
from meshcomm.mesh.all_ranks import of_every_rank
from meshcomm.predict.links import Machine, machine, span
from meshcomm.predict.times import COUNTED, DTYPE_BYTES, Operation, bandwidths, counted_bytes
from meshcomm.show.page import Facts

# The target duration of a round, long enough that clock resolution and call startup do not matter.
ROUND_S: Final = 0.02
_MOST_CALLS: Final = 10_000
Call: TypeAlias = Callable[[], object]

# torch's functions on flat tensors, by their names since torch 2.13 or their older names.
_ALL_GATHER: Final[Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Final[Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# -- one call ---------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """A mesh call and a torch.distributed call with the same result."""

    ours: Call
    torch: Call


def device_of(mesh: Mesh, dim: str) -> torch.device:
    """Return the device of tensors for calls along `dim`: with Gloo the CPU, whatever the mesh's device is."""
    on_host = mesh.plan.family(dim).options.backend == "gloo"
    return torch.device("cpu") if on_host else mesh.device


def pair(mesh: Mesh, dim: str, operation: Operation, size_bytes: int) -> Pair:
    """Return `operation` along `dim` as a mesh call, and as a torch.distributed call on the same group. size_bytes: as
    `counted_bytes` returns it.

    The data are float32 zeros, so sums stay zero. If a mesh call returns new memory, torch's call gets a new tensor
    each time. If a mesh call leaves `x` unchanged, torch's call works on a copy. A buffer that both calls accept is allocated
    once. The root is coord 0. Messages go to the next coord.
    """
    n, coord, group, device = mesh.size(dim), mesh.coord(dim), mesh.group(dim), device_of(mesh, dim)
    count = size_bytes // DTYPE_BYTES

    def zeros(elements: int) -> Tensor:
        # Write to the memory: reading pages that were never written costs nothing and would distort the times.
        return torch.empty(elements, dtype=torch.float32, device=device).zero_()

    x = zeros(count)
    match operation:
        case "all_reduce":
            return Pair(lambda: mesh.all_reduce(dim, x), lambda: dist.all_reduce(x, group=group))
        case "all_gather":
            piece = zeros(count // n)
            return Pair(
                lambda: mesh.all_gather(dim, piece, out=x), lambda: _ALL_GATHER(x, piece, group=group)
            )
        case "reduce_scatter":
            part = zeros(count // n)
            return Pair(
                lambda: mesh.reduce_scatter(dim, x, out=part), lambda: _REDUCE_SCATTER(part, x, group=group)
            )
        case "all_to_all":
            return Pair(
                lambda: mesh.all_to_all(dim, x),
                lambda: dist.all_to_all_single(torch.empty_like(x), x, group=group),
            )
        case "broadcast":
            return Pair(
                lambda: mesh.broadcast(dim, x, src=0), lambda: dist.broadcast(x, group=group, group_src=0)
            )
        case "reduce":
            return Pair(
                lambda: mesh.reduce(dim, x, dst=0),
                lambda: dist.reduce(x.clone(), group=group, group_dst=0),
            )
        case "sendrecv":
            return Pair(lambda: mesh.shift(dim, x), partial(_ring, x, group, coord, n))
    assert_never(operation)


def _ring(x: Tensor, group: dist.ProcessGroup, coord: int, n: int) -> Tensor:
    """Send `x` to the next rank of the group."""
    received = torch.empty_like(x)
    ops = [
        dist.P2POp(dist.irecv, received, group=group, group_peer=(coord - 1) % n),
        dist.P2POp(dist.isend, x, group=group, group_peer=(coord + 1) % n),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return received


# -- rounds -----------------------------------------------------------------------------------------


class Item(NamedTuple):
    """One operation at one size along one dim. size_bytes: as `counted_bytes` returns it."""

    dim: str
    operation: Operation
    size_bytes: int


class Skipped(NamedTuple):
    """An operation that is not measured, and the reason. operation: None for all operations."""

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
    """Return the seconds per call of each function in `ways`, for each of `rounds` rounds. A round calls one function
    `calls` times, then the next one.

    Every other round uses the reverse order, so that no function always runs after the same function.
    align: called before each function's turn, so that all ranks start together. finish: called after each turn,
        before the clock stops; returns when the calls have finished.
    An additional first round is a warmup and is not counted.
    """
    seconds_of: dict[str, list[float]] = {name: [] for name in ways}
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
                seconds_of[name].append(seconds)
    return seconds_of


class Measured(NamedTuple):
    """Seconds per call on the slowest rank, for each round; equal on all ranks. calls: the number of calls per round."""

    item: Item
    calls: int
    ours_s: tuple[float, ...]
    torch_s: tuple[float, ...]


def sweep(
    mesh: Mesh, items: Sequence[Item], rounds: int, round_s: float = ROUND_S, progress: bool = False
) -> tuple[list[Measured], list[Skipped]]:
    """Measure every item. Operations that a backend does not support are skipped, with the reason.

    All groups along a dim run at the same time, as in a training step. progress: print a line to stderr before each item.
    Called by: every rank of the mesh.
    """
    measured: list[Measured] = []
    skipped: dict[tuple[str, str], Skipped] = {}
    for number, item in enumerate(items, 1):
        if (item.dim, item.operation) in skipped:
            continue
        if progress:
            print(f"{number} of {len(items)}: {item.operation} along {item.dim}", file=sys.stderr)
        try:
            measured.append(_measure(mesh, item, rounds, round_s))
        except UnsupportedOp as error:
            # Raised on all ranks, before any bytes move.
            why = f"{error.what}: {error.expected}"
            skipped[item.dim, item.operation] = Skipped(item.dim, item.operation, why)
    return measured, list(skipped.values())


def _measure(mesh: Mesh, item: Item, rounds: int, round_s: float) -> Measured:
    ways = pair(mesh, item.dim, item.operation, item.size_bytes)._asdict()
    # Connect all groups, and let unsupported operations raise.
    for call in ways.values():
        call()
    device = device_of(mesh, item.dim)

    def together() -> None:
        mesh.barrier()
        _finish(device)

    def times(rounds: int, calls: int) -> list[tuple[float, ...]]:
        seconds_of = in_turn(ways, rounds, calls, align=together, finish=partial(_finish, device))
        return slowest(mesh, list(seconds_of.values()))

    # Time one call to estimate how many calls fill a quarter of a round, then time that many to size a full round.
    count = 1
    for share in (0.25, 1.0):
        shortest = min(map(min, times(1, count)))
        count = min(max(1, ceil(share * round_s / max(shortest, 1e-9))), _MOST_CALLS)
        if count == 1:
            break
    return Measured(item, count, *times(rounds, count))


def _finish(device: torch.device) -> None:
    """Return when the device has finished all queued work. On a CPU, return immediately."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def slowest(mesh: Mesh, seconds: Sequence[Sequence[float]]) -> list[tuple[float, ...]]:
    """Return the elementwise maximum of the times over all ranks, equal on all ranks."""
    worst = torch.tensor(seconds, dtype=torch.float64, device=mesh.device)
    for dim in mesh.dims:
        mesh.all_reduce(dim, worst, "max")
    return [tuple(row) for row in worst.tolist()]


def chosen_dims(plan: Plan, asked: Sequence[str]) -> tuple[list[Family], list[Skipped]]:
    """Return the families to measure, in plan order, and the omitted ones.

    asked: names of dims, merged dims or views' dims. If empty, all names are used except those that share
        another name's groups.
    Raises UnknownDim, and ConfigError if nothing is left to measure.
    """
    for name in asked:
        plan.layout.digits(name)
    families, skipped = [], []
    for family in plan.families:
        if asked and family.name not in asked:
            continue
        if family.size == 1:
            skipped.append(Skipped(family.name, None, "one rank: nothing moves"))
        elif family.shares is not None and not asked:
            skipped.append(Skipped(family.name, None, f"it shares the groups of {family.shares}"))
        else:
            families.append(family)
    if not families:
        sizes = ", ".join(f"{family.name} = {family.size}" for family in plan.families)
        raise ConfigError(
            "no dim to measure has two ranks or more",
            given=sizes + "".join(f", --dim {name}" for name in asked),
            expected="a dim of two ranks or more",
            hint="--set mesh.dims.DIM=2" if not asked else "leave --dim out",
        )
    return families, skipped


def items(families: Sequence[Family], operations: Sequence[Operation], sizes: Sequence[int]) -> list[Item]:
    """Return each combination of dim, operation and size once, with sizes ascending. Raises ConfigError."""
    chosen = [
        Item(family.name, operation, counted_bytes(operation, size, family.name, family.size))
        for family in families
        for operation in operations
        for size in sorted(sizes)
    ]
    return list(dict.fromkeys(chosen))


@dataclass(frozen=True)
class Asked:
    """The requested measurements. dims: the dims to measure; if empty, all dims. round_s: as for `sweep`."""

    operations: Sequence[Operation]
    sizes: Sequence[int]
    dims: Sequence[str]
    rounds: int
    round_s: float = ROUND_S


def measured_facts(mesh: Mesh, asked: Asked, topology: TopologyConfig, progress: bool) -> Facts:
    """Run the measurements and return JSON-serializable data.

    topology: as `discovered` returns it. progress: whether this rank reports progress on stderr if stderr is a terminal.
    Called by: every rank of the mesh. Raises UnknownDim and ConfigError, on all ranks.
    """
    families, skipped = chosen_dims(mesh.plan, asked.dims)
    requested = items(families, asked.operations, asked.sizes)
    where = machine(topology)
    described = machine_facts(mesh)
    measured, lacking = sweep(mesh, requested, asked.rounds, asked.round_s, progress and sys.stderr.isatty())
    return {
        "machine": described,
        "mesh": {"dims": dict(mesh.dims), "world_size": mesh.world_size},
        "topology": topology.model_dump(mode="json", exclude_none=True),
        "dtype": "float32",
        "counted": {operation: COUNTED[operation] for operation in asked.operations},
        "rounds": asked.rounds,
        "dims": [_dim_facts(mesh, family, where) for family in families],
        "rows": [
            row_facts(dim, mesh.size(dim), operation, size_bytes, calls, (ours_s, torch_s))
            for (dim, operation, size_bytes), calls, ours_s, torch_s in measured
        ],
        "skipped": [row._asdict() for row in (*skipped, *lacking)],
        "fit": None,
    }


def row_facts(
    dim: str,
    ranks: int,
    operation: Operation,
    size_bytes: int,
    calls: int,
    seconds: tuple[Sequence[float], Sequence[float]],
) -> Facts:
    """Return one row. seconds: the slowest rank's seconds per call in each round, for meshcomm and for torch.

    Times are medians over the rounds, ratio is the median of the rounds' ratios, and bandwidths are computed from the medians.
    """
    ratio = median(a / b for a, b in zip(*seconds, strict=True))
    facts: Facts = {"dim": dim, "operation": operation, "bytes": size_bytes, "calls": calls, "ratio": ratio}
    for who, times in zip(("meshcomm", "torch"), seconds, strict=True):
        usual = median(times)
        spread = {"seconds": usual, "least_s": min(times), "most_s": max(times)}
        facts[who] = spread | bandwidths(operation, ranks, size_bytes, usual)
    return facts


def _dim_facts(mesh: Mesh, family: Family, where: Machine | None) -> Facts:
    link = None if where is None else span(mesh.layout.groups(family.name), where).slowest
    facts = {"dim": family.name, "size": family.size, "groups": family.count}
    return facts | {"backend": family.options.backend, "link": link}


def machine_facts(mesh: Mesh) -> Facts:
    """Return this rank's host and device, the host's one-minute load average, and the number of hosts in the mesh.

    Called by: every rank of the mesh.
    """
    on_cuda = mesh.device.type == "cuda"
    facts: Facts = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hosts": len(set(of_every_rank(mesh, socket.gethostname()))),
        "cpus": os.cpu_count() or 1,
        "load": os.getloadavg()[0],
        "processor": platform.machine(),
        "system": platform.system(),
        "device": torch.cuda.get_device_name(mesh.device) if on_cuda else mesh.device.type,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "meshcomm": __version__,
    }
    if on_cuda:
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts
