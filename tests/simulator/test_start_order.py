"""Ranks that start collectives of several NCCL groups in different orders are reported, whatever the schedule of a run."""

from __future__ import annotations

import gc
import random
import warnings
from itertools import pairwise

import pytest
import torch

import meshcomm
from meshcomm.errors import CallMismatchError, DeadlockError, RankFailed
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
    assert meshcomm.simulate(both, config("gloo"), args=(False,)) == [4.0] * 4  # Gloo's groups do not block
    for seed in range(3):
        with pytest.raises(DeadlockError) as caught:
            meshcomm.simulate(both, config("nccl"), args=(False,), schedule_seed=seed)
        assert set(caught.value.circle) == {0, 1, 2, 3}
        assert "ranks start collectives of NCCL groups in different orders: " in caught.value.what
        first = "rank 0 (dp=0 tp=0) starts all_reduce, call 1 on dp[tp=0] at "
        assert first in caught.value.given
        assert f"{__file__}:{both.__code__.co_firstlineno + 2}, then all_reduce" in caught.value.given


def has_circle(orders: dict[int, list[Call]]) -> bool:
    """Look for a cycle: remove calls that wait for no other call, until none is left to remove."""
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
        error = starts.start([call], len(groups[call[0]]), Start(rank, f"rank {rank}", str(call)))
    assert (error is not None) == has_circle(orders)
    if error is None:
        assert not starts._left and not starts._before and not starts._after, "finished calls are kept"


def receives_first(mesh: Mesh) -> None:
    """Both ranks of "dp" wait for the other before they send, on a backend that starts messages in order."""
    peer = 1 - mesh.coord("dp")
    receive = mesh.irecv("dp", torch.empty(1), src=peer)
    mesh.isend("dp", torch.ones(1), dst=peer).wait()
    receive.wait()


def around(mesh: Mesh) -> None:
    """Rank 0 sends to 2, then to 1; 1 receives from 0 before it sends to 2; 2 receives from 1 first."""
    x, rank = torch.ones(1), mesh.rank
    if rank == 0:
        handles = [mesh.isend("dp", x, dst=2), mesh.isend("dp", x, dst=1)]
    elif rank == 1:
        mesh.recv("dp", x, src=0)
        handles = [mesh.isend("dp", x, dst=2)]
    else:
        handles = [mesh.irecv("dp", x.clone(), src=1), mesh.irecv("dp", x, src=0)]
    for handle in handles:
        handle.wait()


def message_behind_a_collective(mesh: Mesh) -> None:
    """One rank reduces before it receives, the other sends before it reduces."""
    x, y = torch.ones(1), torch.ones(1)
    if mesh.rank == 0:
        reduce = mesh.all_reduce("dp", x, async_op=True)
        mesh.recv("dp", y, src=1)
    else:
        send = mesh.isend("dp", y, dst=0)
        reduce = mesh.all_reduce("dp", x, async_op=True)
        send.wait()
    reduce.wait()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_messages_of_an_nccl_group_are_queued() -> None:
    """Programs that end on Gloo and hang on NCCL are reported."""
    for program, size, error, text in (
        (receives_first, 2, RankFailed, "ranks that all do this wait forever"),
        (around, 3, DeadlockError, "ranks start calls of one NCCL group in different orders: "),
        (
            message_behind_a_collective,
            2,
            DeadlockError,
            "ranks start calls of one NCCL group in different orders",
        ),
    ):
        dims = {"mesh": {"dims": {"dp": size}}}
        meshcomm.simulate(program, {"mesh": {**dims["mesh"], "backend": "gloo"}})
        with pytest.raises(error, match=text):
            meshcomm.simulate(program, {"mesh": {**dims["mesh"], "backend": "nccl"}})


def one_of_each_kind(mesh: Mesh) -> None:
    if mesh.rank == 0:
        mesh.exchange("dp", [(torch.ones(1), 1)])
    else:
        mesh.recv("dp", torch.empty(1), src=0)


def test_a_message_of_an_exchange_does_not_meet_a_receive_on_nccl() -> None:
    config = {"mesh": {"dims": {"dp": 2}, "backend": "nccl"}}
    meshcomm.simulate(one_of_each_kind, {"mesh": {"dims": {"dp": 2}, "backend": "gloo"}})
    with pytest.raises(CallMismatchError, match="use different communicators along dp") as caught:
        meshcomm.simulate(one_of_each_kind, config)
    assert "rank 0: exchange" in caught.value.given and "rank 1: recv" in caught.value.given


def both_ways_at_once(mesh: Mesh) -> list[float]:
    """Exchanges of messages, a ring, and collectives between them."""
    peer, x = 1 - mesh.coord("dp"), torch.tensor([float(mesh.rank)])
    found = []
    for _ in range(3):
        handle = mesh.exchange("dp", [(x, peer)], [(torch.empty(1), peer)], async_op=True)
        total = mesh.all_reduce("dp", x.clone())
        (came,) = handle.wait()
        ring = mesh.shift("dp", x)
        assert ring is not None
        found += [total.item(), came.item(), ring.item()]
    return found


def test_what_nccl_can_do_is_no_deadlock() -> None:
    config = {"mesh": {"dims": {"dp": 2}, "backend": "nccl"}}
    assert meshcomm.simulate(both_ways_at_once, config) == [[1.0, 1.0, 1.0] * 3, [1.0, 0.0, 0.0] * 3]


def test_handles_of_a_run_that_failed_are_dropped_in_silence() -> None:
    # The frames in the error's traceback hold the handles. The error of the run has already reported the calls.
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(RankFailed):
            meshcomm.simulate(receives_first, {"mesh": {"dims": {"dp": 2}, "backend": "nccl"}})
        gc.collect()
    assert not told, [str(each.message) for each in told]
