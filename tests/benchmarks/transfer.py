"""Weights from one mesh to another, beside gather and broadcast in plain torch: `python -m tests.benchmarks.transfer [--rounds 5]`.

8 processes on Gloo, 4 on each side; about 130 MB of bfloat16. Plain torch gathers as many bytes at once on a rank of the source,
which broadcasts them to all ranks of the target.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import prod
from statistics import median
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

import meshcomm
from meshcomm.commands.measure import slowest
from meshcomm.show.units import seconds_text
from meshcomm.testing import Pool
from tests.benchmarks.table import markdown

HIDDEN: Final = 1024
BUCKET_BYTES: Final = 64 << 20
# By name: the dims of both sides, of 4 ranks each.
CASES: Final[dict[str, tuple[dict[str, int], dict[str, int]]]] = {
    "fsdp=4 -> tp=4": ({"fsdp": 4}, {"tp": 4}),
    "tp=2 fsdp=2 -> copy=2 tp=2": ({"tp": 2, "fsdp": 2}, {"copy": 2, "tp": 2}),
    "pp=2 tp=2 -> tp=4": ({"pp": 2, "tp": 2}, {"tp": 4}),
    "ep=4 -> copy=2 tp=2": ({"ep": 4}, {"copy": 2, "tp": 2}),
}


class Weight(NamedTuple):
    """A weight of the model. axes: by dim, the axis that it splits, outermost first. stage: of the pipeline, 0 or 1."""

    shape: tuple[int, ...]
    axes: dict[str, int]
    stage: int


def model(hidden: int, experts: bool) -> dict[str, Weight]:
    """Return the weights by name: of 6 dense layers, or of 5 layers with 8 experts."""
    column, row, expert = {"tp": 0, "fsdp": 0}, {"tp": 1, "fsdp": 0}, {"ep": 0, "tp": 1}
    narrow, wide = hidden * 11 // 16, hidden * 11 // 4
    weights: dict[str, Weight] = {}
    for layer in range(5 if experts else 6):
        own: dict[str, tuple[tuple[int, ...], dict[str, int]]] = {
            "q": ((hidden, hidden), column),
            "kv": ((hidden // 2, hidden), column),
            "o": ((hidden, hidden), row),
        }
        if experts:
            own |= {"up": ((8, narrow, hidden), expert), "down": ((8, hidden, narrow), expert)}
        else:
            own |= {
                "up": ((wide, hidden), column),
                "gate": ((wide, hidden), column),
                "down": ((hidden, wide), row),
            }
        weights |= {f"{layer}.{name}": Weight(*facts, layer // 3) for name, facts in own.items()}
    return weights


class Side(NamedTuple):
    """A side, and the coords of its ranks, the first of which is rank `first`."""

    dims: dict[str, int]
    first: int

    def coords(self) -> dict[int, dict[str, int]]:
        grid = product(*map(range, self.dims.values()))
        return {
            self.first + at: dict(zip(self.dims, numbers, strict=True)) for at, numbers in enumerate(grid)
        }

    def part(self, whole: Tensor, weight: Weight, rank: int) -> Tensor:
        """Return a rank's part of a weight, a view."""
        for dim, axis in weight.axes.items():
            if dim in self.dims:
                whole = whole.chunk(self.dims[dim], axis)[self.coords()[rank][dim]]
        return whole

    def holders(self, weight: Weight) -> list[int]:
        """Return the ranks that have different parts of a weight, or one rank with all of it."""
        ranks = [
            rank for rank, coords in self.coords().items() if coords.get("pp", weight.stage) == weight.stage
        ]
        return ranks if any(dim in self.dims for dim in weight.axes) else ranks[:1]

    def tensor(self, part: Tensor, weight: Weight, mesh: meshcomm.Mesh) -> Tensor:
        """Return a rank's part as a DTensor."""
        dims = tuple(dim for dim in self.dims if dim not in ("copy", "pp"))
        placements = [Shard(weight.axes[dim]) if dim in weight.axes else Replicate() for dim in dims]
        return DTensor.from_local(part, mesh[dims], placements, run_check=False)


class Gathered:
    """Gather on one rank of the source and broadcast to the target, in plain torch."""

    def __init__(self, weights: Mapping[str, Weight], source: Side, target: Side) -> None:
        self.weights, self.source, self.target = weights, source, target
        self.batches: list[tuple[list[int], list[str]]] = []
        room: dict[tuple[int, ...], int] = {}
        for name, weight in weights.items():
            holders = source.holders(weight)
            nbytes = 2 * prod(weight.shape)
            key = tuple(holders)
            if room.get(key, 0) < nbytes:
                self.batches.append((holders, []))
                room[key] = BUCKET_BYTES
            room[key] -= nbytes
            next(names for ranks, names in reversed(self.batches) if ranks == holders).append(name)
        self.groups: dict[tuple[int, ...], tuple[Any, Any]] = {}
        for ranks in sorted(room):
            self.groups[ranks] = dist.new_group([*ranks]), dist.new_group([ranks[0], *target.coords()])

    def __call__(self, mine: Mapping[str, Tensor]) -> None:
        """Move the weights. mine: this rank's parts."""
        me = dist.get_rank()
        for ranks, names in self.batches:
            gathering, sending = self.groups[tuple(ranks)]
            if me in ranks:
                flat = torch.cat([mine[name].flatten() for name in names])
                parts = [torch.empty_like(flat) for _ in ranks] if me == ranks[0] else None
                if len(ranks) > 1:
                    dist.gather(flat, parts, dst=ranks[0], group=gathering)
                else:
                    parts = [flat]
            if me != ranks[0] and me not in self.target.coords():
                continue
            sizes = [prod(self.weights[name].shape) for name in names]
            bucket = torch.empty(sum(sizes), dtype=torch.bfloat16)
            wholes = {
                name: piece.view(self.weights[name].shape)
                for name, piece in zip(names, bucket.split(sizes), strict=True)
            }
            if me == ranks[0] and parts is not None:
                for rank, part in zip(ranks, parts, strict=True):
                    at = 0
                    for name, whole in wholes.items():
                        room = self.source.part(whole, self.weights[name], rank)
                        room.copy_(part[at : at + room.numel()].view(room.shape))
                        at += room.numel()
            dist.broadcast(bucket, ranks[0], group=sending)
            if me in self.target.coords():
                for name, whole in wholes.items():
                    mine[name].copy_(self.target.part(whole, self.weights[name], me))


class Measured(NamedTuple):
    """Seconds of each round, of the slowest rank, and the largest number of bytes that a rank received per byte that it needs."""

    ours: Sequence[float]
    theirs: Sequence[float]
    received: float


def measured(case: str, rounds: int, hidden: int) -> Measured:
    """Measure a case. Called by: 8 ranks."""
    torch.set_num_threads(1)
    source, target = Side(CASES[case][0], 0), Side(CASES[case][1], 4)
    weights = model(hidden, experts="ep" in source.dims)
    with (
        meshcomm.init(dims={"all": 8}, device="cpu") as every,
        meshcomm.init(dims=source.dims, ranks=range(4), device="cpu") as from_mesh,
        meshcomm.init(dims=target.dims, ranks=range(4, 8), device="cpu") as into_mesh,
        meshcomm.link(from_mesh, into_mesh, bucket_bytes=BUCKET_BYTES) as link,
    ):
        me = every.rank
        side, mesh = (source, from_mesh) if from_mesh.is_member else (target, into_mesh)
        generator = torch.Generator().manual_seed(0)
        mine, expected = {}, {}
        for name, weight in weights.items():
            whole = torch.randn(weight.shape, generator=generator).bfloat16()
            if side is target or side.coords()[me].get("pp", weight.stage) == weight.stage:
                expected[name] = side.part(whole, weight, me).clone()
                mine[name] = expected[name].clone()
        tensors = {name: side.tensor(part, weights[name], mesh) for name, part in mine.items()}
        moved = link.weights(tensors, staging="buckets")
        plain = Gathered(weights, source, target)
        needed = sum(part.nbytes for part in mine.values())

        def ours(version: int) -> None:
            moved.push(version=version).wait() if side is source else moved.pull()

        ways: tuple[Callable[[int], None], ...] = ours, lambda version: plain(mine)
        times: list[list[float]] = [[], []]
        ratio = 0.0
        for number in range(rounds + 1):
            for column, move in zip(times, ways, strict=True):
                if side is target:
                    for part in mine.values():
                        part.fill_(torch.nan)
                before = _exchanged(link)
                every.barrier()
                began = time.perf_counter()
                move(number)
                # The first round creates what later rounds reuse.
                column += [time.perf_counter() - began] * (number > 0)
                assert all(torch.equal(mine[name], part) for name, part in expected.items())
                if side is target and (received := _exchanged(link) - before):
                    ratio = received / needed
        ours_s, theirs_s = slowest(every, times)
        return Measured(ours_s, theirs_s, slowest(every, [[ratio]])[0][0])


def _exchanged(link: meshcomm.transfer.link.Link) -> int:
    return sum(row.nbytes for row in link.stats().rows if row.call == "exchange")


def _text(seconds: Sequence[float]) -> str:
    return f"{seconds_text(min(seconds))} ({seconds_text(median(seconds))})"


def main() -> None:
    """Print the table."""
    from tests.benchmarks import transfer

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=HIDDEN)
    given = parser.parse_args()
    pool = Pool()
    try:
        rows = {
            case: pool.run(transfer.measured, case, given.rounds, given.hidden, ranks=8, timeout_s=600)[0]
            for case in CASES
        }
    finally:
        pool.close()
    columns: dict[str, Callable[[str], str]] = {
        "source -> target": lambda case: case,
        "link, minimum (median)": lambda case: _text(rows[case].ours),
        "gather and broadcast": lambda case: _text(rows[case].theirs),
        "ratio of the minima": lambda case: f"{min(rows[case].ours) / min(rows[case].theirs):.2f}",
        "bytes received / bound": lambda case: f"{rows[case].received:.2f}",
    }
    print(markdown(columns, rows))


if __name__ == "__main__":
    main()
