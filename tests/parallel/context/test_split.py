"""Sequences are split, gathered and whole again."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

import meshcomm
from meshcomm.errors import AutogradError, ShapeError, UnknownDim, UnsupportedOp
from meshcomm.mesh import Mesh
from meshcomm.parallel.context import (
    ContextSplit,
    gather_sequence,
    ring_attention,
    sequence_positions,
    split_sequence,
)
from tests.parallel.context.test_ring import SEQUENCE, draw, farthest, one_process, split_up


def cross(mesh: Mesh) -> float:
    q, k, v, dout = draw(4, 2)
    q, dout = q[:, :, :8], dout[:, :, :8]
    mine = split_up(mesh, "cp", ring_attention, "contiguous", [q, k, v, dout], causal=False)
    return farthest(mine, one_process(q, k, v, dout, False, None))


def test_keys_of_another_sequence() -> None:
    assert max(meshcomm.simulate(cross, dims={"cp": 4})) < 1e-12


def there_and_back(mesh: Mesh, order: Any) -> None:
    ids = torch.arange(2 * 12).reshape(2, 12)
    mine = split_sequence(ids, -1, mesh, "cp", order)
    assert mine[0].tolist() == sequence_positions(12, 3, mesh.coord("cp"), order).tolist()
    assert torch.equal(gather_sequence(mine, 1, mesh, "cp", order), ids)
    # Each rank's loss weights all tokens by its coord + 1, so the gradient of the ranks' sum has the factor 1 + 2 + 3.
    x = (mine.double() * 0.5).requires_grad_()
    whole = gather_sequence(x, 1, mesh, "cp", order, grad="reduce_scatter")
    (whole * (mesh.coord("cp") + 1) * ids).sum().backward()
    assert torch.equal(x.grad, mine * 6.0)
    with pytest.raises(AutogradError, match="all_gather"):
        gather_sequence(x, 1, mesh, "cp", order)
    # The gradient of the split covers this rank's tokens alone.
    table = torch.zeros(12, 2, requires_grad=True)
    split_sequence(table, 0, mesh, "cp", order).sum().backward()
    assert torch.equal(
        table.grad[:, 0].nonzero().flatten(), sequence_positions(12, 3, mesh.coord("cp"), order)
    )


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
def test_split_and_gather(order: Any) -> None:
    meshcomm.simulate(there_and_back, dims={"cp": 3}, args=(order,))


def switched(mesh: Mesh) -> None:
    whole = draw(4, 2)
    wanted = one_process(*whole, True, None)[0]
    for dim, attention in product((None, "tp", "cp"), ("ring", "ulysses")):
        split = ContextSplit(mesh, dim, attention)
        alone = dim != "cp"
        assert (split.size, split.coord) == ((1, 0) if alone else (2, mesh.coord("cp")))
        assert split.order == ("zigzag" if attention == "ring" else "contiguous")
        assert torch.equal(split.positions(SEQUENCE), split.split(torch.arange(SEQUENCE), 0))
        q, k, v = (split.split(x, 2) for x in whole[:3])
        out = split.attend(q, k, v)
        if alone:
            assert q is whole[0] and torch.equal(out, wanted)
        assert farthest([split.gather(out, 2)], [wanted]) < 1e-12
    with pytest.raises(UnsupportedOp, match="'flash' is not a kind of attention over a split sequence"):
        ContextSplit(mesh, None, "flash")  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="10 % 4 = 2"):
        ContextSplit(mesh, "cp").positions(10)
    with pytest.raises(UnknownDim, match="ctx"):
        ContextSplit(mesh, "ctx")


def test_one_object_for_a_model() -> None:
    meshcomm.simulate(switched, dims={"dp": 2, "cp": 2, "tp": 1})
