"""The links that groups cross on nodes and racks, against plain loops; and lint's findings about them."""

from __future__ import annotations

import json
import random
import shutil
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
from meshcomm.layout.sizes import ranks_text
from meshcomm.predict.links import Machine, Span, discovered, known_machine, span, strided
from meshcomm.predict.lint import footprint, lint
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


@pytest.mark.parametrize(
    ("nodes", "dims", "order", "crossing"),
    [
        ([0, 1] * 4, {"dp": 2, "tp": 4}, None, "tp crosses nodes"),
        ([0, 1, 1, 0, 1, 0, 0, 1], {"dp": 2, "cp": 2, "tp": 2}, None, "cp, tp cross nodes"),
        ([0, 1] * 4, {"dp": 2, "tp": 4}, [0, 2, 4, 6, 1, 3, 5, 7], None),
        # This dim crosses nodes in every order.
        ([0, 1] * 4, {"tp": 8}, None, None),
        ([0, 1, 1, 1], {"dp": 2, "tp": 2}, None, None),
    ],
)
def test_the_dims_that_cross_nodes_for_the_ranks_order_are_named_with_the_cure(
    nodes: list[int], dims: dict[str, int], order: list[int] | None, crossing: str | None
) -> None:
    config = load_config({"mesh": {"dims": dims, "rank_order": order, "device": "cpu"}})
    topology = discovered(config.topology, {}, 0, nodes)
    found = [each for each in lint(config, None, topology) if each.rule == "scattered-ranks"]
    assert [each.what.split(", because")[0] for each in found] == [crossing] * (crossing is not None)
    for each in found:
        assert each.hint is not None
        cured = load_config({"mesh": {"dims": dims, "device": "cpu"}}, [each.hint.split(", or ")[1]])
        assert "scattered-ranks" not in {each.rule for each in lint(cured, None, topology)}
        zero, one = ([rank for rank, node in enumerate(nodes) if node == which] for which in (0, 1))
        assert each.given == f"node 0: {ranks_text(zero)}; node 1: {ranks_text(one)}"


# -- lint -------------------------------------------------------------------------------------------


def found(dims: dict[str, int], per_node: int | None, limit: int | None = None, **sections: Any) -> list[Any]:
    mesh = {"dims": dims, "device": "cuda", **sections.pop("mesh", {})}
    topology = {"topology": {"ranks_per_node": per_node} | sections} if per_node else {}
    config = load_config({"mesh": mesh} | topology)
    return lint(config, None, config.topology, limit)


def test_a_mesh_as_it_should_be_has_no_finding() -> None:
    assert found({"pp": 8, "dp": 16, "tp": 8}, 8) == []
    assert found({"pp": 2, "dp": 4, "tp": 4}, 8, devices_per_node=8) == []
    # A pipeline may stay inside a node if data does not cross nodes either.
    assert found({"dp": 2, "pp": 2, "tp": 2}, 8) == []
    # A partly used node, and a CPU mesh without devices, do not have too many ranks for their devices.
    assert found({"dp": 4}, 8, devices_per_node=4) == []
    assert found({"dp": 16}, 8, devices_per_node=4, mesh={"device": "cpu"}) == []


@pytest.mark.parametrize(
    ("dims", "rule", "given", "hint"),
    [
        ({"pp": 2, "tp": 8, "dp": 2}, "tensor-across-nodes",
         "tp = 8, 8 ranks on a node: 4 of 4 groups span 2 nodes", "mesh.dims = { pp = 2, dp = 2, tp = 8 }"),
        ({"dp": 2, "tp": 16}, "tensor-across-nodes",
         "tp = 16, 8 ranks on a node: 2 of 2 groups span 2 nodes", "mesh.dims = { dp = 4, tp = 8 }"),
        # Only the groups that cross: ranks 0 to 5, and four more groups, stay on a node.
        ({"dp": 5, "pp": 2, "tp": 6}, "tensor-across-nodes",
         "tp = 6, 8 ranks on a node: 5 of 10 groups span 2 nodes", "mesh.dims = { dp = 15, pp = 2, tp = 2 }"),
        ({"dp": 8, "pp": 2, "tp": 4}, "pipeline-inside-node",
         "pp = 2 on 1 node, dp = 8 on 8 nodes", "mesh.dims = { pp = 2, dp = 8, tp = 4 }"),
        ({"dp": 3, "tp": 4}, "last-node", "12 ranks, 8 on a node: 12 % 8 = 4", "8 or 16 processes"),
        ({"dp": 16}, "devices", "8 ranks on a node, 4 devices", "--nproc-per-node 4, and topology.ranks_per_node = 4"),
    ],
)  # fmt: skip
def test_each_finding_has_its_numbers_and_what_to_try(
    dims: dict[str, int], rule: str, given: str, hint: str
) -> None:
    devices = {"devices_per_node": 4} if rule == "devices" else {}
    (finding,) = [each for each in found(dims, 8, **devices) if (each.rule, each.given) == (rule, given)]
    assert finding.hint == hint
    assert str(finding).startswith(f"{rule}: ") and f"\n  try:      {hint}" in str(finding)


@pytest.mark.parametrize(
    "dims",
    [{"tp": 8, "dp": 4}, {"dp": 2, "tp": 32}, {"cp": 2, "tp": 12, "dp": 2}, {"tp": 4, "pp": 3, "dp": 4}],
)
def test_what_tensor_across_nodes_proposes_has_that_finding_no_more(dims: dict[str, int]) -> None:
    (finding,) = [each for each in found(dims, 8) if each.rule == "tensor-across-nodes"]
    config = {"mesh": {"dims": dims, "device": "cuda"}, "topology": {"ranks_per_node": 8}}
    mended = load_config(config, [finding.hint])
    assert mended.plan(None).layout.world_size == int(np.prod(list(dims.values())))
    assert "tensor-across-nodes" not in {each.rule for each in lint(mended, None, mended.topology)}


def test_communicators_and_their_memory() -> None:
    pairs = [["a", "b"], ["b", "c"], ["a", "c"], ["a", "d"], ["b", "d"], ["c", "d"]]
    merge = {f"m{i}": pair for i, pair in enumerate(pairs)}
    mesh = {"dims": {"a": 2, "b": 2, "c": 2, "d": 4}, "device": "cuda", "merge": merge}
    config = load_config({"mesh": mesh, "topology": {"ranks_per_node": 8, "memory_gbytes": 40.0}})
    cost = footprint(config, config.plan(None), 32)
    # Three groups of two ranks, one of four along d, and six merged ones need memory. The default group is idle.
    assert (cost.nccl, cost.gloo, cost.undecided) == (11, 0, 0)
    assert cost.nccl_mb == 3 * 544 + 7 * 688
    (finding,) = [each for each in lint(config, None, config.topology) if each.rule == "communicators"]
    assert finding.given.startswith("about 6.4 GB (0.5 GB for two ranks")
    large = config.topology.model_copy(update={"memory_gbytes": 80.0})
    assert not [each for each in lint(config, None, large) if each.rule == "communicators"]


def test_file_descriptors_of_gloo() -> None:
    config = load_config({"mesh": {"dims": {"dp": 512, "tp": 2}, "device": "cpu"}})
    # The store, three groups (dp, tp, the default one), and 511 + 1 peers.
    assert footprint(config, config.plan(None), 1024).descriptors == 1 + 3 * 4 + 512
    assert "file-descriptors" in {each.rule for each in lint(config, None, config.topology, 524)}
    assert "file-descriptors" not in {each.rule for each in lint(config, None, config.topology, 525)}


def test_without_a_topology_only_that_is_said() -> None:
    (finding,) = found({"dp": 2, "tp": 16}, None)
    assert (finding.rule, finding.hint) == ("topology", "--set topology.ranks_per_node=8")


def test_dims_by_their_part_in_training_whatever_their_name() -> None:
    config = load_config(ROOT / "configs/quickstart.toml", [
        "topology.ranks_per_node=2", "mesh.dims={ x = 2, y = 2, z = 2 }",
        "parallel.tensor='x'", "parallel.data='y'", "parallel.pipeline='z'",
    ])  # fmt: skip
    rules = {each.rule for each in lint(config, None, config.topology)}
    assert rules == {"tensor-across-nodes", "pipeline-inside-node"}


def command(*words: str) -> Any:
    """Run `meshcomm` in this process. The tests of `plan` check the output of a real process."""
    return CliRunner().invoke(app, list(words))


def test_lint_prints_and_strict_is_an_exit_code(tmp_path: Path) -> None:
    # The path is longer than the narrowest terminal here.
    (folder := tmp_path / ("n" * 60)).mkdir()
    config = str(shutil.copy(ROOT / "configs/gpt_1024.toml", folder))
    words = ["lint", config, "--world-size", "1024", "--set", "topology.ranks_per_node=4"]
    shown = command(*words)
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert shown.stdout.startswith("1 finding on 1,024 ranks:")
    assert "\nlinks: node 2 us 300 GB/s; network 10 us 50 GB/s\n" in shown.stdout
    assert "  try:      mesh.dims = { pp = 16, dp = 16, tp = 4 }\n" in shown.stdout
    assert "\na rank has up to 4 NCCL communicators (about 2.1 GB)\n" in shown.stdout
    for columns in (80, 40):
        folded = CliRunner().invoke(app, words, env={"COLUMNS": str(columns)}).stdout
        # A path is one word and is not folded.
        assert all(len(line) <= columns for line in folded.splitlines() if config not in line)
        assert " ".join(folded.split()) == " ".join(shown.stdout.split())
    one = command("lint", str(ROOT / "configs/ep4_edp2.toml"), "--set", "topology.ranks_per_node=8")
    assert "\na rank has up to 4 Gloo groups (" in one.stdout and "NCCL" not in one.stdout
    strict = command(*words, "--strict", "--json")
    assert strict.exit_code == 1
    facts = json.loads(strict.stdout)
    assert [each["rule"] for each in facts["findings"]] == ["tensor-across-nodes"]
    assert facts["rank"]["nccl"] == 4
    assert command("lint", config, "--world-size", "1024", "--strict").exit_code == 0
