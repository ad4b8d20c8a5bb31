"""Two meshes and how they differ, as `meshcomm plan --diff` shows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshcomm.config import load_config
from meshcomm.show.diff import diff_facts
from tests.show.shown import MESH, QUICK, ROOT, plan_at, run


def difference(a: list[str], b: list[str], source: Any = ROOT / MESH) -> dict[str, Any]:
    one, other = load_config(source, a).resolved(None), load_config(source, b).resolved(None)
    return diff_facts(one, other, one.plan(None), other.plan(None))


def test_a_difference_ends_with_1_and_equal_configs_with_0(tmp_path: Path) -> None:
    code, shown, _ = run("plan", MESH, "--diff", MESH)
    assert code == 0 and shown.startswith(
        "equal: 8 ranks, plan c933ff8e076056e1; every setting is the same\n"
    )
    mesh = {"dims": {"pp": 2, "dp": -1, "tp": 2}, "device": "auto", "timeout_s": 600}
    (tmp_path / "same.json").write_text(json.dumps({"mesh": mesh}))
    (tmp_path / "plain.toml").write_text("[mesh]\ndims = { pp = 2, dp = 2, tp = 2 }\n")
    same = run(
        "plan", str(tmp_path / "same.json"), "--diff", str(tmp_path / "plain.toml"), "--world-size", "8"
    )
    assert same.code == 0
    code, shown, _ = run("plan", MESH, "--diff", QUICK)
    assert code == 1 and shown.startswith("different: plans c933ff8e076056e1 and a67aa15a9d454214\n")


def test_swapped_dims() -> None:
    facts = difference([], ["mesh.dims={ dp = 2, pp = 2, tp = 2 }", "mesh.views="])
    assert not facts["equal"]
    assert [each[0] for each in facts["settings"]] == ["mesh.views", "mesh.dims, order"]
    changed = {each["name"]: each for each in facts["groups"]}
    assert set(changed) == {"pp", "dp", "model", "edp", "ep"}
    assert (changed["pp"]["same"], changed["pp"]["only_a"], changed["pp"]["only_b"]) == (0, 4, 4)
    assert changed["pp"]["examples"] == [[[0, 4], [1, 5], [2, 6]], [[0, 2], [1, 3], [4, 6]]]
    assert changed["ep"]["status"] == "only in a"
    assert facts["ranks"]["moved"] == 4
    assert facts["ranks"]["examples"][0] == {"rank": 2, "coords": {"pp": [0, 1], "dp": [1, 0]}}


@pytest.mark.parametrize("seed", range(4))
def test_a_permuted_order_against_plain_sets(seed: int) -> None:
    words = [f"mesh.rank_order={np.random.default_rng(seed).permutation(8).tolist()}"]
    facts = difference([], words)
    a, b = plan_at(MESH, 8).layout, plan_at(MESH, 8, *words).layout
    coords = [[{**side.coords(r), **side.coords(r, "expert")} for r in range(8)] for side in (a, b)]
    assert facts["ranks"]["moved"] == sum(ours != theirs for ours, theirs in zip(*coords, strict=True))
    for each in facts["groups"]:
        ours, theirs = ({tuple(row) for row in side.groups(each["name"]).tolist()} for side in (a, b))
        sets = {frozenset(row) for row in ours}, {frozenset(row) for row in theirs}
        assert each["same"] == len(ours & theirs)
        assert each["reordered"] == len(sets[0] & sets[1]) - len(ours & theirs)
        assert (each["only_a"], each["only_b"]) == (len(sets[0] - sets[1]), len(sets[1] - sets[0]))


def test_options_names_and_worlds_that_differ() -> None:
    facts = difference([], ["mesh.timeout_s=30.0", "mesh.options.dp={ comm_id = 'x' }"])
    assert [each[0] for each in facts["settings"]] == ["mesh.timeout_s", "mesh.options.dp"]
    assert facts["groups"] == [] and facts["ranks"]["moved"] == 0

    def to(dims: str) -> dict[str, Any]:
        return difference(
            ["mesh.dims={ dp = 4, tp = 2 }"], [f"mesh.dims={dims}"], {"mesh": {"dims": {"dp": 8}}}
        )

    renamed = [
        (each["name"], each["status"], each["also"]) for each in to("{ dp = 4, tensor = 2 }")["groups"]
    ]
    assert renamed == [("tp", "only in a", "tensor"), ("tensor", "only in b", "tp")]
    larger = to("{ dp = 8, tp = 2 }")["ranks"]
    assert (larger["common"], larger["only_b"], larger["moved"]) == (8, 8, 0)
    # Ranks keep their places if a dim of size 1 is added.
    one = to("{ dp = 4, cp = 1, tp = 2 }")
    assert one["ranks"]["moved"] == 0 and not one["equal"]
