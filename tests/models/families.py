"""Small folders of every tested family of transformers, and configurations of meshes that train them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from meshcomm.config import Config, load_config
from meshcomm.train.parity import Difference, compare, record, reference
from tests.train.runs import parallel_of

SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
# The name of the configuration class in transformers, and the settings that differ from SMALL.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama tied": ("LlamaConfig", {"tie_word_embeddings": True, "attention_bias": True, "head_dim": 8}),
    "llama 3": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "mistral": ("MistralConfig", {"sliding_window": 32, "head_dim": 4}),
    "mistral window": ("MistralConfig", {"sliding_window": 10, "head_dim": 8}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2 window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3 layers": (
        "Qwen3Config",
        {
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "gpt2": ("GPT2Config", {}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**_EXPERTS, "moe_intermediate_size": 16, "head_dim": 8, "decoder_sparse_step": 2},
    ),
    "mixtral": ("MixtralConfig", {**_EXPERTS, "intermediate_size": 16}),
    "mixtral window": ("MixtralConfig", {**_EXPERTS, "intermediate_size": 16, "sliding_window": 12}),
}


def folder_of(family: str, path: Path, *, weights: bool = False) -> Path:
    """A folder with the config.json of a small model of a family, and weights if asked for."""
    import torch
    import transformers

    name, more = FAMILIES[family]
    facts = {**SMALL, **more}
    if family == "gpt2":
        facts = {"n_embd": 32, "n_layer": 4, "n_head": 8, "n_positions": 64, "vocab_size": 257}
        facts |= dict.fromkeys(("bos_token_id", "eos_token_id"), None)
    config = getattr(transformers, name)(**facts)
    if weights:
        torch.manual_seed(5)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                # Norms and biases get random values too, so a misplaced one is noticed.
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
        model.save_pretrained(path)
    else:
        config.save_pretrained(path)
    return path


def config_of(
    model: dict[str, Any],
    dims: str,
    *,
    views: Any = None,
    train: dict[str, Any] | None = None,
    tokenizer: str | None = "bytes",
    timeout_s: float = 60.0,
    **parallel: Any,
) -> Config:
    """A training of 10 steps in float64. dims: for example "dp=2 tp=2"; each dim's name gives its role."""
    parts = {"pp": "pipeline", "dp": "data", "fsdp": "shard", "cp": "context", "tp": "tensor"}
    sizes = {name: int(size) for name, size in (pair.split("=") for pair in dims.split())}
    mesh = {"dims": sizes, "device": "cpu", "timeout_s": timeout_s, "reports": ""}
    return load_config(
        {
            "mesh": {**mesh, **({} if views is None else {"views": views})},
            "parallel": parallel_of(**{parts[dim]: dim for dim in sizes}, **parallel),
            "model": model,
            "data": {"seq_len": 32, "max_bytes": 200_000, **({"tokenizer": tokenizer} if tokenizer else {})},
            "train": {
                "steps": 10,
                "global_batch_size": 8,
                "micro_batch_size": 1,
                "clip_norm": 1.0,
                "dtype": "float64",
                **(train or {}),
            },
        }
    )


def recorded(config: Config, steps: int = 10) -> Any:
    """The record of the steps on one rank."""
    import meshcomm

    with meshcomm.init(config) as mesh:
        return record(mesh, config, steps)


def differences(pool: Any, config: Config, alone: Any = None, steps: int = 4) -> list[Difference]:
    """Differences between every rank and one process in every quantity. Also checks that every weight is on some rank."""
    if alone is None:
        (alone,) = pool.run(recorded, reference(config), steps, ranks=1)
    count = math.prod(config.mesh.dims.values())
    assert config.train is not None
    # Each rank compiles for itself, on two cores.
    limit_s = 120.0 * max(1, count // 4) * (4 if config.train.compile else 1)
    ranks = pool.run(recorded, config, steps, ranks=count, timeout_s=limit_s)
    assert {name for rank in ranks for name in rank.weights} == set(alone.weights)
    return [each for rank in ranks for each in compare(rank, alone)]


def logits_of(config: Config, tokens: Any) -> Any:
    """The model's logits for the tokens, on one rank."""
    import torch

    import meshcomm
    from meshcomm.train import Trainer

    with meshcomm.init(config) as mesh, torch.no_grad():
        return Trainer(mesh, config).engine.modules[0](tokens)
