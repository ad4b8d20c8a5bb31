"""Scripts run as ranks of a pretended world: values that only other ranks know are refused by name, all others are right."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshcomm
from meshcomm.commands.dryrun import view as dry_view
from meshcomm.config import TopologyConfig
from meshcomm.dryrun.script import ProgramRecorder, Script, recorded_step, script_step
from meshcomm.dryrun.training import dry_facts, priced
from meshcomm.dryrun.world import World, dry_world
from meshcomm.errors import UnsupportedOp
from meshcomm.layout import Layout
from meshcomm.mesh import Mesh
from meshcomm.show.page import as_text
from tests.group_hooks import needs_group_hooks


def ran(program: Callable[[Mesh], object], ranks: int = 4) -> list[Any]:
    """The program's result on each rank. All ranks run in this process."""
    found: list[Any] = []

    def run() -> None:
        with meshcomm.init(dims={"dp": ranks}) as mesh:
            found.append(program(mesh))

    for rank in range(ranks):
        recorded_step(rank, ranks, run, ProgramRecorder(0))
    return found


X = torch.ones(4, 3)
UNKNOWN: dict[str, tuple[Callable[[Mesh, int], object], str]] = {
    "scatter": (
        lambda m, c: m.scatter("dp", X if c == 1 else None, 1),
        "the slice's shape.*\n.*\n.*\n.*out=",
    ),
    "recv": (lambda m, c: m.recv("dp", src=c ^ 1), "the message's shape.*\n.*\n.*\n.*out="),
    "all_gather": (lambda m, c: m.all_gather("dp", X[:c], uneven=True), "the sizes of their parts"),
    "gather": (lambda m, c: m.gather("dp", X[:c], 0, uneven=True), "the sizes of their parts"),
    "all_to_all": (
        lambda m, c: m.all_to_all("dp", X, input_split_sizes=[1, 1, 1, 1]),
        "the sizes of their parts.*\n.*\n.*\n.*output_split_sizes=",
    ),
    "objects.broadcast": (lambda m, c: m.objects.broadcast("dp", {} if c == 1 else None, 1), "the object,"),
    "objects.scatter": (lambda m, c: m.objects.scatter("dp", [X] * 4 if c == 1 else None, 1), "the object,"),
    "objects.recv": (lambda m, c: m.objects.recv("dp", c ^ 1), "the object,"),
    "recv_any": (lambda m, c: m.recv_any("dp", X), "which rank sends first"),
    "store.get": (lambda m, c: m.store.get("k"), 'only another rank could set "k"'),
    "store.wait": (lambda m, c: m.store.wait(["k"]), 'only another rank could set "k"'),
    "broadcast_object_list": (lambda m, c: dist.broadcast_object_list([None], src=1), "the objects, "),
    "all_gather_object": (lambda m, c: dist.all_gather_object([None] * 4, c), "the objects, "),
    "scatter_object_list": (lambda m, c: dist.scatter_object_list([None], None, src=1), "the objects, "),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", UNKNOWN)
def test_what_only_other_ranks_know_is_refused_by_name(name: str) -> None:
    call, said = UNKNOWN[name]
    with pytest.raises(UnsupportedOp, match=said) as caught:
        ran(lambda mesh: call(mesh, mesh.rank))
    assert "dry run" in caught.value.what
    assert name.split(".")[-1] in caught.value.what or "objects of torch.distributed" in caught.value.what


def test_what_a_rank_knows_has_the_right_shape() -> None:
    def program(mesh: Mesh) -> list[Any]:
        c = mesh.coord("dp")
        source = mesh.scatter("dp", X, src=c, axis=0)
        given = mesh.scatter("dp", X if c == 1 else None, 1, out=torch.empty(1, 3))
        moved = mesh.all_to_all("dp", X, input_split_sizes=[1, 1, 1, 1], output_split_sizes=[1, 2, 0, 3])
        mesh.store.set("mine", str(c))
        objects = [mesh.objects.broadcast("dp", {"c": c}, c), mesh.store.get("mine"), mesh.store.add("n", 1)]
        return [tuple(each.shape) for each in (source, given, moved)] + objects

    shapes = [(1, 3), (1, 3), (6, 3)]
    assert ran(program) == [[*shapes, {"c": c}, str(c).encode(), 1] for c in range(4)]


def looked_at(body: str, tmp_path: Path, world: int = 4, steps: int = 2) -> World:
    """Run a script as every rank, in this process."""
    path = tmp_path / "train.py"
    path.write_text(body)
    program = partial(script_step, Script(path, steps=steps))
    return dry_world(program, Layout({"dp": world}), processes=0)


def test_a_branch_that_no_rank_takes_leaves_no_calls(tmp_path: Path) -> None:
    found = looked_at(
        "import meshcomm, torch\n"
        "with meshcomm.init(dims={'dp': 4}) as mesh:\n"
        "    x = torch.ones(4)\n"
        "    if x.sum().item() > 0:\n"
        "        mesh.all_reduce('dp', x)\n",
        tmp_path,
    )
    assert found.findings == [] and all(not step.calls for step in found.steps.values())
    assert found.replay is not None and not found.replay.stuck


def test_the_line_of_the_peak_is_the_programs_also_where_meshcomm_makes_the_memory(tmp_path: Path) -> None:
    body = """
import meshcomm, torch
with meshcomm.init(dims={'dp': 4}) as mesh:
    gathered = mesh.all_gather('dp', torch.ones(64, 64))
"""
    for step in looked_at(body, tmp_path).steps.values():
        assert step.peak.at == f"{tmp_path / 'train.py'}:4"


STEPS = """
import meshcomm, torch
with meshcomm.init(dims={'dp': 4}) as mesh:
    x, w = torch.ones(64, 64), torch.ones(64, 64)
    mesh.broadcast('dp', w, src=0)
    for step in range(%d):
        mesh.all_reduce('dp', x @ w)
        mesh.step()
"""


@pytest.mark.parametrize(
    ("made", "steps", "part", "rows", "flops"),
    [
        (9, 2, "one step", {"all_reduce": 1}, 1),
        (9, 5, "one step", {"all_reduce": 1}, 1),
        (9, 1, "the start and one step", {"broadcast": 1, "all_reduce": 1}, 1),
        (3, 5, "the whole program", {"broadcast": 1, "all_reduce": 3}, 3),
        (2, 0, "the whole program", {"broadcast": 1, "all_reduce": 2}, 2),
    ],
)
def test_what_is_called_a_step_is_one(
    made: int, steps: int, part: str, rows: dict[str, int], flops: int, tmp_path: Path
) -> None:
    found = looked_at(STEPS % made, tmp_path, steps=steps)
    for step in found.steps.values():
        assert step.part == part and {row.call: row.calls for row in step.rows} == rows
        assert step.part_flops == flops * 2 * 64**3
        assert sum(row.nbytes for row in step.rows) == sum(rows.values()) * 4 * 64**2
        # The calls of all steps are kept, because they have to match between ranks.
        assert len(step.calls) == 1 + min(made, steps or made)
    topology = TopologyConfig(ranks_per_node=4, tflops=1e-6)
    timed = found._replace(replay=priced(topology)(list(found.steps.values()), str))
    facts = dry_facts(timed, None, topology, 0.0)
    assert facts["step"]["compute_s"] == pytest.approx(flops * 2 * 64**3 / 1e6)
    (row,) = facts["calls"]
    assert {each["call"]: each["calls"] for each in row["calls"]} == rows
    parts = facts["step"]["compute_s"] + sum(facts["step"]["exposed_s"].values())
    assert facts["step"]["seconds"] == pytest.approx(parts + sum(facts["step"]["late_s"].values()))
    shown = as_text(dry_view(facts), 120)
    assert f"{part} of each" in shown and f"time of {part}" in shown and f"calls of {part}" in shown


@needs_group_hooks
def test_a_monitored_barrier_is_a_call(tmp_path: Path) -> None:
    found = looked_at(
        "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.monitored_barrier()\n",
        tmp_path,
    )
    assert [len(step.calls) for step in found.steps.values()] == [1] * 4


@needs_group_hooks
def test_calls_on_other_groups_are_compared_too(tmp_path: Path) -> None:
    found = looked_at(
        "import meshcomm, torch, torch.distributed as dist\n"
        "with meshcomm.init(dims={'dp': 4}) as mesh:\n"
        "    pair, x = dist.new_group([0, 1]), torch.ones(4)\n"
        "    assert dist.get_world_size(pair) == (2 if mesh.rank < 2 else -1)\n"
        "    if mesh.rank < 2:\n"
        "        dist.all_reduce(x[mesh.rank :].clone(), group=pair)\n"
        "    mesh.all_reduce('dp', x)\n"
        "    dist.all_reduce(x, group=mesh.group('dp'))\n",
        tmp_path,
    )
    assert [(step.unseen, len(step.calls)) for step in found.steps.values()] == [
        (0, 3),
        (0, 3),
        (0, 2),
        (0, 2),
    ]
    (finding,) = found.findings
    assert finding.what.startswith("ranks 0 1 along groups of 2 do not agree")


def test_random_branches_differ_between_ranks_and_not_between_runs(tmp_path: Path) -> None:
    body = (
        "import meshcomm, random, torch\n"
        "import numpy as np\n"
        "with meshcomm.init(dims={'dp': 4}) as mesh:\n"
        "    for _ in range(8):\n"
        "        if random.random() < 0.5 or np.random.rand() < 0.2:\n"
        "            mesh.all_reduce('dp', torch.ones(4))\n"
    )
    one, two = (looked_at(body, tmp_path) for _ in range(2))
    counts = [len(step.calls) for step in one.steps.values()]
    assert len(set(counts)) > 1 and one.findings == two.findings != []
    assert counts == [len(step.calls) for step in two.steps.values()]


def test_a_loader_with_a_sampler_and_a_rank_that_returns_early(tmp_path: Path) -> None:
    found = looked_at(
        "import sys, meshcomm, torch\n"
        "from torch.utils.data import DataLoader, DistributedSampler, TensorDataset\n"
        "with meshcomm.init(dims={'dp': 4}) as mesh:\n"
        "    data = TensorDataset(torch.randn(64, 8))\n"
        "    sampler = DistributedSampler(data, 4, mesh.rank)\n"
        "    for number, (batch,) in enumerate(DataLoader(data, batch_size=4, sampler=sampler)):\n"
        "        assert batch.shape == (4, 8)\n"
        "        if mesh.rank == 3 and number == 2:\n"
        "            sys.exit(0)\n"
        "        mesh.all_reduce('dp', batch)\n",
        tmp_path,
    )
    (finding,) = found.findings
    assert finding.ranks == (3,) and "2 calls fewer than others make" in finding.what
