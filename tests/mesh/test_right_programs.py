"""Correct programs that wait for each other in unusual ways are left alone; their wrong twins are refused on every rank."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshcomm
from meshcomm.errors import CallMismatchError
from meshcomm.mesh import Mesh
from meshcomm.testing import Pool
from tests.forked_jobs import Job
from tests.group_hooks import needs_group_hooks
from tests.mesh.right_programs import PROGRAMS, WORLD, run_all

LAUNCHED = """
import json, os, sys
from pathlib import Path
from tests.mesh.right_programs import run_all
Path(f"{os.environ['RANK']}.json").write_text(json.dumps(run_all(slow=sys.argv[1] == "slow")))
"""


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "plain": nullcontext,
    "watch": partial(meshcomm.watch, reports=""),
    "mesh": partial(meshcomm.init, dims={"dp": 2, "tp": 2}, device="cpu"),
}


def given(pool: Pool, folder: Path, way: str, slow: bool) -> list[dict[str, str]]:
    if way != "launched":
        return pool.run(partial(run_all, CONTEXTS[way], slow=slow), ranks=WORLD)
    (folder / "program.py").write_text(LAUNCHED)
    root = str(Path(__file__).parents[2])
    command = ("-m", "meshcomm", "run", "--world-size", str(WORLD), "program.py", "slow" if slow else "")
    code, _, err = Job(pool, folder, *command, env={"PYTHONPATH": root}).finish()
    assert code == 0, err
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.fixture(scope="module")
def results(
    pool: Pool, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, bool], list[dict[str, str]]]:
    """The results of the programs on each rank, of the compiled one or of the others, cached for each way of running them."""
    return cache(lambda way, slow: given(pool, tmp_path_factory.mktemp(way), way, slow))


@needs_group_hooks
@pytest.mark.parametrize("way", ["watch", "launched", "mesh"])
@pytest.mark.parametrize("name", PROGRAMS)
# `meshcomm run` watches a program in the same way. tests/comm/test_compiled_programs.py compares the calls of compiled programs.
@pytest.mark.deep_cases(r"-watch\]|\[compiled-|barrier-mesh\]")
def test_a_right_program_is_left_alone(
    results: Callable[[str, bool], list[dict[str, str]]], name: str, way: str
) -> None:
    slow = name == "compiled"
    plain = [of_rank[name] for of_rank in results("plain", slow)]
    assert not any("Error" in each for each in plain)
    assert [of_rank[name] for of_rank in results(way, slow)] == plain


# -- the same on a mesh, also in the simulator ---------------------------------------------------------


def full(value: float, size: int = 3) -> torch.Tensor:
    return torch.full((size,), float(value))


@pytest.mark.mesh(dp=4, via=("simulator", "gloo"))
def test_messages_between_an_asynchronous_call_and_its_wait(mesh: Mesh) -> None:
    rank = mesh.rank
    if rank:
        mesh.send("dp", full(rank), dst=0)
        assert mesh.recv("dp", full(0), src=0).tolist() == [2.0 * rank] * 3
        mesh.barrier("dp")
        assert mesh.recv("dp", full(0), src=0).tolist() == [7.0] * 3
        assert mesh.all_reduce("dp", full(rank)).tolist() == [6.0] * 3
        return
    barrier = mesh.barrier("dp", async_op=True)
    for src in range(1, 4):
        mesh.send("dp", 2 * mesh.recv("dp", full(0), src=src), dst=src)
    barrier.wait()
    summed = mesh.all_reduce("dp", full(rank), async_op=True)
    for dst in range(1, 4):
        mesh.send("dp", full(7), dst=dst)
    assert summed.wait().tolist() == [6.0] * 3


@pytest.mark.mesh(dp=2, tp=2, via=("simulator", "gloo"))
def test_two_dims_started_in_either_order(mesh: Mesh) -> None:
    names = ("dp", "tp") if mesh.rank in (0, 3) else ("tp", "dp")
    handles = {name: mesh.all_reduce(name, full(mesh.rank), async_op=True) for name in names}
    assert handles["dp"].wait()[0] == 2 * (mesh.rank % 2) + 2
    assert handles["tp"].wait()[0] == 4 * (mesh.rank // 2) + 1


@pytest.mark.mesh(dp=4, via=("simulator", "gloo"))
def test_a_rooted_call_that_some_rank_leaves_early(mesh: Mesh) -> None:
    """Rank 2 enters the gather and the scatter after rank 1 has left; rank 3 enters the broadcast after the source has left."""
    rank = mesh.rank
    if rank == 2:
        mesh.recv("dp", full(0), src=1)
    parts = mesh.gather("dp", x := full(rank), dst=0)
    if rank == 1:
        mesh.send("dp", x.fill_(-1), dst=2)
    assert (parts is None) == (rank > 0)
    if parts is not None:
        assert parts.tolist() == [0.0] * 3 + [1.0] * 3 + [2.0] * 3 + [3.0] * 3
    if rank == 3:
        mesh.recv("dp", full(0), src=0)
    mesh.broadcast("dp", x := full(rank + 7), src=0)
    assert x.tolist() == [7.0] * 3
    if rank == 0:
        mesh.send("dp", x.fill_(-1), dst=3)
    if rank == 2:
        mesh.recv("dp", full(0), src=1)
    part = mesh.scatter("dp", torch.arange(12.0) if rank == 0 else None, src=0, out=full(0))
    assert part.tolist() == [3.0 * rank, 3.0 * rank + 1, 3.0 * rank + 2]
    if rank == 1:
        mesh.send("dp", part, dst=2)


@pytest.mark.mesh(dp=4, via=("simulator", "gloo", "emulated_nccl"))
def test_an_asynchronous_all_to_all_of_known_sizes_waits_for_nobody(mesh: Mesh) -> None:
    leaving = [mesh.rank + dst for dst in range(4)]
    # The first call of a communicator connects it, so all of its ranks meet in that call.
    mesh.barrier("dp")
    if mesh.rank:
        mesh.store.wait(["started"])
    handle = mesh.all_to_all(
        "dp",
        full(mesh.rank, sum(leaving)),
        input_split_sizes=leaving,
        output_split_sizes=leaving,
        async_op=True,
    )
    mesh.store.set("started", "")
    assert handle.wait().tolist() == [float(src) for src in range(4) for _ in range(src + mesh.rank)]


@pytest.mark.mesh(dp=2, via="emulated_nccl")
def test_the_host_waits_for_no_queued_call(mesh: Mesh) -> None:
    """As in torch, even a blocking call returns when it is queued, once the communicator is connected."""
    mesh.barrier("dp")
    for number in range(3):
        if mesh.rank:
            mesh.store.wait([f"queued {number}"])
        x = mesh.all_reduce("dp", full(mesh.rank + number))
        mesh.broadcast("dp", x, src=number % 2)
        mesh.store.set(f"queued {number}", "")
        assert x.tolist() == [1.0 + 2 * number] * 3


# -- wrong twins -----------------------------------------------------------------------------------------


def of_size(group: Any, odd: bool, async_op: bool) -> None:
    work = dist.all_reduce(full(1, 6 if odd else 4), group=group, async_op=async_op)
    if work is not None:
        work.wait()


def asynchronous(group: Any, odd: bool) -> None:
    of_size(group, odd, True)


def two_differ_early_and_one_is_late(group: Any, odd: bool) -> None:
    if dist.get_rank() == 2:
        time.sleep(0.1)
    of_size(group, odd, True)


def the_odd_one_is_late(group: Any, odd: bool) -> None:
    if odd:
        time.sleep(0.1)
    of_size(group, odd, True)


def asynchronous_against_blocking(group: Any, odd: bool) -> None:
    of_size(group, odd, odd)


def blocking_against_asynchronous(group: Any, odd: bool) -> None:
    of_size(group, odd, not odd)


def one_of_many_in_flight(group: Any, odd: bool) -> None:
    works = [
        dist.all_reduce(full(1, 3 + (odd and each == 2)), group=group, async_op=True) for each in range(5)
    ]
    for work in reversed(works):
        work.wait()


def another_root(group: Any, odd: bool) -> None:
    dist.broadcast(full(1), 1 if odd else 0, group=group)
    # A rank that the right source has served has a correct result; its next call raises.
    dist.barrier(group)


def another_operation(group: Any, odd: bool) -> None:
    if odd:
        dist.broadcast(full(1), 0, group=group)
    else:
        dist.all_reduce(full(1), group=group)
    dist.barrier(group)


def nothing_against_something(group: Any, odd: bool) -> None:
    dist.all_reduce(full(1, 0 if odd else 4), group=group)
    dist.barrier(group)


def more_than_a_rank_sends(group: Any, odd: bool) -> None:
    expects = [2, 1, 1] if odd else [1, 1, 1]
    dist.all_to_all_single(
        torch.empty(sum(expects)), full(1), expects, [1, 1, 1], group=group, async_op=True
    ).wait()


TWINS = (
    asynchronous,
    two_differ_early_and_one_is_late,
    the_odd_one_is_late,
    asynchronous_against_blocking,
    blocking_against_asynchronous,
    one_of_many_in_flight,
    another_root,
    another_operation,
    nothing_against_something,
    more_than_a_rank_sends,
)


def refused(twin: str, times: int) -> list[list[str]]:
    """Two errors of this rank in each turn: of the wrong call, and of the next call on the group. The odd rank changes."""
    call, found = globals()[twin], []
    meshcomm.watch(reports="")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for turn in range(times):
        group = dist.new_group()
        dist.all_reduce(torch.ones(1), group=group)
        errors = []
        for _ in range(2):
            try:
                call(group, rank == turn % 3)
            except CallMismatchError as error:
                errors.append(str(error))
        found.append(errors)
    dist.barrier()
    dist.destroy_process_group()
    return found


@needs_group_hooks
@pytest.mark.parametrize("times", [3, pytest.param(20, marks=pytest.mark.faults)])
@pytest.mark.parametrize("twin", [each.__name__ for each in TWINS])
def test_a_wrong_twin_is_refused_on_every_rank(pool: Pool, twin: str, times: int) -> None:
    for turn, errors in enumerate(zip(*pool.run(refused, twin, times, ranks=3), strict=True)):
        # Every rank gets the same error, and gets it again from its next call.
        assert len({text for of_rank in errors for text in of_rank}) == 1, errors
        assert all(len(of_rank) == 2 for of_rank in errors)
        who = f"rank {turn % 3} is mismatched"
        assert 'along "group' in errors[0][0] and f"{who}; this group" in errors[0][0]


def without_room(late: int, tag: int) -> str:
    """Rank 0 sends more than rank 1 has room for. Rank `late` starts its end second."""
    with meshcomm.init(dims={"dp": 2}, device="cpu") as mesh:
        group = mesh.group("dp")
        if mesh.rank == late:
            time.sleep(0.5)
        try:
            if mesh.rank:
                dist.irecv(torch.ones(3), 0, group, tag)
            else:
                dist.isend(torch.ones(4), 1, group, tag)
            time.sleep(1)
        except CallMismatchError as error:
            return str(error)
        return ""


@needs_group_hooks
@pytest.mark.parametrize("late", [0, 1])
def test_a_message_without_room_is_refused_at_the_end_that_comes_second(pool: Pool, late: int) -> None:
    """Without this error, Gloo would end the receiver's process."""
    texts = pool.run(without_room, late, 5, ranks=2)
    assert texts[1 - late] == ""
    assert "message 1 with tag 5 from rank 0 to rank 1 on dp differs between its ends" in texts[late]
    assert (
        "rank 0 sends float32 (4) at " in texts[late] and "rank 1 has room for float32 (3) at " in texts[late]
    )
