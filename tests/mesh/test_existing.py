"""A mesh over the program's own groups: DeviceMeshes, their slices and flattened dims, and groups by name."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

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
    """Create each group on all ranks, as Megatron does, and return this rank's group for each name."""
    found = {}
    for name, groups in lists.items():
        for ranks in groups:
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                found[name] = group
    return found


def agrees(mesh: Mesh, lists: dict[str, list[list[int]]]) -> None:
    """Check the ranks along each name, and a sum over them."""
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
        assert len(groups_by_name()) <= before + 2  # one for "model", and one of a single rank
    # The mesh does not change the program's groups.
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
    # Each rank sees a grid, but the ranks see different grids.
    lists = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    rows, columns = made({"rows": lists[0], "columns": lists[1]}).values()
    first, second = (rows, columns) if dist.get_rank() else (columns, rows)
    with pytest.raises(MeshMismatchError, match="rank 0"):
        meshcomm.from_groups({"dp": first, "tp": second}, timeout_s=20)
    with pytest.raises(LaunchError, match=r"groups, and arguments that set the same values"):
        meshcomm.mesh.existing.of_groups({"tp": tp}, {"dims": {"tp": 4}})
    dist.destroy_process_group()


# Two dims of 4 ranks, and a dim over both. torch would sort their ranks differently.
IN_ORDER: dict[str, list[list[int]]] = {"dp": [[2, 0], [3, 1]], "tp": [[1, 0], [3, 2]], "all": [[3, 1, 2, 0]]}


def in_order(lists: dict[str, list[list[int]]]) -> dict[str, Any]:
    found = {}
    for name, groups in lists.items():
        for ranks in groups:
            group = dist.new_group(ranks, sort_ranks=False)
            if dist.get_rank() in ranks:
                found[name] = group
    return found


def as_torch_has_it(mesh: Mesh, groups: dict[str, Any]) -> None:
    """Coords, roots, results and neighbors along each group match torch's own calls on the group."""
    x = torch.tensor([10.0 + mesh.rank])
    for name, group in groups.items():
        ranks, me = dist.get_process_group_ranks(group), dist.get_rank(group)
        size = len(ranks)
        assert mesh.group(name) is group and mesh.ranks(name) == ranks and mesh.coord(name) == me
        assert (
            mesh.layout.coord(mesh.rank, name) == me and mesh.neighbor_rank(name, 1) == ranks[(me + 1) % size]
        )
        parts = [torch.empty(1) for _ in ranks]
        dist.all_gather(parts, x, group=group)
        assert (
            mesh.all_gather(name, x).tolist() == torch.cat(parts).tolist() == [10.0 + rank for rank in ranks]
        )
        root = x.clone()
        dist.broadcast(root, group=group, group_src=1)
        assert mesh.broadcast(name, x.clone(), src=1).item() == root.item() == 10 + ranks[1]
        given = torch.arange(float(size)) if me == 0 else None
        assert mesh.scatter(name, given, src=0).item() == me
        assert mesh.shift(name, x).item() == 10 + ranks[(me - 1) % size]
        assert mesh.objects.all_gather(name, mesh.rank) == ranks
        if me == 0:
            mesh.send(name, x, dst=size - 1)
        elif me == size - 1:
            assert mesh.recv(name, torch.empty(1), src=0).item() == 10 + ranks[0]


@on_ranks(4)
def test_ranks_are_in_the_order_of_their_group() -> None:
    dist.init_process_group("gloo")
    groups = in_order(IN_ORDER)
    with meshcomm.from_groups(groups, timeout_s=20) as mesh:
        assert mesh.layout.rank_order == (3, 2, 1, 0) and mesh.layout.merge == {"all": ("tp", "dp")}
        as_torch_has_it(mesh, groups)
        # A DTensor over the groups has the part of coord c at place c.
        for name in ("dp", "tp"):
            part = torch.tensor([float(mesh.coord(name))])
            whole = DTensor.from_local(part, mesh[name], [Shard(0)], run_check=False).full_tensor()
            assert whole.tolist() == [0, 1] and mesh[name].get_local_rank() == mesh.coord(name)
    # One dim of all ranks, and another grid over the same positions.
    groups = in_order({"dp": [[2, 0, 3, 1]], "outer": [[2, 3], [0, 1]], "inner": [[2, 0], [3, 1]]})
    with meshcomm.from_groups(groups, timeout_s=20) as mesh:
        as_torch_has_it(mesh, groups)
    with meshcomm.from_groups(
        in_order({"dp": [[0, 1], [2, 3]], "tp": [[0, 2], [1, 3]]}), timeout_s=20
    ) as mesh:
        assert mesh.layout.rank_order is None
    dist.destroy_process_group()


@on_ranks(4)
def test_orders_that_no_grid_has_are_refused() -> None:
    dist.init_process_group("gloo")
    rows = {"dp": [[0, 2], [1, 3]], "tp": [[1, 0], [3, 2]]}
    for lists, says in (
        # torch has sorted the ranks of the merged group, but the ranks of tp are not sorted.
        (
            {**rows, "all": [[0, 1, 2, 3]]},
            r'"all" are in another order.*given: +ranks \[0, 1, 2, 3\].*\[1, 0, 3, 2\]',
        ),
        ({**rows, "ep": [[0, 1], [2, 3]]}, '"ep" are in another order'),
        # The two groups along tp order their ranks differently.
        ({"dp": [[0, 2], [1, 3]], "tp": [[1, 0], [2, 3]]}, "rank_order"),
    ):
        with pytest.raises(MeshcommError, match=f"(?s){says}"):
            meshcomm.from_groups(in_order(lists), timeout_s=20)
    dist.destroy_process_group()


@on_ranks(4)
def test_a_device_mesh_whose_groups_are_in_another_order_is_refused() -> None:
    dist.init_process_group("gloo")
    groups = in_order({"dp": [[0, 2], [1, 3]], "tp": [[1, 0], [3, 2]]})
    for grid, fits in (([[0, 1], [2, 3]], False), ([[1, 0], [3, 2]], True)):
        names: Any = ("dp", "tp")
        theirs = DeviceMesh.from_group(
            list(groups.values()), "cpu", mesh=torch.tensor(grid), mesh_dim_names=names
        )
        if fits:
            with meshcomm.init(theirs, timeout_s=20) as mesh:
                assert mesh.ranks("tp") == dist.get_process_group_ranks(groups["tp"])
                assert mesh.objects.all_gather("tp", mesh.rank) == mesh.ranks("tp")
        else:
            with pytest.raises(
                MeshcommError, match=r'(?s)ranks along "tp" are in another order.*ranks \[[13], [02]\]'
            ):
                meshcomm.init(theirs, timeout_s=20)
    dist.destroy_process_group()


@on_ranks(4)
def test_groups_that_were_destroyed() -> None:
    dist.init_process_group("gloo")
    theirs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    group, world = dist.new_group([0, 1, 2, 3]), dist.group.WORLD
    alone = [dist.new_group([rank]) for rank in range(4)][3 - dist.get_rank()]
    dist.destroy_process_group(group)
    with pytest.raises(
        MeshcommError, match=r'(?s)the group along "tp" was destroyed.*given: .*expected: .*try: '
    ):
        meshcomm.from_groups({"tp": group}, timeout_s=20)
    with pytest.raises(MeshcommError, match='no process group along "one"'):
        meshcomm.from_groups({"tp": world, "one": alone}, timeout_s=20)
    dist.destroy_process_group(theirs.get_group("tp"))
    with pytest.raises(MeshcommError, match="was destroyed"):
        meshcomm.init(theirs, timeout_s=20)
    # With another default group, and with none.
    kept, rank = dist.PrefixStore("again", default_store()), dist.get_rank()
    again = dist.new_group([0, 1, 2, 3])
    dist.destroy_process_group()
    for call in (lambda: meshcomm.init(theirs), lambda: meshcomm.from_groups({"tp": again})):
        with pytest.raises(
            LaunchError, match="before torch's default group existed, or after it was destroyed"
        ):
            call()
    dist.init_process_group("gloo", store=kept, rank=rank, world_size=4)
    for call in (lambda: meshcomm.init(theirs), lambda: meshcomm.from_groups({"tp": again})):
        with pytest.raises(MeshcommError, match="was destroyed"):
            call()
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
        # "loss" covers the same ranks as "batch".
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
    """torchtitan uses the fake backend along dims without calls; its groups leave outputs unchanged."""
    theirs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), backend_override={"dp": "fake"})
    own = dist.PrefixStore("own", default_store())
    with meshcomm.init(theirs, timeout_s=20, store=own) as mesh:
        assert own.check([f"meshcomm/opened/{mesh.rank}"])
        assert mesh.group("dp") is not theirs.get_group("dp") and mesh.group("tp") is theirs.get_group("tp")
        agrees(mesh, {"dp": [[0, 2], [1, 3]], "tp": [[0, 1], [2, 3]]})
    dist.destroy_process_group()
