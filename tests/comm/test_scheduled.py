"""The hierarchical all_reduce of a tensor in several pieces, over two and three dims."""

from __future__ import annotations

import pytest
import torch

import meshcomm
from meshcomm import Mesh
from meshcomm.comm import scheduled
from meshcomm.testing import Pool

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
