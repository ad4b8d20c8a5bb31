"""A folder of transformers is understood, or refused by the name of the key, before a process starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

from meshcomm.config import Config, DataConfig, load_config
from meshcomm.errors import ConfigError, MeshcommError, TrainingError
from meshcomm.models.weights import INDEX, SINGLE
from meshcomm.testing import Pool
from meshcomm.train import data as data_of
from tests.models.families import FAMILIES, SMALL, config_of, folder_of, logits_of, recorded
from tests.train.data.test_load import tokenizer, tokens_of

# Keys of config.json files in use that transformers' classes do not write.
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


def test_a_model_that_is_no_language_model_alone_is_refused_by_name(tmp_path: Path) -> None:
    transformers.Gemma3Config(text_config=transformers.Gemma3TextConfig(**SMALL)).save_pretrained(tmp_path)
    found = _refused(tmp_path)
    assert "a gemma3 has parts that do not belong to a language model: vision_config" in found
    assert 'a folder with only its text model, "gemma3_text"' in found
    transformers.ViTConfig().save_pretrained(tmp_path)
    assert "a vit is not a causal language model of transformers" in _refused(tmp_path)
    found = _refused(_changed(folder_of("llama", tmp_path), {"model_type": "newest"}))
    assert "transformers does not understand its config.json" in found and "newest" in found


def test_a_family_without_a_plan_is_split_by_data_alone(tmp_path: Path) -> None:
    transformers.GPTJConfig(n_embd=32, n_layer=2, n_head=4, rotary_dim=4).save_pretrained(tmp_path)
    model = {"pretrained": str(tmp_path), "random_weights": True, "dropout": 0.0}
    assert config_of(model, "fsdp=4") is not None
    with pytest.raises(ConfigError, match="transformers publishes no plan for splitting the folder's model"):
        config_of(model, "tp=2")


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("llama", {"is_encoder_decoder": True}, "has an encoder and a decoder"),
        ("llama", {"num_attention_heads": None}, "transformers does not understand its config.json"),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, "its weights are quantized"),
        ("qwen3", {"layer_types": ["full_attention"] * 3}, "must be equal to the number of"),
    ],
    ids=str,
)
def test_values_that_no_training_has_are_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], said: str
) -> None:
    folder = _changed(folder_of(family, tmp_path), changes)
    with pytest.raises(ConfigError, match=said):
        config_of({"pretrained": str(folder)}, "dp=1")


@pytest.mark.parametrize(("family", "changes"), USED, ids=[family for family, _ in USED])
def test_folders_that_are_in_use_are_taken(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    assert _read(_changed(folder_of(family, tmp_path), changes)) is not None


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_writes_of_a_known_type_is_taken(tmp_path: Path, family: str) -> None:
    assert _read(folder_of(family, tmp_path)) is not None
    # The format of an older version.
    old = {"torch_dtype": "float32"} | ({} if family == "gpt2" else {"rope_theta": 10000.0})
    assert _read(_changed(tmp_path, old, ("dtype",))) is not None


@pytest.mark.parametrize(
    "kind", ["gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "granite", "olmo2"]
)
def test_sizes_that_a_config_leaves_out_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    said = {"model_type": kind}
    if kind != "gpt2":
        said |= {"num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 32}
    (tmp_path / "config.json").write_text(json.dumps(said))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    ours = _read(tmp_path).model
    assert ours.num_heads == theirs.num_attention_heads
    assert ours.num_kv_heads == getattr(theirs, "num_key_value_heads", ours.num_heads)
    assert ours.intermediate_size == (
        4 * ours.hidden_size
        if kind == "gpt2"
        else getattr(theirs, "moe_intermediate_size", None) or theirs.intermediate_size
    )
    assert ours.head_size == (getattr(theirs, "head_dim", None) or ours.hidden_size // ours.num_heads)
    assert ours.vocab_size == theirs.vocab_size
    assert ours.tied_embeddings == theirs.tie_word_embeddings
    assert ours.experts == (getattr(theirs, "num_local_experts", None) or 0)


# -- its tokenizer --------------------------------------------------------------------------------


WORDS = "one two three " * 11


def _with_text(folder: Path, text: str, *changes: str) -> Config:
    (folder / "text.txt").write_text(text)
    config = config_of({"pretrained": str(folder), "dropout": 0.0}, "dp=1")
    data = [f'data.files=["{folder}/text.txt"]', "data.seq_len=4", "data.max_bytes=", "data.tokenizer="]
    return load_config(config, [*data, "train.steps=1", "train.global_batch_size=8", *changes])


def test_text_for_weights_goes_through_the_tokenizer_of_their_folder(pool: Pool, tmp_path: Path) -> None:
    folder = tokenizer(folder_of("llama", tmp_path, weights=True))
    (ours,) = pool.run(recorded, _with_text(folder, WORDS), 1, ranks=1)
    ids = torch.tensor([*[1, 2, 3] * 11, 4][:33])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        logits = model(ids[:32].view(8, 4)).logits
    assert ours.losses[0] == pytest.approx(F.cross_entropy(logits.flatten(0, 1), ids[1:]).item(), abs=1e-6)
    (of_bytes,) = pool.run(recorded, _with_text(folder, WORDS, 'data.tokenizer="bytes"'), 1, ranks=1)
    assert abs(ours.losses[0] - of_bytes.losses[0]) > 1e-3


def test_weights_without_a_tokenizer_take_bytes_only_if_told_so(tmp_path: Path) -> None:
    folder = folder_of("llama", tmp_path)
    # A program may pass its batches directly.
    given = config_of({"pretrained": str(folder)}, "dp=1", tokenizer=None)
    assert given.data is not None
    with pytest.raises(ConfigError) as caught:
        data_of.load(given.data, model=given.model)
    found = str(caught.value)
    assert "data.tokenizer: the weights were trained with a tokenizer that is not in their folder" in found
    assert f"no tokenizer.json in {folder}" in found and 'data.tokenizer = "bytes"' in found
    assert config_of({"pretrained": str(folder)}, "dp=1", tokenizer="bytes") is not None
    # Random weights are tied to no tokenizer yet.
    assert config_of({"pretrained": str(folder), "random_weights": True}, "dp=1", tokenizer=None) is not None
    with pytest.raises(ConfigError, match="no effect without a tokenizer"):
        load_config(config_of({"pretrained": str(folder)}, "dp=1"), ['data.eos="<eos>"'])


def test_bytes_is_no_path_and_a_tokenizer_without_an_eos_ends_nothing(tmp_path: Path) -> None:
    folder = tokenizer(folder_of("llama", tmp_path / "model"))
    config = _with_text(folder, WORDS)
    (tmp_path / "run.json").write_text(json.dumps(config.model_dump(mode="json", exclude_unset=True)))
    read = load_config(tmp_path / "run.json", ['data.tokenizer="bytes"'])
    assert read.data is not None and read.data.tokenizer == "bytes"
    (folder / "tokenizer_config.json").unlink()
    assert config.data is not None
    found = tokens_of(data_of.load(config.data, model=config.model, vocab_size=4))
    assert found == [1, 2, 3] * 11


# -- tokens that the model does not have ----------------------------------------------------------


def _outside(config: DataConfig, vocab_size: int) -> str:
    with pytest.raises(TrainingError) as caught:
        corpus = data_of.load(config, vocab_size=vocab_size)
        for part in (*corpus.parts, *(corpus.validation.parts if corpus.validation else ())):
            part.read(torch.arange(len(part)).numpy())
    return str(caught.value)


def test_a_token_outside_of_the_vocabulary_is_named_with_its_place(tmp_path: Path) -> None:
    np = pytest.importorskip("numpy")
    for name, text in (("a.txt", "ABCD ABCD"), ("b.txt", "ABCDxBCDy")):
        (tmp_path / name).write_text(text)
    found = _outside(DataConfig(files=(f"{tmp_path}/*.txt",), seq_len=2), 96)
    assert "the data has token 120, but the model's vocabulary is 0 to 95" in found
    assert f"120 at position 4 of {tmp_path}/b.txt" in found
    assert "without a tokenizer, each byte is a token" in found
    words = tokenizer(tmp_path / "model")
    (tmp_path / "a.txt").write_text("one two")
    (tmp_path / "b.txt").write_text("one two three")
    found = _outside(DataConfig(files=(f"{tmp_path}/*.txt",), seq_len=2, tokenizer=str(words)), 3)
    assert f"4 at position 2 of {tmp_path}/a.txt" in found and f"{words} has 5 tokens" in found
    # Token files: a wrong token outside the samples that are checked first, and a negative one.
    tokens = np.ones(100_001, np.int32)
    tokens[77_777] = 300
    np.save(tmp_path / "ids.npy", tokens)
    ids = DataConfig(tokens=(f"{tmp_path}/ids.npy",), seq_len=10)
    assert f"300 at position 77777 of {tmp_path}/ids.npy" in _outside(ids, 256)
    held = ids.model_copy(update={"validation": 0.5})
    assert f"300 at position 77777 of {tmp_path}/ids.npy" in _outside(held, 256)
    tokens[77_777] = -3
    np.save(tmp_path / "ids.npy", tokens)
    assert f"-3 at position 77777 of {tmp_path}/ids.npy" in _outside(ids, 256)


def _told(config: Config) -> str:
    with pytest.raises(MeshcommError) as caught:
        recorded(config, 1)
    return str(caught.value)


@pytest.mark.parametrize("model", [{"build": "tests.models.own:spec"}, "llama"], ids=str)
def test_the_vocabulary_of_any_model_reaches_the_data(pool: Pool, tmp_path: Path, model: Any) -> None:
    import numpy as np

    if model == "llama":
        model = {"pretrained": str(folder_of("llama", tmp_path)), "random_weights": True}
    np.save(tmp_path / "ids.npy", np.arange(8 * 4 + 1, dtype=np.uint16) + 230)
    tokens = [f'data.tokens=["{tmp_path}/ids.npy"]', "data.seq_len=4", "data.max_bytes=", "train.steps=1"]
    config = load_config(config_of(model, "dp=1", tokenizer=None), tokens)
    (found,) = pool.run(_told, config, ranks=1)
    assert "the model's vocabulary is 0 to 255" in found and "262 at position 32" in found


# -- config.json and weights that contradict each other -------------------------------------------


def _changed_weights(folder: Path, changes: dict[str, Any]) -> Path:
    held = {**load_file(folder / SINGLE), **changes}
    save_file({name: x for name, x in held.items() if x is not None}, folder / SINGLE, {"format": "pt"})
    return folder


def _logits(folder: Path) -> torch.Tensor:
    found: torch.Tensor = transformers.AutoModelForCausalLM.from_pretrained(folder)(TOKENS).logits
    return found.detach()


TOKENS = torch.arange(64).reshape(2, 32)


def _ours(folder: Path) -> torch.Tensor | str:
    try:
        return logits_of(config_of({"pretrained": str(folder)}, "dp=1", train={"dtype": "float32"}), TOKENS)
    except MeshcommError as error:
        return str(error)


def test_a_tied_weight_that_is_saved_twice_is_one_weight_or_refused(pool: Pool, tmp_path: Path) -> None:
    folder = folder_of("llama tied", tmp_path, weights=True)
    embedding = load_file(folder / SINGLE)["model.embed_tokens.weight"]
    _changed_weights(folder, {"lm_head.weight": embedding.clone()})
    (same,) = pool.run(_ours, folder, ranks=1)
    torch.testing.assert_close(same, _logits(folder), rtol=1e-4, atol=1e-5)
    _changed_weights(folder, {"lm_head.weight": embedding + 1})
    (found,) = pool.run(_ours, folder, ranks=1)
    assert isinstance(found, str), "transformers does not tie these"
    assert (
        "model.embed_tokens.weight and lm_head.weight are one weight in the model, but two in the files"
        in found
    )


def test_of_one_file_and_an_index_the_file_is_read_as_transformers_does(pool: Pool, tmp_path: Path) -> None:
    folder = folder_of("llama", tmp_path, weights=True)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(load_file(folder / SINGLE), "gone")}))
    (ours,) = pool.run(_ours, folder, ranks=1)
    torch.testing.assert_close(ours, _logits(folder), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_act": "nope"}, "KeyError: 'nope'"),
        ({"pad_token_id": 999_999}, "Padding_idx must be within num_embeddings"),
    ],
    ids=str,
)
def test_a_config_that_transformers_refuses_is_an_error_with_its_words(
    pool: Pool, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    folder = _changed(folder_of("llama", tmp_path, weights=True), changes, ("mlp_bias",))
    (found,) = pool.run(_ours, folder, ranks=1)
    assert isinstance(found, str) and "transformers cannot create the model" in found and said in found
    assert str(folder) in found
