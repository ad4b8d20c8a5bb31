"""TensorBoard and Weights & Biases get the numbers of metrics.jsonl from the first rank only, and never end a run."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import meshcomm
from meshcomm.config import Config
from meshcomm.errors import ConfigError, MeshcommError
from meshcomm.testing import Pool
from meshcomm.testing.pool import Limits
from meshcomm.train import Callback, Summary, run, sinks
from tests.train.runs import metrics, run_json
from tests.train.test_evaluation import on

# `import wandb` and `import tensorboard` are only tried if they are installed.
needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed"
)
needs_wandb = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")


def told(config: Config, failing: bool = False) -> Summary:
    with meshcomm.init(config) as mesh, pytest.MonkeyPatch.context() as patch:
        if failing:
            patch.setattr("torch.utils.tensorboard.SummaryWriter.add_scalar", _full)
        return run(mesh, config, Callback())


def _full(*_: Any) -> None:
    raise OSError(28, "no space left")


def written(out: Path) -> dict[str, list[tuple[int, float]]]:
    """The steps and values of all event files, by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(out / "tensorboard"))
    found.Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


@needs_tensorboard
def test_tensorboard_has_the_numbers_of_metrics_also_after_a_resume(pool: Pool, tmp_path: Path) -> None:
    more = ('train.log_to=["tensorboard"]', "train.checkpoint_every=2", "train.peak_flops=1e12")
    pool.run(told, on("dp=2", tmp_path, "train.steps=4", *more), ranks=2)
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
    # The resumed run adds lines after step 4.
    pool.run(told, on("dp=2", tmp_path, "train.steps=6", "train.resume=true", *more), ranks=2)
    found = written(tmp_path)
    steps = [line for line in metrics(tmp_path) if "loss" in line]
    for key in ("loss", "gradient_norm", "lr", "tokens_per_s", "mfu", "peak_memory_bytes"):
        assert found[f"train/{key}"] == [
            (line["step"], pytest.approx(line[key], rel=1e-6)) for line in steps
        ], key
    losses = [
        (line["step"], line["validation_loss"]) for line in metrics(tmp_path) if "validation_loss" in line
    ]
    assert found["validation/loss"] == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in losses]
    assert [step for step, _ in losses] == [2, 4, 6]


@needs_tensorboard
def test_one_that_fails_is_said_once_and_the_run_goes_on(pool: Pool, tmp_path: Path) -> None:
    config = on("dp=2", tmp_path, 'train.log_to=["tensorboard"]')
    ends = pool.call(partial(told, config, True), ranks=2, limits=Limits(60), capture=True)
    said = [
        end.err.count("meshcomm: metrics no longer go to tensorboard; the run continues: OSError")
        for end in ends
    ]
    assert said == [1, 0]
    assert [line["step"] for line in metrics(tmp_path) if "loss" in line] == [1, 2, 3, 4]
    assert run_json(tmp_path)["state"] == "finished"


def refused(config: Config) -> str:
    def missing(name: str) -> None:
        return None

    with meshcomm.init(config) as mesh, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sinks.importlib.util, "find_spec", missing)
        with pytest.raises(MeshcommError) as caught:
            run(mesh, config, Callback())
        return str(caught.value)


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_before_the_training(pool: Pool, tmp_path: Path, name: str) -> None:
    out = tmp_path / "run"
    config = on("dp=2", out, f'train.log_to=["{name}"]')
    texts = pool.run(refused, config, ranks=2)
    for text in texts:
        assert f"{name} is not installed on this host" in text
        assert f"try:      pip install {name}, or train.log_to = []" in text
    assert texts[1].startswith("rank 0 (dp=0) could not start the training: ")
    assert not out.exists()


def test_each_is_named_once() -> None:
    with pytest.raises(ConfigError, match="listed twice"):
        on("one=1", "unused", 'train.log_to=["wandb", "wandb"]')


@needs_wandb
def test_weights_and_biases_is_written_offline_by_a_job_that_ends_well(tmp_path: Path) -> None:
    config = on("dp=2", tmp_path / "out", 'train.log_to=["wandb"]', "train.patience=1", "train.min_delta=50")
    (file := tmp_path / "train.json").write_text(config.model_dump_json(exclude_unset=True))
    env = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    command = [sys.executable, "-m", "meshcomm", "train", str(file), "--set", "train.steps=8"]
    done = subprocess.run(
        command, env={**env, "WANDB_ERROR_REPORTING": "false"}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert "ended early" in done.stdout
    ended = run_json(tmp_path / "out")["ended"]
    assert ended["steps"] == 4 and "has not fallen by more than 50 in 1 evaluations" in ended["reason"]
    (run_,) = (tmp_path / "out" / "wandb").glob("offline-run-*/run-*.wandb")
    content = run_.read_bytes()
    for key in (b"train/loss", b"train/model_flops_per_s", b"validation/loss"):
        assert key in content
