"""What does it cost to make the groups of a mesh? meshcomm beside torch's init_device_mesh."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import meshcomm
from meshcomm.mesh import Mesh
from meshcomm.transport.torch_private import live_groups


@dataclass(frozen=True)
class Startup:
    """One rank's figures: groups it created, seconds until they exist, seconds until all were used."""

    groups: int
    created_s: float
    used_s: float


def startup(dims: Mapping[str, int], rounds: int) -> dict[str, list[Startup]]:
    """Make the mesh `rounds` times each way, in turn, inside one default group of CPU ranks.

    "used" is one all_reduce of one element along every dim, in order. Both ways start together on
    all ranks, after the default group exists and has been used.
    Called by: every rank of a job as large as the mesh, started by a launcher.
    """
    world = 1
    for size in dims.values():
        world *= size
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    assert dist.get_world_size() == world

    def theirs() -> Callable[[], None]:
        mesh = init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))
        groups = [mesh.get_group(name) for name in dims]
        return lambda: [dist.all_reduce(torch.ones(1), group=group) for group in groups] and None

    opened: list[Mesh] = []

    def ours() -> Callable[[], None]:
        mesh = meshcomm.init(dims=dims, device="cpu", timeout_s=120)
        opened.append(mesh)
        return lambda: [mesh.all_reduce(name, torch.ones(1)) for name in dims] and None

    found: dict[str, list[Startup]] = {"init_device_mesh": [], "meshcomm": []}
    for _ in range(rounds):
        for name, make in (("init_device_mesh", theirs), ("meshcomm", ours)):
            dist.all_reduce(torch.ones(1))
            before = live_groups()
            start = time.perf_counter()
            use = make()
            created = time.perf_counter()
            groups = live_groups() - before
            use()
            found[name].append(Startup(groups, created - start, time.perf_counter() - start))
    for mesh in reversed(opened):
        mesh.close()
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    return found


def slowest(by_rank: list[dict[str, list[Startup]]]) -> dict[str, Startup]:
    """Over ranks the slowest, over rounds the median: what a job waits for."""
    result = {}
    for name in by_rank[0]:
        rounds = list(zip(*(rank[name] for rank in by_rank), strict=True))
        result[name] = Startup(
            groups=max(each.groups for each in rounds[0]),
            created_s=median(max(each.created_s for each in ranks) for ranks in rounds),
            used_s=median(max(each.used_s for each in ranks) for ranks in rounds),
        )
    return result
