"""What does it cost to make the groups of a mesh? meshcomm beside torch's init_device_mesh."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import meshcomm
from meshcomm.transport.torch_private import live_groups

Step = Callable[[], None]


@dataclass(frozen=True)
class Startup:
    """One rank's figures: groups it created, seconds until they exist, seconds until all were used.

    alone_s: created_s without the time in which ranks compared their plans.
    """

    groups: int
    alone_s: float
    created_s: float
    used_s: float


def startup(dims: Mapping[str, int], rounds: int) -> dict[str, list[Startup]]:
    """Make the mesh `rounds` times each way, in turn, inside one default group of CPU ranks.

    "used" is one all_reduce of one element along every dim, in order. Both ways start together on
    all ranks, after the default group exists and has been used, and are closed after each round;
    one round before the others is not counted. "meshcomm" does what torch does; "calls compared" is the
    default, where ranks also compare their first calls on each group.
    Called by: every rank of a job as large as the mesh, started by a launcher.
    """
    world = 1
    for size in dims.values():
        world *= size
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    assert dist.get_world_size() == world

    def theirs() -> tuple[Step, Step, float]:
        mesh = init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))
        groups = [mesh.get_group(name) for name in dims]

        def use() -> None:
            for group in groups:
                dist.all_reduce(torch.ones(1), group=group)

        def close() -> None:
            for group in reversed(groups):
                dist.destroy_process_group(group)

        return use, close, 0.0

    def ours(validate_calls: int) -> tuple[Step, Step, float]:
        mesh = meshcomm.init(dims=dims, device="cpu", timeout_s=120, validate_calls=validate_calls)

        def use() -> None:
            for name in dims:
                mesh.all_reduce(name, torch.ones(1))

        return use, mesh.close, mesh.startup_s["agree"]

    ways: dict[str, Callable[[], tuple[Step, Step, float]]] = {
        "init_device_mesh": theirs,
        "meshcomm": lambda: ours(0),
        "meshcomm, calls compared": lambda: ours(64),
    }

    found: dict[str, list[Startup]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, make in ways.items():
            dist.all_reduce(torch.ones(1))
            before = live_groups()
            start = time.perf_counter()
            use, close, agreed = make()
            created = time.perf_counter()
            groups = live_groups() - before
            use()
            used = time.perf_counter()
            # The first round of each also pays for what Python loads once.
            if number > 0:
                found[name].append(Startup(groups, created - start - agreed, created - start, used - start))
            dist.all_reduce(torch.ones(1))
            close()
            # A group's threads end with its last reference: not in the next round's time.
            del use, close
            gc.collect()
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
            alone_s=median(max(each.alone_s for each in ranks) for ranks in rounds),
            created_s=median(max(each.created_s for each in ranks) for ranks in rounds),
            used_s=median(max(each.used_s for each in ranks) for ranks in rounds),
        )
    return result
