"""Collectives and messages along dims, against NumPy on every rank's input at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count, product
from typing import Any

import numpy as np
import pytest
import torch

import meshcomm
from meshcomm.layout import Dims, Layout
from meshcomm.mesh import Mesh
from meshcomm.testing import Pool

# All combinations of three dims are simulated; on processes one order of four ranks has a group whose ranks are
# neighbours, one with a stride and one in another order.
DIMS = {"pp": 2, "dp": 2, "tp": 2}
MERGE = {"model": ("pp", "tp"), "data": ("tp", "dp")}
ORDERS = (None, [6, 3, 1, 4, 0, 7, 5, 2])
FEW = {"dp": 2, "tp": 2}
FEW_ORDER = [2, 0, 3, 1]


def names(mesh: Mesh) -> tuple[Dims, ...]:
    """Groups of two, and merged ones of four."""
    return ("pp", "dp", "tp", "model", "data") if mesh.world_size == 8 else ("dp", "tp", "data")


def cover(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Each value of each axis, in as many combinations as the longest axis has values."""
    return [tuple(axis[i % len(axis)] for axis in axes) for i in range(max(map(len, axes)))]


def value(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What `rank` puts in; small whole numbers, so that every dtype adds them exactly."""
    numbers = (torch.arange(max(1, int(np.prod(shape)))) * 7 + rank * 5) % 11 - (
        0 if dtype == torch.uint8 else 4
    )
    x = numbers[: int(np.prod(shape))].reshape(shape)
    if dtype.is_complex:
        return (x + 1j * (x + rank)).to(dtype)
    return x.to(dtype)


def layouts(x: torch.Tensor) -> list[torch.Tensor]:
    """The same values in memory as usual, transposed, and with gaps."""
    if x.ndim < 2:
        gaps = x.new_zeros((*x.shape, 2))[..., 0]
        return [x.clone(), gaps.copy_(x)]
    turned = x.transpose(0, -1).contiguous().transpose(0, -1)
    gaps = x.new_zeros((*x.shape[:-1], x.shape[-1] * 2))[..., ::2]
    return [x.clone(), turned, gaps.copy_(x)]


def on_processes(check: Callable[[Mesh], None]) -> None:
    with meshcomm.init(
        dims=FEW, merge={"data": ("tp", "dp")}, rank_order=FEW_ORDER, device="cpu", timeout_s=30
    ) as mesh:
        check(mesh)


def everywhere(pool: Pool, check: Callable[[Mesh], None]) -> None:
    """Simulated, with the ranks in both orders, and on processes."""
    for order in ORDERS:
        meshcomm.simulate(check, dims=DIMS, merge=MERGE, rank_order=order)
    pool.run(on_processes, check, ranks=4)


def same(got: Any, want: np.ndarray, what: object) -> None:
    array = got.to(torch.float64).numpy() if got.dtype == torch.bfloat16 else got.numpy()
    assert array.shape == want.shape, (what, array.shape, want.shape)
    # Sums of small whole numbers are exact in every dtype here.
    assert (array == want.astype(array.dtype)).all(), what


def inputs(mesh: Mesh, dims: Dims, shape: tuple[int, ...], dtype: torch.dtype) -> list[np.ndarray]:
    found = []
    for rank in mesh.ranks(dims):
        x = value(rank, shape, dtype)
        found.append(x.to(torch.float64).numpy() if dtype == torch.bfloat16 else x.numpy())
    return found


REDUCE = {"sum": np.sum, "min": np.min, "max": np.max, "product": np.prod, "avg": np.mean}
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.complex64,
)
SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (4, 6), (8, 3, 4), (0, 4))


def reduce_everything(mesh: Mesh) -> None:
    for dims, shape in product(names(mesh), SHAPES):
        for layout, (op, oracle), dtype in cover(range(3), list(REDUCE.items()), DTYPES):
            if refused_on_gloo(op, dtype):
                with pytest.raises(meshcomm.MeshcommError, match="is not possible on gloo"):
                    mesh.all_reduce(dims, value(0, (2,), dtype), op)
                continue
            data = np.stack(inputs(mesh, dims, shape, dtype))
            kinds = layouts(value(mesh.rank, shape, dtype))
            x = kinds[layout % len(kinds)]
            if op == "product":  # keep products exact in half precision
                data = np.sign(data)
                x.sign_()
            assert mesh.all_reduce(dims, x, op) is x
            same(x, oracle(data, axis=0), (dims, dtype, op, shape))


def refused_on_gloo(op: str, dtype: torch.dtype) -> bool:
    whole = not (dtype.is_floating_point or dtype.is_complex)
    return (op == "avg" and whole) or (op in ("min", "max", "product") and dtype.is_complex)


def move_everything(mesh: Mesh) -> None:
    turns = count()
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.bool)
    for dims in names(mesh):
        size, coord = mesh.size(dims), mesh.coord(dims)
        for shape in ((size * 2, 3, size), (size, size), (size,)):
            for axis, src in product(range(-len(shape), len(shape)), (0, size - 1)):
                turn = next(turns)
                dtype = dtypes[turn % 5]
                data = inputs(mesh, dims, shape, dtype)
                kinds = layouts(value(mesh.rank, shape, dtype))
                x = kinds[turn % len(kinds)]
                kept = x.clone()
                same(mesh.all_gather(dims, x, axis), np.concatenate(data, axis), ("gather", dims, axis))
                if x.shape[axis] % size == 0:
                    concat = turn % len(shape)
                    parts = [np.split(each, size, axis)[coord] for each in data]
                    got = mesh.all_to_all(dims, x, axis, concat)
                    same(got, np.concatenate(parts, concat), ("all_to_all", dims, axis, concat))
                    if dtype != torch.bool:
                        want = np.split(np.sum(np.stack(data), 0), size, axis)[coord]
                        same(mesh.reduce_scatter(dims, x, axis), want, ("scatter", dims, axis))
                assert torch.equal(x, kept), "the input changed"
                assert mesh.broadcast(dims, x, src=src) is x
                same(x, data[src], ("broadcast", dims, src))


def messages(mesh: Mesh) -> None:
    for dims in names(mesh):
        size, coord, ranks = mesh.size(dims), mesh.coord(dims), mesh.ranks(dims)
        x = value(mesh.rank, (3, 4), torch.float32)
        for number, (offset, wrap) in enumerate(product((0, 1, -1, 2, size, size + 1), (True, False))):
            got = mesh.shift(dims, layouts(x)[number % 3], offset, wrap=wrap)
            source = coord - offset
            if wrap or 0 <= source < size:
                same(got, value(ranks[source % size], (3, 4), torch.float32).numpy(), (dims, offset))
            else:
                assert got is None
        # All with all in an order that would deadlock blocking sends; sizes differ by sender.
        peers = [c for c in range(size) if c != coord]
        sends = [(value(mesh.rank, (coord + 1, 2), torch.int64), c) for c in peers]
        outs = [(torch.zeros(c + 1, 2, dtype=torch.int64), c) for c in peers]
        for (_, c), got in zip(outs, mesh.exchange(dims, sends, outs), strict=True):
            same(got, value(ranks[c], (c + 1, 2), torch.int64).numpy(), ("exchange", dims, c))
        if coord == 0:
            mesh.send(dims, x, dst=size - 1)
            handle = mesh.isend(dims, x * 2, dst=size - 1, tag=5)
            handle.wait()
            handle.wait()
        if coord == size - 1:
            late = mesh.irecv(dims, torch.zeros(4, 3).T, src=0, tag=5)
            first = mesh.recv(dims, torch.zeros(3, 4), src=0)
            theirs = value(ranks[0], (3, 4), torch.float32).numpy()
            same(first, theirs, "recv")
            same(late.wait(), theirs * 2, "irecv")
            assert late.is_completed()
        mesh.barrier(dims)
    mesh.barrier()


def asynchronous(mesh: Mesh) -> None:
    for dims in names(mesh):
        x = value(mesh.rank, (4, 6), torch.float32).T
        data = [each.T for each in inputs(mesh, dims, (4, 6), torch.float32)]
        reduced = mesh.all_reduce(dims, x.contiguous(), async_op=True)
        gathered = mesh.all_gather(dims, x, axis=1, async_op=True)
        sliced = mesh.reduce_scatter(dims, x.repeat(4, 1), async_op=True) if mesh.size(dims) == 4 else None
        same(gathered.wait(), np.concatenate(data, 1), dims)
        same(reduced.wait(), np.sum(np.stack(data), 0), dims)
        assert reduced.wait() is reduced.wait()
        if sliced is not None:
            same(sliced.wait(), np.sum(np.stack(data), 0), dims)


@pytest.mark.parametrize(
    "check", [reduce_everything, move_everything, messages, asynchronous], ids=lambda check: check.__name__
)
def test_against_numpy(pool: Pool, check: Callable[[Mesh], None]) -> None:
    everywhere(pool, check)


def test_the_layout_says_what_the_mesh_gathers() -> None:
    layout = Layout(DIMS, merge=MERGE)
    assert layout.group_of(5, "data").tolist() == [4, 6, 5, 7]
    assert layout.group_of(5, ("tp", "dp")).tolist() == [4, 6, 5, 7]
