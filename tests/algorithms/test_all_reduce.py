"""Schedules are all-reduces with the costs of the formulas. Run with messages, they give the right sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import meshcomm
from meshcomm.algorithms import (
    Cost,
    Receive,
    Schedule,
    ScheduleStep,
    Send,
    double_tree,
    formulas,
    halving_doubling,
    recursive_doubling,
    ring,
    tree,
    two_level,
)
from meshcomm.algorithms.all_reduce import heap_place, in_order_place, twin_place
from meshcomm.algorithms.schedule import bounds
from meshcomm.comm import scheduled
from meshcomm.errors import AutogradError, CallMismatchError, DeadlockError, LayoutError, UnsupportedOp
from meshcomm.mesh import Mesh
from meshcomm.simulator.run import run_ranks
from meshcomm.simulator.transport import Callsite, SimulatedGroup, SimulatedWork
from meshcomm.testing import Pool
from meshcomm.transport.base import P2P
from tests.algorithms.interpret import interpret
from tests.documents import tool

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "costs.md"


# All small numbers of ranks, and larger ones around powers of two.
SIZES = (*range(1, 20), 31, 32, 33, 48, 63, 64)


def counted(schedule: Schedule, size_bytes: int) -> Cost:
    found = interpret(schedule, size_bytes)
    assert found.steps == schedule.steps
    return Cost(found.steps, found.path_bytes, found.busiest_bytes, found.total_bytes)


def test_counts_are_the_formulas() -> None:
    for n in SIZES:
        for chunks in (1, 2, 5):
            size = 12 * chunks
            assert counted(tree(n, chunks), size) == formulas.tree(n, size, chunks), n
            assert counted(double_tree(n, chunks), size) == formulas.double_tree(n, size, chunks), n
        assert counted(ring(n), 6 * n) == formulas.ring(n, 6 * n), n
        assert counted(recursive_doubling(n), 64) == formulas.recursive_doubling(n, 64), n
        assert counted(halving_doubling(n), 128) == formulas.halving_doubling(n, 128), n
        inners = [inner for inner in range(1, n + 1) if n % inner == 0]
        # The first and the last are rings. Large n run only every third of the others.
        for inner in inners if n < 20 else inners[1:-1:3]:
            assert counted(two_level(n, inner), 6 * n) == formulas.two_level(n, 6 * n, inner), (n, inner)


def test_what_crosses_between_the_levels_is_a_ring_of_a_part() -> None:
    n, inner, size = 12, 4, 120
    schedule, cuts = two_level(n, inner), bounds(size, n)
    across = [0] * n
    for coord in range(n):
        for step in schedule.of(coord):
            for send in step.sends:
                if send.peer // inner != coord // inner:
                    across[coord] += cuts[send.last] - cuts[send.first]
    assert set(across) == {formulas.ring(n // inner, size / inner).busiest_bytes} == {40}
    assert formulas.two_level(n, size, inner).busiest_bytes == formulas.ring(n, size).busiest_bytes == 220


def test_a_length_that_does_not_divide_is_reduced_too() -> None:
    for n in (2, 3, 5, 8, 13):
        for length in (1, 2, 7, 31):
            for schedule in (
                ring(n),
                tree(n, 4),
                double_tree(n, 3),
                recursive_doubling(n),
                halving_doubling(n),
            ):
                found = interpret(schedule, 4 * length, 4)
                assert found.steps <= schedule.steps
                assert found.total_bytes % 4 == 0
            assert interpret(ring(n), length).total_bytes == 2 * (n - 1) * length
    cuts = bounds(7, 3)
    assert cuts == [0, 3, 5, 7]
    assert bounds(2, 4) == [0, 1, 2, 2, 2]


def test_the_trees_are_trees_and_the_two_share_the_work() -> None:
    for n in (*SIZES, 127, 128, 129, 199):
        for place in (heap_place, in_order_place, twin_place):
            places = [place(n, rank) for rank in range(n)]
            roots = [rank for rank in range(n) if places[rank].depth == 0]
            assert len(roots) == 1
            assert sorted(child for each in places for child in each.children) == [
                rank for rank in range(n) if rank not in roots
            ]
            for rank, each in enumerate(places):
                assert len(each.children) <= 2
                for child in each.children:
                    assert (places[child].parent, places[child].depth) == (rank, each.depth + 1)
            height = max(each.depth for each in places)
            # The root has two children, or it is above a tree of all other ranks.
            assert height == (n.bit_length() - 1 if place is heap_place else (n - 1).bit_length())
        both = [r for r in range(n) if in_order_place(n, r).children and twin_place(n, r).children]
        assert both == ([0] if n % 2 and n > 1 else []), n


def changed(steps: list[ScheduleStep], coord: int, fault: str) -> list[ScheduleStep]:
    """The steps of one rank in a ring of four, with a fault."""
    if (fault == "unreduced" and coord == 2) or fault == "twice":
        at = 1 if coord == 2 and fault == "unreduced" else 3
        receives = tuple(r._replace(reduce=fault == "twice") for r in steps[at].receives)
        steps[at] = steps[at]._replace(receives=receives)
    elif fault == "unsent" and coord == 1:
        steps[4] = steps[4]._replace(sends=())
    elif fault == "unreceived" and coord == 1:
        steps[0] = steps[0]._replace(receives=())
    elif fault == "overwritten":
        sends, receives = (Send((coord + 1) % 4, 0, 4),), (Receive((coord - 1) % 4, 0, 4, False),)
        steps[5] = ScheduleStep(sends, receives)
    return steps[:5] if fault == "short" else steps


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("unreduced", r"coord 0 ends with chunk \d made of 1 x coord"),
        ("twice", r"made of .*2 x coord"),
        ("unsent", r"in step 4 coord 1 sends None and 2 expects Receive\(peer=1, first=0"),
        ("unreceived", r"in step 0 coord 1 does not receive Send\(peer=1, first=3, last=4\) of 0"),
        ("overwritten", "in step 5 coord 0 overwrites what it sends"),
        ("short", "coord 0 has 5 steps, not 6"),
    ],
)
def test_a_wrong_schedule_is_found(fault: str, text: str) -> None:
    broken = Schedule("changed", 4, 4, 6, lambda c: tuple(changed(list(ring(4).of(c)), c, fault)))
    with pytest.raises(LayoutError, match=text):
        interpret(broken, 64)


def test_wrong_counts_are_refused() -> None:
    for call in (lambda: ring(0), lambda: tree(4, 0), lambda: formulas.ring(-1, 8)):
        with pytest.raises(LayoutError, match=r"expected: *an integer, 1 or more"):
            call()
    for call in (lambda: two_level(6, 4), lambda: formulas.two_level(6, 8, 4)):
        with pytest.raises(LayoutError, match="6 ranks in groups of 4"):
            call()
    with pytest.raises(LayoutError, match="no coord 3"):
        ring(3).of(3)


def test_times_by_hand() -> None:
    alpha, beta, size = 5e-6, 1e-9, 1 << 24
    assert formulas.tree(64, size).seconds(alpha, beta) == pytest.approx(12 * alpha + 12 * size * beta)
    assert formulas.ring(8, size).seconds(alpha, beta) == pytest.approx(14 * alpha + 1.75 * size * beta)
    # With 64 chunks, the busiest port determines the time instead of the chain.
    assert formulas.tree(64, size, 64).seconds(alpha, beta) == pytest.approx(75 * alpha + 3 * size * beta)


def test_the_guide_has_the_tables_of_the_formulas() -> None:
    text, page = GUIDE.read_text(), tool("algorithms")
    for table in (page.counts(), page.fastest(), page.many()):
        assert table in text, "python docs/tools/algorithms.py makes the tables"


# -- over messages ------------------------------------------------------------------------------

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


def beside_messages(mesh: Mesh) -> None:
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
    beside_messages(mesh)


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
