"""[model] and [train] of small trainings, from positional numbers so that each fits on a line."""

from __future__ import annotations

from typing import Any


def model_of(
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    intermediate_size: int,
    **more: Any,
) -> dict[str, Any]:
    """more: further settings of [model]."""
    sizes = {"num_layers": num_layers, "hidden_size": hidden_size, "num_heads": num_heads}
    return {**sizes, "num_kv_heads": num_kv_heads, "intermediate_size": intermediate_size, **more}


def train_of(steps: int, global_batch_size: int, micro_batch_size: int, **more: Any) -> dict[str, Any]:
    """more: further settings of [train]."""
    batch = {"global_batch_size": global_batch_size, "micro_batch_size": micro_batch_size}
    return {"steps": steps, **batch, **more}
