"""A reduction op is one row of a table: an op that a test adds works wherever ops are used."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

import meshcomm
from meshcomm.comm.scheduled import Scheduled
from meshcomm.mesh import Mesh
from meshcomm.reductions import REDUCTIONS, WIRE_OPS, Reduction, WireOp
from meshcomm.testing import Pool

SETTINGS: Any = {"dims": {"one": 1, "dp": 2, "tp": 2}, "merge": {"all": ("dp", "tp")}}
SUM = REDUCTIONS["sum"]
SQUARES = Reduction(
    "sum_of_squares", SUM.wire, lambda x, factor: x.mul_(x), False, SUM.refuses, linear=False, partial=True
)
ADDED = SQUARES.name


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REDUCTIONS, ADDED, SQUARES)


def squares(mesh: Mesh) -> None:
    for dtype in (torch.float32, torch.float64, torch.int64, torch.int16, torch.complex64):
        # Repeated, because the first calls are checked and later ones may be prepared.
        for _ in range(3):
            for dims in ("one", "tp", "all"):
                every_call(mesh, dims, dtype)
            every_algorithm(mesh, dtype)
            patterns(mesh, dtype)


def brought(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(8) % 3 + rank).to(dtype)


def wanted(mesh: Mesh, dims: str, dtype: torch.dtype) -> list[Any]:
    total: list[Any] = sum(brought(int(rank), dtype) ** 2 for rank in mesh.ranks(dims)).tolist()  # type: ignore[union-attr]
    return total


def every_call(mesh: Mesh, dims: str, dtype: torch.dtype) -> None:
    want, size, coord = wanted(mesh, dims, dtype), mesh.size(dims), mesh.coord(dims)
    own = want[coord * 8 // size : (coord + 1) * 8 // size]
    x = brought(mesh.rank, dtype)
    reduced = mesh.reduce(dims, x, size - 1, ADDED)
    assert (None if reduced is None else reduced.tolist()) == (want if coord == size - 1 else None)
    assert mesh.reduce_scatter(dims, x, 0, ADDED).tolist() == own
    assert torch.equal(x, brought(mesh.rank, dtype))
    assert mesh.all_reduce(dims, x, ADDED) is x and x.tolist() == want
    pair = [brought(mesh.rank, dtype) for _ in range(2)]
    assert [each.tolist() for each in mesh.all_reduce(dims, pair, ADDED, async_op=True).wait()] == [
        want,
        want,
    ]
    columns = brought(mesh.rank, dtype).view(2, 4).t()
    assert mesh.all_reduce(dims, columns, ADDED).t().flatten().tolist() == want


def every_algorithm(mesh: Mesh, dtype: torch.dtype) -> None:
    for algorithm in ("flat", "hierarchical", *get_args(Scheduled)):
        names = ("dp", "tp") if algorithm in ("hierarchical", "two_level") else "all"
        for dims in (names, *([] if names != "all" else ["one"])):
            got = mesh.all_reduce(dims, brought(mesh.rank, dtype), ADDED, algorithm=algorithm)
            assert got.tolist() == wanted(mesh, "one" if dims == "one" else "all", dtype), (algorithm, dims)


def patterns(mesh: Mesh, dtype: torch.dtype) -> None:
    want, place = wanted(mesh, "all", dtype), 2 * mesh.coord("all")
    got = mesh.rearrange(brought(mesh.rank, dtype), "(dp tp h) -> h", partial=ADDED)
    assert got.tolist() == want[place : place + 2]
    alone = mesh.rearrange(brought(mesh.rank, dtype), "(one h) -> h", partial=ADDED)
    assert alone.tolist() == wanted(mesh, "one", dtype)


def on_processes() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(REDUCTIONS, ADDED, SQUARES)
        for compared in (0, 3):
            with meshcomm.init(**SETTINGS, device="cpu", timeout_s=60, validate_calls=compared) as mesh:
                squares(mesh)


@pytest.mark.usefixtures("added")
def test_an_added_operation_is_right_in_the_simulator() -> None:
    # The ranks are threads, which share the table.
    meshcomm.simulate(squares, **SETTINGS)


def test_an_added_operation_is_right_on_processes(pool: Pool) -> None:
    pool.run(on_processes, ranks=4)


def test_a_row_says_everything() -> None:
    with pytest.raises(TypeError, match="partial"):
        Reduction("squares", SUM.wire, None, False, {}, False)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="lacking"):
        WireOp("squares", "add", "SUM", False, True, None)  # type: ignore[call-arg]
    for op in WIRE_OPS.values():
        assert callable(getattr(torch, op.combine)) and hasattr(torch.distributed.ReduceOp, op.reduce_op)
