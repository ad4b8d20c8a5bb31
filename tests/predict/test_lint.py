"""Lint's findings: each has its numbers and a cure, and a mesh as it should be has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshcomm.config import load_config
from meshcomm.layout.sizes import ranks_text
from meshcomm.predict.links import discovered
from meshcomm.predict.lint import footprint, lint

ROOT = Path(__file__).parents[2]


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
