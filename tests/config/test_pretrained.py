"""Facts of a model's config.json, read as transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
import transformers

from meshcomm.config.pretrained import windows_of


def test_windows_of_layers_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 4}
    for place, (kind, said) in enumerate(
        [
            ("mistral", {}),
            ("mistral", {"sliding_window": None}),
            ("mixtral", {}),
            ("mixtral", {"sliding_window": 8}),
            ("llama", {"sliding_window": 8}),
            ("qwen2", {"sliding_window": 8}),
            ("qwen2", {"use_sliding_window": True, "max_window_layers": 3}),
            ("qwen3", {"use_sliding_window": True, "sliding_window": 8}),
            (
                "qwen3",
                {"use_sliding_window": True, "layer_types": [*["full_attention"] * 3, "sliding_attention"]},
            ),
            ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8, "num_experts": 4}),
        ]
    ):
        folder = tmp_path / str(place)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": kind, **sizes, **said}))
        made = transformers.AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model: Any = transformers.AutoModelForCausalLM.from_config(made)
        theirs = tuple(
            (
                getattr(layer.self_attn, "sliding_window", None)
                if "qwen" in kind
                else getattr(made, "sliding_window", None)
            )
            for layer in model.model.layers
        )
        expected = theirs if kind != "llama" else (None,) * 4
        assert (windows_of(folder) or (None,) * 4) == expected, (kind, said)
