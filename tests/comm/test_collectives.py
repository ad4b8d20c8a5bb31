"""Collectives and messages along dims on Gloo, against NumPy on every rank's input at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import meshcomm
from meshcomm.layout import Dims, Layout
from meshcomm.mesh import Mesh
from meshcomm.testing import Pool

DIMS = {"pp": 2, "dp": 2, "tp": 2}
MERGE = {"model": ("pp", "tp"), "data": ("tp", "dp")}
ORDERS = (None, [6, 3, 1, 4, 0, 7, 5, 2])
NAMES: tuple[Dims, ...] = ("pp", "dp", "tp", "model", "data", ("tp", "dp"))


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


def each_mesh(check: Callable[[Mesh], None]) -> None:
    for order in ORDERS:
        with meshcomm.init(dims=DIMS, merge=MERGE, rank_order=order, device="cpu", timeout_s=30) as mesh:
            check(mesh)


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
    torch.int32,
    torch.uint8,
    torch.complex64,
)
SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (4, 6), (8, 3, 4), (0, 4))


def reduce_everything(mesh: Mesh) -> None:
    for dims in NAMES:
        for dtype in DTYPES:
            for op, oracle in REDUCE.items():
                if meshcomm_refuses(op, dtype):
                    with pytest.raises(meshcomm.MeshcommError, match="is not possible on gloo"):
                        mesh.all_reduce(dims, value(0, (2,), dtype), op)
                    continue
                for shape in SHAPES if dtype == torch.float32 else SHAPES[1:3]:
                    data = np.stack(inputs(mesh, dims, shape, dtype))
                    if op == "product":  # keep products exact in half precision
                        data = np.sign(data)
                    want = oracle(data, axis=0)
                    for x in layouts(value(mesh.rank, shape, dtype)):
                        if op == "product":
                            x.sign_()
                        got = mesh.all_reduce(dims, x, op)
                        assert got is x
                        same(got, want, (dims, dtype, op, shape))


def meshcomm_refuses(op: str, dtype: torch.dtype) -> bool:
    whole = not (dtype.is_floating_point or dtype.is_complex)
    return (op == "avg" and whole) or (op in ("min", "max", "product") and dtype.is_complex)


def test_all_reduce(pool: Pool) -> None:
    pool.run(each_mesh, reduce_everything)


def move_everything(mesh: Mesh) -> None:
    for dims in NAMES:
        size, coord = mesh.size(dims), mesh.coord(dims)
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.bool):
            for shape in ((size * 2, 3, size), (size, size), (size,)):
                data = inputs(mesh, dims, shape, dtype)
                for src in range(size):
                    for x in layouts(value(mesh.rank, shape, dtype)):
                        assert mesh.broadcast(dims, x, src=src) is x
                        same(x, data[src], ("broadcast", dims, src))
                for axis in range(-len(shape), len(shape)):
                    for x in layouts(value(mesh.rank, shape, dtype)):
                        kept = x.clone()
                        same(
                            mesh.all_gather(dims, x, axis), np.concatenate(data, axis), ("gather", dims, axis)
                        )
                        if x.shape[axis] % size == 0:
                            for concat in range(len(shape)):
                                parts = [np.split(each, size, axis)[coord] for each in data]
                                want = np.concatenate(parts, concat)
                                got = mesh.all_to_all(dims, x, axis, concat)
                                same(got, want, ("all_to_all", dims, axis, concat))
                            if dtype != torch.bool:
                                want = np.split(np.sum(np.stack(data), 0), size, axis)[coord]
                                same(mesh.reduce_scatter(dims, x, axis), want, ("scatter", dims, axis))
                        assert torch.equal(x, kept), "the input changed"


def test_broadcast_gather_scatter_all_to_all(pool: Pool) -> None:
    pool.run(each_mesh, move_everything, timeout_s=120)


def messages(mesh: Mesh) -> None:
    for dims in NAMES:
        size, coord, ranks = mesh.size(dims), mesh.coord(dims), mesh.ranks(dims)
        x = value(mesh.rank, (3, 4), torch.float32)
        for offset in (0, 1, -1, 2, size, size + 1):
            for wrap in (True, False):
                for each in layouts(x):
                    got = mesh.shift(dims, each, offset, wrap=wrap)
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


def test_messages(pool: Pool) -> None:
    pool.run(each_mesh, messages)


def asynchronous(mesh: Mesh) -> None:
    for dims in NAMES:
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


def test_handles(pool: Pool) -> None:
    pool.run(each_mesh, asynchronous)


def gradients(mesh: Mesh) -> list[Any]:
    """Each functional op inside a small loss; returns input gradients."""
    f = mesh.functional
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64) + mesh.rank
    weight = torch.tensor([[1.0, 10.0], [100.0, 1000.0]], dtype=torch.float64)
    scale = mesh.coord("tp") + 1.0
    found = []
    for forward in (
        lambda x: (f.all_reduce("tp", x, grad="identity") * weight).sum(),
        lambda x: (f.all_reduce("tp", x, grad="sum") * weight * scale).sum(),
        lambda x: (f.all_reduce("tp", x, "avg", grad="identity") * weight).sum(),
        lambda x: (f.all_reduce("tp", x, "avg", grad="sum") * weight * scale).sum(),
        lambda x: (f.identity("tp", x) * weight * scale).sum(),
        lambda x: (f.all_gather("tp", x, 1, grad="slice") * torch.cat([weight, weight * 2], 1)).sum(),
        lambda x: (
            f.all_gather("tp", x, 1, grad="reduce_scatter") * torch.cat([weight, weight * 2], 1) * scale
        ).sum(),
        lambda x: (f.reduce_scatter("tp", x, 0) * weight[:1] * scale).sum(),
        lambda x: (f.slice("tp", x, 0) * weight[:1] * scale).sum(),
        lambda x: (f.all_to_all("tp", x, 0, 1) * torch.cat([weight[0], weight[1]]) * scale).sum(),
        lambda x: (f.shift("tp", x, 1) * weight * scale).sum(),
    ):
        leaf = x.clone().requires_grad_()
        forward(leaf).backward()
        assert leaf.grad is not None
        found.append(leaf.grad.tolist())
    return found


def run_gradients() -> tuple[dict[str, int], list[Any]]:
    with meshcomm.init(dims={"dp": 1, "tp": 2}, device="cpu", timeout_s=30) as mesh:
        return mesh.coords, gradients(mesh)


def test_functional_gradients(pool: Pool) -> None:
    w = np.array([[1.0, 10.0], [100.0, 1000.0]])
    for coords, found in pool.run(run_gradients, ranks=2):
        c = coords["tp"]
        scales = [1.0, 2.0]
        # Written out by hand: what each rank's input contributes to the losses that count.
        want = [
            w,  # equal losses, counted once
            w * 3,  # 1 + 2: both losses contain every x
            w / 2,
            w * 3 / 2,
            w * 3,
            w if c == 0 else w * 2,
            (w if c == 0 else w * 2) * 3,
            np.array([w[0] * 1, w[0] * 2]),  # row r goes to coord r, whose scale is r + 1
            np.array([w[0] * 1, w[0] * 2]),
            # coord r gets row r of both; my row lies at columns 2c..2c+1 there
            np.array([w.reshape(-1)[2 * c : 2 * c + 2] * s for s in scales]),
            w * scales[1 - c],  # my x went to the other rank
        ]
        assert len(found) == len(want)
        for number, (got, expected) in enumerate(zip(found, want, strict=True)):
            assert np.allclose(got, expected, rtol=0, atol=0), (number, got, expected)


def test_the_layout_says_what_the_mesh_gathers() -> None:
    layout = Layout(DIMS, merge=MERGE)
    assert layout.group_of(5, "data").tolist() == [4, 6, 5, 7]
    assert layout.group_of(5, ("tp", "dp")).tolist() == [4, 6, 5, 7]
