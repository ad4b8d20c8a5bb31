"""The training loop itself runs in the simulator and computes on every mesh what one process computes."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest

import meshcomm
from meshcomm.config import Config, load_config
from meshcomm.mesh import Mesh
from meshcomm.train import Callback, Summary, run

STEPS = 3
BASE: dict[str, Any] = {
    "mesh": {"dims": {"pp": 1, "dp": 1, "tp": 1}, "device": "cpu"},
    "parallel": {"data": "dp", "tensor": "tp", "pipeline": "pp"},
    "model": {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 64},
    "data": {"seq_len": 32, "max_bytes": 100_000},
    "train": {
        "steps": STEPS, "global_batch_size": 4, "micro_batch_size": 1, "warmup_steps": 2, "clip_norm": 0.5,
        "dtype": "float64", "seed": 3,
    },
}  # fmt: skip


def settings(out: Path, *overrides: str) -> Config:
    return load_config(BASE, [f'train.out="{out}"', *overrides])


def train(config: Config, world: int) -> list[Summary]:
    def body(mesh: Mesh) -> Summary:
        return run(mesh, config, Callback())

    return meshcomm.simulate(body, config, world_size=world)


def test_the_losses_of_one_process(tmp_path: Path) -> None:
    (alone,) = train(settings(tmp_path / "alone"), 1)
    split = train(settings(tmp_path / "split", "mesh.dims={ pp = 1, dp = 2, tp = 2 }"), 4)
    assert alone.losses[-1] < alone.losses[0]
    for summary in split:
        assert summary.losses == pytest.approx(alone.losses, rel=1e-12)


@pytest.mark.parametrize(
    "overrides",
    [
        ["mesh.dims={ pp = 2, dp = 1, tp = 1 }"],
        ["mesh.dims={ pp = 1, dp = 2, tp = 1 }", 'parallel.shard="dp"', "parallel.data="],
        ["mesh.dims={ pp = 2, dp = 2, tp = 1 }", "train.checkpoint_every=2"],
    ],
    ids=["pipeline", "shard", "checkpoint"],
)
def test_what_uses_torchs_groups(overrides: list[str], tmp_path: Path) -> None:
    (alone,) = train(settings(tmp_path / "alone"), 1)
    split = settings(tmp_path / "split", *overrides)
    for summary in train(split, prod(split.mesh.dims.values())):
        assert summary.losses == pytest.approx(alone.losses, rel=1e-12)
