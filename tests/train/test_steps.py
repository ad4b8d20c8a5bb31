"""A run reports the same on every rank and writes its metrics once; learning rates follow their schedule."""

from __future__ import annotations

import dataclasses
import json
import math
from itertools import pairwise, product
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

import meshcomm
from meshcomm.config import Config, ModelConfig, TrainConfig, load_config
from meshcomm.mesh import Mesh
from meshcomm.models.transformer import Transformer
from meshcomm.parallel import Stage, TensorSplit
from meshcomm.parallel.context import ContextSplit
from meshcomm.parallel.splits import Splits
from meshcomm.testing import Pool
from meshcomm.train import Callback, Start, Step, Summary, learning_rate, run
from tests.train.runs import metrics, run_json

pytestmark = pytest.mark.long

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"

TINY: dict[str, Any] = {
    "mesh": {"dims": {"pp": 1, "dp": 1, "tp": 1}, "device": "cpu", "timeout_s": 60.0},
    # Small buckets: even this model makes several all_reduces per step.
    "parallel": {"data": "dp", "tensor": "tp", "pipeline": "pp", "options": {"bucket_mb": 0.01}},
    # Three layers: stages of two and one.
    "model": {"num_layers": 3, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 64},
    "data": {"seq_len": 16, "max_bytes": 200_000},
    "train": {"steps": 6, "global_batch_size": 8, "micro_batch_size": 2, "warmup_steps": 2, "seed": 7},
}
ONE_STEP = TrainConfig(steps=1, global_batch_size=1, micro_batch_size=1)


def tiny(*overrides: str) -> Config:
    return load_config(TINY, overrides)


class NoMesh:
    """The parts of a mesh that a split over nothing needs."""

    device = torch.device("cpu")
    is_async = False


# -- a run ----------------------------------------------------------------------------------------


class Notes(Callback):
    """Records the calls of its methods."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def on_start(self, start: Start) -> None:
        self.calls.append(("start", start))

    def on_step(self, step: Step) -> None:
        self.calls.append(("step", step))
        self.precision = torch.get_float32_matmul_precision()

    def on_end(self, summary: Summary, error: BaseException | None) -> None:
        self.calls.append(("interrupted" if error else "finish", summary))


def run_once(config: Config) -> tuple[Summary, list[tuple[str, Any]]]:
    notes = Notes()
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    with meshcomm.init(config) as mesh:
        summary = run(mesh, config, notes)
    assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == (threads, precision)
    assert config.train is not None
    assert notes.precision == (config.train.float32_matmul_precision or precision)
    return summary, notes.calls


def test_a_run_tells_every_rank_the_same_and_writes_metrics_once(pool: Pool, tmp_path: Path) -> None:
    config = tiny(
        "mesh.dims={ pp = 2, dp = 1, tp = 1 }",
        f'train.out="{tmp_path}"',
        "train.steps=4",
        "train.log_every=3",
        'train.float32_matmul_precision="high"',
    )
    for _ in range(2):
        results = pool.run(run_once, config, ranks=2)
    assert len({summary.losses for summary, _ in results}) == 1
    summary, calls = results[0]
    assert [name for name, _ in calls] == ["start", "step", "step", "step", "finish"]
    start = calls[0][1]
    mesh = cast(Mesh, NoMesh())
    one = Transformer(
        Splits(TensorSplit(mesh, None), ContextSplit(mesh, None)),
        cast(ModelConfig, config.model),
        Stage(0, 1, range(3)),
        16,
        ONE_STEP,
    )
    assert start.parameters == sum(parameter.numel() for parameter in one.parameters())
    assert (start.steps, start.tokens_per_step, start.text_bytes) == (4, 8 * 16, 200_000)
    assert calls[-1][1] == summary
    assert summary.steps == len(summary.losses) == 4

    lines = metrics(tmp_path)
    told = [dataclasses.asdict(value) for name, value in calls if name == "step"]
    # The MFU of a CPU is unknown.
    assert [
        {**line, "fault": "", "mfu": None, "terms": {}, "loss_scale": None, "experts": {}} for line in lines
    ] == told
    assert [line["step"] for line in lines] == [1, 3, 4]
    assert [line["loss"] for line in lines] == [summary.losses[step - 1] for step in (1, 3, 4)]
    assert [line["tokens"] for line in lines] == [128 * step for step in (1, 3, 4)]
    rates = [round(line["tokens_per_s"] * seconds) for line, seconds in zip(lines, spans(lines), strict=True)]
    assert rates == [128 * steps for steps in (1, 2, 1)]
    assert {file.name for file in tmp_path.iterdir()} == {
        *("metrics.jsonl", "config.json", "run.json"),
        *("metrics.1.jsonl", "config.1.json", "run.1.json"),
    }
    again = load_config(tmp_path / "config.json")
    assert (
        again == load_config(again, ["mesh.dims={ pp = 2, dp = 1, tp = 1 }"]) and again.train == config.train
    )
    about, before = (json.loads((tmp_path / f"run{n}.json").read_text()) for n in ("", ".1"))
    assert about["state"] == before["state"] == "finished" and about["run"] != before["run"]
    assert (about["steps"], about["ended"]["steps"], about["ended"]["reason"]) == (4, 4, None)
    assert about["dims"] == {"pp": 2, "dp": 1, "tp": 1} and about["fingerprint"] == before["fingerprint"]
    assert about["ended"]["late"].keys() == {"pp"}
    assert {row["dim"] for row in about["ended"]["stats"]} >= {"pp"}


def spans(lines: list[dict[str, Any]]) -> list[float]:
    ends = [0.0, *(line["seconds"] for line in lines)]
    return [b - a for a, b in pairwise(ends)]


def interrupt(config: Config) -> list[tuple[str, Any]]:
    class Stop(Notes):
        def on_step(self, step: Step) -> None:
            super().on_step(step)
            if step.step == 2:
                raise KeyboardInterrupt

    notes = Stop()
    with meshcomm.init(config) as mesh, pytest.raises(KeyboardInterrupt):
        run(mesh, config, notes)
    return notes.calls


def test_an_interrupted_run_says_how_far_it_came(pool: Pool, tmp_path: Path) -> None:
    config = tiny("mesh.dims={ pp = 1, dp = 2, tp = 1 }", f'train.out="{tmp_path}"')
    for calls in pool.run(interrupt, config, ranks=2):
        assert [name for name, _ in calls] == ["start", "step", "step", "interrupted"]
        assert calls[-1][1].steps == 2
    assert len(metrics(tmp_path)) == 2
    assert run_json(tmp_path)["ended"]["reason"] == "interrupted"


@pytest.mark.deep
def test_the_quickstart_learns(pool: Pool, tmp_path: Path) -> None:
    dims = "mesh.dims={ pp = 1, dp = 2, tp = 1 }"  # the losses of any mesh
    config = load_config(QUICKSTART, [dims, "train.steps=12", f'train.out="{tmp_path}"'])
    summary, _ = pool.run(run_once, config, ranks=2, timeout_s=120)[0]
    assert abs(summary.losses[0] - math.log(256)) < 0.05
    assert summary.losses[-1] < 3.2


def rates(**given: Any) -> list[float]:
    train = TrainConfig(global_batch_size=1, micro_batch_size=1, **given)
    return [learning_rate(train, step) for step in range(1, train.steps + 1)]


def test_rates_warm_up_and_end_where_their_schedule_says() -> None:
    # The default is 0.1 + 0.45 (1 + cos), exact to the last bit.
    shape = [0.1 + 0.45 * (1 + math.cos(math.pi * ((step - 5) / 55))) for step in range(6, 61)]
    warm = [3e-3 * step / 5 for step in range(1, 6)]
    assert rates(steps=60, warmup_steps=5, lr=3e-3) == warm + [3e-3 * each for each in shape]
    for schedule, least in product(("cosine", "linear"), (0.0, 0.25, 1.0)):
        found = rates(steps=20, warmup_steps=4, lr=2.0, schedule=schedule, min_lr_ratio=least)
        assert found[:4] == [0.5, 1.0, 1.5, 2.0]
        assert found[-1] == pytest.approx(2 * least, abs=1e-15)
        assert found[11] == pytest.approx(1 + least), "halfway"
        assert found[4:] == sorted(found[4:], reverse=True)
    linear = rates(steps=11, lr=1.0, schedule="linear", min_lr_ratio=0.0)
    assert np.allclose(np.diff(linear), -1 / 11)
    assert rates(steps=5, warmup_steps=2, lr=1.0, schedule="constant") == [0.5, 1.0, 1.0, 1.0, 1.0]
    assert rates(steps=3, warmup_steps=3, lr=3.0) == [1.0, 2.0, 3.0]
