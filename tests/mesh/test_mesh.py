"""A live mesh on real processes is its plan, rank by rank."""

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

import meshcomm
from meshcomm.config import MeshConfig
from meshcomm.errors import MeshClosed, UnsupportedOp
from meshcomm.mesh import Mesh
from meshcomm.testing import Pool
from meshcomm.transport import ProcessGroupTransport
from meshcomm.transport.torch_private import backend_of, live_groups

RICH = MeshConfig(
    dims={"pp": 2, "dp": -1, "tp": 2, "one": 1},
    merge={"model": ("pp", "tp"), "all": ("pp", "dp", "tp"), "same": ("dp", "tp")},
    views={"expert": {"pp": 2, "edp": -1, "ep": 4}},
    rank_order=(5, 2, 7, 0, 1, 6, 3, 4),
    device="cpu",
    backend="gloo",
    timeout_s=30,
    options={"pp": {"timeout_s": 20.0}, "dp": {"lane": "overlap"}},
)


def created(config: MeshConfig) -> list[dict[str, Any]]:
    """What exists in this process for each name, read back from torch."""
    before = live_groups()
    with meshcomm.init(config) as mesh:
        found = []
        for group in mesh.plan.for_rank(mesh.rank).groups:
            transport = mesh._transports[group.name]
            assert isinstance(transport, ProcessGroupTransport)
            handle = transport.group
            backend = handle._get_backend(torch.device("cpu"))
            found.append(
                {
                    "name": group.name,
                    "ranks": dist.get_process_group_ranks(handle),
                    "coord": dist.get_rank(handle),
                    "backend": backend_of(handle),
                    "timeout_s": backend.options._timeout.total_seconds(),
                    "identity": handle.group_name,
                    "label": handle.group_desc,
                }
            )
        # The default group, and one for each family that creates any.
        assert live_groups() - before == 1 + mesh.plan.for_rank(mesh.rank).creations
        return found


def test_the_plan_is_what_real_processes_create(pool: Pool) -> None:
    plan = meshcomm.plan(RICH, 8)
    for rank, found in enumerate(pool.run(created, RICH)):
        mine = plan.for_rank(rank)
        assert [group["name"] for group in found] == [group.name for group in mine.groups]
        for real, planned in zip(found, mine.groups, strict=True):
            assert real["ranks"] == list(planned.ranks)
            assert real["coord"] == planned.ranks.index(rank) == plan.layout.coord(rank, planned.name)
            assert real["backend"] == planned.options.backend
            assert real["timeout_s"] == planned.options.timeout_s
            if planned.shares is None:
                assert real["label"] == planned.label
        by_name = {group["name"]: group["identity"] for group in found}
        for planned in mine.groups:
            if planned.shares is not None:
                assert by_name[planned.name] == by_name[planned.shares]
        own = [by_name[group.name] for group in mine.groups if group.shares is None]
        assert len(set(own)) == len(own)


def rank_is_coord(orders: list[list[int]]) -> None:
    for order in orders:
        with meshcomm.init(
            dims={"a": 2, "b": 2, "c": 2}, rank_order=order, device="cpu", timeout_s=30
        ) as mesh:
            for dim in mesh.dims:
                assert dist.get_rank(mesh.group(dim)) == mesh.coord(dim)
                ranks = mesh.all_gather(dim, torch.tensor([mesh.rank]))
                assert ranks.tolist() == mesh.ranks(dim)
                assert mesh.coords_of(mesh.peer_rank(dim, 1))[dim] == (mesh.coord(dim) + 1) % 2


def test_group_rank_is_coord_under_every_rank_order(pool: Pool) -> None:
    rng = random.Random(1)
    orders = [rng.sample(range(8), 8) for _ in range(10)]
    pool.run(rank_is_coord, orders)


def opened_and_closed() -> tuple[int, list[float]]:
    sums = []
    for _ in range(3):
        with meshcomm.init(dims={"dp": 2, "tp": -1}, device="cpu", timeout_s=30) as mesh:
            x = torch.full((3,), float(mesh.rank))
            sums.append(mesh.all_reduce("tp", x)[0].item())
            mesh.close()
            with pytest.raises(MeshClosed, match=r"the mesh {'dp': 2, 'tp': 4} is closed on rank \d \(dp="):
                mesh.barrier("dp")
    return live_groups(), sums


def test_closing_and_opening_again_in_one_process(pool: Pool) -> None:
    for rank, (left, sums) in enumerate(pool.run(opened_and_closed)):
        assert left == 0
        assert sums == [6.0 if rank < 4 else 22.0] * 3


def two_meshes() -> Any:
    encoder = meshcomm.init(dims={"tp": 2}, ranks=[0, 1], device="cpu", timeout_s=30)
    model = meshcomm.init(dims={"pp": 3, "tp": 2}, ranks=[2, 3, 4, 5, 6, 7], device="cpu", timeout_s=30)
    bridge = meshcomm.init(dims={"world": -1}, device="cpu", timeout_s=30)
    mesh = encoder if encoder.is_member else model
    total = mesh.all_reduce("tp", torch.tensor([bridge.rank]))
    everything = bridge.all_gather("world", total)
    other = model if encoder.is_member else encoder
    refusals = []
    for call in (lambda: other.all_reduce("tp", total), lambda: other.coord("tp"), lambda: other["tp"]):
        try:
            call()
        except meshcomm.MeshcommError as error:
            refusals.append(str(error))
    lone = other["tp"] if other.is_member else None
    assert lone is None
    for each in (bridge, model, encoder):
        each.close()
    return everything.tolist(), refusals


def test_meshes_on_parts_of_the_world_side_by_side(pool: Pool) -> None:
    for rank, (everything, refusals) in enumerate(pool.run(two_meshes)):
        assert everything == [1, 1, 5, 5, 9, 9, 13, 13]
        assert len(refusals) == 3
        covered = "2 3 4 5 6 7" if rank < 2 else "0 1"
        for text in refusals:
            assert f"rank {rank} is not in the mesh" in text
            assert f"the mesh covers ranks {covered}" in text


def over_existing() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    theirs = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    before = live_groups()
    with meshcomm.init(theirs) as mesh:
        same = mesh.group("tp") is theirs.get_group("tp")
        gathered = mesh.all_gather("tp", torch.tensor([mesh.rank])).tolist()
        after = live_groups()
    alive = dist.is_initialized()
    dist.destroy_process_group()
    return same, gathered, after - before, alive


def test_a_mesh_from_an_existing_device_mesh(pool: Pool) -> None:
    for rank, (same, gathered, made, alive) in enumerate(pool.run(over_existing)):
        assert same and alive and made == 0
        assert gathered == list(range(rank // 4 * 4, rank // 4 * 4 + 4))


def device_meshes() -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    order = [3, 1, 0, 2, 7, 5, 4, 6]
    with meshcomm.init(
        dims={"dp": 2, "cp": 1, "tp": 4}, rank_order=order, device="cpu", timeout_s=30
    ) as mesh:
        before = live_groups()
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
        # Only the dim of size 1 got a handle for torch's sake; it carries nothing.
        assert live_groups() == before + 1


def test_device_meshes_are_over_our_groups(pool: Pool) -> None:
    pool.run(device_meshes)


def late_merge() -> Any:
    with meshcomm.init(dims={"pp": 2, "dp": 2, "tp": 2}, device="cpu", timeout_s=30) as mesh:
        try:
            mesh.all_reduce(("pp", "tp"), torch.ones(1))
        except meshcomm.MeshcommError as error:
            refusal = str(error)
        mesh.create("model", ("pp", "tp"), timeout_s=15)
        x = mesh.all_gather(("pp", "tp"), torch.tensor([mesh.rank]))
        return refusal, x.tolist(), mesh.ranks("model"), mesh["tp"].get_local_rank(), mesh.coord("tp")


def test_create_declares_a_merged_dim_on_a_live_mesh(pool: Pool) -> None:
    for refusal, gathered, ranks, local, coord in pool.run(late_merge):
        assert gathered == ranks
        assert local == coord
        assert 'no group was declared over ("pp", "tp")' in refusal
        assert 'merge = { pp_tp = ["pp", "tp"] }' in refusal
        assert 'mesh.create("pp_tp", ("pp", "tp"))' in refusal


def warmed() -> tuple[list[str], list[str], list[str], list[str], bool]:
    """What was used while `init` ran, in order, and on which ranks it was kept."""
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
        # flat has the ranks of grad, so that its group is the same one.
        assert kept == planned == ["pp", "tp", "grad"]
        assert used == kept and len(made) == 3 and timed
    cold = meshcomm.simulate(lambda mesh: (dict(mesh.warm_up_s), mesh.stats().rows), dims={"dp": 2})
    assert cold == [({}, ()), ({}, ())]


def broken_warm_up() -> tuple[int, bool]:
    before = live_groups()
    with (
        mock.patch.object(Mesh, "warm_up", side_effect=RuntimeError("no connection")),
        pytest.raises(RuntimeError, match="no connection"),
    ):
        meshcomm.init(dims={"dp": 2}, device="cpu", timeout_s=30, warm_up=True)
    return live_groups() - before, dist.is_initialized()


def test_a_warm_up_that_fails_gives_the_groups_back(pool: Pool) -> None:
    assert pool.run(broken_warm_up, ranks=2) == [(0, False)] * 2


# What rank 1 of two gives in place of the usual, and what is said of it; of what it cannot even read, on the others.
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


def odd_one_out() -> list[str]:
    texts = []
    for odd, _ in ODD:
        given = {**USUAL, **(odd if os.environ["RANK"] == "2" else {})}
        if "NCCL_ALGO" in given:
            os.environ["NCCL_ALGO"] = given.pop("NCCL_ALGO")
        with pytest.raises(meshcomm.MeshcommError) as caught:
            meshcomm.init(device="cpu", **given)
        texts.append(f"{type(caught.value).__name__}: {caught.value}")
    return texts


def test_disagreement_is_an_error_on_every_rank_naming_the_odd_one(pool: Pool) -> None:
    for rank, texts in enumerate(pool.run(odd_one_out, ranks=4)):
        for text, (odd, expected) in zip(texts, ODD, strict=True):
            if rank == 2 and expected == "problem = ":
                assert text.startswith("ConfigError: ")
                assert ("timeout_s" if "options" in odd else "2*3*2 = 12") in text
                continue
            assert text.startswith("MeshMismatchError: "), (odd, text)
            assert "rank 2 of 4 is mismatched" in text
            assert f"rank 2: {expected}" in text, (odd, text)


def absent(timeout_s: float) -> str:
    if os.environ["RANK"] == "2":
        return ""
    try:
        meshcomm.init(dims={"dp": 4}, device="cpu", timeout_s=timeout_s)
    except meshcomm.MeshcommError as error:
        return str(error)
    return "nothing"


def test_a_rank_that_never_comes_is_named(pool: Pool) -> None:
    for rank, text in enumerate(pool.run(absent, 2.0, ranks=4)):
        if rank != 2:
            assert "rank 2 of 4 never came to agree on the mesh" in text
            assert "ranks 0 1 3" in text


def size_one() -> None:
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


def test_dims_of_size_one_are_dims(pool: Pool) -> None:
    pool.run(size_one, ranks=1)


def three_at_once() -> list[float]:
    dims = {"dp": 2, "tp": 2}
    with (
        meshcomm.init(dims=dims, device="cpu", timeout_s=30) as first,
        meshcomm.init(dims=dims, device="cpu", timeout_s=30) as second,
        meshcomm.init(dims=dims, device="cpu", timeout_s=30) as third,
    ):
        x = torch.tensor([float(first.rank)])
        return [mesh.all_reduce("tp", x.clone()).item() for mesh in (first, second, third)]


def test_equal_meshes_open_at_once_have_groups_of_their_own(pool: Pool) -> None:
    assert pool.run(three_at_once, ranks=4) == [[1.0] * 3] * 2 + [[5.0] * 3] * 2


def in_a_fork() -> list[str]:
    with meshcomm.init(dims={"dp": 2, "tp": 1}, device="cpu", timeout_s=20) as mesh:
        mesh.all_reduce("dp", torch.ones(1))
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            said = []
            for call in (
                lambda: mesh.all_reduce("dp", torch.ones(1)),
                lambda: mesh.all_reduce("tp", torch.ones(1)),
                lambda: mesh.functional.all_gather("dp", torch.ones(1), grad="slice"),
                lambda: mesh.barrier("dp", timeout_s=1),
                lambda: mesh.group("dp"),
                lambda: mesh.store.set("key", "value"),
                mesh.step,
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
            lines = told.read().splitlines()
        os.waitpid(child, 0)
        # The parent's mesh goes on.
        assert mesh.all_reduce("dp", torch.ones(1)).item() == 2
        mesh.store.set(f"{mesh.rank}", "still here")
        assert mesh.local_rank == mesh.rank
        return [line.replace(str(os.getpid()), "PARENT").replace(str(child), "CHILD") for line in lines]


def test_a_call_in_a_forked_process_names_the_one_that_the_mesh_belongs_to(pool: Pool) -> None:
    for lines in pool.run(in_a_fork, ranks=2, timeout_s=60):
        mine = "the mesh {'dp': 2, 'tp': 1} belongs to process PARENT; this is process CHILD, which was forked from it"
        assert lines[:5] + lines[6:] == [mine] * 6 + ["nothing"]
        assert "the mesh belongs to process PARENT, from which this one was forked" in lines[5]


def copied() -> list[str]:
    with meshcomm.init(dims={"dp": 2}, device="cpu", timeout_s=20) as mesh:
        module = torch.nn.Linear(1, 1)
        module.mesh = mesh
        assert copy.deepcopy(module).mesh is mesh
        handle = mesh.all_reduce("dp", torch.ones(1), async_op=True)
        found = []
        for each in (mesh, handle, {"mesh": mesh}):
            with pytest.raises(UnsupportedOp) as caught:
                pickle.dumps(each)
            found.append(caught.value.what)
        handle.wait()
        return found


def test_a_mesh_is_shared_by_copies_and_refuses_to_be_pickled(pool: Pool) -> None:
    for rank, texts in enumerate(pool.run(copied, ranks=2)):
        mine = f"a mesh cannot be pickled, on rank {rank} (dp={rank})"
        assert texts == [mine, "the handle of a call cannot be pickled", mine]
