"""Whole tensors of a mesh on one of its ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import meshcomm
from meshcomm.errors import TransferMismatch
from meshcomm.transfer.fused import Kept, Parts, kept
from meshcomm.transfer.gather import Gathered
from meshcomm.transfer.placement import Located
from meshcomm.transfer.tensors import Cut, Cutout, Parted, own_regions, placement_of

SHAPES = [(7, 5), (4, 3), (1, 9), (0, 4), (3,), ()]


def values_of(number: int) -> Tensor:
    return torch.randn(SHAPES[number], generator=torch.Generator().manual_seed(number))


def parts(mesh: Any) -> dict[str, Parted]:
    """Tensors in every layout, of which each rank along pp has others."""
    tensors: dict[str, Parted] = {}
    for number, shape in enumerate(SHAPES):
        splits = [Shard(0) if shape else Replicate(), Shard(len(shape) - 1) if shape else Replicate()]
        stage = f"stage {mesh.coord('pp')}, {number}"
        tensors[stage] = distribute_tensor(values_of(number), mesh["dp", "tp"], splits)
    fused = kept(torch.arange(36.0).view(12, 3), Parts((8, 4)))
    tensors["fused"] = Kept(distribute_tensor(fused, mesh["tp"], [Shard(0)]), Parts((8, 4)))
    tensors["plain"] = torch.arange(3)
    stacked = distribute_tensor(torch.arange(40.0).view(5, 4, 2), mesh["dp", "tp"], [Shard(0), Shard(1)])
    for index in range(5):
        for name, first, last in (("up", 0, 1), ("gate", 1, 4)):
            cutout = Cutout(stacked, Cut((index, first, 0), (index + 1, last, 2), (2, 1)))
            if cutout.is_held:
                tensors[f"{index} {name}"] = cutout
    return tensors


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("bucket_bytes", [16, 1 << 20])
def test_each_tensor_arrives_whole_on_one_rank(rank: int, bucket_bytes: int) -> None:
    def program(mesh: Any) -> dict[str, Tensor]:
        tensors = parts(mesh)
        for tensor in tensors.values():
            # torch and the placement say the same of where a part lies.
            where = Located(placement_of(tensor, mesh.layout, mesh.rank), mesh.layout)
            boxes = [box[:2] for box in where.boxes(mesh.layout.position(mesh.rank)) if 0 not in box.shape]
            own = [region.box[:2] for region in own_regions(tensor) if 0 not in region.box.shape]
            assert own == boxes
        gathered = Gathered(mesh, tensors, rank, bucket_bytes=bucket_bytes)
        arrived = dict(gathered)
        assert arrived.keys() == gathered.kinds.keys()
        assert len(mesh.layout.merge) == 1
        return arrived

    ranks = meshcomm.simulate(program, dims={"pp": 2, "dp": 2, "tp": 2})
    expected = {
        f"stage {pp}, {number}": values_of(number) for pp in range(2) for number in range(len(SHAPES))
    }
    expected |= {"fused": torch.arange(36.0).view(12, 3), "plain": torch.arange(3)}
    for index, value in enumerate(torch.arange(40.0).view(5, 4, 2)):
        expected |= {f"{index} up": value[:1].T, f"{index} gate": value[1:].T}
    for at, arrived in enumerate(ranks):
        assert arrived.keys() == expected.keys()
        if at == rank:
            assert all(torch.equal(arrived[name], value) for name, value in expected.items())
        else:
            assert not any(value.numel() for value in arrived.values())


def test_parts_that_make_no_whole_are_an_error_on_every_rank() -> None:
    def program(mesh: Any) -> str:
        shape = (4, 2) if mesh.rank else (4, 3)
        tensor = DTensor.from_local(torch.zeros(shape), mesh["tp"], [Shard(0)], run_check=False)
        with pytest.raises(TransferMismatch) as caught:
            Gathered(mesh, {"w": tensor}, 0)
        return str(caught.value)

    for text in meshcomm.simulate(program, dims={"tp": 2}):
        assert "w differs among the ranks of the source" in text


def test_a_mesh_of_one_rank_needs_no_message() -> None:
    def program(mesh: Any) -> Tensor:
        ((name, tensor),) = Gathered(mesh, {"w": torch.arange(4)}, 0)
        assert name == "w"
        return tensor

    assert meshcomm.simulate(program, dims={"dp": 1})[0].tolist() == [0, 1, 2, 3]
