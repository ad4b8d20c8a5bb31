"""The same training on every mesh, its data, and its reports."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor

import meshcomm
from meshcomm.config import Config, ModelConfig, TrainConfig, load_config
from meshcomm.errors import TrainingError
from meshcomm.mesh import Mesh
from meshcomm.models.transformer import Transformer, initialise
from meshcomm.parallel import Stage, TensorSplit
from meshcomm.parallel.splits import Splits
from meshcomm.testing import Pool
from meshcomm.train import Callback, Start, Step, Summary, learning_rate, run
from meshcomm.train.screen import TrainingReporter
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


# -- the model ------------------------------------------------------------------------------------


class NoMesh:
    """The parts of a mesh that a split over nothing needs."""

    device = torch.device("cpu")
    is_async = False


def plain_logits(weights: dict[str, Tensor], config: ModelConfig, tokens: Tensor) -> Tensor:
    """The transformer again, written from the formulas: loops over heads, complex rotations."""

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.norm_eps).sqrt() * weights[name + ".weight"]

    def linear(x: Tensor, name: str) -> Tensor:
        return torch.einsum("bsi,oi->bso", x, weights[name + ".weight"])

    length, size = tokens.shape[1], config.hidden_size // config.num_heads
    turn = torch.polar(
        torch.ones(length, size // 2, dtype=torch.float64),
        torch.tensor(
            [[p * config.rope_theta ** (-2 * i / size) for i in range(size // 2)] for p in range(length)],
            dtype=torch.float64,
        ),
    )

    def rotated(x: Tensor) -> Tensor:
        pairs = torch.complex(x[..., : size // 2], x[..., size // 2 :]) * turn
        return torch.cat([pairs.real, pairs.imag], -1)

    x = weights["embed.weight"][tokens]
    future = torch.ones(length, length).triu(1).bool()
    for layer in range(config.num_layers):
        at = f"layers.{layer}."
        h = norm(x, at + "attn_norm")
        q, k, v = (linear(h, at + f"attn.w{name}").split(size, -1) for name in "qkv")
        heads = []
        for head in range(config.num_heads):
            shared = head * config.num_kv_heads // config.num_heads
            scores = rotated(q[head]) @ rotated(k[shared]).mT / math.sqrt(size)
            heads.append(scores.masked_fill(future, -math.inf).softmax(-1) @ v[shared])
        x = x + linear(torch.cat(heads, -1), at + "attn.wo")
        h = norm(x, at + "ff_norm")
        gate = linear(h, at + "ff.w1")
        x = x + linear(gate * gate.sigmoid() * linear(h, at + "ff.w3"), at + "ff.w2")
    return linear(norm(x, "norm"), "head")


def test_the_model_is_the_transformer_it_says_it_is() -> None:
    config = ModelConfig(num_layers=2, hidden_size=24, num_heads=6, num_kv_heads=2, intermediate_size=40)
    split = Splits.of(TensorSplit(cast(Mesh, NoMesh()), None, torch.float64))
    model = Transformer(split, config, Stage(0, 1, range(2)), 9, ONE_STEP)
    initialise(model, config, seed=1)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    tokens = torch.randint(256, (3, 9), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(tokens), plain_logits(weights, config, tokens), rtol=1e-12, atol=1e-13)


def test_weights_follow_from_the_seed_and_the_name_alone() -> None:
    config = ModelConfig(num_layers=4, hidden_size=16, num_heads=2, num_kv_heads=2, intermediate_size=16)
    split = Splits.of(TensorSplit(cast(Mesh, NoMesh()), None))

    def drawn(seed: int, stage: Stage) -> dict[str, Tensor]:
        model = Transformer(split, config, stage, 4, ONE_STEP)
        initialise(model, config, seed)
        return dict(model.named_parameters())

    all_of_it = drawn(3, Stage(0, 1, range(4)))
    parts = {**drawn(3, Stage(0, 2, range(1))), **drawn(3, Stage(1, 2, range(1, 4)))}
    assert list(parts) == list(all_of_it)
    assert all(torch.equal(parts[name], value) for name, value in all_of_it.items())
    other = drawn(4, Stage(0, 1, range(4)))
    assert not torch.equal(other["layers.2.attn.wq.weight"], all_of_it["layers.2.attn.wq.weight"])
    assert not torch.equal(all_of_it["layers.1.ff.w1.weight"], all_of_it["layers.2.ff.w1.weight"])


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
    one = Transformer(
        Splits.of(TensorSplit(cast(Mesh, NoMesh()), None)),
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
    assert [{**line, "fault": "", "mfu": None, "terms": {}} for line in lines] == told
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


def disagree(files: list[str], out: str) -> list[str]:
    """The errors on this rank if rank 2 has other settings, other text or no text, and if the folder cannot be made."""
    base = [f'train.out="{out}"', "train.steps=1", "train.warmup_steps=0", f'data.files=["{files[0]}"]']
    told = []
    with meshcomm.init(tiny("mesh.dims={ pp = 1, dp = 2, tp = 2 }")) as mesh:
        for odd in ("train.lr=0.1", f'data.files=["{files[1]}"]', 'data.files=["missing.txt"]'):
            config = tiny("mesh.dims={ pp = 1, dp = 2, tp = 2 }", *base, *([odd] if mesh.rank == 2 else []))
            with pytest.raises(TrainingError) as caught:
                run(mesh, config, Callback())
            told.append(str(caught.value))
        config = tiny("mesh.dims={ pp = 1, dp = 2, tp = 2 }", *base, f'train.out="{files[0]}/inside"')
        with pytest.raises(TrainingError) as caught:
            run(mesh, config, Callback())
        return [*told, str(caught.value)]


def test_ranks_that_would_train_something_else_are_named(pool: Pool, tmp_path: Path) -> None:
    files = [str(tmp_path / "common.txt"), str(tmp_path / "odd.txt")]
    Path(files[0]).write_text("something to read " * 10)
    Path(files[1]).write_text("something else to read " * 10)
    told = pool.run(disagree, files, str(tmp_path / "run"), ranks=4)
    for rank, (settings, data, missing, folder) in enumerate(told):
        assert settings.startswith("ranks disagree on train.lr: rank 2 against the other 3\n")
        assert "train.lr: rank 2 = 0.1, the others 0.003\n" in settings
        assert data.startswith("ranks disagree on data.sha256: rank 2 against the other 3\n")
        assert "try:      in data.files, name files that are identical on every host" in data
        others = "rank 2 (pp=0 dp=1 tp=0) could not start the training: "
        assert missing.startswith(f"{others * (rank != 2)}no training data matches 'missing.txt'\n")
        others = "rank 0 (pp=0 dp=0 tp=0) could not start the training: "
        assert folder.startswith(
            f"{others * (rank != 0)}the folder for the run cannot be created: not a directory\n"
        )
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


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


# -- the display of a run -------------------------------------------------------------------------


START = Start(
    steps=30,
    tokens_per_step=100,
    parameters=1234,
    text_bytes=5000,
    text_files=3,
    threads=1,
)
SUMMARY = Summary(30, tuple(5.5 - step / 10 for step in range(30)), 3000, 75.0, Path("runs/x/metrics.jsonl"))


def shown(terminal: bool, tell: Callable[[TrainingReporter], None]) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None)
    tell(TrainingReporter(console))
    return cast(io.StringIO, console.file).getvalue()


def whole_run(reporter: TrainingReporter) -> None:
    reporter.on_start(START)
    for step in range(1, 31):
        reporter.on_step(Step(step, 5.5 - step / 10, 2.0, 0.1, step * 100, 40.0, step * 2.5))
    reporter.on_end(SUMMARY, None)


def test_without_a_terminal_a_line_comes_now_and_then() -> None:
    lines = shown(False, whole_run).splitlines()
    assert lines[0] == (
        "1,234 parameters, 5,000 bytes of text from 3 files, 30 steps of 100 tokens, 1 CPU thread per rank"
    )
    # This line comes before the end of the first step, which can take long.
    assert "step 1 of 30" in lines[1]
    assert lines[3] == "step 3/30  loss 5.2000  40 tokens/s  0:01:08 left"
    steps = [int(line.split("/")[0].removeprefix("step ")) for line in lines if line.startswith("step")]
    assert steps == [1, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30]

    # Slow steps are still shown.
    def slow(reporter: TrainingReporter) -> None:
        reporter.on_start(dataclasses.replace(START, steps=1000))
        for step in range(1, 6):
            reporter.on_step(Step(step, 5.0, 2.0, 0.1, step * 100, 40.0, step * 20.0))

    steps = [
        int(line.split("/")[0][5:]) for line in shown(False, slow).splitlines() if line.startswith("step")
    ]
    assert steps == [1, 3, 5]


def test_on_a_terminal_there_is_one_bar_and_then_the_summary() -> None:
    out = shown(True, whole_run)
    facts = ("30/30", "loss 2.5000", "40 tokens/s", "training finished", "5.5000 -> 2.6000")
    for fact in (*facts, "0:01:15 for 30 steps, 3,000 tokens"):
        assert fact in out


@pytest.mark.parametrize("terminal", [True, False])
def test_a_reporter_tells_a_second_run_as_the_first(terminal: bool) -> None:
    def again(reporter: TrainingReporter) -> None:
        whole_run(reporter)
        reporter._say("again")
        whole_run(reporter)

    first, second = shown(terminal, again).split("again\n")
    assert second.splitlines()[-1] == first.splitlines()[-1] and "loss 2.5000  40 tokens/s" in second
    assert terminal or first == second


def test_an_interrupted_run_is_closed_with_one_line() -> None:
    def tell(reporter: TrainingReporter) -> None:
        reporter.on_start(START)
        reporter.on_step(Step(1, 5.4, 2.0, 0.1, 100, 40.0, 2.5))
        reporter.on_end(dataclasses.replace(SUMMARY, steps=1, losses=(5.4,)), KeyboardInterrupt())

    last = "stopped after step 1 of 30, loss 5.4000; metrics in runs/x/metrics.jsonl"
    assert shown(False, tell).splitlines()[-1] == last
    assert shown(True, tell).rstrip().endswith(last)


# -- the quickstart -------------------------------------------------------------------------------


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
