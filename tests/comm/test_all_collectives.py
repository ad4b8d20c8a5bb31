"""The rest of what torch.distributed can do, along dims: against NumPy on every rank's input."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from itertools import count, product
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate

import meshcomm
from meshcomm.comm.handle import UnwaitedHandle
from meshcomm.layout import Dims
from meshcomm.mesh import Mesh
from meshcomm.testing import Pool
from meshcomm.transport.support import REDUCE_OPS, reduce_refusal
from tests.comm.test_collectives import cover, everywhere, inputs, layouts, names, on_processes, same, value

ALL_DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
)
ORACLE: dict[str, Any] = {
    "sum": lambda a: a.sum(0),
    "avg": lambda a: a.mean(0),
    "premul_sum": lambda a: (a * 0.5).sum(0),
    "product": lambda a: a.prod(0),
    "min": lambda a: a.min(0),
    "max": lambda a: a.max(0),
    "band": lambda a: np.bitwise_and.reduce(a, 0),
    "bor": lambda a: np.bitwise_or.reduce(a, 0),
    "bxor": lambda a: np.bitwise_xor.reduce(a, 0),
}


def small(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Positive, small enough that every product and sum is exact in every dtype."""
    x = (torch.arange(int(np.prod(shape))) + rank) % 2 + 1
    return x.reshape(shape).to(dtype)


def numbers(x: torch.Tensor) -> np.ndarray:
    if x.dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        return x.to(torch.float64).numpy()
    return x.numpy()


def every_op_and_dtype(mesh: Mesh) -> None:
    size, coord = mesh.size("dp"), mesh.coord("dp")
    for dtype, op in product(ALL_DTYPES, REDUCE_OPS):
        x = small(mesh.rank, (size * 2, 3), dtype)
        factor = 0.5 if op == "premul_sum" else None
        calls: list[Callable[[], Any]] = [
            lambda: mesh.all_reduce("dp", x, op, factor=factor),
            lambda: mesh.reduce("dp", x, 0, op, factor=factor),
            lambda: mesh.reduce_scatter("dp", x, 0, op, factor=factor),
        ]
        if reduce_refusal("gloo", op, dtype) is not None:
            for call in calls:
                with pytest.raises(meshcomm.MeshcommError, match=f"{op} of .* is not possible on gloo"):
                    call()
            continue
        data = np.stack([numbers(small(rank, (size * 2, 3), dtype)) for rank in mesh.ranks("dp")])
        want = ORACLE[op](data)
        kept = x.clone()
        got = mesh.reduce("dp", x, size - 1, op, factor=factor)
        assert (got is not None) == (coord == size - 1)
        if got is not None:
            assert got.dtype == dtype
            assert (numbers(got) == want).all(), ("reduce", dtype, op)
        part = calls[2]()
        assert part.dtype == dtype
        assert (numbers(part) == np.split(want, size)[coord]).all(), ("scatter", dtype, op)
        assert torch.equal(numbers_equal(x), numbers_equal(kept)), "the input changed"
        assert calls[0]() is x
        assert (numbers(x) == want).all(), ("all_reduce", dtype, op)


def on_two() -> None:
    with meshcomm.init(dims={"dp": 2}, device="cpu", timeout_s=30) as mesh:
        every_op_and_dtype(mesh)


def test_every_reduce_op_and_dtype(pool: Pool) -> None:
    pool.run(on_two, ranks=2)
    meshcomm.simulate(every_op_and_dtype, dims={"dp": 4})


def numbers_equal(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def rooted(mesh: Mesh) -> None:
    dtypes = (torch.float32, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16)
    for dims in names(mesh):
        size, coord, ranks = mesh.size(dims), mesh.coord(dims), mesh.ranks(dims)
        for src, (dtype, axis) in product(range(size), cover(dtypes, (0, 1, -1, 0))):
            x = value(mesh.rank, (size, 3, size), dtype)
            raw = [value(rank, (size, 3, size), dtype) for rank in ranks]
            got = mesh.gather(dims, x, src, axis)
            assert (got is not None) == (coord == src)
            if got is not None:
                assert equal(got, cat(raw, axis))
            if axis == 1:
                continue
            given = raw[src] if coord == src else None
            part = mesh.scatter(dims, given, src, axis)
            assert part.dtype == dtype
            want = raw[src].view(torch.uint8) if dtype == torch.float8_e4m3fn else raw[src]
            assert equal(part, torch.chunk(want, size, axis)[coord].view(dtype).contiguous())
            out = torch.empty_like(part).transpose(0, 1).contiguous().transpose(0, 1)
            assert mesh.scatter(dims, given, src, axis, out=out) is out
            assert equal(out, part)


def cat(parts: list[torch.Tensor], axis: int) -> torch.Tensor:
    if parts[0].dtype in (torch.float8_e4m3fn, torch.uint16):
        width = torch.uint8 if parts[0].dtype == torch.float8_e4m3fn else torch.int16
        return torch.cat([p.contiguous().view(width) for p in parts], axis).view(parts[0].dtype)
    return torch.cat(parts, axis)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype in (torch.float8_e4m3fn, torch.uint16):
        width = torch.uint8 if a.dtype == torch.float8_e4m3fn else torch.int16
        return torch.equal(a.contiguous().view(width), b.contiguous().view(width))
    return torch.equal(a, b)


def uneven(mesh: Mesh) -> None:
    turns = count()
    for dims in names(mesh):
        size, coord, ranks = mesh.size(dims), mesh.coord(dims), mesh.ranks(dims)
        for lengths, axis in product(
            ([c % 3 for c in range(size)], [0] * size, [4] + [0] * (size - 1)), (0, 1, -1)
        ):
            turn = next(turns)
            dtype = (torch.float32, torch.complex64, torch.bool)[turn % 3]
            shapes = [[2, 3, 2] for _ in ranks]
            for shape, length in zip(shapes, lengths, strict=True):
                shape[axis] = length
            parts = [value(rank, tuple(shape), dtype) for rank, shape in zip(ranks, shapes, strict=True)]
            want = torch.cat(parts, axis)
            x = layouts(parts[coord])[turn // 3 % 3]
            assert torch.equal(mesh.all_gather(dims, x, axis, uneven=True), want)
            out = torch.empty_like(want)
            assert mesh.all_gather(dims, x, axis, uneven=True, out=out) is out
            assert torch.equal(out, want)
            got = mesh.gather(dims, x, size - 1, axis, uneven=True)
            assert (got is not None) == (coord == size - 1)
            assert got is None or torch.equal(got, want)
        # Row c of the table: what coord c sends to each. Sent and received sizes differ.
        table = [[(a * 2 + b) % 4 for b in range(size)] for a in range(size)]
        rows = [value(rank, (sum(table[c]), 2), torch.float32) for c, rank in enumerate(ranks)]
        got = mesh.all_to_all(dims, rows[coord], 0, 0, splits=table[coord])
        want = torch.cat([rows[c].split(table[c])[coord] for c in range(size)])
        assert torch.equal(got, want)
        columns = [row.T for row in rows]
        got = mesh.all_to_all(dims, columns[coord], 1, 1, splits=table[coord])
        assert torch.equal(got, want.T)


def outs(mesh: Mesh) -> None:
    for dims in names(mesh):
        size = mesh.size(dims)
        x = value(mesh.rank, (size, 4), torch.float32)
        data = inputs(mesh, dims, (size, 4), torch.float32)
        for axis, shape in ((0, (size * size, 4)), (1, (size, size * 4))):
            for out in (torch.empty(shape), torch.empty(shape[::-1]).T):
                assert mesh.all_gather(dims, x, axis, out=out) is out
                same(out, np.concatenate(data, axis), dims)
        for out in (torch.empty(1, 4), torch.empty(1, 8)[:, ::2]):
            assert mesh.reduce_scatter(dims, x, out=out) is out
            same(out, np.split(np.sum(np.stack(data), 0), size)[mesh.coord(dims)], dims)
        received = torch.empty(1, size * 4).T.contiguous().T
        assert mesh.all_to_all(dims, x, 0, 1, out=received) is received
        assert torch.equal(received, mesh.all_to_all(dims, x, 0, 1))
        even = [1] * size
        assert mesh.all_to_all(dims, x, 0, 1, splits=even, out=torch.empty(1, size * 4)).equal(received)
        whole = torch.empty(size, size * 4)
        for uneven in (False, True):
            got = mesh.gather(dims, x, 0, axis=1, out=whole, uneven=uneven)
            assert got is (whole if mesh.coord(dims) == 0 else None)
            if got is not None:
                same(got, np.concatenate(data, 1), dims)
        with pytest.raises(meshcomm.MeshcommError, match="out does not fit the result"):
            mesh.all_gather(dims, x, out=torch.empty(3))


def together(mesh: Mesh) -> None:
    for dims in names(mesh):
        size, coord = mesh.size(dims), mesh.coord(dims)
        shapes = [(size, 3), (), (size * 2,), (0, 4), (size, 1, 2)]
        kinds = (torch.float32, torch.int64, torch.bfloat16, torch.float32, torch.float32)

        def mine(rank: int) -> list[torch.Tensor]:
            return [value(rank, s, d) for s, d in zip(shapes, kinds, strict=True)]

        everyone = [mine(rank) for rank in mesh.ranks(dims)]
        tensors = mine(mesh.rank)
        tensors[0] = tensors[0].T.contiguous().T
        reduced = mesh.all_reduce(dims, tensors)
        assert all(a is b for a, b in zip(reduced, tensors, strict=True))
        for i, x in enumerate(tensors):
            one = value(mesh.rank, shapes[i], kinds[i])
            assert torch.equal(x, mesh.all_reduce(dims, one)), (dims, i)
        tensors = mine(mesh.rank)
        handle = mesh.broadcast(dims, tensors, src=size - 1, async_op=True)
        for x, want in zip(handle.wait(), everyone[size - 1], strict=True):
            assert torch.equal(x, want)
        gathered = mesh.all_gather(dims, mine(mesh.rank), axis=-1)
        for i, x in enumerate(gathered):
            parts = [each[i].reshape(1) if each[i].ndim == 0 else each[i] for each in everyone]
            assert torch.equal(x, torch.cat(parts, -1)), (dims, i)
        even = [i for i, s in enumerate(shapes) if s and s[0] % size == 0]
        scattered = mesh.reduce_scatter(dims, [mine(mesh.rank)[i] for i in even])
        for i, x in zip(even, scattered, strict=True):
            one = mesh.reduce_scatter(dims, value(mesh.rank, shapes[i], kinds[i]))
            assert torch.equal(x, one), (dims, i)
        assert mesh.all_reduce(dims, []) == []
        assert coord == mesh.coord(dims)


def layered(mesh: Mesh) -> None:
    # The three dims at once on simulated ranks; pairs, in either order, everywhere.
    found: list[Dims] = [("dp", "tp"), ("tp", "dp")]
    if mesh.world_size == 8:
        found += [("pp", "dp", "tp"), ("tp", "pp"), "model"]
    for dims, shape in product(found, ((5,), (2, 3), (), (0,), (16, 3))):
        ranks = mesh.layout.group_of(mesh.rank, dims).tolist()
        for number, op in enumerate(("sum", "avg", "min", "max", "premul_sum")):
            data = np.stack([value(rank, shape, torch.float64).numpy() for rank in ranks])
            kinds = layouts(value(mesh.rank, shape, torch.float64))
            x, factor = kinds[number % len(kinds)], 0.5 if op == "premul_sum" else None
            assert mesh.all_reduce(dims, x, op, algorithm="hierarchical", factor=factor) is x
            same(x, ORACLE[op](data), (dims, op, shape))
    with pytest.raises(meshcomm.MeshcommError, match="no algorithm 'star'"):
        mesh.all_reduce("dp", torch.ones(1), algorithm="star")  # type: ignore[call-overload]
    with pytest.raises(meshcomm.MeshcommError, match="no algorithm 'hierarchical'"):
        mesh.all_reduce("dp", torch.ones(1), algorithm="hierarchical")


def post(mesh: Mesh) -> None:
    for dims in names(mesh):
        size, coord, ranks = mesh.size(dims), mesh.coord(dims), mesh.ranks(dims)
        for dtype in (torch.float32, torch.float8_e4m3fn, torch.bool, torch.complex128):
            # Shapes that only the sender knows; 0-dim and empty ones among them.
            shape = [(coord + 1, 2), (), (0, 3), (2, coord + 1)][coord % 4]
            x = value(mesh.rank, shape, dtype)
            came = mesh.shift(dims, x, handshake=True)
            behind = (coord - 1) % size
            shape = [(behind + 1, 2), (), (0, 3), (2, behind + 1)][behind % 4]
            assert came is not None
            assert came.shape == shape
            assert equal(came, value(ranks[behind], shape, dtype))
        if coord == 0:
            seen = set()
            for _ in range(size - 1):
                x, source = mesh.recv_any(dims, torch.zeros(2), tag=3)
                assert x.tolist() == [source, ranks[source]]
                seen.add(source)
            assert seen == set(range(1, size))
            unknown, source = mesh.recv_any(dims, tag=4)
            assert (unknown.shape, source) == ((size, 3), size - 1)
            assert mesh.recv(dims, src=1, tag=5).tolist() == list(range(7))
        else:
            mesh.send(dims, torch.tensor([float(coord), float(mesh.rank)]), dst=0, tag=3)
            if coord == size - 1:
                mesh.send(dims, torch.zeros(size, 3), dst=0, tag=4, handshake=True)
            if coord == 1:
                mesh.isend(dims, torch.arange(7), dst=0, tag=5, handshake=True).wait()
        # Tags keep two messages of one pair apart, whatever the order they are listed in.
        peer = (coord + 1) % size if size == 2 else coord ^ 1
        a, b = mesh.exchange(
            dims,
            [(torch.full((1,), 1.0 + mesh.rank), peer, 1), (torch.full((1,), 100.0 + mesh.rank), peer, 2)],
            [(torch.zeros(1), peer, 2), (torch.zeros(1), peer, 1)],
        )
        assert (a.item(), b.item()) == (100 + ranks[peer], 1 + ranks[peer])


def next_to_nothing(mesh: Mesh) -> None:
    size, coord = mesh.size("dp"), mesh.coord("dp")
    for shape, dtype in (
        ((0,), torch.float32),
        ((0, 3), torch.complex64),
        ((), torch.bool),
        ((), torch.float32),
    ):
        x = torch.ones(shape, dtype=dtype)
        assert mesh.shift("dp", x).shape == shape
        # Whoever comes first, and what is sent to it afterwards, with the same tag too.
        if coord == 0:
            sources = set()
            for _ in range(size - 1):
                came, source = mesh.recv_any("dp", torch.zeros(shape, dtype=dtype), tag=6)
                assert torch.equal(came, x)
                sources.add(source)
            assert sources == set(range(1, size))
            for dst in sources:
                mesh.send("dp", torch.ones(2), dst=dst)
                assert mesh.recv("dp", torch.zeros(2), src=dst, tag=6).sum() == 2
        else:
            mesh.send("dp", x, dst=0, tag=6)
            assert mesh.recv("dp", torch.zeros(2), src=0).sum() == 2
            mesh.send("dp", torch.ones(2), dst=0, tag=6)


def run_next_to_nothing() -> None:
    with meshcomm.init(dims={"dp": 3}, device="cpu", timeout_s=30) as mesh:
        next_to_nothing(mesh)


def test_empty_messages_from_whoever_comes_first(pool: Pool) -> None:
    pool.run(run_next_to_nothing, ranks=3)
    meshcomm.simulate(next_to_nothing, dims={"dp": 3}, explore=3)


def handles(mesh: Mesh) -> None:
    x = torch.ones(3)
    handle = mesh.all_reduce("dp", x, async_op=True)
    with pytest.raises(meshcomm.MeshcommError, match="the result was asked for before wait"):
        handle.result()
    assert handle.wait() is x
    assert handle.wait() is x
    assert handle.result() is x
    assert handle.is_completed()
    assert handle.is_success()
    assert handle.exception() is None
    assert handle.get_future().wait() is x
    with pytest.raises(meshcomm.MeshcommError, match="there is no source to tell"):
        _ = handle.source
    peer = 1 - mesh.coord("tp")
    sent = mesh.isend("tp", x, dst=peer)
    received = mesh.irecv("tp", torch.zeros(3), src=peer)
    assert received.wait().tolist() == [2.0] * 3
    assert received.source == peer
    sent.wait()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dropped = mesh.all_reduce("dp", torch.ones(1), async_op=True)
        del dropped
        gc.collect()
    texts = [str(each.message) for each in caught if each.category is UnwaitedHandle]
    assert len(texts) == 1
    assert f'all_reduce along "dp" on {mesh.label}: the handle made at {__file__}:' in texts[0]
    mesh.barrier("dp")
    late = mesh.barrier("tp", async_op=True)
    assert late.wait() is None


@pytest.mark.parametrize(
    "check", [rooted, uneven, outs, together, layered, post], ids=lambda check: check.__name__
)
def test_against_numpy(pool: Pool, check: Callable[[Mesh], None]) -> None:
    everywhere(pool, check)


def test_handles_say_what_became_of_the_call(pool: Pool) -> None:
    pool.run(on_processes, handles, ranks=4)


def profiled() -> tuple[list[str], str]:
    with (
        meshcomm.init(dims={"dp": 2, "tp": 2}, device="cpu", timeout_s=30) as mesh,
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
    ):
        mesh.all_reduce("dp", torch.ones(1))
        mesh.all_gather(("tp",), torch.ones(1))
        mesh.shift("tp", torch.ones(1))
    found = sorted({each.key for each in profile.key_averages() if each.key.startswith("meshcomm::")})
    return found, mesh.plan.fingerprint


def test_the_profiler_sees_op_dims_and_plan(pool: Pool) -> None:
    found, plan = pool.run(profiled, ranks=4)[0]
    assert found == [
        f"meshcomm::all_gather tp, plan {plan}",
        f"meshcomm::all_reduce dp, plan {plan}",
        f"meshcomm::shift tp, plan {plan}",
    ]


def wrong(mesh: Mesh) -> list[str]:
    x = torch.ones(4, 2)
    texts = []
    for call in (
        lambda: mesh.all_reduce("dp", x, factor=2.0),
        lambda: mesh.all_reduce("dp", x, "premul_sum"),
        lambda: mesh.scatter("dp", None, src=mesh.coord("dp")),
        lambda: mesh.all_to_all("dp", x, splits=[1, 2]),
        lambda: mesh.all_gather("dp", [x], out=x),
        lambda: mesh.gather("dp", x, dst=2),
        lambda: mesh.all_reduce("dp", torch.ones(2).to(torch.float8_e4m3fn)),
        lambda: mesh.all_reduce("dp", torch.ones(2), "band"),
        lambda: mesh.all_reduce(("dp", "tp"), x),
        lambda: mesh.all_reduce("dp", DTensor.from_local(x, mesh["dp"], [Replicate()])),
        lambda: mesh.send("dp", x.to_sparse(), dst=1),
        lambda: mesh.all_gather("dp", x.to("meta")),
        lambda: mesh.broadcast("dp", [x, 3.0], src=0),
        lambda: mesh.all_reduce("dp", 3.0),
    ):
        try:
            call()
            texts.append("nothing")
        except meshcomm.MeshcommError as error:
            texts.append(f"{type(error).__name__}: {error.what}")
    return texts


def run_wrong() -> list[str]:
    with meshcomm.init(dims={"dp": 2, "tp": 2}, device="cpu", timeout_s=30) as mesh:
        return wrong(mesh)


def test_each_mistake_is_refused_before_a_byte_moves(pool: Pool) -> None:
    at = "on rank 0 (dp=0 tp=0)"
    assert pool.run(run_wrong, ranks=4)[0] == [
        f"ShapeError: all_reduce along \"dp\" {at}: factor has no effect with op='sum'",
        f'ShapeError: all_reduce along "dp" {at}: op="premul_sum" without a factor',
        f'ShapeError: scatter along "dp" {at}: the source has nothing to scatter',
        f'ShapeError: all_to_all along "dp" {at}: splits do not cut axis 0',
        "UnsupportedOp: all_gather of a list on rank 0 (dp=0 tp=0): out has no effect",
        f'LayoutError: gather along "dp" {at}: dst=2 is not a coord',
        f'UnsupportedOp: all_reduce along "dp" {at}: sum of float8_e4m3fn is not possible on gloo',
        f'UnsupportedOp: all_reduce along "dp" {at}: band of float32 is not possible on gloo',
        'UnknownDim: no group was declared over ("dp", "tp")',
        f'ShapeError: all_reduce along "dp" {at} was given a DTensor',
        f'ShapeError: send along "dp" {at} cannot carry this tensor',
        f'ShapeError: all_gather along "dp" {at} cannot carry this tensor',
        f'ShapeError: broadcast of a list along "dp" {at} was given a float',
        f'ShapeError: all_reduce along "dp" {at} was given a float',
    ]


def weighted(mesh: Mesh) -> None:
    """Each rank's own factor, while calls are still compared; and one without effect, once they are not."""
    n, rank = mesh.size("dp"), mesh.rank
    x, total = torch.arange(2.0 * n), torch.arange(2.0 * n) * sum(range(1, n + 1))
    for algorithm in ("flat", "tree"):
        found = mesh.all_reduce("dp", x.clone(), "premul_sum", factor=rank + 1.0, algorithm=algorithm)
        assert torch.equal(found, total)
    found = mesh.reduce("dp", x, 0, "premul_sum", factor=rank + 1.0)
    assert found is None if mesh.coord("dp") else torch.equal(found, total)
    found = mesh.reduce_scatter("dp", x, op="premul_sum", factor=rank + 1.0)
    assert torch.equal(found, total.chunk(n)[mesh.coord("dp")])
    for _ in range(2):
        with pytest.raises(meshcomm.MeshcommError, match="factor has no effect with op='sum'"):
            mesh.all_reduce("dp", x, factor=2.0)
        mesh.all_reduce("dp", x)


def run_weighted() -> None:
    for compared in (0, "always"):
        with meshcomm.init(dims={"dp": 3}, device="cpu", timeout_s=30, validate_calls=compared) as mesh:
            weighted(mesh)


def test_each_rank_has_a_factor_of_its_own(pool: Pool) -> None:
    pool.run(run_weighted, ranks=3)
    meshcomm.simulate(weighted, dims={"dp": 3})
