"""The same checks on NCCL. Each says by name what it lacks where there are no GPUs."""

from __future__ import annotations

import pytest
import torch

import meshcomm
from meshcomm.mesh import Mesh
from tests.ranks import on_ranks

pytestmark = pytest.mark.gpu

GPUS = torch.cuda.device_count()
needs_one = pytest.mark.skipif(GPUS < 1, reason="needs a GPU; this host has none")
needs_eight = pytest.mark.skipif(GPUS < 8, reason=f"needs 8 GPUs; this host has {GPUS}")


@needs_one
@on_ranks(1)
def test_world_size_one_on_one_gpu() -> None:
    with meshcomm.init(dims={"dp": 1, "tp": 1}, timeout_s=60) as mesh:
        x = torch.arange(6.0, device=mesh.device).view(2, 3)
        assert mesh.device.type == "cuda" and mesh.plan.defaults.backend == "nccl"
        assert mesh.plan.for_rank(0).creations == 0
        for dims in ("dp", "tp", ("dp", "tp")):
            assert torch.equal(mesh.all_reduce(dims, x.clone()), x)
            assert torch.equal(mesh.all_gather(dims, x, 1), x)
            assert torch.equal(mesh.reduce_scatter(dims, x, 1), x)
            assert torch.equal(mesh.all_to_all(dims, x, 0, 1), x)
            assert torch.equal(mesh.rearrange(x, "a b -> a (tp b)"), x)
            y = x.clone().requires_grad_()
            mesh.functional.all_reduce("tp", y, grad="sum").sum().backward()
            assert torch.equal(y.grad, torch.ones_like(x))


@needs_one
@on_ranks(GPUS + 1)
def test_more_ranks_than_devices_are_refused() -> None:
    told = rf"{GPUS + 1} ranks on a host with {GPUS} cuda device\(s\)"
    with pytest.raises(meshcomm.MeshcommError, match=told):
        meshcomm.init(dims={"dp": GPUS + 1}, timeout_s=30)


@needs_eight
@on_ranks(8)
def test_eight_gpus() -> None:
    dims, merge = {"pp": 2, "dp": 2, "tp": 2}, {"model": ("pp", "tp"), "data": ("tp", "dp")}
    for order in (None, [6, 3, 1, 4, 0, 7, 5, 2]):
        with meshcomm.init(dims=dims, merge=merge, rank_order=order, device="cuda", timeout_s=60) as mesh:
            torch.set_default_device(mesh.device)
            try:
                basics(mesh)
            finally:
                torch.set_default_device(None)


def basics(mesh: Mesh) -> None:
    for dims in ("pp", "dp", "tp", "model", "data"):
        ranks = mesh.ranks(dims)
        x = torch.full((8, 4), float(mesh.rank))
        assert mesh.all_gather(dims, x[:1, :1]).view(-1).tolist() == ranks
        assert mesh.all_reduce(dims, x.clone())[0, 0] == sum(ranks)
        assert mesh.reduce_scatter(dims, x)[0, 0] == sum(ranks)
        assert mesh.all_to_all(dims, x)[:: 8 // len(ranks), 0].tolist() == ranks
        assert mesh.broadcast(dims, x.clone(), src=1)[0, 0] == ranks[1]
        for offset in (1, -1, 2):
            came = mesh.shift(dims, x, offset)
            assert came is not None
            assert came[0, 0] == ranks[(mesh.coord(dims) - offset) % len(ranks)]
        with pytest.raises(meshcomm.MeshcommError, match="band of int64 is not possible on nccl"):
            mesh.all_reduce(dims, x.long(), "band")
        with pytest.raises(meshcomm.MeshcommError, match="cannot receive from any source"):
            mesh.recv_any(dims, x)
