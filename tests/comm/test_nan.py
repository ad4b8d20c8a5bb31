"""min and max of floats: NaN wins and -0.0 is below 0.0, on every transport and by every algorithm."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import meshcomm
from meshcomm.mesh import Mesh
from meshcomm.testing import Pool

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
RANKS = 4


def values(coord: int, dtype: torch.dtype) -> torch.Tensor:
    """Element c is NaN on coord c only, by turns with either sign; then zeros of mixed signs, and numbers."""
    x = torch.tensor([float(coord - 2)] * RANKS)
    x[coord] = math.copysign(math.nan, -1.0 if coord % 2 else 1.0)
    zeros = [0.0 if coord else -0.0, -0.0 if coord else 0.0]
    rest = [-0.0, 0.0, math.inf if coord == 1 else -math.inf, (-1.5) ** coord]
    return torch.cat([x, torch.tensor([*zeros, *rest])]).to(dtype)


def reduced(mesh: Mesh) -> dict[str, Any]:
    found = {}
    for op in ("min", "max"):
        for dtype in DTYPES:
            own = values(mesh.coord("dp"), dtype)
            whole = torch.cat([own] * RANKS)
            got = {
                "flat": mesh.all_reduce("dp", own.clone(), op),
                "ring": mesh.all_reduce("dp", own.clone(), op, algorithm="ring"),
                "tree": mesh.all_reduce("dp", own.clone(), op, algorithm="tree"),
                "reduce": mesh.reduce("dp", own, 2, op),
                "reduce_scatter": mesh.reduce_scatter("dp", whole, op=op),
            }
            for name, x in got.items():
                found[f"{name} {op} {dtype}"] = x
    return found


def on_gloo() -> dict[str, Any]:
    with meshcomm.init(dims={"dp": RANKS}, device="cpu", timeout_s=60, validate_calls=0) as mesh:
        return reduced(mesh)


@pytest.mark.parametrize("via", ["simulator", "gloo"])
def test_nan_and_signed_zeros_in_min_and_max(via: str, pool: Pool) -> None:
    if via == "simulator":
        ranks = meshcomm.simulate(reduced, dims={"dp": RANKS})
    else:
        ranks = pool.run(on_gloo, ranks=RANKS)
    for op, combine in (("min", torch.minimum), ("max", torch.maximum)):
        for dtype in DTYPES:
            wanted = values(0, dtype)
            for coord in range(1, RANKS):
                wanted = combine(wanted, values(coord, dtype))
            assert wanted[:RANKS].isnan().all() and not wanted[RANKS:].isnan().any()
            # torch leaves open which zero is the smaller.
            signs = [op == "min", op == "min", True, False]
            for coord, found in enumerate(ranks):
                for name in ("flat", "ring", "tree", "reduce", "reduce_scatter"):
                    got = found[f"{name} {op} {dtype}"]
                    if name == "reduce" and coord != 2:
                        assert got is None
                        continue
                    where = (name, op, dtype, coord, got)
                    assert got.dtype == dtype, where
                    assert torch.equal(got.isnan(), wanted.isnan()), where
                    assert torch.equal(got[RANKS:], wanted[RANKS:]), where
                    assert got[RANKS : RANKS + 4].signbit().tolist() == signs, where
