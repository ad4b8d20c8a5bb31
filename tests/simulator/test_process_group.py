"""Unchanged torch programs on simulated ranks match Gloo's processes to the bit, and bugs in them are proved."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import meshcomm
from meshcomm.errors import (
    CallMismatchError,
    DeadlockError,
    MeshcommError,
    RankFailed,
    UnmatchedMessage,
    UnsupportedOp,
)
from meshcomm.mesh import Mesh
from meshcomm.simulator.run import simulate_script
from meshcomm.testing import Pool
from tests.simulator.torch_programs import PROGRAMS


def on_gloo(name: str) -> Any:
    dist.init_process_group("gloo")
    try:
        return PROGRAMS[name]()
    finally:
        dist.destroy_process_group()


def simulated(mesh: Mesh, name: str) -> Any:
    return PROGRAMS[name]()


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_unchanged_program_of_torch_is_as_on_processes(name: str, pool: Pool) -> None:
    theirs = pool.run(on_gloo, name, ranks=4)
    for seed in range(2):
        ours = meshcomm.simulate(simulated, dims={"dp": 2, "tp": 2}, args=(name,), schedule_seed=seed)
        assert ours == theirs
    assert not dist.is_initialized()


def _extremes(mesh: Mesh) -> list[Any]:
    x = torch.tensor([torch.nan, 0.0, -0.0, 1.0] * 3).roll(mesh.rank)
    return [mesh.all_reduce("dp", x.clone(), op=op).view(torch.int32).tolist() for op in ("min", "max")]


def _extremes_on_gloo(_: str) -> list[Any]:
    with meshcomm.init(dims={"dp": 4}, device="cpu") as mesh:
        return _extremes(mesh)


def test_a_minimum_of_the_mesh_is_as_on_processes(pool: Pool) -> None:
    assert meshcomm.simulate(_extremes, dims={"dp": 4}) == pool.run(_extremes_on_gloo, "", ranks=4)


SCRIPT = """
import sys
import torch
import torch.distributed as dist
from tests.simulator.torch_programs import PROGRAMS

dist.init_process_group("gloo")
found = PROGRAMS["ddp"]()
print(dist.get_rank(), found[0][-1])
dist.destroy_process_group()
assert not dist.is_initialized()
"""


def test_a_script_that_knows_nothing_of_meshcomm_runs(tmp_path: Path, capsys: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    assert simulate_script(None, script, (), (), 4, 0) == 4
    expected = meshcomm.simulate(simulated, dims={"dp": 2, "tp": 2}, args=("ddp",))
    lines = sorted(capsys.readouterr().out.splitlines())
    assert lines == [f"{rank} {losses[-1]}" for rank, (losses, _) in enumerate(expected)]


# -- bugs in torch programs -------------------------------------------------------------------------


def _line(text: str) -> str:
    """The place of the line that contains `text` in this file, as errors show it."""
    lines = Path(__file__).read_text().splitlines()
    return f"{__file__}:{next(n for n, line in enumerate(lines, 1) if line.endswith(text))}"


def _error(kind: type[MeshcommError], program: Any, **config: Any) -> Any:
    with pytest.raises(kind) as caught:
        meshcomm.simulate(program, dims={"dp": 2, "tp": 2}, **config)
    return caught.value


def test_a_different_shape_on_one_rank_is_named() -> None:
    def program(mesh: Mesh) -> None:
        x = torch.ones(3 if mesh.rank == 2 else 4)
        dist.all_reduce(x)  # the wrong shape

    error = _error(CallMismatchError, program)
    assert error.mismatched_ranks == (2,)
    assert 'along "default group"' in str(error) and "rank 2: all_reduce(dtype float32, elements 3" in str(
        error
    )
    assert _line("# the wrong shape") in str(error)


def test_a_call_of_one_rank_inside_backward_is_named() -> None:
    def program(mesh: Mesh) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for layer in net:
            fully_shard(layer, mesh=mesh["dp"])
        if mesh.rank == 3:
            dist.all_reduce(torch.ones(1), group=mesh.group("dp"))  # a call of its own
        net(torch.ones(2, 4)).sum().backward()

    error = _error(CallMismatchError, program)
    assert set(error.mismatched_ranks) <= {1, 3}
    assert 'along "dp"' in str(error) and _line("# a call of its own") in str(error)


def test_two_groups_in_different_orders_are_a_circle() -> None:
    def program(mesh: Mesh) -> None:
        groups = mesh.group("dp"), mesh.group("tp")
        for group in groups if mesh.rank in (0, 3) else groups[::-1]:
            dist.all_reduce(torch.ones(1), group=group)  # crossed

    error = _error(DeadlockError, program)
    assert set(error.circle) == {0, 1, 2, 3}
    assert "all_reduce, call 1 on dp[tp=0]" in str(error) and _line("# crossed") in str(error)


def test_ranks_that_send_before_they_receive_are_a_circle() -> None:
    def program(mesh: Mesh) -> None:
        x, peer = torch.ones(2), mesh.rank ^ 1
        dist.send(x, peer)  # everybody sends
        dist.recv(x, peer)

    error = _error(DeadlockError, program)
    assert len(error.circle) == 2
    assert "waits in send to rank" in str(error) and "on default group" in str(error)
    assert _line("# everybody sends") in str(error)


def test_a_message_that_nobody_receives_is_named() -> None:
    def program(mesh: Mesh) -> None:
        if mesh.rank == 0:
            dist.isend(torch.ones(2), 1, tag=7)  # never received

    error = _error(UnmatchedMessage, program)
    assert error.waiting == (0,)
    assert "send to rank 1, tag 7" in str(error) and _line("# never received") in str(error)


def test_a_rank_that_leaves_before_the_last_step_of_ddp_is_named() -> None:
    def program(mesh: Mesh) -> None:
        torch.manual_seed(0)
        net = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
        for _ in range(2 if mesh.rank == 1 else 3):
            net(torch.ones(2, 4)).sum().backward()  # one step less

    error = _error(DeadlockError, program)
    assert "rank 1" in error.what and _line("# one step less") in str(error)


def test_an_average_is_refused_as_gloo_refuses_it_and_nccl_orders_calls() -> None:
    def program(mesh: Mesh) -> None:
        dist.all_reduce(torch.ones(2, dtype=torch.int64), dist.ReduceOp.AVG)

    error = _error(RankFailed, program)
    assert "avg of int64 is not possible on gloo" in str(error)


def test_coalesced_messages_of_nccl_are_one_call() -> None:
    def program(mesh: Mesh) -> list[float]:
        x, y, peer = torch.tensor([float(mesh.rank)]), torch.empty(1), mesh.rank ^ 1
        ends = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, y, peer)]
        for work in dist.batch_isend_irecv(ends[:: 1 if mesh.rank % 2 else -1]):
            work.wait()
        return y.tolist()

    found = meshcomm.simulate(program, dims={"dp": 2, "tp": 2}, backend="nccl")
    assert found == [[1.0], [0.0], [3.0], [2.0]]


def test_splits_of_a_group_of_the_mesh_fit_or_are_told() -> None:
    def program(mesh: Mesh, more: int) -> list[float]:
        sends = [[1, 3], [2, 4]][mesh.rank]
        comes = [[1, 2], [3 + more, 4]][mesh.rank]
        y = torch.empty(sum(comes))
        dist.all_to_all_single(y, torch.full((sum(sends),), float(mesh.rank)), comes, sends, mesh.group("ep"))
        return y.tolist()

    found = meshcomm.simulate(program, dims={"ep": 2}, args=(0,))
    assert found == [[0.0, 1.0, 1.0], [0.0] * 3 + [1.0] * 4]
    with pytest.raises(CallMismatchError, match=r"sends \(1, 3\), expects \(1, 2\)"):
        meshcomm.simulate(program, dims={"ep": 2}, args=(1,))


def test_calls_of_torch_on_the_groups_of_a_mesh_are_counted() -> None:
    def program(mesh: Mesh) -> Any:
        dist.all_reduce(torch.ones(4), group=mesh.group("tp"))
        mesh.all_reduce("tp", torch.ones(4))
        return [(row.dim, row.call, row.calls) for row in mesh.stats().rows]

    found = meshcomm.simulate(program, dims={"dp": 2, "tp": 2})
    assert found == [[("tp", "all_reduce (torch)", 1), ("tp", "all_reduce", 1)]] * 4


@pytest.mark.parametrize("seed", range(4))
def test_a_tensor_that_two_dims_split_unevenly_is_whole_again(seed: int) -> None:
    """DTensor's plan depends on a rank's coordinates, and is cached for all ranks of a process."""

    def program(mesh: Mesh) -> list[float]:
        parts = distribute_tensor(torch.arange(5.0), mesh["dp", "tp"], [Shard(0), Shard(0)])
        return parts.full_tensor().tolist()

    found = meshcomm.simulate(program, dims={"dp": 2, "tp": 2}, schedule_seed=seed)
    assert found == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 4


def watched_meanwhile(_: str) -> tuple[bool, list[Any], float]:
    watch = meshcomm.watch()
    dist.init_process_group("gloo")
    try:
        found = meshcomm.simulate(lambda mesh: dist.get_world_size(), dims={"dp": 4})
        x = torch.ones(1)
        dist.all_reduce(x)
        return bool(watch.stats().rows), found, x.item()
    finally:
        watch.close()
        dist.destroy_process_group()


def test_a_simulation_leaves_the_watch_of_the_process_alone(pool: Pool) -> None:
    assert pool.run(watched_meanwhile, "", ranks=2) == [(True, [4] * 4, 2.0)] * 2


def test_a_simulation_keeps_nothing() -> None:
    class Given:
        pass

    given = Given()
    kept = weakref.ref(given)
    meshcomm.simulate(
        lambda mesh, given: dist.all_reduce(torch.ones(2), group=mesh.group("tp")),
        dims={"tp": 2},
        args=(given,),
    )
    del given
    gc.collect()
    assert kept() is None


def test_another_reduction_of_torch_on_a_group_of_the_mesh_is_named() -> None:
    def program(mesh: Mesh) -> None:
        op = dist.ReduceOp.MAX if mesh.rank == 2 else dist.ReduceOp.SUM
        dist.all_reduce(torch.ones(2), op, group=mesh.group("tp"))

    error = _error(CallMismatchError, program)
    assert "op max" in str(error) and "op sum" in str(error)


def test_a_call_of_the_mesh_and_one_of_torch_are_one_collective() -> None:
    def program(mesh: Mesh) -> list[float]:
        x = torch.full((2,), float(mesh.rank))
        if mesh.rank % 2:
            dist.all_reduce(x, group=mesh.group("tp"))
        else:
            x = mesh.all_reduce("tp", x)
        return x.tolist()

    assert meshcomm.simulate(program, dims={"dp": 2, "tp": 2}) == [[1.0, 1.0]] * 2 + [[5.0, 5.0]] * 2


def test_split_sizes_of_another_sum_are_refused_on_the_rank_that_passes_them() -> None:
    def program(mesh: Mesh) -> None:
        sends = [1, 2] if mesh.rank == 1 else [2, 2]
        dist.all_to_all_single(torch.empty(4), torch.ones(4), [2, 2], sends, mesh.group("tp"))

    error = _error(RankFailed, program)
    assert [*error.by_rank] == [1] and "split sizes [1, 2] do not divide 4 rows" in str(error)


def test_a_wrong_split_of_one_rank_is_named_if_the_others_agree() -> None:
    def program(mesh: Mesh) -> None:
        comes = [2, 1, 1, 1] if mesh.rank == 1 else [1] * 4
        dist.all_to_all_single(torch.empty(sum(comes)), torch.ones(4), comes, [1] * 4)

    error = _error(CallMismatchError, program)
    assert error.mismatched_ranks == (1,) and "as ranks 0 2 3: all_to_all" in str(error)


@pytest.mark.parametrize("call", [lambda x: dist.send(x, 9), lambda x: dist.group.WORLD.broadcast(x, 9)])
def test_a_rank_that_a_group_lacks_is_named(call: Any) -> None:
    error = _error(RankFailed, lambda mesh: call(torch.ones(1)))
    assert "rank 9 is not in default group, which has ranks 0 to 3" in str(error)


def test_another_thread_of_a_rank_sees_its_groups_and_may_not_communicate() -> None:
    def program(mesh: Mesh) -> tuple[int, str]:
        with ThreadPoolExecutor(1) as other:
            rank = other.submit(dist.get_rank).result()
            with pytest.raises(UnsupportedOp) as caught:
                other.submit(dist.all_reduce, torch.ones(1)).result()
        return rank, caught.value.what

    what = "rank {} communicates from a thread that is not its own"
    assert meshcomm.simulate(program, dims={"tp": 2}) == [(rank, what.format(rank)) for rank in range(2)]


def test_a_tensor_whose_elements_share_memory_is_refused_where_it_would_be_written() -> None:
    def program(mesh: Mesh) -> list[float]:
        dist.all_gather_into_tensor(x := torch.empty(8), torch.ones(1).expand(2))
        dist.broadcast(torch.ones(1).expand(2), 0)  # Gloo writes beyond its memory
        return x.tolist()

    error = _error(RankFailed, program)
    assert "broadcast on default group of a tensor whose memory has gaps or overlaps" in str(error)
    assert _line("# Gloo writes beyond its memory") in str(error)


def test_a_broadcast_fills_a_tensor_of_another_shape_as_gloo_does() -> None:
    def program(mesh: Mesh) -> list[float]:
        x = torch.arange(8.0) if mesh.rank == 0 else torch.zeros(2, 4)
        dist.broadcast(x, 0)
        return x.flatten().tolist()

    assert meshcomm.simulate(program, dims={"dp": 4}) == [[*map(float, range(8))]] * 4


def test_collectives_of_nccl_in_one_batch_are_waited_for() -> None:
    def program(mesh: Mesh) -> list[float]:
        xs = [torch.full((2,), float(mesh.rank + n)) for n in range(2)]
        with dist._coalescing_manager(async_ops=True) as batch:
            for x in xs:
                dist.all_reduce(x)
        batch.wait()
        return [x[0].item() for x in xs]

    assert meshcomm.simulate(program, dims={"dp": 4}, backend="nccl") == [[6.0, 10.0]] * 4


def test_a_mesh_over_a_device_mesh_compares_without_calls_of_its_own() -> None:
    """Rank 1 receives before its collective, and rank 0 sends after it has started one. This is right on processes."""

    def program(mesh: Mesh) -> list[float]:
        over = meshcomm.init(mesh["tp"])
        x, y = torch.ones(2), torch.zeros(2)
        if mesh.rank == 0:
            handle = over.all_reduce("tp", x, async_op=True)
            over.send("tp", torch.full((2,), 7.0), dst=1)
            x = handle.wait()
        else:
            y = over.recv("tp", out=y, src=0)
            x = over.all_reduce("tp", x)
        over.close()
        return [*x.tolist(), *y.tolist()]

    assert meshcomm.simulate(program, dims={"tp": 2}) == [[2.0, 2.0, 0.0, 0.0], [2.0, 2.0, 7.0, 7.0]]


@pytest.mark.parametrize(
    "call", [dist.all_reduce, lambda x: dist.broadcast(x, 1), lambda x: dist.reduce(x, 1)]
)
@pytest.mark.parametrize("part", [lambda b: b[:, 1], lambda b: b[::2, :2], lambda b: b[0, :1].expand(4)])
def test_a_tensor_with_gaps_is_refused_because_gloo_changes_other_memory(call: Any, part: Any) -> None:
    error = _error(RankFailed, lambda mesh: call(part(torch.ones(4, 4))))
    assert "memory has gaps or overlaps" in str(error) and "try:      x.contiguous()" in str(error)
    assert "strides" in str(error.by_rank[0]) and "rank 0 (dp=0 tp=0)" in str(error.by_rank[0])
