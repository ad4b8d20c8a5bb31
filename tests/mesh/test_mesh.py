"""A live mesh on real processes matches its plan on every rank."""

from __future__ import annotations

import copy
import os
import pickle
import random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import meshcomm
from meshcomm.errors import ConfigError, MeshClosed, MeshMismatchError, UnsupportedOp
from meshcomm.mesh import Mesh
from meshcomm.testing import Pool
from meshcomm.transport import ProcessGroupTransport
from meshcomm.transport.torch_private import backend_of, groups_by_name
from tests.ranks import on_ranks

RICH: dict[str, Any] = {
    "merge": {"model": ("pp", "tp"), "all": ("pp", "dp", "tp"), "same": ("dp", "tp")},
    "views": {"expert": {"pp": 2, "edp": -1, "ep": 4}},
    "rank_order": (5, 2, 7, 0, 1, 6, 3, 4),
    "options": {"pp": {"timeout_s": 20.0}, "dp": {"comm_id": "overlap"}},
}


@pytest.mark.mesh(
    pp=2, dp=2, tp=2, one=1, **RICH, via="gloo", not_via={"emulated_nccl": "reads back Gloo's options"}
)
def test_the_plan_is_what_real_processes_create(mesh: Mesh) -> None:
    """torch reports the planned group for each name."""
    mine = mesh.plan.for_rank(mesh.rank)
    identities = {}
    for group in mine.groups:
        transport = mesh._state.transports[group.name]
        assert isinstance(transport, ProcessGroupTransport)
        handle = transport.group
        assert dist.get_process_group_ranks(handle) == list(group.ranks)
        assert dist.get_rank(handle) == group.ranks.index(mesh.rank) == mesh.coord(group.name)
        assert backend_of(handle) == group.options.backend == "gloo"
        seconds = handle._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        assert seconds == group.options.timeout_s and (seconds == 20) == (group.name == "pp")
        assert group.shares is not None or handle.group_desc == group.label
        identities[group.name] = handle.group_name
    assert all(identities[each.name] == identities[each.shares or each.name] for each in mine.groups)
    own = [identities[each.name] for each in mine.groups if each.shares is None]
    assert len(set(own)) == len(own) == mine.creations
    # The default group, and one group for each family that creates groups.
    assert len(groups_by_name()) == 1 + mine.creations


@on_ranks(8)
def test_group_rank_is_coord_under_every_rank_order() -> None:
    rng = random.Random(1)
    for _ in range(4):
        order = rng.sample(range(8), 8)
        dims = {"a": 2, "b": 2, "c": 2}
        with meshcomm.init(dims=dims, rank_order=order, device="cpu", timeout_s=30) as mesh:
            for dim in mesh.dims:
                assert dist.get_rank(mesh.group(dim)) == mesh.coord(dim)
                ranks = mesh.all_gather(dim, torch.tensor([mesh.rank]))
                assert ranks.tolist() == mesh.ranks(dim)
                assert mesh.get_coords(mesh.neighbor_rank(dim, 1))[dim] == (mesh.coord(dim) + 1) % 2


@on_ranks(4)
def test_closing_and_opening_again_in_one_process() -> None:
    for _ in range(3):
        with meshcomm.init(dims={"dp": 2, "tp": -1}, device="cpu", timeout_s=30) as mesh:
            total = mesh.all_reduce("tp", torch.full((3,), float(mesh.rank)))
            assert total.tolist() == [1.0 if mesh.rank < 2 else 5.0] * 3
            mesh.close()
            with pytest.raises(MeshClosed, match=r"the mesh {'dp': 2, 'tp': 2} is closed on rank \d \(dp="):
                mesh.barrier("dp")
    assert len(groups_by_name()) == 0


@on_ranks(5)
def test_meshes_on_parts_of_the_world_side_by_side() -> None:
    encoder = meshcomm.init(dims={"tp": 2}, ranks=[0, 1], device="cpu", timeout_s=30)
    model = meshcomm.init(dims={"pp": 1, "tp": 3}, ranks=[2, 3, 4], device="cpu", timeout_s=30)
    bridge = meshcomm.init(dims={"world": -1}, device="cpu", timeout_s=30)
    mesh, other = (encoder, model) if encoder.is_member else (model, encoder)
    total = mesh.all_reduce("tp", torch.tensor([bridge.rank]))
    assert bridge.all_gather("world", total).tolist() == [1, 1, 9, 9, 9]
    assert not other.is_member
    covered = "2 3 4" if encoder.is_member else "0 1"
    for call in (lambda: other.all_reduce("tp", total), lambda: other.coord("tp"), lambda: other["tp"]):
        with pytest.raises(meshcomm.MeshcommError, match=f"rank {bridge.rank} is not in the mesh") as caught:
            call()
        assert f"the mesh covers ranks {covered}" in str(caught.value)
    for each in (bridge, model, encoder):
        each.close()


@on_ranks(4)
def test_a_mesh_from_an_existing_device_mesh() -> None:
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    theirs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    before = len(groups_by_name())
    with meshcomm.init(theirs) as mesh:
        assert mesh.group("tp") is theirs.get_group("tp") and len(groups_by_name()) == before
        first = mesh.rank // 2 * 2
        assert mesh.all_gather("tp", torch.tensor([mesh.rank])).tolist() == [first, first + 1]
    # torch sorts the ranks of a group. One of the two groups along tp has descending ranks, so both are created.
    theirs = DeviceMesh("cpu", torch.tensor([[0, 1], [3, 2]]), mesh_dim_names=("dp", "tp"))
    with meshcomm.init(theirs) as mesh:
        for dim, lent in (("dp", True), ("tp", False)):
            assert (mesh.group(dim) is theirs.get_group(dim)) is lent
            found = mesh.all_gather(dim, torch.tensor([mesh.rank])).tolist()
            assert found == mesh.ranks(dim) and dist.get_rank(mesh.group(dim)) == mesh.coord(dim)
        assert mesh.ranks("tp") == ([0, 1] if mesh.rank < 2 else [3, 2])
    assert dist.is_initialized()
    dist.destroy_process_group()


@pytest.mark.mesh(dp=2, cp=1, tp=4, rank_order=[3, 1, 0, 2, 7, 5, 4, 6], via="gloo")
def test_device_meshes_are_over_our_groups(mesh: Mesh) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    before = len(groups_by_name())
    assert mesh["tp"].get_group() is mesh.group("tp")
    assert mesh["tp"].get_local_rank() == mesh.coord("tp")
    whole = torch.arange(32.0).reshape(8, 4)
    for names in (("dp", "tp"), ("tp", "dp"), ("dp", "cp", "tp")):
        device_mesh = mesh[names]
        assert device_mesh.mesh_dim_names == names
        assert tuple(device_mesh.shape) == tuple(mesh.size(name) for name in names)
        assert device_mesh.get_coordinate() in (
            tuple(mesh.coord(name) for name in names),
            [mesh.coord(name) for name in names],
        )
        placements = [Shard(0) if name == "tp" else Replicate() for name in names]
        sharded = distribute_tensor(whole, device_mesh, placements)
        mine = whole[mesh.coord("tp") * 2 : mesh.coord("tp") * 2 + 2]
        assert torch.equal(sharded.to_local(), mine)
        assert torch.equal(sharded.full_tensor(), whole)
    # Only the dim of size 1 gets a new handle, because torch needs one. It carries no data.
    assert len(groups_by_name()) == before + 1


@pytest.mark.mesh(
    dp=2, cp=2, tp=2, merge={"ends": ["dp", "tp"]}, rank_order=[3, 1, 0, 2, 7, 5, 4, 6], via="gloo"
)
def test_a_merged_dim_is_one_dim_of_a_device_mesh(mesh: Mesh) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    before = len(groups_by_name())
    whole = torch.arange(32.0).reshape(8, 4)
    for names in (("ends",), ("cp", "ends"), ("ends", "cp")):
        device_mesh = mesh[names]
        assert device_mesh.mesh_dim_names == names
        assert tuple(device_mesh.shape) == tuple(mesh.size(name) for name in names)
        assert device_mesh.get_group(names.index("ends")) is mesh.group("ends")
        placements = [Shard(0) if name == "ends" else Replicate() for name in names]
        sharded = distribute_tensor(whole, device_mesh, placements)
        mine = mesh.coord("ends") * 2
        assert torch.equal(sharded.to_local(), whole[mine : mine + 2])
        assert torch.equal(sharded.full_tensor(), whole)
    assert len(groups_by_name()) == before


@pytest.mark.mesh(dp=2, one=1, via="gloo")
def test_a_group_of_one_rank_reduces_as_gloo_does(mesh: Mesh) -> None:
    theirs = [dist.new_group([rank]) for rank in range(2)][mesh.rank]
    whole = [2, 3]
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex64):
        for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
            ended = []
            for group in (theirs, mesh.group("one")):
                x, out = torch.tensor(whole, dtype=dtype), torch.zeros(2, dtype=dtype)
                try:
                    dist.all_reduce(x, getattr(dist.ReduceOp, name), group)
                    dist.reduce_scatter_single(out, x, getattr(dist.ReduceOp, name), group)
                    ended.append([*x.tolist(), *out.tolist()])
                except (RuntimeError, ValueError, meshcomm.MeshcommError):
                    ended.append("refused")
            assert ended[0] == ended[1], (dtype, name, ended)
    factor: Any = dist._make_nccl_premul_sum(0.5)
    x, out = torch.tensor([2.0, 3.0]), torch.zeros(2)
    dist.all_reduce(x, factor, mesh.group("one"))
    dist.reduce_scatter_single(out, x, factor, mesh.group("one"))
    assert x.tolist() == [1, 1.5] and out.tolist() == [0.5, 0.75]
    dist.broadcast(x, mesh.rank, mesh.group("one"))


@pytest.mark.mesh(pp=2, dp=1, tp=2, via="gloo")
def test_create_declares_a_merged_dim_on_a_live_mesh(mesh: Mesh) -> None:
    with pytest.raises(meshcomm.MeshcommError) as caught:
        mesh.all_reduce(("pp", "tp"), torch.ones(1))
    assert caught.value.what == 'no group was declared over ("pp", "tp")'
    assert 'merge = { pp_tp = ["pp", "tp"] }' in str(caught.value)
    assert 'mesh.create_group("pp_tp", ("pp", "tp"))' in str(caught.value)
    mesh.create_group("model", ("pp", "tp"), timeout_s=15)
    assert mesh.all_gather(("pp", "tp"), torch.tensor([mesh.rank])).tolist() == mesh.ranks("model")
    assert mesh["tp"].get_local_rank() == mesh.coord("tp")
    # A merged dim is replaced by its dims here, as in every call.
    mesh.create_group("all", ("dp", "model"))
    assert mesh.layout.merge["all"] == ("dp", "pp", "tp") and mesh.size("all") == 4


def warmed() -> tuple[list[str], list[str], list[str], list[str], bool]:
    """The warmed names, the dims with one barrier, the planned families, the created groups, and whether each warm-up took time."""
    config = {
        "mesh": {
            "dims": {"pp": 2, "tp": 2, "one": 1},
            "merge": {"grad": ["pp", "tp"]},
            "views": {"other": {"flat": 4}},
            "device": "cpu",
            "timeout_s": 30.0,
            "warm_up": True,
        }
    }
    with meshcomm.init(config) as mesh:
        used = [row.dim for row in mesh.stats().rows if row.calls == 1 and row.call == "barrier"]
        made = [group.label for group in mesh.plan.for_rank(mesh.rank).groups if group.shares is None]
        timed = all(seconds > 0 for seconds in mesh.warm_up_s.values())
        return list(mesh.warm_up_s), used, [f.name for f in mesh.plan.families if f.creates], made, timed


def test_groups_are_warmed_up_in_plan_order_where_the_configuration_says_so(pool: Pool) -> None:
    simulated = meshcomm.simulate(lambda mesh: warmed(), dims={"all": 4})
    for kept, used, planned, made, timed in [*pool.run(warmed, ranks=4), *simulated]:
        # flat has the same ranks as grad, so both share one group.
        assert kept == planned == ["pp", "tp", "grad"]
        assert used == kept and len(made) == 3 and timed
    cold = meshcomm.simulate(lambda mesh: (dict(mesh.warm_up_s), mesh.stats().rows), dims={"dp": 2})
    assert cold == [({}, ()), ({}, ())]


@on_ranks(2)
def test_a_warm_up_that_fails_gives_the_groups_back() -> None:
    before = len(groups_by_name())
    with (
        mock.patch.object(Mesh, "warm_up", side_effect=RuntimeError("no connection")),
        pytest.raises(RuntimeError, match="no connection"),
    ):
        meshcomm.init(dims={"dp": 2}, device="cpu", timeout_s=30, warm_up=True)
    assert len(groups_by_name()) == before and not dist.is_initialized()


# Settings of rank 2 that differ from USUAL, and words of the error. If they are wrong, the others report rank 2's problem.
USUAL: dict[str, Any] = {
    "dims": {"pp": 2, "dp": 1, "tp": 2},
    "merge": {"grad": ["pp", "dp"]},
    "timeout_s": 30.0,
}
ODD: list[tuple[dict[str, Any], str]] = [
    ({"dims": {"pp": 1, "dp": 2, "tp": 2}}, "dims.pp = 1; the others: 2"),
    (
        {"dims": {"dp": 1, "pp": 2, "tp": 2}},
        "dims = { dp = 1, pp = 2, tp = 2 }; the others: { pp = 2, dp = 1, tp = 2 }",
    ),
    ({"merge": {}}, 'merge.grad = none; the others: ["pp", "dp"]'),
    ({"rank_order": [1, 0, 2, 3]}, "rank_order = [1, 0, 2, 3]; the others: none"),
    ({"timeout_s": 31.0}, "options.pp.timeout_s = 31.0; the others: 30.0"),
    ({"warm_up": True}, "warm_up = true; the others: false"),
    ({"validate_calls": 7}, "validate_calls = 7; the others: 64"),
    ({"NCCL_ALGO": "Ring"}, "environment.NCCL_ALGO = Ring; the others: none"),
    ({"options": {"pp": {"timeout_s": -1.0}}}, "problem = "),
    ({"dims": {"pp": 2, "dp": 3, "tp": 2}}, "problem = "),
]


@on_ranks(4)
def test_disagreement_is_an_error_on_every_rank_naming_the_odd_one() -> None:
    rank = os.environ["RANK"]
    for odd, expected in ODD:
        given = {**USUAL, **(odd if rank == "2" else {})}
        if "NCCL_ALGO" in given:
            os.environ["NCCL_ALGO"] = given.pop("NCCL_ALGO")
        kind, said = MeshMismatchError, f"rank 2: {expected}"
        if rank == "2" and expected == "problem = ":
            kind, said = ConfigError, "timeout_s" if "options" in odd else "2*3*2 = 12"
        with pytest.raises(kind) as caught:
            meshcomm.init(device="cpu", **given)
        assert said in str(caught.value)
        assert kind is ConfigError or "rank 2 of 4 is mismatched" in str(caught.value)


@on_ranks(4)
def test_a_rank_that_never_comes_is_named() -> None:
    if os.environ["RANK"] != "2":
        with pytest.raises(
            MeshMismatchError, match="rank 2 of 4 never arrived to agree on the mesh"
        ) as caught:
            meshcomm.init(dims={"dp": 4}, device="cpu", timeout_s=2)
        assert "ranks 0 1 3" in str(caught.value)


def test_dims_of_size_one_are_dims() -> None:
    with meshcomm.init(dims={"dp": 1, "tp": 1}, device="cpu") as mesh:
        assert mesh.plan.for_rank(0).creations == 0
        x = torch.arange(6.0).reshape(2, 3)
        for dims in ("dp", "tp", ("dp", "tp")):
            assert torch.equal(mesh.all_reduce(dims, x.clone()), x)
            assert torch.equal(mesh.broadcast(dims, x.clone(), src=0), x)
            assert torch.equal(mesh.all_gather(dims, x, axis=1), x)
            assert torch.equal(mesh.reduce_scatter(dims, x), x)
            assert torch.equal(mesh.all_to_all(dims, x, 0, 1), x)
            assert torch.equal(mesh.shift(dims, x, 3), x)
            assert mesh.shift(dims, x, 1, wrap=False) is None
            mesh.barrier(dims)
        assert dist.get_world_size(mesh.group("tp")) == 1


def test_a_graph_reads_the_facts_of_a_mesh() -> None:
    with meshcomm.init(dims={"dp": 1}, device="cpu") as mesh:

        def scaled(x: torch.Tensor) -> torch.Tensor:
            return (
                x if mesh.is_fake or mesh.closed else x * (mesh.rank + mesh.world_size + mesh.local_rank + 1)
            )

        assert torch.compile(scaled, fullgraph=True, backend="eager")(torch.ones(2)).tolist() == [2.0, 2.0]


@on_ranks(4)
def test_equal_meshes_open_at_once_have_groups_of_their_own() -> None:
    more: dict[str, Any] = {"dims": {"dp": 2, "tp": 2}, "device": "cpu", "timeout_s": 30}
    with meshcomm.init(**more) as first, meshcomm.init(**more) as second, meshcomm.init(**more) as third:
        for mesh in (first, second, third):
            assert mesh.all_reduce("tp", torch.tensor([float(mesh.rank)])).item() == sum(mesh.ranks("tp"))


@pytest.mark.mesh(dp=2, tp=1, via="gloo")
def test_a_call_in_a_forked_process_names_the_one_that_the_mesh_belongs_to(mesh: Mesh) -> None:
    mesh.all_reduce("dp", torch.ones(1))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        said = []
        for call in (
            lambda: mesh.all_reduce("dp", torch.ones(1)),
            lambda: mesh.all_reduce("tp", torch.ones(1)),
            lambda: mesh.functional.all_gather("dp", torch.ones(1), grad="slice"),
            lambda: mesh.debug.monitored_barrier("dp", timeout_s=1),
            lambda: mesh.group("dp"),
            mesh.step,
            lambda: mesh.store.set("key", "value"),
            mesh.close,
        ):
            try:
                call()
                said.append("nothing")
            except MeshClosed as error:
                said.append(error.what)
        os.write(writer, "\n".join(said).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        *lines, of_store, closing = told.read().splitlines()
    os.waitpid(child, 0)
    # The parent's mesh still works.
    assert mesh.all_reduce("dp", torch.ones(1)).item() == 2
    mesh.store.set(f"{mesh.rank}", "still here")
    assert mesh.local_rank == mesh.rank
    whose = f"belongs to process {os.getpid()}; this is process {child}, which was forked from it"
    assert lines == [f"the mesh {{'dp': 2, 'tp': 1}} {whose}"] * 6
    assert f"the mesh belongs to process {os.getpid()}, from which this one was forked" in of_store
    assert closing == "nothing"


@pytest.mark.mesh(dp=2, via="gloo")
def test_a_mesh_is_shared_by_copies_and_refuses_to_be_pickled(mesh: Mesh) -> None:
    module = torch.nn.Linear(1, 1)
    module.mesh = mesh
    assert copy.deepcopy(module).mesh is mesh and copy.copy(mesh) is mesh
    handle = mesh.all_reduce("dp", torch.ones(1), async_op=True)
    for each in (mesh, handle, {"mesh": mesh}):
        with pytest.raises(UnsupportedOp) as caught:
            pickle.dumps(each)
        mine = f"a mesh cannot be pickled, on {mesh.label}"
        assert caught.value.what == ("the handle of a call cannot be pickled" if each is handle else mine)
    handle.wait()


# Ranks 1, 2 and 4 of five have coords 0, 1 and 2, so rank 1 and coord 1 are different processes.
MEMBERS = [1, 2, 4]


def own(mesh: Mesh) -> Tensor:
    return torch.tensor([float(mesh.rank)])


@pytest.mark.mesh(line=3, ranks=MEMBERS, world_size=5, via="gloo")
def test_dst_and_src_are_global_ranks_in_torch_and_coords_here(mesh: Mesh) -> None:
    if not mesh.is_member:
        return
    group, coord = mesh.group("line"), mesh.coord("line")
    assert dist.get_process_group_ranks(group) == MEMBERS == mesh.ranks("line")
    assert MEMBERS[coord] == mesh.rank == mesh.get_rank(line=coord)
    # torch reads src=1 as rank 1, which is coord 0. meshcomm reads it as coord 1, which is rank 2.
    x = own(mesh)
    dist.broadcast(x, src=1, group=group)
    assert (x.item(), mesh.broadcast("line", own(mesh), src=1).item()) == (1, 2)
    total = mesh.reduce("line", own(mesh), dst=2)
    assert (total is None) == (mesh.rank != 4) and (total is None or total.item() == 7)
    # A number that is not a coord is refused before anything is sent.
    with pytest.raises(meshcomm.MeshcommError, match="dst=4 is not a coord"):
        mesh.send("line", own(mesh), dst=4)
    with pytest.raises(meshcomm.MeshcommError, match="src=4 is not a coord"):
        mesh.broadcast("line", own(mesh), src=4)
