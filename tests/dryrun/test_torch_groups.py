"""Programs that make their groups with torch alone make the same calls as one rank of a pretended world and as processes."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

import meshcomm
from meshcomm.commands import app
from meshcomm.commands.dryrun import dry_run
from meshcomm.commands.plan import mesh_made_by
from meshcomm.dryrun.script import Script
from meshcomm.errors import LaunchError, RankFailed
from meshcomm.testing import Pool
from tests.group_hooks import needs_group_hooks
from tests.mesh.test_watched import PROGRAMS, START

pytestmark = [needs_group_hooks, pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")]
REPLICATED = """
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh("cpu", (world // 4, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
flat = mesh["replicate", "shard"]._flatten("data").get_group()
net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))
for part in (*net, net): fully_shard(part, mesh=mesh["replicate", "shard"])
optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
for step in range(3):
    net(torch.ones(2, 8)).sum().backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    for each in (mesh["shard"].get_group(), mesh["tp"].get_group(), flat):
        dist.all_reduce(torch.ones(3), group=each)
dist.destroy_process_group()
"""
TOLD = """
objects = [{"hidden": 8 * 2 ** k} for k in range(2)] if rank == 0 else [None, None]
dist.broadcast_object_list(objects, src=0)
dist.broadcast_object_list(again := [("w", 3)] if rank == 0 else [None])
dist.all_reduce(torch.ones(objects[1]["hidden"] + again[0][1]))
dist.destroy_process_group()
"""
# Some programs make each dim's groups by hand, like this one.
GRID = """
grid = torch.arange(world).view(world // 2, 2)
dp, tp = (grid == dist.get_rank()).nonzero().flatten().tolist()
group = dist.new_subgroups_by_enumeration(grid.tolist())[0]
dist.all_reduce(torch.ones(1 + dp), group=group)
dist.broadcast(torch.ones(3), src=int(grid[dp, 0].item()), group=group)
grid.add_(1).mul_(torch.ones(2, dtype=torch.int64))
mask = torch.arange(world)[:, None] >= torch.arange(world)[None]
assert mask.float().matmul(torch.ones(world, 1)).shape == (world, 1)
dist.destroy_process_group()
"""
ALL = {
    **{name: text for name, text in PROGRAMS.items() if name != "pipeline"},
    "hsdp": REPLICATED,
    "objects": TOLD,
    "grid": GRID,
}

Rows = dict[tuple[str, str], tuple[int, int]]


def as_process(script: str, *arguments: str) -> Rows:
    """The script's calls and bytes as `meshcomm.watch` counts them."""
    watch = meshcomm.watch(validate_calls=0)
    found: Rows = {}
    ends = watch._end

    def end() -> None:
        for row in watch.stats().rows:
            lane = row.dim.partition(" of a DeviceMesh")[0]
            lane = f"groups of {row.ranks}" if lane.startswith("group ") else lane
            calls, nbytes = found.get((lane, row.call), (0, 0))
            found[lane, row.call] = (calls + row.calls, nbytes + row.nbytes)
        ends()

    watch._end = end  # type: ignore[method-assign]
    watch._forget()
    watch._forget = watched_again(watch, end)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
    if dist.is_initialized():
        dist.destroy_process_group()
    return found


def most_of(ranks: list[Rows]) -> Rows:
    """The bytes and calls of the rank that moves the most along each dim, as a dry run reports them."""
    most: Rows = {}
    for rows in ranks:
        for key, (calls, nbytes) in rows.items():
            most[key] = max(most.get(key, (0, 0)), (nbytes, calls))
    return most


def told(facts: dict[str, Any]) -> Rows:
    """The same from a dry run."""
    return {
        (row["dim"], each["call"]): (each["bytes"], each["calls"])
        for row in facts["calls"]
        for each in row["calls"]
    }


def watched_again(watch: Any, end: Any) -> Any:
    from meshcomm.transport.torch_changes import on_default_group

    return on_default_group(watch._begin, end)


def written(folder: Path, name: str) -> Path:
    path = folder / "train.py"
    path.write_text(START + ALL[name])
    return path


@pytest.mark.parametrize("name", ALL)
@pytest.mark.deep_cases(r"\[fsdp, tensor")
def test_a_dry_run_calls_what_processes_call(pool: Pool, tmp_path: Path, name: str) -> None:
    path = written(tmp_path, name)
    made = pool.run(as_process, str(path), "none", "0", ranks=4)
    facts = dry_run(None, 4, Script(path, ("none", "0"), steps=0))
    assert not facts["findings"] and facts["part"] == "the whole program"
    most = most_of(made)
    if name == "ddp":
        # DDP compares shapes between ranks, which depends on received values, so a dry run leaves it out.
        assert most.pop(("default group", "all_gather")) == (32, 1)
        nbytes, calls = most["default group", "broadcast"]
        most["default group", "broadcast"] = (nbytes - 48, calls - 1)
    assert told(facts) == most != {}


@pytest.mark.deep
def test_a_large_world_of_a_device_mesh(tmp_path: Path) -> None:
    path = written(tmp_path, "hsdp")
    facts = dry_run(None, 1024, Script(path, ("none", "0")))
    assert facts["dims"] == {"replicate": 256, "shard": 2, "tp": 2}
    assert facts["part"] == "one step" and not facts["findings"] and not facts["unlike"]
    assert {row["dim"] for row in facts["calls"]} == {"replicate", "shard", "tp", "data"}


def test_the_plan_of_a_program(tmp_path: Path) -> None:
    path = written(tmp_path, "hsdp")
    assert mesh_made_by(path, 8) == {"mesh": {"dims": {"replicate": 2, "shard": 2, "tp": 2}}}
    result = CliRunner().invoke(
        app, ["plan", str(path), "--world-size", "8", "--rank", "replicate=1,shard=0,tp=1"]
    )
    assert result.exit_code == 0 and "rank 5" in result.output and "shard" in result.output
    result = CliRunner().invoke(app, ["plan", str(path)])
    assert result.exit_code == 2 and "--world-size" in result.output
    path.write_text("import meshcomm\nmeshcomm.init(dims={'pp': 2, 'tp': -1}, rank_order=[3, 2, 1, 0])\n")
    assert mesh_made_by(path, 4) == {"mesh": {"dims": {"pp": 2, "tp": 2}, "rank_order": [3, 2, 1, 0]}}


def test_ranks_that_call_otherwise_are_named(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        START
        + "mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))\n"
        + "for _ in range(2 + (rank == 3)):\n"
        + "    dist.all_reduce(torch.ones(4), group=mesh['tp'].get_group())\n"
    )
    facts = dry_run(None, 4, Script(path, ("none", "0")))
    (finding,) = facts["findings"]
    assert finding["what"].startswith("ranks 2 3 along tp do not agree")


def test_what_cannot_be_pretended_is_named(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(START + "dist.broadcast_object_list(found := [1], src=1)\nprint(found)\n")
    with pytest.raises(Exception, match="a collective of objects"):
        dry_run(None, 4, Script(path, ("none", "0")))
    path.write_text(START + PROGRAMS["pipeline"])
    with pytest.raises(RankFailed, match="dynamic shape inference"):
        dry_run(None, 4, Script(path, ("none", "0")))
    path.write_text("print('hello')\n")
    with pytest.raises(LaunchError, match="no call on a torch process group"):
        dry_run(None, 4, Script(path))
