"""All-reduces by schedules, dim by dim and in several pieces: right sums, and the messages that the formulas state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import meshcomm
from meshcomm.algorithms import formulas
from meshcomm.comm import scheduled
from meshcomm.errors import AutogradError, CallMismatchError, DeadlockError, UnsupportedOp
from meshcomm.mesh import Mesh
from meshcomm.simulator.run import run_ranks
from meshcomm.simulator.transport import Callsite, SimulatedGroup, SimulatedWork
from meshcomm.testing import Pool
from meshcomm.transport.base import P2P
from tests.algorithms.interpret import interpret

DIMS = {"pp": 2, "dp": 2, "tp": 2}


def reduced(mesh: Mesh, length: int, op: str) -> None:
    """Each call gives the result of a reduction over all ranks' tensors."""
    for dims in (("dp", "tp"), ("pp", "dp", "tp"), ("pp", "tp")):
        if not set(dims) <= set(mesh.coords):
            continue
        others = set(mesh.coords) - set(dims)
        ranks = [
            r for r in range(mesh.world_size) if all(mesh.get_coords(r)[d] == mesh.coords[d] for d in others)
        ]
        everyone = torch.stack([torch.arange(length) % 97 + rank for rank in ranks]).double()
        expected = everyone.sum(0) if op == "sum" else everyone.amax(0)
        x = (torch.arange(length) % 97 + mesh.rank).double()
        mesh.all_reduce(dims, x, op=op, algorithm="hierarchical")
        assert torch.equal(x, expected), dims


@pytest.mark.parametrize("length", [1, 1000, 4097])
@pytest.mark.parametrize("op", ["sum", "max"])
def test_pieces_give_the_whole(length: int, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduled, "_PIECE_BYTES", 1024 * 8)
    meshcomm.simulate(reduced, dims=DIMS, args=(length, op))


def on_gloo() -> None:
    with meshcomm.init(dims={"dp": 2, "tp": 2}, device="cpu", timeout_s=30) as mesh:
        reduced(mesh, 1_500_000, "sum")


def test_pieces_of_their_usual_size_on_processes(pool: Pool) -> None:
    pool.run(on_gloo, ranks=4)


REDUCE: dict[str, Any] = {
    "sum": np.sum,
    "avg": np.mean,
    "product": np.prod,
    "min": np.min,
    "max": np.max,
    "premul_sum": lambda each, axis: np.sum(each * 0.5, axis),
}


LEVELS = ("pp", "dp")


def value(rank: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Small integers, whose sum is the same in every order."""
    count = int(np.prod(shape))
    return ((torch.arange(count, dtype=torch.float64) * 7 + rank * 5) % 11 - 4).reshape(shape)


def cases(along: tuple[str, ...]) -> list[tuple[Any, str]]:
    """Every algorithm along each of the dims, and two_level along dims with two levels."""
    flat = [name for name in scheduled.SCHEDULED if name != "two_level"]
    return [(dims, name) for dims in along for name in flat] + [("all", "two_level"), (LEVELS, "two_level")]


def right(mesh: Mesh, along: tuple[str, ...]) -> None:
    shapes: list[tuple[int, ...]] = [(), (5,), (2, 3), (0, 3), (37,)]
    for number, (dims, name) in enumerate(cases(along)):
        ranks = mesh.layout.group_of(mesh.rank, dims).tolist()
        for turn, op in enumerate(REDUCE):
            shape = shapes[(number + turn) % len(shapes)]
            wanted = REDUCE[op](np.stack([value(rank, shape).numpy() for rank in ranks]), axis=0)
            factor = 0.5 if op == "premul_sum" else None
            x = value(mesh.rank, shape)
            if turn % 2:
                x = x.new_empty((*shape, 2))[..., 0].copy_(x)
            got = mesh.all_reduce(dims, x, op, algorithm=name, factor=factor)
            assert got is x
            assert np.allclose(x.numpy(), wanted, rtol=1e-15), (dims, name, op, shape)


def same_bits(mesh: Mesh, along: tuple[str, ...]) -> None:
    for dims, name in cases(along):
        x = torch.randn(61, generator=torch.Generator().manual_seed(mesh.rank))
        x[:2] = torch.tensor([float("nan"), -0.0 if mesh.rank % 2 else 0.0])
        for op in ("sum", "min"):
            y = mesh.all_reduce(dims, x.clone(), op, algorithm=name)
            everyone = mesh.all_gather(dims, y.view(torch.int32).view(1, -1))
            assert (everyone == everyone[0]).all(), (dims, name, op)
            assert torch.allclose(
                y, mesh.all_reduce(dims, x.clone(), op), rtol=1e-4, atol=1e-5, equal_nan=True
            )


def dtypes(mesh: Mesh, names: tuple[Any, ...]) -> None:
    size = mesh.size("all")
    for name in names:
        for dtype in (torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.uint8, torch.int16):
            x = torch.full((9,), mesh.rank + 1).to(dtype)
            assert mesh.all_reduce("all", x, algorithm=name).tolist() == [size * (size + 1) / 2] * 9
        bits = torch.tensor([1 << mesh.rank, 63, 0])
        assert mesh.all_reduce("all", bits.clone(), "bor", algorithm=name).tolist() == [63, 63, 0]
        assert mesh.all_reduce("all", bits.clone(), "band", algorithm=name).tolist() == [0, 63, 0]
        assert mesh.all_reduce("all", bits.clone(), "bxor", algorithm=name).tolist() == [63, 0, 0]
        some = torch.tensor([mesh.rank == 2, False, True])
        assert mesh.all_reduce("all", some, "max", algorithm=name).tolist() == [True, False, True]


def counted_messages(mesh: Mesh, along: tuple[str, ...]) -> None:
    """This rank sends as many messages as the interpreter counts."""
    length, chunks = 40, 4
    for dims, name in cases(along):
        comm = mesh._at[dims]
        inner = mesh.size("dp") if name == "two_level" else 1
        before = dict(comm.recorder.messages.begun)
        x = torch.full((length,), float(mesh.rank))
        scheduled.all_reduce(comm, x, "sum", scheduled.Algorithm(name, inner, chunks))  # type: ignore[arg-type]
        assert x.tolist() == [sum(mesh.layout.group_of(mesh.rank, dims).tolist())] * length
        begun = comm.recorder.messages.begun
        sent = sum(begun[key] - before.get(key, 0) for key in begun if key[0] == "send")
        schedule = scheduled.schedule_of(name, comm.size, inner, chunks)  # type: ignore[arg-type]
        assert sent == interpret(schedule, 4 * length, 4).messages[comm.coord], (dims, name)
        assert not comm.recorder.inside


def with_pending_messages(mesh: Mesh) -> None:
    """A pending user message along the same dim is not mistaken for the algorithm's."""
    coord, size = mesh.coord("all"), mesh.size("all")
    x = torch.ones(12)
    came = mesh.irecv("all", torch.zeros(2), src=(coord - 1) % size)
    mesh.all_reduce("all", x, algorithm="ring")
    mesh.isend("all", torch.full((2,), float(coord)), dst=(coord + 1) % size).wait()
    assert x.tolist() == [size] * 12
    assert came.wait().tolist() == [(coord - 1) % size] * 2


def refused(mesh: Mesh) -> None:
    x = torch.ones(4)
    wanted: Any
    for wanted, dims, more in (
        ("no algorithm 'star'", "all", {"algorithm": "star"}),
        ("async_op=True", "all", {"algorithm": "ring", "async_op": True}),
        ('over two or more dims "hierarchical", "two_level"', "dp", {"algorithm": "two_level"}),
        ("avg of int64 is not possible", "dp", {"algorithm": "ring", "op": "avg"}),
        ("no reduce op 'mean'", "dp", {"algorithm": "ring", "op": "mean"}),
    ):
        given = x.long() if "int64" in wanted else x
        with pytest.raises(UnsupportedOp, match=wanted):
            mesh.all_reduce(dims, given, **more)
    with pytest.raises(UnsupportedOp, match="x a list"):
        mesh.all_reduce("all", [x], algorithm="ring")
    with pytest.raises(meshcomm.MeshcommError, match="factor has no effect"):
        mesh.all_reduce("all", x, factor=2.0, algorithm="ring")
    with pytest.raises(AutogradError, match=r"mesh\.functional\.all_reduce"):
        mesh.all_reduce("all", torch.ones(4, requires_grad=True), algorithm="tree")
    with torch.no_grad():
        y = mesh.all_reduce("all", torch.ones(4, requires_grad=True), algorithm="tree")
    assert y.tolist() == [6] * 4
    with pytest.raises(CallMismatchError, match="all_reduce by ring"):
        mesh.all_reduce("all", x, algorithm="ring" if mesh.rank < 4 else "tree")
    assert x.tolist() == [1] * 4


DIMS = {"one": 1, "pp": 2, "dp": 3}


MERGE = {"all": LEVELS}


def run_all(mesh: Mesh, along: tuple[str, ...], names: tuple[str, ...]) -> None:
    for check in (right, same_bits, counted_messages):
        check(mesh, along)
    dtypes(mesh, names)
    with_pending_messages(mesh)


def run_on_gloo() -> None:
    with meshcomm.init(dims=DIMS, merge=MERGE, device="cpu", timeout_s=30, validate_calls="always") as mesh:
        refused(mesh)
    with meshcomm.init(dims=DIMS, merge=MERGE, device="cpu", timeout_s=30, validate_calls=0) as mesh:
        run_all(mesh, ("all",), ("halving_doubling",))


def test_algorithms_on_gloo(pool: Pool) -> None:
    pool.run(run_on_gloo, ranks=6)


def test_algorithms_along_dims_of_1_2_3_and_6() -> None:
    meshcomm.simulate(run_all, dims=DIMS, merge=MERGE, args=(("one", "pp", "dp", "all"), scheduled.SCHEDULED))


def skipped(mesh: Mesh, name: str) -> None:
    if mesh.rank != 4:
        mesh.all_reduce("all", torch.ones(8), algorithm=name)  # type: ignore[call-overload]


def test_a_rank_that_does_not_come_is_named() -> None:
    for name in scheduled.SCHEDULED:
        with pytest.raises(DeadlockError, match=r"rank 4 returned while ranks 0 1 2 3 5 wait") as found:
            meshcomm.simulate(skipped, dims=DIMS, merge=MERGE, args=(name,))
        assert "waits in all_reduce (" in str(found.value)
        assert f"at {__file__}:" in str(found.value)


@pytest.mark.parametrize("n", [2, 6, 13])
def test_a_simulated_run_sends_what_the_formulas_say(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, messages = [0] * n, [0] * n
    start_message = SimulatedGroup.start_message

    def counted(
        group: SimulatedGroup, coord: int, message: P2P, site: Callsite, single: bool
    ) -> SimulatedWork:
        if message.direction == "send":
            sent[coord] += message.x.nbytes
            messages[coord] += 1
        return start_message(group, coord, message, site, single)

    monkeypatch.setattr(SimulatedGroup, "start_message", counted)
    inner = max(d for d in range(1, n) if n % d == 0)
    for name in scheduled.SCHEDULED:
        chunks = 4 if "tree" in name else 1
        schedule = scheduled.schedule_of(name, n, inner, chunks)  # type: ignore[arg-type]
        length = 3 * schedule.chunks

        def body() -> list[float]:
            with meshcomm.init(dims={"dp": n}, device="cpu", validate_calls=0) as mesh:
                x = torch.arange(length, dtype=torch.float64) + mesh.rank
                algorithm = scheduled.Algorithm(name, inner, chunks)  # type: ignore[arg-type]
                return scheduled.all_reduce(mesh._at["dp"], x, "sum", algorithm).tolist()

        sent[:], messages[:] = [0] * n, [0] * n
        results = run_ranks(body, n, 0, 30.0)
        wanted = [n * i + n * (n - 1) / 2 for i in range(length)]
        assert results == [wanted] * n
        counts = interpret(schedule, 8 * length, 8)
        assert (tuple(sent), tuple(messages)) == (counts.sent, counts.messages), name
        more = {"two_level": (inner,), "tree": (chunks,), "double_tree": (chunks,)}.get(name, ())
        cost = getattr(formulas, name)(n, 8 * length, *more)
        assert (max(sent), sum(sent), counts.steps) == (cost.busiest_bytes, cost.total_bytes, cost.steps), (
            name
        )
