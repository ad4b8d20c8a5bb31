"""How a user's program is type-checked: `mypy` reads this file; it is never run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, assert_type

import torch
from torch import Tensor

import meshcomm
from meshcomm import Handle, Mesh
from meshcomm.layout import Layout
from meshcomm.testing import Pool


def collectives(mesh: Mesh, x: Tensor, xs: list[Tensor], later: bool) -> None:
    assert_type(mesh.all_reduce("dp", x), Tensor)
    assert_type(mesh.all_reduce(("dp", "tp"), torch.nn.Parameter(x)), Tensor)
    assert_type(mesh.all_reduce("dp", x, async_op=True), Handle[Tensor])
    assert_type(mesh.all_reduce("dp", xs), list[Tensor])
    assert_type(mesh.all_reduce("dp", tuple(xs)), Sequence[Tensor])
    assert_type(mesh.all_reduce("dp", xs, async_op=True).wait(), list[Tensor])
    assert_type(mesh.reduce("dp", x, dst=0), Tensor | None)
    assert_type(mesh.reduce("dp", x, dst=0, async_op=True), Handle[Tensor | None])
    assert_type(mesh.reduce_scatter("dp", x, op="avg"), Tensor)
    assert_type(mesh.reduce_scatter("dp", x, async_op=True), Handle[Tensor])
    assert_type(mesh.broadcast("dp", x, src=0), Tensor)
    assert_type(mesh.broadcast("dp", xs, src=0), list[Tensor])
    assert_type(mesh.all_gather("dp", x, uneven=True), Tensor)
    assert_type(mesh.all_gather("dp", x, async_op=True), Handle[Tensor])
    assert_type(mesh.gather("dp", x, dst=0), Tensor | None)
    assert_type(mesh.scatter("dp", None, src=0), Tensor)
    assert_type(mesh.all_gather("dp", x, dim=1), Tensor)
    assert_type(mesh.all_to_all("dp", x, input_split_sizes=[1, 3]), Tensor)
    assert_type(mesh.barrier("dp", async_op=True), Handle[None])
    assert_type(mesh.barrier("dp", async_op=later), Handle[None] | None)


def messages(mesh: Mesh, x: Tensor, open_line: bool) -> None:
    assert_type(mesh.shift("cp", x), Tensor)
    assert_type(mesh.shift("cp", x, wrap=open_line), Tensor | None)
    assert_type(mesh.exchange("dp", [(x, 0)], [(x, 1)]), list[Tensor])
    assert_type(mesh.exchange("dp", [(x, 0)], async_op=True), Handle[list[Tensor]])
    assert_type(mesh.recv("pp", src=0), Tensor)
    assert_type(mesh.isend("pp", x, dst=1), Handle[None])
    assert_type(mesh.irecv("pp", x, src=1).wait(), Tensor)


def places(mesh: Mesh, layout: Layout) -> None:
    assert_type(mesh.neighbor_rank("dp", +1), int)
    assert_type(mesh.neighbor_rank("dp", +1, wrap=False), int | None)
    assert_type(layout.neighbor_rank(3, "dp", +1), int)


def function(mesh: Mesh) -> float:
    return float(mesh.coord("dp"))


def ranks(pool: Pool, allow: bool) -> None:
    assert_type(meshcomm.simulate(function, dims={"dp": 2}), list[float])
    assert_type(pool.run(function), list[Any])
    assert_type(pool.run(function, allow=allow), list[Any])
