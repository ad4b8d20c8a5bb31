"""`meshcomm transfer`: the splits that two trainings give a model's weights, and what sending them costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshcomm.commands import app

pytestmark = pytest.mark.timeout(100)

CONFIGS = Path(__file__).parents[2] / "configs"
QUICK = str(CONFIGS / "quickstart.toml")
# The embedding and the head, and q, o, k, v, three matrices of the feed-forward block and two norms of four layers; the last norm.
NORMS = 9 * 128
PARAMETERS = 2 * 256 * 128 + 4 * (2 * 128 + 2 * 64 + 3 * 384) * 128 + NORMS


def command(*words: str) -> Any:
    return CliRunner().invoke(app, ["transfer", *words])


def facts_of(*words: str) -> Any:
    shown = command(*words, "--json")
    assert shown.exit_code == 0, shown.output
    return json.loads(shown.stdout)


@pytest.fixture
def copies(tmp_path: Path) -> str:
    """A mesh without a training."""
    path = tmp_path / "copies.toml"
    path.write_text("[mesh]\ndims = { copy = 2, tp = 2 }\n")
    return str(path)


def splits(facts: Any) -> dict[str, tuple[str, str]]:
    return {row["name"]: (row["source"], row["target"]) for row in facts["weights"]}


def test_the_weights_of_a_training_on_copies(copies: str) -> None:
    shown = command(QUICK, copies, "--set", "topology.ranks_per_node=8")
    assert shown.exit_code == 0, shown.output
    lines = [line.split() for line in shown.stdout.splitlines()]
    assert ["layers.*.attn.wo.weight", "4", "128", "128", "float32", "n", "k/tp", "n", "k/tp"] in lines
    assert " -> copy=2 tp=2 (4 ranks)" in shown.stdout
    facts = facts_of(QUICK, copies, "--set", "topology.ranks_per_node=8", "--stripes", "")
    assert facts["bytes"] == 4 * PARAMETERS and facts["tensors"] == 39
    sends, _, _, receives = facts["loads"]
    # Each target rank has half of each matrix, and the norms.
    assert receives["max_bytes"] == receives["bound_bytes"] == 4 * ((PARAMETERS + NORMS) // 2)
    assert sends["mean_bytes"] * 8 == receives["mean_bytes"] * 4
    assert receives["rank"] == 8 and receives["coords"] == {"copy": 0, "tp": 0}
    assert facts["seconds"]["bound"] <= facts["seconds"]["direct"] <= facts["seconds"]["gather_broadcast"]
    assert command(QUICK, copies).stdout.splitlines()[-1].startswith("no times: they need [topology]")


def test_splits_are_those_of_each_training(copies: str) -> None:
    same = [f"--target-set=model.{key}" for key in ("intermediate_size=192", "experts=8")]
    facts = facts_of(str(CONFIGS / "ep4_edp2.toml"), str(CONFIGS / "hsdp2x2_tp2.toml"), *same)
    of = splits(facts)
    assert of["layers.*.attn.wq.weight"] == ("n k", "n/tp/fsdp k")
    assert of["layers.*.ff.experts.w2"] == ("n/ep k a", "n/fsdp k a/tp")
    back = splits(facts_of(str(CONFIGS / "hsdp2x2_tp2.toml"), copies))
    assert back["layers.*.attn.wo.weight"] == ("n/fsdp k/tp", "n k/tp")


def test_options(copies: str, tmp_path: Path) -> None:
    node = ("--set", "topology.ranks_per_node=8")
    plain = facts_of(QUICK, copies, *node)
    assert facts_of(QUICK, copies, *node, "--cast", "bfloat16")["bytes"] == plain["bytes"] // 2
    # Both copies are on one node.
    assert plain["stripes"] == ["copy"]
    direct = facts_of(QUICK, copies, *node, "--stripes", "")
    assert direct["stripes"] == [] and plain["loads"][0]["max_bytes"] < direct["loads"][0]["max_bytes"]
    assert facts_of(QUICK, copies, "--stripes", "copy")["stripes"] == ["copy"]
    assert facts_of(QUICK, copies, "--bytes", "64KiB")["rounds"] > plain["rounds"]
    same = facts_of(QUICK, QUICK, "--same-ranks")
    assert same["ranks_on_both"] == 8 and same["messages"] == 0
    assert same["loads"][3]["max_bytes"] == same["loads"][3]["bound_bytes"] == 0
    wider = facts_of(QUICK, copies, "--target-set", "mesh.dims.copy=-1", "--target-world-size", "8")
    assert wider["target"] == {"dims": {"copy": 4, "tp": 2}, "ranks": 8}


def test_a_transformers_model_is_not_loaded(copies: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=128, tie_word_embeddings=True)
    config.save_pretrained(tmp_path / "model")
    facts = facts_of(copies, copies, "--model", str(tmp_path / "model"))
    of = splits(facts)
    assert of["model.layers.*.self_attn.k_proj.weight"] == ("n/tp k", "n/tp k")
    assert facts["source"]["ranks"] == facts["target"]["ranks"] == 4 and facts["ranks_on_both"] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("SOURCE", "--stripes", "x"), "the mesh has no dim 'x'"),
        (("SOURCE", "--cast", "int8"), "expected: a floating-point dtype"),
        (("SOURCE", "--target-set", "mesh.dims.tp=-1"), "--target-world-size N, or --target-set"),
        (("SOURCE", "--target-set", "mesh.dims.tp=3"), "is not divisible"),
        (("SOURCE", "--bytes", "some"), "'some' is not a number of bytes"),
        (("SOURCE", "--target-set", "mesh.dims.tp=3"), 'cannot be split along "tp"'),
        (("SOURCE", "--target-world-size", "5"), "the mesh does not fit the world"),
        (("SOURCE", "--model", "nowhere"), "nowhere/config.json"),
        (("COPIES",), "no model whose weights are transferred"),
    ],
)
def test_what_a_user_does_wrong_is_told_without_a_traceback(
    copies: str, words: tuple[str, ...], said: str
) -> None:
    first, *rest = words
    shown = command(QUICK if first == "SOURCE" else copies, copies, *rest)
    assert shown.exit_code == 2 and said in shown.stderr and "try:" in shown.stderr, shown.output
    assert shown.stdout == ""


def test_different_models_are_refused() -> None:
    shown = command(QUICK, QUICK, "--target-set", "model.hidden_size=256")
    assert shown.exit_code == 2 and "hidden_size = 128 in" in shown.stderr, shown.output
    assert command(QUICK, QUICK).exit_code == 0
