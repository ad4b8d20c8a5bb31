"""The dry run against real runs on 8 ranks: every kind of parallelism, the built-in model and folders of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshcomm.config import load_config
from meshcomm.testing import Pool
from tests.dryrun.test_rank import BUILT_IN, compared
from tests.models.families import folder_of
from tests.train.runs import parallel_of

pytestmark = [pytest.mark.parity, pytest.mark.timeout(600)]

# dims, [parallel] without the roles of the dims, [train], and [model] or a family.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any] | str]] = {
    "data": ("dp=8", {}, {}, {}),
    "sharded": ("fsdp=8", {}, {"compute_dtype": "bfloat16"}, {}),
    "sharded, kept gathered": ("fsdp=8", {"reshard": False}, {}, {}),
    "sharded, copies": ("dp=2 fsdp=4", {}, {}, {}),
    "sharded, tensor, sequence": ("dp=2 fsdp=2 tp=2", {"sequence_parallel": True}, {}, {}),
    "pipeline, data, tensor": ("pp=2 dp=2 tp=2", {}, {}, {}),
    "interleaved, sharded, tensor": (
        "pp=2 fsdp=2 tp=2",
        {"schedule": "interleaved_1f1b", "stages_per_rank": 2},
        {},
        {},
    ),
    "zero bubble, tensor": ("pp=4 tp=2", {"schedule": "zero_bubble", "stages_per_rank": 2}, {}, {}),
    "ring, data, again": ("dp=4 cp=2", {}, {"activation_checkpointing": True}, {}),
    "ring, tensor": ("cp=4 tp=2", {"sequence_parallel": True}, {}, {}),
    "heads, sharded": (
        "fsdp=2 cp=4",
        {"attention": "ulysses"},
        {"activation_checkpointing": "selective"},
        {},
    ),
    "experts": (
        "dp=4 tp=2",
        {"expert": "ep", "views": {"expert": {"edp": 2, "ep": 2, "tp": 2}}},
        {},
        {"experts": 4, "capacity_factor": 1.0},
    ),
    "Qwen3": ("pp=2 dp=2 tp=2", {}, {"activation_checkpointing": True}, "qwen3"),
    "Llama": ("fsdp=4 tp=2", {"sequence_parallel": True}, {}, "llama"),
    "GPT-2": ("pp=2 fsdp=4", {}, {}, "gpt2"),
    "Mixtral": ("dp=2 fsdp=2 cp=2", {}, {}, "mixtral"),
}
_PARTS = {"pp": "pipeline", "dp": "data", "fsdp": "shard", "cp": "context", "tp": "tensor"}


@pytest.mark.parametrize("case", CASES)
def test_calls_bytes_and_memory_are_those_of_a_real_run(
    pool: Pool, figures: Callable[[str], None], tmp_path: Path, case: str
) -> None:
    dims, parallel, train, model = CASES[case]
    sizes = {name: int(size) for name, _, size in (each.partition("=") for each in dims.split())}
    copies = sizes.get("dp", 1) * sizes.get("fsdp", 1)
    if isinstance(model, str):
        folder = folder_of(model, tmp_path / model)
        trained: dict[str, Any] = {"pretrained": str(folder), "random_weights": True, "dropout": 0.0}
    else:
        trained = {**BUILT_IN, "num_layers": 8, "num_heads": 8, "num_kv_heads": 8, **model}
    views = parallel.get("views", {})
    rest = {name: value for name, value in parallel.items() if name != "views"}
    config = load_config(
        {
            "mesh": {"dims": sizes, "views": views, "device": "cpu", "timeout_s": 120.0, "validate_calls": 0},
            "parallel": parallel_of(**{_PARTS[dim]: dim for dim in sizes}, **rest),
            "model": trained,
            "data": {"seq_len": 64},
            "train": {"steps": 1, "global_batch_size": 8 * copies, "micro_batch_size": 1, **train},
        }
    )
    ratios = compared(pool, config, 8)
    figures(
        f"dry run on 8 ranks, {case}: predicted / measured peak {', '.join(f'{each:.3f}' for each in ratios)}"
    )
