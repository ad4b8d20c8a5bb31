"""A mesh over groups that the program has made: DeviceMeshes, their slices and flattened dims, and groups by name."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import meshcomm
from meshcomm.errors import LaunchError, MeshcommError, MeshMismatchError
from meshcomm.mesh import Mesh
from meshcomm.transport.torch_private import default_store, groups_by_name
from tests.ranks import on_ranks

AS_MEGATRON = {  # of 8 ranks, tp-cp-ep-dp-pp with tp=2 cp=1 pp=2 ep=2 etp=1
    "tp": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "cp": [[rank] for rank in range(8)],
    "dp": [[0, 2], [1, 3], [4, 6], [5, 7]],
    "pp": [[0, 4], [1, 5], [2, 6], [3, 7]],
    "dp_cp": [[0, 2], [1, 3], [4, 6], [5, 7]],
    "mp": [[0, 1, 4, 5], [2, 3, 6, 7]],
    "tp_dp": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "ep": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "edp": [[0, 2], [1, 3], [4, 6], [5, 7]],
    "world": [[0, 1, 2, 3, 4, 5, 6, 7]],
}


def made(lists: dict[str, list[list[int]]]) -> dict[str, Any]:
    """This rank's group of every name, each created by all ranks, as Megatron does."""
    found = {}
    for name, groups in lists.items():
        for ranks in groups:
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                found[name] = group
    return found


def agrees(mesh: Mesh, lists: dict[str, list[list[int]]]) -> None:
    """Along every name: the ranks of the list, and a sum over them."""
    for name, groups in lists.items():
        ranks = next(ranks for ranks in groups if mesh.rank in ranks)
        assert mesh.ranks(name) == ranks, name
        assert mesh.all_reduce(name, torch.tensor([float(mesh.rank)])).item() == sum(ranks), name


@on_ranks(8)
def test_megatrons_groups_by_name() -> None:
    dist.init_process_group("gloo")
    groups, before = made(AS_MEGATRON), len(groups_by_name())
    with meshcomm.from_groups(groups, merge={"model": ("pp", "tp")}, timeout_s=20) as mesh:
        agrees(mesh, AS_MEGATRON)
        assert list(mesh.layout.dims) == ["cp", "pp", "dp", "tp"]
        assert mesh.layout.merge["mp"] == ("pp", "tp") and mesh.group("mp") is groups["mp"]
        assert all(mesh.group(name) is groups[name] for name in AS_MEGATRON if name != "cp")
        assert mesh.all_reduce("model", torch.ones(1)).item() == 4
        assert "17 groups, 1 created per rank" in str(mesh)
        assert re.search(r"dp +dim +2 +2 +4 +gloo +1800 s +the program", str(mesh))
        assert len(groups_by_name()) <= before + 2  # of "model", and the group of one rank
    # The program's groups are left as they were.
    x = torch.ones(1)
    dist.all_reduce(x, group=groups["dp"])
    assert x.item() == 2
    dist.destroy_process_group()


@on_ranks(4)
def test_groups_that_are_not_of_one_grid_are_refused() -> None:
    dist.init_process_group("gloo")
    tp, uneven = made({"tp": [[0, 1], [2, 3]], "uneven": [[0, 3], [1, 2]]}).values()
    for groups, says in (
        ({"tp": tp}, "do not reach all 4 ranks.*given: +tp: ranks .*2 ranks that are 2 apart"),
        (
            {"tp": tp, "odd": uneven},
            'the ranks along "odd" are not evenly spaced|do not reach all 4 ranks',
        ),
        ({"tp": tp, "dp": None}, 'no process group along "dp".*a NoneType, on rank'),
    ):
        with pytest.raises(MeshcommError, match=f"(?s){says}"):
            meshcomm.from_groups(groups, timeout_s=20)
    # Each rank sees a grid, and they are not the same one.
    lists = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    rows, columns = made({"rows": lists[0], "columns": lists[1]}).values()
    first, second = (rows, columns) if dist.get_rank() else (columns, rows)
    with pytest.raises(MeshMismatchError, match="rank 0"):
        meshcomm.from_groups({"dp": first, "tp": second}, timeout_s=20)
    with pytest.raises(LaunchError, match=r"groups, and arguments that set the same values"):
        meshcomm.mesh.existing.of_groups({"tp": tp}, {"dims": {"tp": 4}})
    dist.destroy_process_group()


def test_groups_before_torchs_default_group() -> None:
    with pytest.raises(LaunchError, match="from_groups was called before torch's default group existed"):
        meshcomm.from_groups({"tp": None})  # type: ignore[dict-item]


@on_ranks(8)
def test_several_device_meshes_and_what_was_flattened() -> None:
    world = init_device_mesh("cpu", (8,), mesh_dim_names=("world",))
    dense = world._unflatten(0, (2, 2, 1, 2), ("pp", "batch", "cp", "tp"))
    sparse = world._unflatten(0, (2, 2, 2), ("pp", "efsdp", "ep"))
    loss = dense["batch", "cp"]._flatten("loss")
    model = dense["batch", "tp"]._flatten("model")
    before = len(groups_by_name())
    with meshcomm.init([dense, sparse, world], merge={"both": ("pp", "tp")}, timeout_s=20) as mesh:
        assert mesh.layout.views == {
            "efsdp_ep_view": {"pp": 2, "efsdp": 2, "ep": 2},
            "world_view": {"world": 8},
        }
        assert mesh.group("model") is model.get_group() and mesh.size("both") == 4
        assert mesh.group("ep") is sparse.get_group("ep") and mesh.group("tp") is dense.get_group("tp")
        agrees(mesh, {name: AS_MEGATRON[name] for name in ("pp", "tp", "ep", "world")})
        agrees(mesh, {"batch": AS_MEGATRON["dp"], "efsdp": AS_MEGATRON["edp"], "both": AS_MEGATRON["mp"]})
        # "loss" leads through the same ranks as "batch".
        assert loss.size() == 2 and "loss" not in mesh.layout.names
        assert len(groups_by_name()) == before + 1
    with meshcomm.init(dense, options={"tp": {"comm_id": "own"}}, validate_calls="always") as mesh:
        agrees(mesh, {"tp": AS_MEGATRON["tp"]})
    dist.destroy_process_group()


@on_ranks(4)
def test_device_meshes_that_cannot_be_one_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    other = DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]), mesh_dim_names=("a", "b"))
    for source, keys, says in (
        ([mesh, mesh["tp"]], {}, "the DeviceMesh is a slice"),
        ([mesh, other], {}, "not factorizations of the same ranks"),
        ([], {}, "does not consist of DeviceMeshes"),
        ([mesh, "tp"], {}, "does not consist of DeviceMeshes"),
        (mesh, {"dims": {"dp": 4}, "device": "cpu"}, "a DeviceMesh, and arguments.*dims, device"),
        (mesh, {"overrides": ["mesh.timeout_s=3"]}, "overrides have no effect"),
    ):
        with pytest.raises(MeshcommError, match=f"(?s){says}"):
            meshcomm.init(source, **keys)
    dist.destroy_process_group()


@on_ranks(4)
def test_a_dim_on_torchs_fake_backend_gets_groups_of_its_own() -> None:
    """torchtitan asks for it where it makes no calls; its groups leave outputs as they are."""
    theirs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), backend_override={"dp": "fake"})
    own = dist.PrefixStore("own", default_store())
    with meshcomm.init(theirs, timeout_s=20, store=own) as mesh:
        assert own.check([f"meshcomm/opened/{mesh.rank}"])
        assert mesh.group("dp") is not theirs.get_group("dp") and mesh.group("tp") is theirs.get_group("tp")
        agrees(mesh, {"dp": [[0, 2], [1, 3]], "tp": [[0, 1], [2, 3]]})
    dist.destroy_process_group()
