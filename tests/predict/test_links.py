"""The links that groups cross on nodes and racks, against plain loops."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from meshcomm.commands import app
from meshcomm.config import TopologyConfig, load_config
from meshcomm.errors import ConfigError
from meshcomm.layout import Layout
from meshcomm.predict.links import Machine, Span, discovered, known_machine, span, strided
from meshcomm.show.grid import grid_facts
from meshcomm.show.plan import plan_facts

ROOT = Path(__file__).parents[2]
LINKS = {
    name: {"latency_us": i + 1.0, "bandwidth_gbytes_s": 100.0}
    for i, name in enumerate(("node", "rack", "network"))
}


def machine(per_node: int, per_rack: int | None) -> Machine:
    """A machine whose levels have distinct latencies."""
    topology = {"ranks_per_node": per_node, "nodes_per_rack": per_rack, "links": LINKS}
    return known_machine(load_config({"mesh": {"dims": {"a": 1}}, "topology": topology}).topology, "here")


def counted(groups: Sequence[Sequence[int]], per_node: int, per_rack: int) -> tuple[Any, ...]:
    """The fewest and most nodes of a group, groups by slowest link, and the common shape of all groups, by plain loops."""
    crosses = {"node": 0, "rack": 0, "network": 0}
    shapes = set()
    nodes = []
    for group in groups:
        on_node: dict[int, int] = {}
        in_rack: dict[int, set[int]] = {}
        for rank in group:
            node = rank // per_node
            on_node[node] = on_node.get(node, 0) + 1
            in_rack.setdefault(node // per_rack, set()).add(node)
        nodes.append(len(on_node))
        if len(group) > 1:
            crosses["node" if len(on_node) == 1 else "rack" if len(in_rack) == 1 else "network"] += 1
        ranks, racks = set(on_node.values()), {len(each) for each in in_rack.values()}
        even = len(ranks) == len(racks) == 1
        shapes.add((min(ranks), min(racks), len(in_rack)) if even else None)
    return min(nodes), max(nodes), crosses, shapes.pop() if len(shapes) == 1 else None


def levels(found: Span) -> tuple[int, ...] | None:
    """How many units meet at the node, rack and network level, or 1 where none do."""
    by_level = {int(hop.alpha_s * 10**6): hop.ranks for hop in found.route.hops}
    return tuple(by_level.get(level, 1) for level in (1, 2, 3)) if found.route.even else None


def test_spans_against_plain_loops_and_one_group_of_each_kind_says_the_same() -> None:
    for seed in range(60):
        chance = random.Random(seed)
        sizes = {f"d{i}": chance.choice([1, 2, 2, 3, 4, 6]) for i in range(chance.randrange(1, 5))}
        world = int(np.prod(list(sizes.values())))
        order = list(range(world))
        if chance.random() < 0.3:
            chance.shuffle(order)
        per_node, per_rack = chance.choice([1, 2, 3, 4, 6, 8]), chance.choice([1, 2, 3])
        layout, where = Layout(sizes, rank_order=order), machine(per_node, per_rack)
        names = list(sizes)
        steps = [int(np.prod(list(sizes.values())[i + 1 :])) for i in range(len(names))]
        strides = dict(zip(names, zip(sizes.values(), steps, strict=True), strict=True))
        for dims in [*names, tuple(names), tuple(reversed(names[:2])), tuple(names[::2])]:
            groups = layout.groups(dims)
            found = span(groups, where)
            fewest, most, crosses, shape = counted(groups.tolist(), per_node, per_rack)
            assert (found.fewest, found.most, found.crosses, levels(found)) == (fewest, most, crosses, shape)
            slowest = [name for name, number in crosses.items() if number]
            assert found.slowest == (slowest[-1] if slowest else None)
            if shape is None:
                assert found.route.ranks == found.size and len(found.route.hops) == 1
                assert found.route.slowest.alpha_s * 10**6 == LINKS[slowest[-1]]["latency_us"]
            if order == sorted(order):
                along = [strides[name] for name in ((dims,) if isinstance(dims, str) else dims)]
                few = span(strided(along, world, where), where)
                assert few.route == found.route and few.slowest == found.slowest, (sizes, dims)


def test_plan_says_which_share_of_the_groups_crosses_which_link() -> None:
    about = {"ranks_per_node": 8, "nodes_per_rack": 2}
    config = load_config({"mesh": {"dims": {"pp": 2, "dp": 6, "tp": 2}}, "topology": about})
    facts = {dim["name"]: dim for dim in plan_facts(config.plan(None), topology=config.topology)["dims"]}
    assert facts["dp"]["crosses"] == {"node": 0, "rack": 2, "network": 2}
    assert facts["pp"]["crosses"] == {"node": 0, "rack": 4, "network": 8}
    shown = command("plan", str(ROOT / "configs/quickstart.toml"), "--set", "topology.ranks_per_node=3")
    assert "node 75%, network 25%" in shown.stdout


def test_a_rack_without_a_speed_of_its_own_has_the_network_s() -> None:
    links = {"network": {"latency_us": 7.0, "bandwidth_gbytes_s": 25.0}}
    about = {"ranks_per_node": 2, "nodes_per_rack": 3, "links": links}
    where = known_machine(load_config({"mesh": {"dims": {"a": 2}}, "topology": about}).topology, "x")
    assert [str(level) for level in where.levels] == [
        "node 2 us 300 GB/s (assumed)",
        "rack 7 us 25 GB/s",
        "network 7 us 25 GB/s",
    ]
    assert [level.ranks for level in where.levels] == [2, 6, 0]
    with pytest.raises(ConfigError, match=r"try:      --set topology.ranks_per_node=8"):
        known_machine(TopologyConfig(), "x.toml")


@pytest.mark.parametrize(
    ("env", "ranks", "devices"),
    [
        ({}, None, None),
        ({"LOCAL_WORLD_SIZE": "4", "SLURM_TASKS_PER_NODE": "8(x2)"}, 4, None),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x16)", "SLURM_GPUS_ON_NODE": "8"}, 8, 8),
        ({"SLURM_TASKS_PER_NODE": "8"}, 8, None),
        ({"SLURM_TASKS_PER_NODE": "8(x3),4"}, None, None),
        ({"SLURM_TASKS_PER_NODE": "8(x2)", "SLURM_DISTRIBUTION": "block:cyclic"}, 8, None),
        ({"SLURM_TASKS_PER_NODE": "8(x2)", "SLURM_DISTRIBUTION": "cyclic"}, None, None),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "CUDA_VISIBLE_DEVICES": "0,1, 3"}, 2, 3),
        ({"LOCAL_WORLD_SIZE": "many", "CUDA_VISIBLE_DEVICES": ""}, None, None),
    ],
)
def test_what_the_launcher_s_environment_says(
    env: dict[str, str], ranks: int | None, devices: int | None
) -> None:
    found = discovered(TopologyConfig(), env)
    assert (found.ranks_per_node, found.devices_per_node) == (ranks, devices)
    written = discovered(TopologyConfig(ranks_per_node=16, devices_per_node=1), env)
    assert (written.ranks_per_node, written.devices_per_node) == (16, 1)


@pytest.mark.parametrize(
    ("per_host", "ranks"),
    [(None, 2), (2, 2), (4, 4), (0, None)],
    ids=["not asked", "equal", "other", "cyclic"],
)
def test_the_hosts_of_the_ranks_count_more_than_the_launcher(per_host: int | None, ranks: int | None) -> None:
    # srun -m cyclic: each node has two tasks that are not neighbours.
    cyclic = {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
    assert discovered(TopologyConfig(), cyclic, per_host).ranks_per_node == ranks
    assert discovered(TopologyConfig(ranks_per_node=16), cyclic, per_host).ranks_per_node == 16
    assert discovered(TopologyConfig(), {}, per_host).ranks_per_node is None


def test_ranks_that_hosts_hold_in_any_order_against_plain_loops() -> None:
    for seed in range(60):
        chance = random.Random(seed)
        sizes = {f"d{i}": chance.choice([1, 2, 2, 3, 4]) for i in range(chance.randrange(1, 4))}
        world = int(np.prod(list(sizes.values())))
        nodes = [chance.randrange(chance.choice([1, 2, 4])) for _ in range(world)]
        nodes = [sorted({*nodes}).index(node) for node in nodes]
        topology = discovered(TopologyConfig(), {}, 0, nodes)
        assert topology.ranks_per_node == max(nodes.count(node) for node in nodes)
        config = load_config({"mesh": {"dims": sizes}})
        plan = config.plan(None)
        for dim in plan_facts(plan, topology=topology)["dims"]:
            on = [{nodes[rank] for rank in group} for group in plan.layout.groups(dim["name"]).tolist()]
            assert dim["nodes"] == {"fewest": min(map(len, on)), "most": max(map(len, on))}
            assert dim["crosses"]["node"] == (sum(len(each) == 1 for each in on) if dim["size"] > 1 else 0)
        rank = chance.randrange(world)
        place = plan_facts(plan, rank, topology)["rank"]["machine"]
        mine = [other for other in range(world) if nodes[other] == nodes[rank]]
        assert (place["node"], place["ranks"], place["local_rank"]) == (nodes[rank], mine, mine.index(rank))
        assert grid_facts(plan, topology=topology)["node"] == nodes


def command(*words: str) -> Any:
    """Run `meshcomm` in this process. The tests of `plan` check the output of a real process."""
    return CliRunner().invoke(app, list(words))
