"""`meshcomm dryrun config.json --dims ...`: the training of a model from its config.json alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("transformers")

from meshcomm.commands import app
from meshcomm.config import load_config
from meshcomm.config.of_model import is_of_model, placed_on, training_of
from meshcomm.config.pretrained import sizes_of
from meshcomm.errors import ConfigError
from meshcomm.models.hf import counts_of
from meshcomm.predict.estimate import Sizes, weights, workload

PUBLISHED = Path(__file__).parents[2] / "configs" / "published"
# The mesh of each model's paper if it has one, else a mesh with as many ranks.
MESHES = {
    "llama3_405b": "pp=16,fsdp=128,tp=8",
    "deepseek_v3": "pp=16,fsdp=128,ep=64",
    "qwen3_235b": "pp=4,fsdp=16,tp=4,ep=16",
}


def _said(*arguments: str) -> Any:
    result = CliRunner().invoke(app, ["dryrun", *arguments, "--json", "--sample", "0"])
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.stdout)


@pytest.mark.deep
def test_a_config_json_is_run_dry(tmp_path: Path) -> None:
    from tests.models import table

    table.smallest("deepseek_v3").save_pretrained(tmp_path)
    facts = _said(str(tmp_path / "config.json"), "--dims", "pp=2,fsdp=4,ep=2", "--set", "data.seq_len=64")
    assert facts["world_size"] == 8 and not facts["findings"]
    assert facts["memory"]["fits"] is not False


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("llama3_405b", 405.85, 405.85),
        ("deepseek_v3", 671.03, 37.55),
        ("qwen3_235b", 235.09, 22.19),
        ("gpt_oss_120b", 116.83, 5.71),
    ],
)
def test_a_published_config_has_the_weights_that_its_model_is_published_to_have(
    name: str, billions: float, active: float
) -> None:
    counts = counts_of(PUBLISHED / name)
    plain, experts = sum(counts.layers) + counts.ends, sum(counts.experts)
    assert (plain + experts) / 1e9 == pytest.approx(billions, abs=0.005)
    sizes = sizes_of(PUBLISHED / name)
    share = sizes["experts_per_token"] / sizes["experts"] if experts else 0
    assert (plain + share * experts) / 1e9 == pytest.approx(active, abs=0.02)


def test_meshes_of_a_config_json_are_ranked_by_its_weights() -> None:
    path = PUBLISHED / "qwen3_235b" / "config.json"
    result = CliRunner().invoke(app, ["tune", str(path), "--world-size", "256", "--top", "3", "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["world_size"] == 256 and len(facts["placements"]) == 3
    # Weights of 4 bytes, sharded over all ranks except norms and other small ones.
    assert facts["placements"][0]["memory_bytes"]["weights"] == pytest.approx(235.09e9 * 4 / 256, rel=0.05)
    counts = counts_of(path.parent)
    work = workload(load_config(placed_on(path, 256)), counts)
    plain, experts, *_ = weights(work, Sizes(shard=256, microbatches=2))
    assert (plain, experts) == (sum(counts.layers) + counts.ends, sum(counts.experts))


@pytest.mark.deep
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", MESHES)
def test_a_published_model_on_a_published_mesh(name: str) -> None:
    facts = _said(str(PUBLISHED / name / "config.json"), "--dims", MESHES[name])
    assert not facts["findings"]


def test_what_is_no_model_or_no_dim_is_refused(tmp_path: Path) -> None:
    path = PUBLISHED / "qwen3_235b" / "config.json"
    assert is_of_model(path) and not is_of_model(PUBLISHED / "llama3_405b.toml")
    for dims, said in (
        ("pp=0", "pp=0 is not a dim"),
        ("rows=2", "rows=2 is not a dim"),
        ("dp=4,ep=3", "cannot be distributed"),
    ):
        with pytest.raises(ConfigError, match=said):
            training_of(path, dims)
    result = CliRunner().invoke(app, ["dryrun", str(path)])
    assert result.exit_code == 2 and "a model's config.json contains no dim sizes" in result.stderr
    result = CliRunner().invoke(app, ["dryrun", str(PUBLISHED / "llama3_405b.toml"), "--dims", "dp=2"])
    assert result.exit_code == 2 and "--dims requires a model's config.json" in result.stderr


def test_its_training_is_a_configuration() -> None:
    config = load_config(training_of(PUBLISHED / "qwen3_235b" / "config.json", "pp=4,fsdp=16,tp=4,ep=16"))
    assert config.mesh.views == {"expert": {"pp": 4, "edp": 1, "ep": 16, "tp": 4}}
    assert config.model is not None and config.model.experts == 128 and config.model.num_layers == 94
    assert config.parallel is not None and config.parallel.options.sequence_parallel
