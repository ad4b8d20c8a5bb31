"""Collectives of several NCCL groups that ranks start in different orders are told, whatever the luck of a run."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

import meshcomm
from meshcomm.errors import DeadlockError
from meshcomm.mesh import Mesh
from meshcomm.simulator.start_order import Call, Start, StartOrder


def both(mesh: Mesh, same: bool) -> float:
    order = ("dp", "tp") if same or mesh.rank in (0, 3) else ("tp", "dp")
    handles = [mesh.all_reduce(dim, torch.ones(1), async_op=True) for dim in order]
    return sum(handle.wait().item() for handle in handles)


def config(backend: str) -> dict[str, object]:
    return {"mesh": {"dims": {"dp": 2, "tp": 2}, "backend": backend}}


def test_asynchronous_calls_of_two_nccl_groups_in_crossed_order() -> None:
    assert meshcomm.simulate(both, config("nccl"), args=(True,)) == [4.0] * 4
    assert meshcomm.simulate(both, config("gloo"), args=(False,)) == [4.0] * 4  # Gloo's groups do not wait so
    for seed in range(3):
        with pytest.raises(DeadlockError) as caught:
            meshcomm.simulate(both, config("nccl"), args=(False,), schedule_seed=seed)
        assert set(caught.value.circle) == {0, 1, 2, 3}
        assert "ranks start collectives of NCCL groups in different orders: " in caught.value.what
        first = "rank 0 (dp=0 tp=0) starts all_reduce, call 1 on dp[tp=0] at "
        assert first in caught.value.given
        assert f"{__file__}:{both.__code__.co_firstlineno + 2}, then all_reduce" in caught.value.given


def has_circle(orders: dict[int, list[Call]]) -> bool:
    """By taking calls away that no other call has to wait for, until none is left."""
    before: dict[Call, set[Call]] = {call: set() for calls in orders.values() for call in calls}
    for calls in orders.values():
        for first, second in pairwise(calls):
            before[second].add(first)
    while free := [call for call, needs in before.items() if not needs]:
        for call in free:
            del before[call]
        for needs in before.values():
            needs.difference_update(free)
    return bool(before)


@pytest.mark.parametrize("seed", range(60))
def test_the_graph_against_taking_calls_away(seed: int) -> None:
    draw = random.Random(seed)
    groups = [tuple(draw.sample(range(5), draw.randint(2, 4))) for _ in range(4)]
    calls = [(group, number) for group in range(len(groups)) for number in range(1, 3)]
    orders: dict[int, list[Call]] = {}
    for rank in range(5):
        own = [call for call in calls if rank in groups[call[0]]]
        for _ in range(draw.choice((0, 0, 1, 2))):  # swaps neighbours of different groups
            at = draw.randrange(max(1, len(own) - 1))
            if at + 1 < len(own) and own[at][0] != own[at + 1][0]:
                own[at], own[at + 1] = own[at + 1], own[at]
        orders[rank] = own
    starts, places = StartOrder(), dict.fromkeys(orders, 0)
    error = None
    while error is None and (left := [rank for rank in orders if places[rank] < len(orders[rank])]):
        rank = draw.choice(left)
        call = orders[rank][places[rank]]
        places[rank] += 1
        error = starts.start(call, len(groups[call[0]]), Start(rank, f"rank {rank}", str(call)))
    assert (error is not None) == has_circle(orders)
    if error is None:
        assert not starts._left and not starts._before and not starts._after, "finished calls are kept"
