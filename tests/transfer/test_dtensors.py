"""DTensors through `link.transfer`, beside what torch's distribute_tensor and full_tensor give."""

from __future__ import annotations

import random
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import meshcomm
from meshcomm import Mesh
from meshcomm.transfer.fused import Kept, Parts, kept
from tests.transfer.pairs import random_whole, same_bits

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.float64)


def random_dims(draw: random.Random, names: str, most: int) -> dict[str, int]:
    """Return two or three dims of at most `most` ranks."""
    while True:
        dims = {name: draw.choice([1, 2, 2, 3, 4]) for name in names[: draw.randint(2, 3)]}
        if prod(dims.values()) <= most:
            return dims


def distributed(mesh: Mesh, whole: Tensor, draw: random.Random) -> DTensor:
    """Return a tensor split in a random way over some dims of a mesh, without communication."""
    names = tuple(name for name in mesh.layout.dims if draw.random() < 0.8) or tuple(mesh.layout.dims)
    placements: list[Any] = [
        Shard(draw.randrange(whole.ndim)) if whole.ndim and draw.random() < 0.7 else Replicate()
        for _ in names
    ]
    return distribute_tensor(whole, mesh[names], placements, src_data_rank=None)


@pytest.mark.parametrize("block", range(8), ids="block{}".format)
@pytest.mark.deep_cases("block[1-9]")
def test_random_placements(block: int) -> None:
    def program(all_ranks: Mesh, seed: int) -> None:
        draw = random.Random(seed)
        dims = random_dims(draw, "xyz", 4), random_dims(draw, "uvw", 8)
        first = draw.choice([0, 0, 2, 4])
        sizes = [prod(each.values()) for each in dims]
        if first + sizes[1] > 8:
            first = 8 - sizes[1]
        whole = random_whole(
            [draw.choice([0, 1, 3, 4, 5, 8, 13]) for _ in range(draw.randint(0, 3))],
            draw.choice(DTYPES),
            seed,
        )
        draws = [random.Random(draw.random()) for _ in range(2)]
        with (
            meshcomm.init(dims=dims[0], ranks=range(sizes[0]), device="cpu") as source,
            meshcomm.init(dims=dims[1], ranks=range(first, first + sizes[1]), device="cpu") as target,
            meshcomm.link(source, target, bucket_bytes=max(7, whole.nbytes // 20)) as link,
        ):
            x = distributed(source, whole, draws[0]) if source.is_member else None
            out = wanted = None
            if target.is_member:
                wanted = distributed(target, whole, random.Random(seed))
                out = distributed(target, torch.full_like(whole, 77), random.Random(seed))
            for _ in range(2 if link.is_member else 0):
                assert link.transfer(x, into=out) is out
                if out is not None and wanted is not None:
                    assert same_bits(out.to_local(), wanted.to_local()), (seed, out, wanted)

    for seed in range(block * 12, block * 12 + 12):
        meshcomm.simulate(program, dims={"all": 8}, args=(seed,))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.Linear(13, 5, bias=False))


@pytest.mark.parametrize("first", [0, 2, 4])
@pytest.mark.parametrize(
    "dims",
    [
        {"fsdp": 2, "tp": 2},
        {"rep": 2, "fsdp": 2},
        {"fsdp": 4},
        {"fsdp": 3, "tp": 2},
        {"rep": 2, "fsdp": 2, "tp": 2},
    ],
)
# Three dims at once stand for two of them, where ranks divide the axes; the first rank of the source varies in the other cases.
@pytest.mark.deep_cases(r"\[dims[01]-[24]|\[dims4-2")
def test_parameters_of_fsdp_and_tensor_parallel(dims: dict[str, int], first: int) -> None:
    """The target gets the values from before the split, and sends them back. Sizes are uneven, and some parts empty."""

    def program(_: Mesh) -> None:
        source = meshcomm.init(dims=dims, ranks=range(prod(dims.values())), device="cpu")
        target = meshcomm.init(dims={"copy": 2, "tp": 2}, ranks=range(first, first + 4), device="cpu")
        with source, target, meshcomm.link(source, target) as there, meshcomm.link(target, source) as back:
            model = net()
            wholes = [parameter.detach().clone() for parameter in model.parameters()]
            if source.is_member:
                if "tp" in dims:
                    parallelize_module(model, source["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
                for layer in model:
                    fully_shard(layer, mesh=source[("rep", "fsdp") if "rep" in dims else ("fsdp",)])
            for parameter, whole in zip(model.parameters(), wholes, strict=True) if there.is_member else ():
                x = parameter if source.is_member else None
                out = columns = None
                if target.is_member:
                    out = torch.full_like(whole, torch.nan)
                    columns = distribute_tensor(
                        out, target["copy", "tp"], [Replicate(), Shard(whole.ndim - 1)], src_data_rank=None
                    )
                there.transfer(x, out)
                assert out is None or same_bits(out, whole)
                there.transfer(x, into=columns)
                assert columns is None or same_bits(columns.full_tensor(), whole)
                part = None
                with torch.no_grad():
                    if isinstance(x, DTensor):
                        part = x.to_local().clone()
                        x.to_local().fill_(torch.nan)
                    back.transfer(columns, into=x)
                if isinstance(x, DTensor) and part is not None:
                    assert same_bits(x.to_local(), part)

    meshcomm.simulate(program, dims={"all": 8})


def test_names_on_some_ranks_and_fused_weights() -> None:
    """Stages hold different names on both sides; a fused weight, whose rows have another order in memory, has its own on arrival."""
    parts = Parts((8, 4, 4))
    wholes = {f"{number}": random_whole([7, 6], torch.bfloat16, number) for number in range(5)}
    fused = torch.arange(16 * 3.0).view(16, 3)

    def held(mesh: Mesh, stages: dict[str, int], axis: int, blank: bool) -> dict[str, Any]:
        tensors: dict[str, Any] = {}
        for name, whole in wholes.items():
            if stages[name] in (mesh.coord("pp"), -1):
                values = torch.full_like(whole, torch.nan) if blank else whole
                tensors[name] = distribute_tensor(values, mesh["tp"], [Shard(axis)], src_data_rank=None)
        rows = kept(torch.full_like(fused, torch.nan) if blank else fused, parts)
        split = distribute_tensor(rows, mesh["tp"], [Shard(0)], src_data_rank=None)
        return {**tensors, "qkv": Kept(split, parts)}

    def program(_: Mesh) -> None:
        source = meshcomm.init(dims={"pp": 2, "tp": 2}, ranks=range(4), device="cpu")
        target = meshcomm.init(dims={"tp": 2, "pp": 2}, ranks=range(4, 8), device="cpu")
        whole = meshcomm.init(dims={"copy": 3}, ranks=range(3, 6), device="cpu")
        first, second = {"0": 0, "1": 0, "2": 1, "3": 1, "4": -1}, {"0": 1, "1": 0, "2": 0, "3": -1, "4": 0}
        with (
            source,
            target,
            whole,
            meshcomm.link(source, target) as link,
            meshcomm.link(source, whole) as last,
        ):
            given = held(source, first, 0, False) if source.is_member else {}
            if link.is_member:
                model = given if source.is_member else held(target, second, 1, True)
                weights = link.weights(model)
                if source.is_member:
                    weights.push(version=1).wait()
                else:
                    assert weights.pull() == 1
                    for name, tensor in held(target, second, 1, False).items():
                        mine = model[name]
                        if isinstance(tensor, Kept):
                            tensor, mine = tensor.tensor, mine.tensor
                        assert same_bits(mine.to_local(), tensor.to_local()), name
            if last.is_member:
                plain = {"qkv": torch.full_like(fused, torch.nan)}
                into = plain if whole.is_member and source.is_member else None
                weights = last.weights(given if source.is_member else plain, into=into, only=["qkv"])
                if source.is_member:
                    push = weights.push(version=2)
                if whole.is_member:
                    assert weights.pull() == 2 and same_bits(plain["qkv"], fused)
                if source.is_member:
                    push.wait()

    meshcomm.simulate(program, dims={"all": 8})
