"""A reduction op is one row of a table: ops that a test adds work wherever ops are used."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch

import meshcomm
from meshcomm.comm.scheduled import Scheduled
from meshcomm.errors import AutogradError
from meshcomm.mesh import Mesh
from meshcomm.reductions import REDUCTIONS, WIRE_OPS, Reduction, WireOp
from meshcomm.testing import Pool

SETTINGS: Any = {"dims": {"one": 1, "dp": 2, "tp": 2}, "merge": {"all": ("dp", "tp")}}
SUM = REDUCTIONS["sum"]
# The values of the first are prepared. The second sends x as it is, under a name that its backend operation does not have.
ADDED = {
    "sum_of_squares": Reduction(
        "sum_of_squares", SUM.wire, lambda x, factor: x.mul_(x), False, SUM.refuses, partial=True
    ),
    "total": Reduction("total", SUM.wire, None, False, SUM.refuses, partial=True),
}
CASES = [
    ("sum_of_squares", dtype)
    for dtype in (torch.float32, torch.float64, torch.int64, torch.int16, torch.complex64)
]
CASES += [("total", torch.float32)]


def added_operations(mesh: Mesh) -> None:
    for op, dtype in CASES:
        # Repeated, because the first calls are checked and later ones may be prepared.
        for _ in range(3):
            for dims in ("one", "tp", "all"):
                every_call(mesh, dims, dtype, op)
            every_algorithm(mesh, dtype, op)
            patterns(mesh, dtype, op)
            functional(mesh, dtype, op)


def brought(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(8) % 3 + rank).to(dtype)


def wanted(mesh: Mesh, dims: str, dtype: torch.dtype, op: str) -> list[Any]:
    power = {"sum_of_squares": 2, "total": 1}[op]
    total: list[Any] = sum(brought(int(rank), dtype) ** power for rank in mesh.ranks(dims)).tolist()  # type: ignore[union-attr]
    return total


def every_call(mesh: Mesh, dims: str, dtype: torch.dtype, op: str) -> None:
    want, size, coord = wanted(mesh, dims, dtype, op), mesh.size(dims), mesh.coord(dims)
    own = want[coord * 8 // size : (coord + 1) * 8 // size]
    x = brought(mesh.rank, dtype)
    reduced = mesh.reduce(dims, x, size - 1, op)
    assert (None if reduced is None else reduced.tolist()) == (want if coord == size - 1 else None)
    assert mesh.reduce_scatter(dims, x, 0, op).tolist() == own
    assert torch.equal(x, brought(mesh.rank, dtype))
    assert mesh.all_reduce(dims, x, op) is x and x.tolist() == want
    pair = [brought(mesh.rank, dtype) for _ in range(2)]
    assert [each.tolist() for each in mesh.all_reduce(dims, pair, op, async_op=True).wait()] == [
        want,
        want,
    ]
    columns = brought(mesh.rank, dtype).view(2, 4).t()
    assert mesh.all_reduce(dims, columns, op).t().flatten().tolist() == want


def every_algorithm(mesh: Mesh, dtype: torch.dtype, op: str) -> None:
    for algorithm in ("flat", "hierarchical", *get_args(Scheduled)):
        names = ("dp", "tp") if algorithm in ("hierarchical", "two_level") else "all"
        for dims in (names, *([] if names != "all" else ["one"])):
            got = mesh.all_reduce(dims, brought(mesh.rank, dtype), op, algorithm=algorithm)
            want = wanted(mesh, "one" if dims == "one" else "all", dtype, op)
            assert got.tolist() == want, (algorithm, dims)


def patterns(mesh: Mesh, dtype: torch.dtype, op: str) -> None:
    want, place = wanted(mesh, "all", dtype, op), 2 * mesh.coord("all")
    got = mesh.rearrange(brought(mesh.rank, dtype), "(dp tp h) -> h", partial=op)
    assert got.tolist() == want[place : place + 2]
    alone = mesh.rearrange(brought(mesh.rank, dtype), "(one h) -> h", partial=op)
    assert alone.tolist() == wanted(mesh, "one", dtype, op)


def functional(mesh: Mesh, dtype: torch.dtype, op: str) -> None:
    want, place, x = wanted(mesh, "tp", dtype, op), 4 * mesh.coord("tp"), brought(mesh.rank, dtype)
    assert mesh.functional.all_reduce("tp", x, op, grad="sum").tolist() == want
    assert mesh.functional.reduce_scatter("tp", x, 0, op).tolist() == want[place : place + 4]
    assert torch.equal(x, brought(mesh.rank, dtype))
    if dtype.is_floating_point:
        x.requires_grad_()
        if op == "total":
            mesh.functional.all_reduce("tp", x, op, grad="sum").sum().backward()
            assert x.grad is not None and x.grad.tolist() == [2.0] * 8
        else:
            with pytest.raises(AutogradError, match="no gradient for op='sum_of_squares'"):
                mesh.functional.all_reduce("tp", x, op, grad="sum")
            with pytest.raises(AutogradError, match='partial="sum_of_squares" has no gradient'):
                mesh.rearrange(x, "(tp h) -> h", partial=op)


def on_processes() -> None:
    with patch.dict(REDUCTIONS, ADDED):
        for compared in (0, 3):
            with meshcomm.init(**SETTINGS, device="cpu", timeout_s=60, validate_calls=compared) as mesh:
                added_operations(mesh)


def test_an_added_operation_is_right_in_the_simulator() -> None:
    # The ranks are threads, which share the table.
    with patch.dict(REDUCTIONS, ADDED):
        meshcomm.simulate(added_operations, **SETTINGS)


def test_an_added_operation_is_right_on_processes(pool: Pool) -> None:
    pool.run(on_processes, ranks=4)


def test_a_row_says_everything() -> None:
    with pytest.raises(TypeError, match="partial"):
        Reduction("squares", SUM.wire, None, False, {})  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="lacking"):
        WireOp("squares", "add", "SUM", False, True, None)  # type: ignore[call-arg]
    for op in WIRE_OPS.values():
        assert callable(getattr(torch, op.combine)) and hasattr(torch.distributed.ReduceOp, op.reduce_op)


@pytest.mark.parametrize(
    ("file", "sentence", "in_patterns"),
    [
        ("meshcomm/comm/along.py", r" op: {9}(.*?)\. An op", False),
        ("docs/guide/communication.md", r"\*\*Reduce operations\*\*: (.*?)\.\n", False),
        ("docs/guide/patterns.md", r"`partial` applies to .*? Valid values are (.*?)\.", True),
    ],
)
def test_a_list_of_operations_has_all_of_them(file: str, sentence: str, in_patterns: bool) -> None:
    found = re.search(sentence, (Path(__file__).parents[1] / file).read_text(), re.DOTALL)
    assert found is not None
    # What an operation does is in parentheses.
    names = re.findall(r'["`](\w+)["`]', re.sub(r"\(.*?\)", "", found[1], flags=re.DOTALL))
    assert names == [row.name for row in REDUCTIONS.values() if row.partial or not in_patterns]
