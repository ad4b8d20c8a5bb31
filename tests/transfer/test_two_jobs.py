"""Links between two jobs: tensors, versions of weights, and a target that dies and comes again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import meshcomm
from meshcomm.testing import Pool
from meshcomm.transfer.link import Link
from tests.ports import free_port
from tests.two_jobs import Place, run, values


def whole(seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(7, 5, generator=draw),
        "b": torch.randn(3, generator=draw),
        "c": torch.randn((), generator=draw),
    }


def linked(place: Place, mesh: meshcomm.Mesh, port: int, **keys: Any) -> Link:
    side = {"trainer": "source", "generator": "target"}[place.job]
    return meshcomm.link(
        **{side: mesh}, name="policy", store=f"tcp://127.0.0.1:{port}", timeout_s=30.0, **keys
    )


def model_of(mesh: meshcomm.Mesh, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, the first of them split along the mesh's only dim."""
    split = distribute_tensor(tensors["a"].clone(), mesh.device_mesh, [Shard(0)])
    return {"a": split, "b": tensors["b"].clone(), "c": tensors["c"].clone()}


def parts(model: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in model.items()}


def _versions(place: Place, port: int) -> list[int]:
    with place.mesh() as mesh, linked(place, mesh, port) as link:
        x = out = None
        full = torch.arange(12.0).view(6, 2)
        if place.job == "trainer":
            x = full.chunk(2)[place.rank]
        else:
            out = torch.full((6, 1), torch.nan)
        link.transfer(x, out, "n/dp k -> n k/dp")
        if out is not None:
            assert torch.equal(out, full.chunk(2, 1)[place.rank])
        model = model_of(
            mesh, whole() if place.job == "trainer" else {n: x * torch.nan for n, x in whole().items()}
        )
        weights, seen = link.weights(model), []
        for version in (1, 5):
            if place.job == "trainer":
                weights.push(version=version).wait()
                seen.append(weights.version)
                with torch.no_grad():
                    for tensor in model.values():
                        tensor.add_(1)
                continue
            seen.append(weights.pull())
            for name, tensor in parts(model).items():
                assert torch.equal(tensor, whole()[name] + (version > 1))
        return seen


def test_versions_go_from_one_job_to_another(pool: Pool, tmp_path: Path) -> None:
    """Both jobs see the same versions, bit-equal on the target."""
    ended = run(pool, tmp_path, _versions, free_port(), trainer=2, generator=2)
    assert values(ended) == [[1, 5]] * 4
