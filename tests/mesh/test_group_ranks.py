"""Global ranks, group ranks and coords: what dst and src mean, in torch.distributed and here."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import meshcomm
from meshcomm.mesh import Mesh

# Ranks 1, 2, 4 of five: coords 0, 1, 2. The number 1 is rank 1 and coord 1, and these are not the same.
MEMBERS = [1, 2, 4]


def own(mesh: Mesh) -> Tensor:
    return torch.tensor([float(mesh.rank)])


def of_torch(mesh: Mesh) -> None:
    """In torch.distributed src, dst and peer are global ranks, also with a group."""
    group, rank = mesh.group("line"), mesh.rank
    assert dist.get_process_group_ranks(group) == MEMBERS == mesh.ranks("line")
    assert dist.get_group_rank(group, rank) == dist.get_rank(group) == mesh.coord("line")
    assert dist.get_global_rank(group, 1) == 2

    # broadcast: src=1 is rank 1, which is coord 0. As a group rank it would be rank 2.
    x = own(mesh)
    dist.broadcast(x, src=1, group=group)
    assert x.item() == 1
    x = own(mesh)
    dist.broadcast(x, group=group, group_src=1)
    assert x.item() == 2
    assert mesh.broadcast("line", own(mesh), src=1).item() == 2
    # Coord 0 exists, rank 0 is not in the group.
    with pytest.raises(ValueError, match="Global rank 0 is not part of group"):
        dist.broadcast(own(mesh), src=0, group=group)
    assert mesh.broadcast("line", own(mesh), src=0).item() == 1

    # send and recv: rank 1 sends to dst=2. As a group rank that would be rank 4, which receives nothing.
    if rank == 1:
        dist.send(own(mesh), dst=2, group=group)
        dist.send(own(mesh), group=group, group_dst=2)
        mesh.send("line", own(mesh), dst=2)
    elif rank == 2:
        x = own(mesh)
        dist.recv(x, src=1, group=group)
        assert x.item() == 1
    else:
        for _ in range(2):
            x = own(mesh)
            dist.recv(x, group=group, group_src=0)
            assert x.item() == 1


def of_ours(mesh: Mesh) -> None:
    """Here they are coords, and a number that is none is refused before anything is sent."""
    coord = mesh.coord("line")
    assert MEMBERS[coord] == mesh.rank == mesh.rank_at(line=coord)
    assert mesh.coords_of(4) == {"line": 2}
    total = mesh.reduce("line", own(mesh), dst=2)
    assert (total is None) == (mesh.rank != 4) and (total is None or total.item() == 7)
    with pytest.raises(meshcomm.MeshcommError, match="dst=4 is not a coord"):
        mesh.send("line", own(mesh), dst=4)
    with pytest.raises(meshcomm.MeshcommError, match="src=4 is not a coord"):
        mesh.broadcast("line", own(mesh), src=4)


@pytest.mark.mesh(line=3, ranks=MEMBERS, world_size=5, via="gloo")
def test_dst_and_src_are_global_ranks_in_torch_and_coords_here(mesh: Mesh) -> None:
    if mesh.is_member:
        of_torch(mesh)
        of_ours(mesh)
