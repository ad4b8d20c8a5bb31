"""Five published meshes: their groups against plain loops, and where they lie on nodes of eight."""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import pytest

from meshcomm.config import load
from meshcomm.show.plan import plan_facts


class Published(NamedTuple):
    """dims and view outermost first. rows: (name, size, stride, groups, nodes of one group, link); golden.

    Of each group list the first group's first members are in `begins`, and the last group's in `ends`.
    """

    source: str
    dims: dict[str, int]
    view: dict[str, int]
    rows: list[tuple[str, int, int | None, int, int, str | None]]
    begins: dict[str, list[int]]
    ends: dict[str, list[int]]


PUBLISHED = {
    "Llama 3 405B, long context": Published(
        'Grattafiori et al. 2024, "The Llama 3 Herd of Models", table 4: 16,384 GPUs, sequences of 131,072; order TP, CP, PP, DP '
        "from inside. The first version prints DP 4 there, which does not multiply to the GPUs; later ones 8",
        {"dp": 8, "pp": 16, "cp": 16, "tp": 8},
        {},
        [
            ("dp", 8, 2048, 2048, 8, "network"),
            ("pp", 16, 128, 1024, 16, "network"),
            ("cp", 16, 8, 1024, 16, "network"),
            ("tp", 8, 1, 2048, 1, "node"),
        ],
        {"dp": [0, 2048, 4096], "pp": [0, 128, 256], "cp": [0, 8, 16], "tp": [0, 1, 2]},
        {"dp": [2047, 4095, 6143], "pp": [14463, 14591, 14719], "cp": [16263, 16271, 16279], "tp": [16376, 16377, 16378]},
    ),
    "Megatron 175B": Published(
        'Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", '
        "table 2: 174.6 billion parameters, model-parallel size 96, 1,536 GPUs; tensor 8 by its rule that tensor "
        "parallelism takes the GPUs of a node, so pipeline 12; ranks by tensor, data, pipeline from inside",
        {"pp": 12, "dp": 16, "tp": 8},
        {},
        [
            ("pp", 12, 128, 128, 12, "network"),
            ("dp", 16, 8, 96, 16, "network"),
            ("tp", 8, 1, 192, 1, "node"),
        ],
        {"pp": [0, 128, 256], "dp": [0, 8, 16], "tp": [0, 1, 2]},
        {"pp": [127, 255, 383], "dp": [1415, 1423, 1431], "tp": [1528, 1529, 1530]},
    ),
    "Megatron 1T": Published(
        "Narayanan et al. 2021, table 1, 1008.0 billion parameters: tensor 8, pipeline 64, 3,072 GPUs, batch 3,072",
        {"pp": 64, "dp": 6, "tp": 8},
        {},
        [
            ("pp", 64, 48, 48, 64, "network"),
            ("dp", 6, 8, 512, 6, "network"),
            ("tp", 8, 1, 384, 1, "node"),
        ],
        {"pp": [0, 48, 96], "dp": [0, 8, 16], "tp": [0, 1, 2]},
        {"pp": [47, 95, 143], "dp": [3031, 3039, 3047], "tp": [3064, 3065, 3066]},
    ),
    "torchtitan 3-D": Published(
        'Liang et al. 2024, "TorchTitan", and benchmarks/llama3_h100_202412_torchtitan.md of its repository, table 5: '
        "Llama 3.1 405B on 512 GPUs, FSDP 8, TP 8, PP 8",
        {"pp": 8, "dp_shard": 8, "tp": 8},
        {},
        [
            ("pp", 8, 64, 64, 8, "network"),
            ("dp_shard", 8, 8, 64, 8, "network"),
            ("tp", 8, 1, 64, 1, "node"),
        ],
        {"pp": [0, 64, 128], "dp_shard": [0, 8, 16], "tp": [0, 1, 2]},
        {"pp": [63, 127, 191], "dp_shard": [455, 463, 471], "tp": [504, 505, 506]},
    ),
    "DeepSeek-V3": Published(
        'DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", 3.2: 2,048 GPUs, pipeline 16, experts over 64 GPUs of 8 nodes',
        {"pp": 16, "dp": 128},
        {"pp": 16, "edp": 2, "ep": 64},
        [
            ("pp", 16, 128, 128, 16, "network"),
            ("dp", 128, 1, 16, 16, "network"),
            ("edp", 2, 64, 1024, 2, "network"),
            ("ep", 64, 1, 32, 8, "network"),
        ],
        {"pp": [0, 128, 256], "dp": [0, 1, 2], "edp": [0, 64], "ep": [0, 1, 2]},
        {"pp": [127, 255, 383], "dp": [1920, 1921, 1922], "edp": [1983, 2047], "ep": [1984, 1985, 1986]},
    ),
}  # fmt: skip


def loops(dims: dict[str, int], along: str) -> list[list[int]]:
    """Every group along one dim, by counting through all coords, outermost first."""
    ranks: dict[tuple[int, ...], int] = {}
    for rank, coords in enumerate(product(*(range(size) for size in dims.values()))):
        ranks[coords] = rank
    place = list(dims).index(along)
    others = [range(size) if name != along else [0] for name, size in dims.items()]
    groups = []
    for coords in product(*others):
        group = []
        for coord in range(dims[along]):
            group.append(ranks[(*coords[:place], coord, *coords[place + 1 :])])
        groups.append(group)
    return groups


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_mesh(name: str) -> None:
    published = PUBLISHED[name]
    mesh: dict[str, Any] = {"dims": published.dims, "device": "cuda"}
    if published.view:
        mesh["views"] = {"expert": published.view}
    config = load({"mesh": mesh, "topology": {"ranks_per_node": 8}})
    plan = config.plan(None)
    facts = plan_facts(plan, topology=config.topology)
    rows = [
        (dim["name"], dim["size"], dim["stride"], dim["groups"], dim["nodes"]["most"], dim["link"]["name"])
        for dim in facts["dims"]
    ]
    assert rows == published.rows
    assert all(dim["nodes"]["fewest"] == dim["nodes"]["most"] for dim in facts["dims"])
    for along in published.begins:
        dims = published.dims if along in published.dims else published.view
        groups = plan.layout.groups(along).tolist()
        assert groups == loops(dims, along)
        assert groups[0][:3] == published.begins[along]
        assert groups[-1][:3] == published.ends[along]
    # The plan's groups are those lists, one after the other.
    created = [list(group.ranks) for group in plan.groups() if group.shares is None]
    families = [family.name for family in plan.families if family.creates]
    assert created == [group for along in families for group in plan.layout.groups(along).tolist()]
    assert facts["groups"] == len(created)


@pytest.mark.parametrize("name", PUBLISHED)
def test_lint_finds_nothing_wrong_with_how_they_lie(name: str) -> None:
    from meshcomm.topology import lint

    published = PUBLISHED[name]
    mesh: dict[str, Any] = {"dims": published.dims, "device": "cuda"}
    if published.view:
        mesh["views"] = {"expert": published.view}
    config = load({"mesh": mesh, "topology": {"ranks_per_node": 8, "devices_per_node": 8}})
    assert lint(config, None, config.topology, 1 << 20) == []
