"""Three published meshes: their groups against NumPy, and their placement on nodes of eight."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest

from meshcomm.config import load_config
from meshcomm.predict.lint import lint
from meshcomm.show.plan import plan_facts


class Published(NamedTuple):
    """dims and view: outermost first. rows: (name, size, stride, groups, nodes of one group, link), as fixed values."""

    source: str
    dims: dict[str, int]
    view: dict[str, int]
    rows: list[tuple[str, int, int | None, int, int, str | None]]


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
    ),
}  # fmt: skip


def along_axis(dims: dict[str, int], along: str) -> list[list[int]]:
    """Every group along one dim by NumPy, from a grid of all ranks with the outermost dim first."""
    grid = np.arange(math.prod(dims.values())).reshape(list(dims.values()))
    found: list[list[int]] = np.moveaxis(grid, list(dims).index(along), -1).reshape(-1, dims[along]).tolist()
    return found


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_mesh(name: str) -> None:
    published = PUBLISHED[name]
    mesh: dict[str, Any] = {"dims": published.dims, "device": "cuda"}
    if published.view:
        mesh["views"] = {"expert": published.view}
    config = load_config({"mesh": mesh, "topology": {"ranks_per_node": 8, "devices_per_node": 8}})
    plan = config.plan(None)
    facts = plan_facts(plan, topology=config.topology)
    rows = [
        (dim["name"], dim["size"], dim["stride"], dim["groups"], dim["nodes"]["most"], dim["link"]["name"])
        for dim in facts["dims"]
    ]
    assert rows == published.rows
    assert all(dim["nodes"]["fewest"] == dim["nodes"]["most"] for dim in facts["dims"])
    for along, *_ in rows:
        dims = published.dims if along in published.dims else published.view
        assert plan.layout.groups(along).tolist() == along_axis(dims, along)
    # The plan creates exactly these groups, in this order.
    created = [list(group.ranks) for group in plan.groups() if group.shares is None]
    families = [family.name for family in plan.families if family.creates]
    assert created == [group for along in families for group in plan.layout.groups(along).tolist()]
    assert facts["groups"] == len(created)
    # lint finds no problem in their placement.
    assert lint(config, None, config.topology, 1 << 20) == []
