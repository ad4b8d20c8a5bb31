"""Calls on torch's groups outside a mesh: the default group and groups of dist.new_group are compared like the mesh's groups."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshcomm
from meshcomm.errors import CallMismatchError
from meshcomm.mesh import Mesh
from meshcomm.testing import Pool
from meshcomm.transport import torch_private
from tests.group_hooks import needs_group_hooks
from tests.ranks import on_ranks

pytestmark = needs_group_hooks

CONFIG: dict[str, Any] = {"dims": {"dp": 2, "tp": 2}, "device": "cpu", "timeout_s": 20, "validate_calls": 3}


def refused(group: Any, odd: bool, number: int, name: str, ranks: str) -> None:
    """All ranks of the group refuse a call whose size differs on one rank, and the group stays usable.

    ranks: the odd rank, " of " and the others. In a group of two ranks, either may be wrong.
    """
    with pytest.raises(CallMismatchError) as caught:
        dist.all_reduce(torch.ones(6 if odd else 4), group=group)
    who, _, others = ranks.partition(" of ")
    given, expected = str(caught.value.given), str(caught.value.expected)
    usual = f"all_reduce(dtype float32, elements 4, op sum) at {__file__}:"
    if " " in others:
        blamed = f"rank {who} is mismatched"
        assert f"as ranks {others}: {usual}" in expected
    else:
        blamed = "ranks {} {} do not agree".format(*sorted((who, others)))
        assert f"rank {others}: {usual}" in given and expected == "the same calls on every rank of the group"
    assert caught.value.what.startswith(f'ranks differ in call {number} along "{name}": {blamed}; nothing')
    assert f"rank {who}: all_reduce(dtype float32, elements 6, op sum) at {__file__}:" in given


def labels(mesh: Mesh) -> list[str]:
    return [group["label"] for group in mesh._state.watch.status()["groups"]]  # type: ignore[union-attr]


@on_ranks(4)
def test_the_default_group_is_compared_while_a_mesh_is_open() -> None:
    with meshcomm.init(**CONFIG) as mesh:
        x = torch.ones(3)
        dist.all_reduce(x)
        assert x.tolist() == [4.0] * 3 and labels(mesh)[-1] == "default group"
        refused(None, mesh.rank == 2, 2, "default group", "2 of 0 1 3")
        # The size and the bytes of an object are two calls. From the fourth call on, no call is compared.
        found: list[Any] = [None] * 4
        dist.all_gather_object(found, {"rank": mesh.rank})
        assert found == [{"rank": rank} for rank in range(4)]
        dist.barrier()
        recorder = mesh._state.watch._recorders[-1]  # type: ignore[union-attr]
        assert recorder.check is None and recorder.started == 5
        # mesh.step ignores these calls, because another thread may make them at its own pace.
        for _ in range(mesh.rank):
            recorder.started += 1
        mesh.step()


@on_ranks(4)
def test_an_object_of_torch_against_a_call_of_the_mesh() -> None:
    with meshcomm.init(**CONFIG) as mesh:
        found: list[Any] = [None] * 2
        with pytest.raises(CallMismatchError, match=r"ranks (0 1|2 3) do not agree"):
            if mesh.coord("tp") == 1:
                dist.all_gather_object(found, "an object", group=mesh.group("tp"))
            else:
                mesh.objects.all_gather("tp", "an object")


@on_ranks(4)
def test_groups_of_new_group_are_compared_and_let_go() -> None:
    dist.init_process_group("gloo")
    before = dist.new_group([1, 3], group_desc="experts")
    plain = torch_private.c10d._register_pg_in_world
    mesh = meshcomm.init(**CONFIG)
    whole = dist.new_group(timeout=dist.default_pg_timeout)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = pairs[mesh.rank // 2]
    dist.all_reduce(torch.ones(3), group=whole)
    refused(whole, mesh.rank == 1, 2, f"group {whole.group_name}", "1 of 0 2 3")
    refused(pair, mesh.rank % 2 == 1, 1, f"group {pair.group_name}", f"{mesh.rank | 1} of {mesh.rank & 2}")
    if mesh.rank % 2:
        refused(before, mesh.rank == 3, 1, f"group {before.group_name}, experts", "3 of 1")
    seen = labels(mesh)
    assert len(seen) == 2 + 2 + mesh.rank % 2
    for group in (whole, pair):
        dist.destroy_process_group(group)
    # Creating the next group removes the destroyed ones.
    last = dist.new_group()
    assert labels(mesh) == [label for label in seen if "group" not in label or "experts" in label]
    dist.all_reduce(torch.ones(1), group=last)
    mesh.close()
    assert torch_private.c10d._register_pg_in_world is plain
    assert not torch_private.has_hooks(last) and not torch_private.has_hooks(torch_private.default_group())
    dist.all_reduce(torch.ones(1), group=last)
    dist.destroy_process_group()


@on_ranks(4)
def test_groups_with_ranks_outside_of_the_mesh_are_left_alone() -> None:
    with meshcomm.init(ranks=[0, 1], **{**CONFIG, "dims": {"dp": 2}}) as mesh:
        x = torch.ones(3)
        dist.all_reduce(x)
        assert x.tolist() == [4.0] * 3
        inside = dist.new_group([0, 1])
        if mesh.is_member:
            assert labels(mesh) == ["dp"]
            refused(inside, mesh.rank == 1, 1, f"group {inside.group_name}", "1 of 0")


@on_ranks(2)
def test_a_second_mesh_leaves_the_comparison_to_the_first_one() -> None:
    config = {**CONFIG, "dims": {"dp": 2}}
    with meshcomm.init(**config) as first, meshcomm.init(**config) as second:
        group = dist.new_group()
        refused(None, first.rank == 1, 1, "default group", "1 of 0")
        refused(group, first.rank == 1, 1, f"group {group.group_name}", "1 of 0")
        assert len(labels(first)) == 3 and len(labels(second)) == 1


@on_ranks(2)
def test_a_mesh_that_nobody_closed_goes_on_to_compare_on_every_rank() -> None:
    """The rank whose garbage is collected first must not decide who compares."""
    mesh: Any = meshcomm.init(**{**CONFIG, "dims": {"dp": 2}})
    rank = mesh.rank
    del mesh
    dist.all_reduce(torch.ones(3))
    refused(None, rank == 1, 2, "default group", "1 of 0")
    # The comparison ends with the default group. A new default group has the same name, but is not compared.
    store = dist.PrefixStore("again", torch_private.default_store())
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    assert not torch_private.has_hooks(torch_private.default_group())
    with meshcomm.init(**{**CONFIG, "dims": {"dp": 2}}):
        refused(None, rank == 1, 1, "default group", "1 of 0")
    dist.destroy_process_group()


@on_ranks(2)
def test_another_thread_may_call_on_a_group_of_its_own_at_its_own_pace() -> None:
    """Checkpoints that are written during training make such calls, and steps must not blame them."""
    with meshcomm.init(**{**CONFIG, "dims": {"dp": 2}}) as mesh:
        group = dist.new_group()

        def writes() -> None:
            for _ in range(20):
                time.sleep(0.01 * (1 + mesh.rank))
                dist.all_reduce(torch.ones(1), group=group)

        thread = threading.Thread(target=writes)
        thread.start()
        for _ in range(30):
            mesh.all_reduce("dp", torch.ones(1))
            mesh.step()
            time.sleep(0.05)
        thread.join()


def test_descriptors_stay_flat_where_groups_come_and_go(pool: Pool) -> None:
    for first, last in pool.run(descriptors, ranks=2):
        assert last <= first + 4


def descriptors() -> tuple[int, int]:
    """The open descriptors after the third group and at the end. Gloo's own thread closes connections late."""
    import os

    counts: list[int] = []
    with meshcomm.init(**{**CONFIG, "dims": {"dp": 2}}):
        for _ in range(12):
            group = dist.new_group()
            for _ in range(5):
                dist.all_reduce(torch.ones(1), group=group)
            dist.destroy_process_group(group)
            del group
            counts.append(len(os.listdir("/proc/self/fd")))
        deadline = time.monotonic() + 10
        while counts[-1] > counts[2] + 4 and time.monotonic() < deadline:
            time.sleep(0.05)
            counts.append(len(os.listdir("/proc/self/fd")))
    return counts[2], counts[-1]


@on_ranks(2)
def test_a_message_of_torch_that_was_waited_for_is_not_waited_for_again() -> None:
    """In Gloo, a second wait for the same message fails after the group's timeout, and its connections close."""
    with meshcomm.init(dims={"pp": 2}, device="cpu", timeout_s=2) as mesh:
        x, peer, group = torch.full((3,), float(mesh.rank)), 1 - mesh.rank, mesh.group("pp")
        ops = [dist.P2POp(dist.isend, x, peer, group), dist.P2POp(dist.irecv, y := x.clone(), peer, group)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        time.sleep(3)
        assert y[0] == peer and mesh.all_reduce("pp", x).tolist() == [1.0] * 3
