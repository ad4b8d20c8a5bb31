"""`meshcomm tune`: it ranks meshes, explains the ranking, and writes the best one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshcomm.commands import app, tune
from meshcomm.config import load_config
from meshcomm.predict.place import place_config
from meshcomm.show.page import as_text
from tests.commands.test_dryrun import CONFIG

pytestmark = pytest.mark.timeout(100)


ROOT = Path(__file__).parents[2]


def test_the_command_ranks_explains_and_writes(tmp_path: Path) -> None:
    def command(*words: str) -> Any:
        return CliRunner().invoke(app, list(words))

    quickstart = str(ROOT / "configs/quickstart.toml")
    words = ["tune", quickstart, "--world-size", "8", "--set", "topology.ranks_per_node=4"]
    target = str(tmp_path / "placed.toml")
    shown = command(*words, "--write", target)
    assert shown.exit_code == 0, shown.stderr
    assert "20 meshes of 8 ranks ranked: 9 legal factorizations in all orders" in shown.stdout
    # Assumed figures of the machine are marked as assumed.
    assert (
        "a rank: 400 TFLOP/s (of an H100, not of mesh.device cpu, as topology.tflops is not" in shown.stdout
    )
    cuda = command(*words, "--top", "1", "--set", "mesh.device=cuda").stdout
    assert "a rank: 400 TFLOP/s (of an H100, as topology.tflops is not set), 80 GB (of an" in cuda
    named = command(*words, "--set", "topology.tflops=0.05", "--set", "topology.memory_gbytes=12")
    assert "a rank: 0.05 TFLOP/s, 12 GB, of which 10% stay free (--margin)\n" in named.stdout
    every = json.loads(command(*words, "--top", "1000", "--json").stdout)["placements"]
    least = min(sum(each["memory_bytes"].values()) for each in every) / 1e9
    few = [*words, "--set", f"topology.memory_gbytes={1.05 * least}"]
    assert "less a margin of 10%" in command(*few).stderr
    assert json.loads(command(*few, "--margin", "0", "--json").stdout)["too_large"] > 0
    assert "links: node 2 us 300 GB/s (assumed); network 10 us 50 GB/s (assumed)" in shown.stdout
    facts = json.loads(command(*words, "--json").stdout)
    assert len(facts["placements"]) == 10
    assert dict(load_config(target).mesh.dims) == facts["placements"][0]["dims"]
    plan = command("plan", target)
    assert plan.exit_code == 0 and "mesh of 8 ranks" in plan.stdout
    kept = json.loads(command(*words, "--json", "--keep", "pp", "--keep", "tp").stdout)
    assert {(p["dims"]["pp"], p["dims"]["tp"]) for p in kept["placements"]} == {(2, 2)}


@pytest.mark.parity
def test_place_ranks_its_meshes_by_a_dry_run_where_asked(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_text(CONFIG.replace("1e-3", "1"))
    settings = load_config(path)
    ranking = place_config(settings, 8, settings.topology, top=2)
    order, ran = tune.dry_runs(ranking, settings, settings.topology)
    assert sorted(order) == [0, 1] and all(each["fits"] for each in ran)
    assert [ran[i]["step_s"] for i in order] == sorted(each["step_s"] for each in ran)
    # The formula's memory estimate is close.
    for placement, each in zip(ranking.placements, ran, strict=True):
        assert sum(placement.memory_bytes.values()) == pytest.approx(each["peak_bytes"], rel=0.3)
    words = ["tune", str(path), "--world-size", "8", "--top", "2", "--exact"]
    facts = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    for placement, i in zip(facts["placements"], order, strict=True):
        assert placement["exact"] == ran[i]
        assert list(placement["dims"].values()) == list(ranking.placements[i].dims.values())
    assert "dry run" in as_text(tune.view(facts), 140)
