"""Programs that create their groups with torch alone are watched by `meshcomm run`, or by one line under any launcher."""

from __future__ import annotations

import os
import re
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import meshcomm
from meshcomm.errors import CallMismatchError, ConfigError, MeshMismatchError, UnsupportedOp
from meshcomm.mesh import Watch, watched
from meshcomm.testing import Pool
from meshcomm.transport import torch_private
from meshcomm.watching.timer import is_held
from tests.commands.shown import combined
from tests.forked_jobs import Job
from tests.group_hooks import needs_group_hooks
from tests.ranks import on_ranks

pytestmark = needs_group_hooks


def differs(group: Any, odd: bool, along: str, who: str) -> None:
    with pytest.raises(CallMismatchError) as caught:
        dist.all_reduce(torch.ones(6 if odd else 4), group=group)
    assert caught.value.what.startswith(f'ranks differ in call 1 along "{along}": {who}; nothing')
    assert "elements 6" in str(caught.value.given) and __file__ in str(caught.value.given)


@on_ranks(4)
def test_groups_are_watched_from_their_making_to_the_end_of_the_default_group() -> None:
    plain = (torch_private.c10d._is_barrier_after_init, torch_private.c10d._register_pg_in_world)
    watch = meshcomm.watch()
    assert watch.stats().rows == ()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    differs(None, rank == 3, "default group", "rank 3 is mismatched")
    group = mesh["tp"].get_group()
    label = f"tp of a DeviceMesh, group {group.group_name}"
    differs(group, rank % 2 == 1, label, f"ranks {rank & 2} {rank | 1} do not agree")
    pair = dist.new_group([0, 2], group_desc="pair")
    dist.all_reduce(x := torch.ones(3), group=group)
    assert x.tolist() == [2.0] * 3
    rows = {row.dim: (row.call, row.ranks, row.calls, row.nbytes) for row in watch.stats().rows}
    assert rows[label] == ("all_reduce", 2, 1, 12)
    if rank in (0, 2):
        differs(pair, rank == 2, f"group {pair.group_name}, pair", "ranks 0 2 do not agree")
    groups = list(torch_private.groups_by_name().values())
    assert any(map(torch_private.has_hooks, groups))
    store = dist.PrefixStore("again", torch_private.default_store())
    dist.destroy_process_group()
    assert not any(map(torch_private.has_hooks, groups)) and watch.stats().rows == ()
    # The next default group is watched too.
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    differs(None, rank == 1, "default group", "rank 1 is mismatched")
    dist.destroy_process_group()
    watch.close()
    assert plain == (torch_private.c10d._is_barrier_after_init, torch_private.c10d._register_pg_in_world)


@on_ranks(2)
def test_groups_of_a_program_that_names_no_backend_are_watched() -> None:
    watch = meshcomm.watch()
    rank = int(os.environ["RANK"])
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    differs(mesh.get_group(), rank == 1, "default group", "ranks 0 1 do not agree")
    dist.all_reduce(torch.ones(2))
    assert [row.calls for row in watch.stats().rows] == [1]
    watch.close()
    # A mesh over such a default group.
    with meshcomm.init(dims={"dp": 2}, device="cpu", timeout_s=30) as over:
        assert over.all_reduce("dp", torch.ones(1)).item() == 2
    dist.destroy_process_group()


@on_ranks(2)
def test_a_group_that_is_there_is_watched_and_a_second_watch_takes_over() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    first = meshcomm.watch(validate_calls=0)
    dist.all_reduce(torch.ones(1))
    assert len(first.stats().rows) == 1
    with meshcomm.watch() as second:
        assert first.stats().rows == ()
        differs(None, rank == 1, "default group", "ranks 0 1 do not agree")
        assert len(second.stats().rows) == 1
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


@on_ranks(2)
def test_a_mesh_takes_the_watch_over() -> None:
    meshcomm.watch()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.all_reduce(torch.ones(3))
    with meshcomm.init(dims={"dp": 2}, device="cpu") as mesh:
        assert not watched._LAST
        differs(None, rank == 1, "default group", "ranks 0 1 do not agree")
        assert mesh.all_reduce("dp", torch.ones(1)).item() == 2
    dist.destroy_process_group()


@on_ranks(2)
def test_the_default_group_of_a_mesh_is_the_meshs() -> None:
    meshcomm.watch()
    with meshcomm.init(dims={"dp": 2}, device="cpu") as mesh:
        assert not watched._LAST
        differs(None, mesh.rank == 1, "default group", "ranks 0 1 do not agree")


@on_ranks(2)
def test_ranks_that_do_not_watch_are_named() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=2))
    if dist.get_rank() == 0:
        with pytest.raises(MeshMismatchError, match="rank 1 of 2 never arrived to agree on the watch"):
            meshcomm.watch()
    else:
        time.sleep(2.5)
        with pytest.raises(MeshMismatchError):
            meshcomm.watch()
    dist.destroy_process_group()


@on_ranks(2)
def test_ranks_that_watch_otherwise_are_told() -> None:
    dist.init_process_group("gloo")
    with pytest.raises(MeshMismatchError, match="validate_calls"):
        meshcomm.watch(validate_calls=2 + dist.get_rank())
    dist.destroy_process_group()


@on_ranks(2)
def test_a_timeout_that_the_program_changes_is_followed() -> None:
    watch = meshcomm.watch()
    dist.init_process_group("gloo", timeout=timedelta(seconds=50))
    dist.all_reduce(torch.ones(1))
    (recorder,) = outside(watch)
    assert recorder.timeout_s() == 50
    torch_private.c10d._set_pg_timeout(timedelta(seconds=20), dist.group.WORLD)
    assert recorder.timeout_s() == 20
    dist.destroy_process_group()


@on_ranks(2)
def test_a_reduce_scatter_whose_work_never_ends_is_no_hang() -> None:
    """Gloo's Work of a reduce_scatter reports that it is not completed, even after a wait for it."""
    watch = meshcomm.watch(validate_calls=0)
    dist.init_process_group("gloo")
    group, out = dist.new_group(), torch.zeros(2)
    dist.reduce_scatter_tensor(out, torch.ones(4), group=group)
    (recorder,) = outside(watch)
    assert out.tolist() == [2.0, 2.0] and recorder.last()["over"] is not None  # type: ignore[index]
    assert not recorder.inside and not is_held(recorder, recorder.work)
    work = dist.reduce_scatter_tensor(out, torch.ones(4), group=group, async_op=True)
    assert recorder.pending
    work.wait()
    dist.all_reduce(out)
    assert not recorder.pending
    dist.destroy_process_group()


def outside(watch: Watch) -> list[Any]:
    assert watch._outside is not None
    return watch._outside.recorders


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"validate_calls": -1}, ConfigError, "validate_calls"),
        ({"validate_calls": "often"}, ConfigError, "validate_calls"),
        ({"warn_after_s": 0}, UnsupportedOp, "warn_after_s: timeout_s=0 is not a valid timeout"),
    ],
)
def test_what_a_watch_does_not_take_is_refused(given: dict[str, Any], error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        meshcomm.watch(**given)
    assert not watched._LAST


@on_ranks(2)
def test_a_backend_that_cannot_be_watched_is_refused_where_it_was_asked_for() -> None:
    dist.init_process_group("gloo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watched, "backend_of", lambda _: "ucc")
        with pytest.raises(UnsupportedOp, match="groups of the backend ucc cannot be watched"):
            meshcomm.watch()
        watched.watch_if_possible(False)
        patch.setattr(watched, "backend_of", lambda _: "fake")
        assert meshcomm.watch().stats().rows == ()
    dist.destroy_process_group()


def test_an_older_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "CAN_WATCH", False)
    with pytest.raises(UnsupportedOp, match="cannot be watched"):
        meshcomm.watch()
    # `meshcomm run` leaves such a program alone.
    watched.watch_if_possible(False)
    assert not watched._LAST


# -- whole programs without meshcomm --------------------------------------------------------------------

START = """
import os, sys, time, torch
import torch.distributed as dist
import torch.nn as nn
from datetime import timedelta
from torch.distributed.device_mesh import init_device_mesh
fault, late = (*sys.argv[1:], "none", "0")[:2]
dist.init_process_group("gloo", timeout=timedelta(seconds=30))
set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
set_timeout(timedelta(seconds=4), dist.group.WORLD)
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
def limited(mesh):
    for name in mesh.mesh_dim_names:
        set_timeout(timedelta(seconds=4), mesh[name].get_group())
    return mesh
def planted(step):
    if rank != 1 or step != int(late):
        return False
    if fault == "sleep": time.sleep(60)
    if fault == "raise": raise ValueError("planted")
    if fault == "exit": os._exit(0)
    if fault == "kill": os.kill(os.getpid(), 9)
    return fault == "skip"
"""
PROGRAMS = {
    "ddp": """
from torch.nn.parallel import DistributedDataParallel as DDP
net = DDP(nn.Linear(4, 4))
for step in range(80):
    if not planted(step):
        net(torch.ones(2, 4)).sum().backward()
        if step % 10 == 9: dist.barrier()
print("trained")
""",
    "fsdp, tensor": """
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
mesh = limited(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
fully_shard(net, mesh=mesh["dp"])
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(80):
    if not planted(step):
        net(torch.ones(2, 8)).sum().backward()
    optimizer.step()
print("trained")
""",
    "pipeline": """
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
part = nn.Linear(4, 4)
stage = PipelineStage(part, rank, world, torch.device("cpu"), group=dist.group.WORLD)
schedule = Schedule1F1B(stage, 4, loss_fn=lambda y, t: (y - t).square().mean())
for step in range(80):
    if planted(step): continue
    x = torch.ones(8, 4)
    if rank == 0: schedule.step(x)
    elif rank == world - 1: schedule.step(target=x)
    else: schedule.step()
print("trained")
""",
    "groups by hand": """
pairs = [dist.new_group([0, 1], timeout=timedelta(seconds=4)), dist.new_group([2, 3], timeout=timedelta(seconds=4))]
for step in range(80):
    x = torch.ones(3 if fault != "shape" or step != int(late) or rank != 1 else 5)
    if not planted(step): dist.all_reduce(x, group=pairs[rank // 2])
    if step % 10 == 9: dist.all_reduce(x)
print("trained")
""",
}


def ran(pool: Pool, folder: Path, program: str, fault: str, late: int = 5) -> tuple[int, str, str]:
    (folder / "train.py").write_text(START + PROGRAMS[program])
    command = ("-m", "meshcomm", "run", "--world-size", "4", "train.py", fault, str(late))
    return Job(pool, folder, *command).finish()


# The program, the fault, the number of steps before it, and words about rank 1 in the launcher's last lines.
FAULTS = [
    ("ddp", "sleep", 5, "waited for rank 1"),
    ("ddp", "skip", 75, "rank 1 is mismatched"),
    ("ddp", "raise", 5, "rank 1 failed: ValueError: planted"),
    ("ddp", "exit", 5, "rank 1 ended with exit code 0 while rank"),
    ("fsdp, tensor", "sleep", 75, "waited for rank 1"),
    ("fsdp, tensor", "skip", 75, "rank 1 ended with exit code 0 while rank"),
    ("fsdp, tensor", "kill", 5, "rank 1 was ended by SIGKILL"),
    ("pipeline", "sleep", 5, "waited for rank 1"),
    ("pipeline", "raise", 5, "rank 1 failed: ValueError: planted"),
    ("groups by hand", "shape", 5, "ranks 0 1 do not agree"),
    ("groups by hand", "sleep", 75, "waited for rank 1"),
    ("groups by hand", "exit", 75, "rank 1 ended with exit code 0 while rank"),
]
_IN_THE_GATE = (("ddp", "exit"), ("groups by hand", "shape"), ("fsdp, tensor", "kill"))


@pytest.mark.parametrize(
    ("program", "fault", "late", "said"),
    [pytest.param(*case, marks=[pytest.mark.faults] * (case[:2] not in _IN_THE_GATE)) for case in FAULTS],
    ids=lambda value: str(value),
)
@pytest.mark.deep_cases(r"\[fsdp, tensor-kill")
def test_a_fault_in_a_program_that_does_not_know_meshcomm(
    pool: Pool, tmp_path: Path, program: str, fault: str, late: int, said: str
) -> None:
    code, _, err = ran(pool, tmp_path, program, fault, late)
    last = "\n".join(line for line in err.splitlines() if line.startswith("meshcomm: "))
    assert code != 0 and re.search(said, last), err


@pytest.mark.parametrize(
    "program", [pytest.param(each, marks=[pytest.mark.faults] * (each == "ddp")) for each in PROGRAMS]
)
@pytest.mark.deep_cases(r"\[(pipeline|groups|fsdp, tensor)")
def test_a_program_without_a_fault_is_left_alone(pool: Pool, tmp_path: Path, program: str) -> None:
    code, out, err = ran(pool, tmp_path, program, "none")
    assert (code, out.split()) == (0, ["trained"] * 4), err
    assert "meshcomm" not in err


@pytest.mark.faults
def test_a_call_that_blocks_is_told_of_once_and_may_still_end(pool: Pool, tmp_path: Path) -> None:
    program = START.replace("dist.init", "import meshcomm; meshcomm.watch(warn_after_s=1)\ndist.init", 1)
    program = program.replace("time.sleep(60)", "time.sleep(4)").replace("seconds=4", "seconds=30")
    (tmp_path / "train.py").write_text(program + PROGRAMS["ddp"])
    command = ("-m", "meshcomm", "run", "--world-size", "4", "train.py", "sleep", "5")
    code, out, err = Job(pool, tmp_path, *command).finish()
    said = [line for line in err.splitlines() if line.startswith("meshcomm: ")]
    assert code == 0 and out.split() == ["trained"] * 4 and len(said) == 1, err
    assert (
        " has waited 1 s in all_reduce along " in said[0] and "rank 1 has not arrived: it is at " in said[0]
    )
    # The rank that asked has also written a report.
    reports = combined(tmp_path / "meshcomm-reports").splitlines()
    assert reports[0].startswith("4 report(s) in ") and reports[1].startswith("rank 1 is at "), reports
    assert reports[1].partition("; ")[2].startswith("ranks 0 2 3 wait for it in all_reduce"), reports


@pytest.mark.faults
def test_one_line_under_another_launcher(pool: Pool, tmp_path: Path) -> None:
    program = START.replace("dist.init", "import meshcomm; meshcomm.watch()\ndist.init", 1) + PROGRAMS["ddp"]
    (tmp_path / "train.py").write_text(program)
    command = ("-m", "torch.distributed.run", "--nproc-per-node", "4", "train.py", "sleep", "5")
    code, _, err = Job(pool, tmp_path, *command).finish()
    assert code == 1 and "rank 1 has not arrived: it is at " in err and "CollectiveTimeout" in err
