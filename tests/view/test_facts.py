"""The page's facts: groups follow from strides, and traffic is the predicted one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from meshcomm.config import Config, load_config
from meshcomm.predict.estimate import workload
from meshcomm.predict.place import rank_placements
from meshcomm.show.plan import dims_table, plan_facts
from meshcomm.view.facts import page_facts

ROOT = Path(__file__).parents[2]


CONFIGS = ROOT / "configs"


# Merged dims, a view that shares a dim, a dim of size 1, and nodes that cut groups.
MESH: dict[str, Any] = {
    "mesh": {
        "dims": {"pp": 2, "one": 1, "dp": 4, "tp": 2},
        "merge": {"model": ["pp", "tp"], "batch": ["dp", "one"]},
        "views": {"expert": {"pp": 2, "edp": 2, "ep": 4}},
    },
    "topology": {"ranks_per_node": 4},
}


BIG = CONFIGS / "gpt_1024.toml"


def facts_of(settings: Config, world: int | None = None) -> dict[str, Any]:
    facts = page_facts(settings, world, settings.topology)
    # The browser gets the facts as JSON.
    assert json.loads(json.dumps(facts)) == facts
    return facts


@pytest.mark.parametrize(
    "mesh",
    [
        MESH["mesh"],
        {**MESH["mesh"], "rank_order": [*range(15, -1, -1)]},
        {"dims": {"b": 2, "a": 3}, "ranks": [1, 2, 5, 6, 8, 9]},
    ],
    ids=["merged dims and views", "reversed", "part of a world"],
)
def test_every_group_follows_from_the_strides_that_are_sent(mesh: dict[str, Any]) -> None:
    settings = load_config({"mesh": mesh})
    facts, layout = facts_of(settings), settings.layout(None)
    world = facts["world_size"]
    order = facts["rank_order"] or list(range(world))
    assert order == layout.ranks.tolist()
    for dim in facts["dims"]:
        groups: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for position, rank in enumerate(order):
            coord, rest, left = 0, position, []
            for size, stride in dim["digits"]:
                coord = coord * size + position // stride % size
                rest -= position // stride % size * stride
            left.append(rest)
            groups.setdefault(tuple(left), []).append((coord, rank))
        found = sorted([rank for _, rank in sorted(group)] for group in groups.values())
        assert found == sorted(layout.groups(dim["name"]).tolist()), dim["name"]
        home = dict(facts["views"]).get(dim["home"], facts["base"])
        assert {name for name, _ in home} >= set(dim["dims"])


def test_facts_of_131072_ranks_are_as_short_as_those_of_8() -> None:
    big = facts_of(load_config(BIG), 131072)
    assert big["world_size"] == 131072 and big["ranks_per_node"] == 8
    assert len(json.dumps(big)) < 2000
    assert [dim["nodes"]["most"] for dim in big["dims"]] == [8, 2048, 1]


def test_a_dim_is_described_by_its_row_in_the_table_of_plan() -> None:
    settings = load_config(MESH)
    facts = facts_of(settings)
    table = dims_table(plan_facts(settings.plan(None), topology=settings.topology)["dims"])
    for dim, row in zip(facts["dims"], table.rows, strict=True):
        cells = dict(zip(table.columns, row, strict=True))
        assert (dim["name"], dim["size"], dim["groups"]) == (
            cells.pop("dim"), int(cells.pop("size")), int(cells.pop("groups")),
        )  # fmt: skip
        assert dim["record"] == [f"{name} {cell}" for name, cell in cells.items() if cell != "-"]


def test_predicted_traffic_is_that_of_place() -> None:
    settings = load_config(CONFIGS / "llama_405b.toml")
    assert settings.parallel is not None
    keep = {part: settings.mesh.dims[dim] for part, dim in settings.parallel.parts.items()}
    roomy = settings.topology.model_copy(update={"memory_gbytes": 1e6})
    ranking = rank_placements(workload(settings), 16384, roomy, keep)
    rows = facts_of(settings)["traffic"]["rows"]
    # Calls and sizes do not depend on the order of dims, which `place` chooses.
    found = [(row["operation"], row["what"], row["calls"], row["size_bytes"], row["size"]) for row in rows]
    shares = ranking.placements[0].shares
    assert found == [(e.flow.operation, e.flow.what, e.calls, e.flow.size_bytes, e.ranks) for e in shares]
    by_what = {row["what"]: row for row in rows}
    gathered = by_what["weights gathered"]
    # Weights are sharded along 8 ranks of dp and 16 of cp.
    assert gathered["sent_bytes"] == pytest.approx(gathered["calls"] * gathered["size_bytes"] * 127 / 128)
    # Each message takes 10 us and the time of its bytes at 50 GB/s.
    sent = by_what["activations and their gradients"]
    assert sent["seconds"] == pytest.approx(sent["calls"] * (10e-6 + sent["size_bytes"] / 50e9))
    assert {tuple(row["along"]): row["link"] for row in rows} == {
        **dict.fromkeys((("dp", "cp"), ("pp",), ("cp",)), "network"),
        ("tp",): "node",
    }


def test_the_mesh_of_a_model_that_code_builds_is_shown_without_its_traffic() -> None:
    settings = load_config(
        {
            "mesh": {"dims": {"dp": 2}},
            "parallel": {"data": "dp"},
            "model": {"build": "module:function"},
            "data": {"seq_len": 8},
            "train": {"steps": 1, "global_batch_size": 2, "micro_batch_size": 1},
        }
    )
    assert page_facts(settings, None, settings.topology)["traffic"] is None


def test_predicted_traffic_by_hand_whoever_sits_where() -> None:
    settings = load_config(CONFIGS / "quickstart.toml").resolved(8)
    traffic = facts_of(settings, 8)["traffic"]
    rows = {row["along"][0]: row for row in traffic["rows"]}
    assert traffic["links"] is None and list(rows) == ["tp", "pp", "dp"]
    # At least 4 all_reduces in each of 2 layers, for 4 micro-batches of 4 * 128 tokens of width 128 in float32.
    assert rows["tp"]["calls"] >= 2 * 4 * 4 and rows["tp"]["size_bytes"] == 4 * 128 * 128 * 4
    assert rows["tp"]["sent_bytes"] == rows["tp"]["calls"] * rows["tp"]["size_bytes"]
    assert (rows["pp"]["calls"], rows["pp"]["seconds"], rows["pp"]["link"]) == (2 * 4, None, None)
    # Each micro-batch sends an activation one way and its gradient the other way.
    assert rows["pp"]["sent_bytes"] == rows["pp"]["received_bytes"] == 4 * 4 * 128 * 128 * 4
    assert rows["tp"]["received_bytes"] is rows["dp"]["received_bytes"] is None
    # `place` refuses another order of ranks or a view, but neither changes the bytes.
    for change in ("mesh.rank_order = [7, 6, 5, 4, 3, 2, 1, 0]", "mesh.views = { other = { a = 4, b = 2 } }"):
        assert facts_of(load_config(settings, [change]), 8)["traffic"] == traffic
    assert facts_of(load_config(CONFIGS / "mesh.toml"))["traffic"] is None


def test_experts_gradients_go_along_the_dims_of_their_view() -> None:
    rows = facts_of(load_config(CONFIGS / "ep4_edp2.toml"))["traffic"]["rows"]
    assert {(*row["along"], row["size"]) for row in rows} == {("ep", 4), ("dp", 8), ("edp", 2)}
    both = load_config(CONFIGS / "cp2_dp2_tp2.toml")
    (row,) = [row for row in facts_of(both)["traffic"]["rows"] if len(row["along"]) == 2]
    assert row["along"] == ["dp", "cp"] and row["size"] == 4 and row["digits"] == [[2, 2], [2, 4]]


def test_every_fact_that_the_page_reads_is_sent() -> None:
    facts = facts_of(load_config(MESH))
    text = "".join(path.read_text() for path in (ROOT / "meshcomm" / "view").glob("*.js"))
    read = {name: set(re.findall(rf"\b{name}\??\.(\w+)", text)) for name in ("facts", "family")}
    assert read["facts"] - {"json"} <= set(facts)  # facts.json is a file name
    # The page itself gives a family its hue and adds `rest`.
    assert read["family"] - {"hue", "rest"} <= set.intersection(*(set(dim) for dim in facts["dims"]))


def gathered(found: Mapping[int, Any], by: int) -> list[list[int]]:
    groups: dict[Any, list[int]] = {}
    for rank, cell in found.items():
        groups.setdefault(cell[by], []).append(rank)
    return sorted(sorted(group) for group in groups.values())
