"""Random pairs of layouts for `link.transfer`, on every rank of a job, beside what torch.chunk gives. Each pair follows from its seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import ExitStack
from math import prod
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

import meshcomm
from meshcomm.transfer import plan
from tests.transfer.oracle import Case, Grid, random_axes, random_case, random_grid

DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip


class Pair(NamedTuple):
    """Two sides. source_mesh, target_mesh: the keys of `meshcomm.init`. reused: whether one mesh is on both sides."""

    source: Case
    target: Case
    source_mesh: dict[str, Any]
    target_mesh: dict[str, Any]
    reused: bool
    dtype: torch.dtype
    stripes: tuple[str, ...] | None
    bucket_bytes: int

    @property
    def pattern(self) -> str:
        return f"{self.source.text} -> {self.target.text}"


def random_pair(seed: int, world: int) -> Pair:
    """Return a pair of layouts on the ranks of a job: apart, partly overlapping, on equal ranks, or one mesh."""
    draw = random.Random(seed)
    axes = random_axes(draw, draw.randint(0, 3))
    most = draw.choice([world // 2, world])
    from_grid = random_grid(draw, "xyz", 0, most)
    free = world - len(from_grid.order)
    reused = draw.random() < 0.15
    if reused:
        into_grid = from_grid
    elif free and draw.random() < 0.5:
        into_grid = random_grid(draw, "uvw", len(from_grid.order), free)
    else:
        into_grid = random_grid(draw, "uvw", draw.randint(0, free), len(from_grid.order))
    source = random_case(draw, from_grid, axes, at=False)
    target = random_case(draw, into_grid, axes, at=False)
    from_keys = _mesh_keys(draw, from_grid)
    into_keys = from_keys if reused else _mesh_keys(draw, into_grid)
    stripes = None if draw.random() < 0.6 else tuple(draw.sample([*into_keys["dims"]], 1))
    dtype = draw.choice(DTYPES)
    nbytes = dtype.itemsize * prod(sum(size for _, size in axis) for axis in axes)
    # Buckets of a byte, too, but not thousands of rounds.
    bucket_bytes = max(draw.choice([1, 7, 100, 1 << 20]), nbytes // 20)
    return Pair(source, target, from_keys, into_keys, reused, dtype, stripes, bucket_bytes)


def _mesh_keys(draw: random.Random, grid: Grid) -> dict[str, Any]:
    """Return a mesh in which the dims of a grid are dims, dims of a view, or merged dims."""
    keys: dict[str, Any] = {"ranks": sorted(grid.order), "rank_order": grid.order}
    dims = dict(grid.dims)
    kind = draw.random()
    if kind < 0.2:
        return {**keys, "dims": {"all": prod(dims.values())}, "views": {"grid": dims}}
    if kind < 0.4 and 4 in dims.values():
        merged = next(name for name, size in dims.items() if size == 4)
        parts = {
            part: size
            for name, of_name in dims.items()
            for part, size in ([(f"{name}a", 2), (f"{name}b", 2)] if name == merged else [(name, of_name)])
        }
        return {**keys, "dims": parts, "merge": {merged: [f"{merged}a", f"{merged}b"]}}
    return {**keys, "dims": dims}


def random_whole(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Return a tensor of random bits, NaNs included."""
    generator = torch.Generator().manual_seed(seed)
    count = prod(shape)
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool().reshape(shape)
    bits = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return bits.view(dtype).reshape(shape)


def strided(values: Tensor, draw: random.Random) -> Tensor:
    """Return equal values, often in memory with other strides."""
    kind = draw.random()
    if values.ndim and kind < 0.25:
        return (
            values.T.contiguous().T if values.ndim == 2 else values.movedim(0, -1).contiguous().movedim(-1, 0)
        )
    if values.ndim and kind < 0.5:
        room = torch.empty([2 * size + 1 for size in values.shape], dtype=values.dtype)
        held = room[tuple(slice(1, None, 2) for _ in values.shape)]
        held.copy_(values)
        return held
    return values.clone(memory_format=torch.contiguous_format)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and bits."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(_bytes(each.clone(memory_format=torch.contiguous_format)) for each in (one, other)))


def _bytes(contiguous: Tensor) -> Tensor:
    return contiguous.as_strided((contiguous.numel(),), (1,)).view(torch.uint8)


def poisoned(values: Tensor, draw: random.Random) -> Tensor:
    """Return memory for `values`, filled with ones bits: NaN for floats."""
    blank = torch.ones_like(values, memory_format=torch.contiguous_format)
    if values.dtype != torch.bool:
        _bytes(blank).fill_(255)
    return strided(blank, draw)


def check_pair(seed: int, world: int, rank: int) -> None:
    """Transfer a pair's tensor three times and compare. Called by: every rank of the job."""
    pair = random_pair(seed, world)
    shape = [sum(size for _, size, _ in axis) for axis in pair.source.axes]
    draw = random.Random(seed * 1000 + rank)
    with ExitStack() as stack:
        source = target = stack.enter_context(meshcomm.init(**pair.source_mesh, device="cpu"))
        if not pair.reused:
            target = stack.enter_context(meshcomm.init(**pair.target_mesh, device="cpu"))
        link = stack.enter_context(
            meshcomm.link(source, target, stripes=pair.stripes, bucket_bytes=pair.bucket_bytes)
        )
        for turn in range(3 if link.is_member else 0):
            whole = random_whole(shape, pair.dtype, seed + turn)
            own, wanted = (
                case.part(whole, case.grid.order.index(rank)) if rank in case.grid.order else None
                for case in (pair.source, pair.target)
            )
            x = None if own is None else strided(own, draw)
            out = None if wanted is None else poisoned(wanted, draw)
            assert link.transfer(x, out, pair.pattern, **pair.source.sizes) is out
            assert wanted is None or same_bits(out, wanted), f"{seed}: {pair}\n{out}\n{wanted}"
            assert own is None or same_bits(x, own), f"{seed}: x changed"


def check_pairs_on_process(seeds: Sequence[int], least_striped_bytes: int) -> None:
    """Transfer pairs on a rank of a job of processes. least_striped_bytes: see plan.py; small tensors have stripes only with 0."""
    dist.init_process_group("gloo")
    try:
        with patch.object(plan, "_LEAST_STRIPED_BYTES", least_striped_bytes):
            for seed in seeds:
                check_pair(seed, dist.get_world_size(), dist.get_rank())
    finally:
        dist.destroy_process_group()
