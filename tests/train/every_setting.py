"""A value for each setting of [train] that changes what a step applies, so that tests of steps cover every one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from meshcomm.config.write import whole_toml

# tests/config/test_schema.py compares these with the settings that a step reads. Each changes the losses, also beside the
# others: tests/simulator/test_simulated_training.py.
EVERY: Final[Mapping[str, Any]] = {
    "lr": 0.02,
    "optimizer": "adam",
    "optimizer_args": {"amsgrad": True},
    "weight_decay": 0.3,
    "betas": [0.5, 0.7],
    # Adam's updates hardly depend on the size of gradients that are larger than this.
    "eps": 0.01,
    "groups": {"embed*": {"lr": 0.5}},
    "frozen": ["*attn_norm*"],
    "label_smoothing": 0.1,
    "z_loss": 0.01,
    "clip_norm": 0.5,
    "seed": 3,
}


def overrides() -> list[str]:
    """`EVERY` in the form of `--set`."""
    return [f"train.{name}={whole_toml(value)}" for name, value in EVERY.items()]
