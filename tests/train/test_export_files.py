"""An exported folder has all files of its source except the weights, so transformers opens it like the source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshcomm.train.export_files import copy_beside

COPIED = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.txt"),
    *("merges.txt", "spiece.model", "tokenizer.model.v3", "tekken.json", "normalizer.json", "vocab-src.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/tool_use.jinja"),
    *("preprocessor_config.json", "processor_config.json", "generation_config.json", "tokenization_own.py"),
    *("LICENSE", "original/params.json"),
)
LEFT_OUT = (
    *("config.json", "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack", "x.gguf"),
    *(
        "adapter_config.json",
        "adapter_model.safetensors",
        "training_args.bin",
        "original/consolidated.00.pth",
    ),
    *(
        ".git/config",
        ".gitattributes",
        "onnx/model.onnx",
        "checkpoint-500/config.json",
        "checkpoint-500/a.txt",
    ),
)


def test_all_but_weights_is_copied(tmp_path: Path) -> None:
    source, target = tmp_path / "from", tmp_path / "to"
    for name in (*COPIED, *LEFT_OUT):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(f"content of {name}")
    target.mkdir()
    (target / "config.json").write_text("the export's own")
    # A run, or the export itself, may be inside the source folder.
    draft = source / ".to.part"
    draft.mkdir()
    for folder in (target, draft):
        copy_beside(folder, source)
    found = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert found == {*COPIED, "config.json"}
    assert all((target / name).read_text() == f"content of {name}" for name in COPIED)
    assert (target / "config.json").read_text() == "the export's own"
    assert {str(path.relative_to(draft)) for path in draft.rglob("*") if path.is_file()} == {*COPIED}
    assert not (target / "onnx").exists()
    # A missing source is not an error, because only the weights matter.
    copy_beside(target, tmp_path / "gone")


def test_what_transformers_saves_comes_back(tmp_path: Path) -> None:
    """A tokenizer with several chat templates that transformers has saved works the same from the copy."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "a": 1, "b": 2}, "?"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?", eos_token="b")
    made.chat_template = {
        "default": "{{ messages[0]['content'] }}",
        "tool_use": "tools {{ messages[0]['content'] }}",
    }
    source, target = tmp_path / "from", tmp_path / "to"
    made.save_pretrained(source)
    (source / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert (source / "additional_chat_templates" / "tool_use.jinja").is_file()
    target.mkdir()
    (target / "config.json").write_text(json.dumps({"model_type": "llama"}))
    copy_beside(target, source)
    before, after = (transformers.AutoTokenizer.from_pretrained(each) for each in (source, target))
    assert after.get_chat_template("tool_use") == before.get_chat_template("tool_use")
    assert after("a b a").input_ids == before("a b a").input_ids == [1, 2, 1]
    assert after.eos_token == "b"
