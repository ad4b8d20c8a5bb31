"""`meshcomm.adopt`: groups that torch makes share communicators, and their calls give what they gave."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import meshcomm
from meshcomm.errors import CommunicationError
from meshcomm.transport.torch_private import default_store, groups_by_name
from tests.ranks import on_ranks


def begin_again(backend: str = "gloo") -> None:
    """The next default group of this process, on the store of the one before."""
    store, rank, world = default_store(), dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group(backend, store=dist.PrefixStore("again", store), rank=rank, world_size=world)


def trained(sizes: tuple[int, ...], names: tuple[str, ...], device: str = "cpu") -> tuple[list[float], int]:
    """Losses of FSDP2 on ("dp", "cp") and a DTensor on "tp", as torchtitan makes its meshes; and how many groups there are."""
    world = init_device_mesh(device, (4,), mesh_dim_names=("world",))
    mesh = world._unflatten(0, sizes, names)
    again = world._unflatten(0, (2, 2), ("fsdp", "tp"))
    mesh["dp", "cp"]._flatten("loss")
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 8, device=device)
    fully_shard(net, mesh=again["fsdp"])
    weight = distribute_tensor(torch.ones(8, 8, device=device), mesh["cp", "tp"], [Replicate(), Shard(0)])
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.1), []
    for step in range(3):
        torch.manual_seed(step + 10 * dist.get_rank())
        loss = net(torch.randn(4, 8).to(device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    whole = DTensor.from_local(weight.to_local(), weight.device_mesh, weight.placements).full_tensor()
    assert (whole == 1).all() and whole.shape == (8, 8)
    return losses, len(groups_by_name())


@on_ranks(4)
def test_the_same_losses_with_fewer_groups() -> None:
    dims = (2, 1, 2), ("dp", "cp", "tp")
    dist.init_process_group("gloo")
    losses, plain = trained(*dims)
    adopted = meshcomm.adopt()
    begin_again()
    assert trained(*dims)[0] == losses
    # dp, cp, tp, fsdp, tp and loss: two are made, and one is of a single rank.
    assert repr(adopted) == "6 groups requested: 2 made, 3 shared, 1 of one rank"
    assert len(groups_by_name()) == plain - 3
    adopted.close()
    assert dist.new_group([0, 1]) is not dist.new_group([0, 1]) or dist.get_rank() > 1
    dist.destroy_process_group()


@on_ranks(4)
def test_only_equal_groups_are_shared() -> None:
    dist.init_process_group("gloo")
    adopted = meshcomm.adopt()
    pair = dist.new_group([1, 0])
    inside = dist.get_rank() < 2
    assert dist.new_group([0, 1]) is pair and dist.new_group([0, 1], backend="gloo") is pair
    assert (pair is dist.GroupMember.NON_GROUP_MEMBER) is not inside
    others = [
        dist.new_group([0, 1], timeout=timedelta(seconds=99)),
        dist.new_group([0, 1], backend="fake"),
        dist.new_group([0, 1, 2, 3]),
    ]
    if inside:
        others.append(dist.new_group([0, 1], use_local_synchronization=True))
        assert all(each is not pair for each in others)
    alone = [dist.new_group([rank]) for rank in range(4)][dist.get_rank()]
    x = torch.ones(3)
    dist.all_reduce(x, group=alone)
    assert dist.get_process_group_ranks(alone) == [dist.get_rank()] and x.tolist() == [1, 1, 1]
    # Names of groups are counted alike on all ranks, members or not.
    everyone = dist.new_group()
    dist.all_reduce(x, group=everyone)
    assert x.tolist() == [4, 4, 4]
    if inside:
        dist.destroy_process_group(pair)
        with pytest.raises(
            CommunicationError, match=r"(?s)requested a group again that it had destroyed.*ranks 0 1"
        ):
            dist.new_group([0, 1])
    adopted.close()
    adopted.close()
    dist.destroy_process_group()


@on_ranks(2)
def test_a_watch_sees_what_is_shared_once() -> None:
    with meshcomm.watch(reports="") as watch:
        adopted = meshcomm.adopt()
        dist.init_process_group("gloo")
        first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
        for group in (first, second):
            dist.all_reduce(torch.ones(4), group=group)
        assert first is second and "all_reduce" in str(watch.stats())
        # Another default group begins anew.
        begin_again()
        dist.all_reduce(torch.ones(4), group=dist.new_group([0, 1]))
        assert adopted.made == 2
        adopted.close()
        dist.destroy_process_group()
