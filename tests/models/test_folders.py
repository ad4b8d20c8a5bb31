"""What a folder of transformers says is understood, or refused by the name of the key, before a process is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import transformers

from meshcomm.config.pretrained import TYPES
from meshcomm.errors import ConfigError
from meshcomm.models.families import FAMILIES as KNOWN

from .families import FAMILIES, SMALL, config_of, folder_of

# A class of transformers that meshcomm does not know -> keys that change what it computes.
UNKNOWN: dict[str, tuple[dict[str, Any], list[str]]] = {
    "GraniteConfig": (
        {"embedding_multiplier": 12.0, "logits_scaling": 8.0},
        ["embedding_multiplier = 12.0", "logits_scaling = 8.0", "attention_multiplier = 1.0"],
    ),
    "Gemma2Config": ({}, ["final_logit_softcapping = 30.0", "attn_logit_softcapping = 50.0"]),
    "Phi3Config": ({}, ['model_type = "phi3"']),
}

# Of config.json files that are in use, what the classes of transformers do not write themselves.
USED: list[tuple[str, dict[str, Any]]] = [
    (
        "llama",
        {
            "_name_or_path": "meta",
            "torch_dtype": "bfloat16",
            "pretraining_tp": 1,
            "mlp_bias": False,
            "rope_theta": 500000.0,
            "rope_scaling": None,
            "unsloth_version": "2024.9",
            "is_llama_config": True,
            "rope_interleaved": False,
            "transformers.js_config": {"dtype": "q4"},
            "eos_token_id": [1, 2],
        },
    ),
    ("qwen2", {"use_mrope": False, "torch_dtype": "bfloat16", "max_window_layers": 28, "rope_theta": 1e6}),
    (
        "gpt2",
        {
            "n_ctx": 64,
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
            "gradient_checkpointing": False,
        },
    ),
]


def _changed(folder: Path, changes: dict[str, Any], remove: tuple[str, ...] = ()) -> Path:
    path = folder / "config.json"
    said = {key: value for key, value in json.loads(path.read_text()).items() if key not in remove}
    path.write_text(json.dumps({**said, **changes}))
    return folder


def _read(folder: Path) -> Any:
    return config_of({"pretrained": str(folder), "random_weights": True, "dropout": 0.0}, "dp=1")


def _refused(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        _read(folder)
    return str(caught.value)


def test_the_types_that_are_read_are_those_that_are_built() -> None:
    assert list(TYPES) == list(KNOWN)


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_type_is_refused_when_the_config_is_read(tmp_path: Path, name: str) -> None:
    more, keys = UNKNOWN[name]
    getattr(transformers, name)(**{**SMALL, **more}).save_pretrained(tmp_path)
    found = _refused(tmp_path)
    assert f"how to split a {json.loads((tmp_path / 'config.json').read_text())['model_type']}" in found
    assert all(key in found for key in keys), found
    assert "one of gpt2, llama, mistral" in found
    assert "ModelSpec" in found


def test_keys_of_another_model_are_refused_by_name(tmp_path: Path) -> None:
    changes = {
        "embedding_multiplier": 12.0,
        "attn_logit_softcapping": 50.0,
        "layer_types": ["full_attention"],
    }
    found = _refused(_changed(folder_of("llama", tmp_path), changes))
    assert "3 keys" in found
    assert (
        'embedding_multiplier = 12.0, attn_logit_softcapping = 50.0, layer_types = ["full_attention"]'
        in found
    )
    # What says nothing is no key.
    assert _read(_changed(tmp_path, dict.fromkeys(changes))) is not None


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("llama", {"rope_scaling": {"type": "mrope", "factor": 2.0}}, 'rope_scaling.type = "mrope"'),
        ("llama", {"rope_parameters": {"rope_type": "default", "mrope_section": [2]}}, "mrope_section = [2]"),
        ("qwen2", {"use_mrope": True}, "use_mrope = true"),
        ("llama", {"is_encoder_decoder": True}, "is_encoder_decoder = true"),
        ("llama", {"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}, "auto_map"),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ("mistral", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ],
    ids=str,
)
def test_values_that_change_what_is_computed_are_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], said: str
) -> None:
    assert said in _refused(_changed(folder_of(family, tmp_path), changes))


@pytest.mark.parametrize(("family", "changes"), USED, ids=[family for family, _ in USED])
def test_folders_that_are_in_use_are_taken(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    assert _read(_changed(folder_of(family, tmp_path), changes)) is not None


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_writes_of_a_known_type_is_taken(tmp_path: Path, family: str) -> None:
    assert _read(folder_of(family, tmp_path)) is not None
    # As an older version wrote it.
    old = {"torch_dtype": "float32"} | ({} if family == "gpt2" else {"rope_theta": 10000.0})
    assert _read(_changed(tmp_path, old, ("dtype",))) is not None


@pytest.mark.parametrize("kind", KNOWN)
def test_sizes_that_a_config_leaves_out_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    said = {"model_type": kind}
    if kind != "gpt2":
        said |= {"num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 32}
    (tmp_path / "config.json").write_text(json.dumps(said))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    ours = _read(tmp_path).model
    assert ours.heads == theirs.num_attention_heads
    assert ours.kv_heads == getattr(theirs, "num_key_value_heads", ours.heads)
    assert ours.ff == (
        4 * ours.width
        if kind == "gpt2"
        else getattr(theirs, "moe_intermediate_size", None) or theirs.intermediate_size
    )
    assert ours.head_size == (getattr(theirs, "head_dim", None) or ours.width // ours.heads)
    assert ours.vocabulary == theirs.vocab_size
    assert ours.tied_embeddings == theirs.tie_word_embeddings
    assert ours.experts == (getattr(theirs, "num_local_experts", None) or 0)
