"""The same training on every mesh, the data it reads, and what it tells."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
import sysconfig
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor

import meshcomm
from meshcomm.config import Config, DataConfig, ModelConfig, TrainConfig, load
from meshcomm.errors import TrainingError
from meshcomm.mesh import Mesh
from meshcomm.parallel import GradientSync, Stage, TensorSplit, whole
from meshcomm.parallel.splits import Splits
from meshcomm.testing import Pool
from meshcomm.train import Silent, Start, Step, Summary, learning_rate, run, trainer_for
from meshcomm.train import data as text
from meshcomm.train.data import Batches, Corpus
from meshcomm.train.loop import batches_of
from meshcomm.train.metrics import MetricsFile
from meshcomm.train.model import Transformer, initialise
from meshcomm.train.screen import TrainingReporter, curve, duration, summary_panel

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"

TINY: dict[str, Any] = {
    "mesh": {"dims": {"pp": 1, "dp": 1, "tp": 1}, "device": "cpu", "timeout_s": 60.0},
    # Small buckets: several all_reduces per step, even of this model.
    "parallel": {"data": "dp", "tensor": "tp", "pipeline": "pp", "bucket_mb": 0.01},
    # Three layers: stages of two and one.
    "model": {"layers": 3, "width": 32, "heads": 4, "kv_heads": 2, "ff": 64},
    "data": {"sequence": 16, "max_bytes": 200_000},
    "train": {"steps": 6, "global_batch": 8, "microbatch": 2, "warmup_steps": 2, "seed": 7},
}


def tiny(*overrides: str) -> Config:
    return load(TINY, overrides)


# -- the same training on every mesh --------------------------------------------------------------

Weights = dict[str, np.ndarray[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Trained:
    """Every step's loss, this rank's stages' whole weights, and which samples its coord along data reads."""

    losses: list[float]
    weights: Weights
    coord: int
    offsets: list[list[int]]


def train(config: Config) -> Trained:
    with meshcomm.init(config) as mesh:
        trainer = trainer_for(mesh, config)
        _, _, _, settings = trainer.sections
        read = batches_of(trainer, text.load(trainer.sections[2]))
        steps = range(1, settings.steps + 1)
        losses = [trainer.step(*read(step), learning_rate(settings, step)).loss for step in steps]
        weights = {name: whole(p).numpy() for name, p in trainer.named_parameters()}
        for state in trainer.optimizer.state.values():
            # What a checkpoint of the optimiser would save is whole, as the parameters are.
            assert isinstance(state["exp_avg"], torch.distributed.tensor.DTensor) == (mesh.size("tp") > 1)
        (sync,) = trainer.gradients
        assert isinstance(sync, GradientSync) and len(sync.buckets) > 1
        mine = batches(trainer.data_coord, trainer.data_size)
        return Trained(losses, weights, mesh.coord("dp"), [mine.offsets(step).tolist() for step in steps])


def gathered(results: list[Trained]) -> Trained:
    """One list of losses and all weights; ranks that hold the same thing hold it bit by bit."""
    weights: Weights = {}
    for found in results:
        assert found.losses == results[0].losses
        for name, value in found.weights.items():
            assert np.array_equal(weights.setdefault(name, value), value), name
    return dataclasses.replace(results[0], weights=weights)


@pytest.mark.parametrize(
    ("overrides", "ranks", "tolerance"),
    [
        # Adam divides by the gradient's own size, so a difference of 1e-7 in a tiny gradient becomes
        # one in the step; measured over 20 steps: 2e-7 in losses, 3e-6 in weights.
        (["mesh.dims={ pp = 1, dp = 2, tp = 2 }", "train.microbatch=4"], 4, 1e-5),
        # Other dims first, ranks in disorder, uneven stages, all microbatches in flight.
        (
            [
                'train.dtype="float64"',
                "mesh.dims={ tp = 2, dp = 2, pp = 2 }",
                "mesh.rank_order=[3, 1, 7, 0, 5, 2, 6, 4]",
                'parallel.schedule="gpipe"',
                "train.steps=3",
            ],
            8,
            1e-12,
        ),
    ],
    ids=["float32", "float64"],
)
def test_losses_weights_and_data_do_not_depend_on_the_mesh(
    pool: Pool, overrides: list[str], ranks: int, tolerance: float
) -> None:
    alone = [each for each in overrides if each.startswith(("train.dtype", "train.steps"))]
    one = pool.run(train, tiny(*alone), ranks=1)[0]
    assert one.losses[-1] < one.losses[0] - 0.05
    results = pool.run(train, tiny(*overrides), ranks=ranks)
    many = gathered(results)
    assert many.weights.keys() == one.weights.keys()
    assert many.losses == pytest.approx(one.losses, rel=tolerance, abs=0)
    for name, value in one.weights.items():
        assert np.linalg.norm(many.weights[name] - value) < tolerance * np.linalg.norm(value), name
    # Ranks along tensor and pipeline read the same samples, those along data their own.
    by_coord = [{tuple(map(tuple, one.offsets)) for one in results if one.coord == c} for c in (0, 1)]
    (first,), (second,) = by_coord
    for step, (left, right) in enumerate(zip(first, second, strict=True), start=1):
        assert [*left, *right] == batches(0, 1).offsets(step).tolist()


# -- the model ------------------------------------------------------------------------------------


class NoMesh:
    """As much of a mesh as a split over nothing needs."""

    device = torch.device("cpu")


def plain_logits(weights: dict[str, Tensor], config: ModelConfig, tokens: Tensor) -> Tensor:
    """The transformer once more, as the formulas say it: loops over heads, complex rotations."""

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.norm_eps).sqrt() * weights[name + ".weight"]

    def linear(x: Tensor, name: str) -> Tensor:
        return torch.einsum("bsi,oi->bso", x, weights[name + ".weight"])

    length, size = tokens.shape[1], config.width // config.heads
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
    for layer in range(config.layers):
        at = f"layers.{layer}."
        h = norm(x, at + "attn_norm")
        q, k, v = (linear(h, at + f"attn.w{name}").split(size, -1) for name in "qkv")
        heads = []
        for head in range(config.heads):
            shared = head * config.kv_heads // config.heads
            scores = rotated(q[head]) @ rotated(k[shared]).mT / math.sqrt(size)
            heads.append(scores.masked_fill(future, -math.inf).softmax(-1) @ v[shared])
        x = x + linear(torch.cat(heads, -1), at + "attn.wo")
        h = norm(x, at + "ff_norm")
        gate = linear(h, at + "ff.w1")
        x = x + linear(gate * gate.sigmoid() * linear(h, at + "ff.w3"), at + "ff.w2")
    return linear(norm(x, "norm"), "head")


def test_the_model_is_the_transformer_it_says_it_is() -> None:
    config = ModelConfig(layers=2, width=24, heads=6, kv_heads=2, ff=40)
    split = Splits.of(TensorSplit(cast(Mesh, NoMesh()), None, torch.float64))
    model = Transformer(split, config, Stage(0, 1, range(2)), 9)
    initialise(model, config.layers, seed=1)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    tokens = torch.randint(256, (3, 9), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(tokens), plain_logits(weights, config, tokens), rtol=1e-12, atol=1e-13)


def test_weights_follow_from_the_seed_and_the_name_alone() -> None:
    config = ModelConfig(layers=4, width=16, heads=2, kv_heads=2, ff=16)
    split = Splits.of(TensorSplit(cast(Mesh, NoMesh()), None))

    def drawn(seed: int, stage: Stage) -> dict[str, Tensor]:
        model = Transformer(split, config, stage, 4)
        initialise(model, config.layers, seed)
        return dict(model.named_parameters())

    all_of_it = drawn(3, Stage(0, 1, range(4)))
    parts = {**drawn(3, Stage(0, 2, range(1))), **drawn(3, Stage(1, 2, range(1, 4)))}
    assert list(parts) == list(all_of_it)
    assert all(torch.equal(parts[name], value) for name, value in all_of_it.items())
    other = drawn(4, Stage(0, 1, range(4)))
    assert not torch.equal(other["layers.2.attn.wq.weight"], all_of_it["layers.2.attn.wq.weight"])
    assert not torch.equal(all_of_it["layers.1.ff.w1.weight"], all_of_it["layers.2.ff.w1.weight"])


# -- data -----------------------------------------------------------------------------------------

ABC = Corpus(np.arange(1000, dtype=np.int64).astype(np.uint8), (), b"")


def batches(coord: int, size: int, seed: int = 0) -> Batches:
    return Batches(ABC, sequence=7, global_batch=12, seed=seed, coord=coord, size=size)


@pytest.mark.parametrize("size", [1, 2, 3, 12])
def test_data_ranks_share_out_the_same_global_batch(size: int) -> None:
    for step in (1, 2, 50):
        whole_batch = batches(0, 1)(step)
        parts = [batches(coord, size)(step) for coord in range(size)]
        for index in (0, 1):
            assert torch.equal(torch.cat([part[index] for part in parts]), whole_batch[index])
            assert whole_batch[index].shape == (12, 7)
        assert sum(len(batches(coord, size).offsets(step)) for coord in range(size)) == 12


def test_samples_are_stretches_of_the_text_and_targets_follow() -> None:
    offsets = batches(0, 1).offsets(4)
    tokens, targets = batches(0, 1)(4)
    for offset, token, target in zip(offsets, tokens, targets, strict=True):
        assert token.tolist() == [value % 256 for value in range(offset, offset + 7)]
        assert target.tolist() == [value % 256 for value in range(offset + 1, offset + 8)]
    drawn = np.concatenate([batches(0, 1).offsets(step) for step in range(2000)])
    assert (drawn.min(), drawn.max()) == (0, 1000 - 8)
    assert not np.array_equal(batches(0, 1).offsets(1), batches(0, 1).offsets(2))
    assert not np.array_equal(batches(0, 1).offsets(1), batches(0, 1, seed=1).offsets(1))


def test_the_default_text_is_the_standard_library(tmp_path: Path) -> None:
    corpus = text.load(DataConfig(sequence=8, max_bytes=100_000))
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    assert len(corpus.text) == 100_000
    assert corpus.text.tobytes() == b"".join(file.read_bytes() for file in files)[:100_000]
    assert list(corpus.files) == files[: len(corpus.files)]


def test_files_and_globs_are_read_once_and_sorted(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.md"):
        (tmp_path / name).write_text(name * 3)
    config = DataConfig(files=(f"{tmp_path}/*.txt", f"{tmp_path}/b.txt"), sequence=4)
    corpus = text.load(config)
    assert corpus.text.tobytes() == b"a.txta.txta.txtb.txtb.txtb.txt"
    assert [file.name for file in corpus.files] == ["a.txt", "b.txt"]


def test_text_that_is_missing_or_too_short_is_told(tmp_path: Path) -> None:
    with pytest.raises(TrainingError) as caught:
        text.load(DataConfig(files=("nowhere/*.txt",), sequence=4))
    assert str(caught.value) == (
        "no training data matches 'nowhere/*.txt'\n"
        "  given:    data.files has 'nowhere/*.txt'\n"
        "  expected: a file, or a glob that matches at least one\n"
        "  try:      paths are relative to the config file"
    )
    (tmp_path / "short.txt").write_text("abcd")
    with pytest.raises(TrainingError) as caught:
        text.load(DataConfig(files=(f"{tmp_path}/short.txt",), sequence=4))
    assert str(caught.value) == (
        "4 bytes of training data are less than one sample\n"
        "  given:    1 files, max_bytes = 8000000, sequence = 4\n"
        "  expected: 5 bytes or more: a sample, and the byte after it\n"
        "  try:      more files, or a shorter sequence"
    )


# -- a run ----------------------------------------------------------------------------------------


class Notes:
    """A reporter that remembers what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def start(self, start: Start) -> None:
        self.calls.append(("start", start))

    def step(self, step: Step) -> None:
        self.calls.append(("step", step))

    def finish(self, summary: Summary) -> None:
        self.calls.append(("finish", summary))

    def interrupted(self, summary: Summary) -> None:
        self.calls.append(("interrupted", summary))


def run_once(config: Config) -> tuple[Summary, list[tuple[str, Any]]]:
    notes = Notes()
    threads = torch.get_num_threads()
    with meshcomm.init(config) as mesh:
        summary = run(mesh, config, notes)
    assert torch.get_num_threads() == threads
    return summary, notes.calls


def test_a_run_tells_every_rank_the_same_and_writes_metrics_once(pool: Pool, tmp_path: Path) -> None:
    config = tiny(
        "mesh.dims={ pp = 2, dp = 1, tp = 1 }",
        f'train.out="{tmp_path}"',
        "train.steps=4",
        "train.log_every=3",
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
    )
    assert start.parameters == sum(parameter.numel() for parameter in one.parameters())
    assert (start.steps, start.tokens_per_step, start.text_bytes) == (4, 8 * 16, 200_000)
    assert calls[-1][1] == summary
    assert summary.steps == len(summary.losses) == 4

    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    told = [dataclasses.asdict(value) for name, value in calls if name == "step"]
    assert [{**line, "fault": ""} for line in lines] == told
    assert [line["step"] for line in lines] == [1, 3, 4]
    assert [line["loss"] for line in lines] == [summary.losses[step - 1] for step in (1, 3, 4)]
    assert [line["tokens"] for line in lines] == [128 * step for step in (1, 3, 4)]
    rates = [round(line["tokens_per_s"] * seconds) for line, seconds in zip(lines, spans(lines), strict=True)]
    assert rates == [128 * steps for steps in (1, 2, 1)]
    assert {file.name for file in tmp_path.iterdir()} == {
        *("metrics.jsonl", "config.json", "run.json"),
        *("metrics.1.jsonl", "config.1.json", "run.1.json"),
    }
    again = load(tmp_path / "config.json")
    assert again == load(again, ["mesh.dims={ pp = 2, dp = 1, tp = 1 }"]) and again.train == config.train
    about, before = (json.loads((tmp_path / f"run{n}.json").read_text()) for n in ("", ".1"))
    assert about["state"] == before["state"] == "finished" and about["run"] != before["run"]
    assert (about["steps"], about["ended"]["steps"], about["ended"]["reason"]) == (4, 4, None)
    assert about["dims"] == {"pp": 2, "dp": 1, "tp": 1} and about["fingerprint"] == before["fingerprint"]
    assert about["ended"]["late"].keys() == {"pp"}
    assert {row["dim"] for row in about["ended"]["stats"]} >= {"pp"}


def spans(lines: list[dict[str, Any]]) -> list[float]:
    ends = [0.0, *(line["seconds"] for line in lines)]
    return [b - a for a, b in pairwise(ends)]


def diverge(config: Config) -> tuple[str, list[tuple[str, Any]]]:
    notes = Notes()
    with meshcomm.init(config) as mesh, pytest.raises(TrainingError) as caught:
        run(mesh, config, notes)
    return str(caught.value), notes.calls


def test_a_loss_that_is_not_finite_ends_the_run_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    overrides = ["mesh.dims={ pp = 2, dp = 1, tp = 1 }", f'train.out="{tmp_path}"', "train.lr=1e30"]
    results = pool.run(diverge, tiny(*overrides), ranks=2)
    assert len({message for message, _ in results}) == 1
    message, calls = results[0]
    step = calls[-1][1].steps + 1
    assert calls[-1][0] == "interrupted"
    assert re.fullmatch(
        rf"the (loss|gradient norm) of step {step} is (nan|inf)\n"
        r"  given:    rank \d \(pp=. dp=0 tp=.\): (nan|inf) in the gradient of \S+(, and of \d+ more of its \d+ "
        r"parameters)?\n"
        r"(            .*\n)*"
        r"            loss [\w.+]+, gradient norm (nan|inf), lr [\d.e+]+\n"
        r"  expected: finite numbers on every rank; this step is not applied, and nothing is saved after it\n"
        r"  try:      go on from the last checkpoint \(train.resume = true\) with a smaller train.lr than 1e\+30, "
        r'or with train.nonfinite = "skip"',
        message,
    )
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == calls[-1][1].steps
    about = json.loads((tmp_path / "run.json").read_text())
    assert (about["state"], about["ended"]["steps"]) == ("stopped", step - 1)
    assert re.fullmatch(rf"TrainingError: the .* of step {step} is (nan|inf)", about["ended"]["reason"])


def disagree(files: list[str], out: str) -> list[str]:
    """What this rank is told when rank 2 has other settings, other text, no text, no folder."""
    base = [f'train.out="{out}"', "train.steps=1", "train.warmup_steps=0", f'data.files=["{files[0]}"]']
    told = []
    with meshcomm.init(tiny("mesh.dims={ pp = 1, dp = 2, tp = 2 }")) as mesh:
        for odd in ("train.lr=0.1", f'data.files=["{files[1]}"]', 'data.files=["missing.txt"]'):
            config = tiny("mesh.dims={ pp = 1, dp = 2, tp = 2 }", *base, *([odd] if mesh.rank == 2 else []))
            with pytest.raises(TrainingError) as caught:
                run(mesh, config, Silent())
            told.append(str(caught.value))
        config = tiny("mesh.dims={ pp = 1, dp = 2, tp = 2 }", *base, f'train.out="{files[0]}/inside"')
        with pytest.raises(TrainingError) as caught:
            run(mesh, config, Silent())
        return [*told, str(caught.value)]


def test_ranks_that_would_train_something_else_are_named_before_the_first_step(
    pool: Pool, tmp_path: Path
) -> None:
    files = [str(tmp_path / "common.txt"), str(tmp_path / "odd.txt")]
    Path(files[0]).write_text("something to read " * 10)
    Path(files[1]).write_text("something else to read " * 10)
    told = pool.run(disagree, files, str(tmp_path / "run"), ranks=4)
    for rank, (settings, data, missing, folder) in enumerate(told):
        assert settings.startswith("ranks disagree on train.lr: rank 2 against the other 3\n")
        assert "train.lr: rank 2 = 0.1, the others 0.003\n" in settings
        assert data.startswith("ranks disagree on the training data: rank 2 against the other 3\n")
        assert missing.startswith(
            "no training data matches 'missing.txt'" if rank == 2 else "rank 2 could not start the training\n"
        )
        assert folder.startswith(
            "the folder for the run cannot be made: not a directory\n"
            if rank == 0
            else "rank 0 could not start the training\n"
        )
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


class Stop(Notes):
    def step(self, step: Step) -> None:
        super().step(step)
        if step.step == 2:
            raise KeyboardInterrupt


def interrupt(config: Config) -> list[tuple[str, Any]]:
    notes = Stop()
    with meshcomm.init(config) as mesh, pytest.raises(KeyboardInterrupt):
        run(mesh, config, notes)
    return notes.calls


def test_an_interrupted_run_says_how_far_it_came(pool: Pool, tmp_path: Path) -> None:
    config = tiny("mesh.dims={ pp = 1, dp = 2, tp = 1 }", f'train.out="{tmp_path}"')
    for calls in pool.run(interrupt, config, ranks=2):
        assert [name for name, _ in calls] == ["start", "step", "step", "interrupted"]
        assert calls[-1][1].steps == 2
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_the_learning_rate_rises_and_then_falls_to_a_tenth() -> None:
    settings = TrainConfig(steps=110, global_batch=1, microbatch=1, lr=2.0, warmup_steps=10)
    rates = [learning_rate(settings, step) for step in range(1, 111)]
    assert rates[:10] == pytest.approx([0.2 * step for step in range(1, 11)])
    assert rates[59] == pytest.approx(2.0 * (0.1 + 0.9 / 2))
    assert rates[109] == pytest.approx(0.2)
    assert all(a > b for a, b in pairwise(rates[9:]))
    none = TrainConfig(steps=1, global_batch=1, microbatch=1, lr=2.0)
    assert learning_rate(none, 1) == pytest.approx(0.2)


# -- what a person sees ---------------------------------------------------------------------------


def test_earlier_metrics_are_put_aside(tmp_path: Path) -> None:
    for run_number in range(3):
        with MetricsFile(tmp_path / "run") as file:
            file.write(Step(run_number, 1.0, 2.0, 0.1, 10, 5.0, 2.0))
            # Complete while the run goes on.
            assert json.loads(file.path.read_text())["step"] == run_number
    found = {file.name: json.loads(file.read_text())["step"] for file in (tmp_path / "run").iterdir()}
    assert found == {"metrics.1.jsonl": 0, "metrics.2.jsonl": 1, "metrics.jsonl": 2}


START = Start(steps=30, tokens_per_step=100, parameters=1234, text_bytes=5000, text_files=3, threads=1)
SUMMARY = Summary(30, tuple(5.5 - step / 10 for step in range(30)), 3000, 75.0, Path("runs/x/metrics.jsonl"))


def shown(terminal: bool, tell: Callable[[TrainingReporter], None]) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None)
    tell(TrainingReporter(console))
    return cast(io.StringIO, console.file).getvalue()


def whole_run(reporter: TrainingReporter) -> None:
    reporter.start(START)
    for step in range(1, 31):
        reporter.step(Step(step, 5.5 - step / 10, 2.0, 0.1, step * 100, 40.0, step * 2.5))
    reporter.finish(SUMMARY)


def test_without_a_terminal_a_line_comes_now_and_then() -> None:
    lines = shown(False, whole_run).splitlines()
    assert lines[0] == (
        "1,234 parameters, 5,000 bytes of text from 3 files, 30 steps of 100 tokens, 1 CPU thread per rank"
    )
    steps = [int(line.split("/")[0].removeprefix("step ")) for line in lines if line.startswith("step")]
    assert steps == [1, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30]
    # Before the first step is over, which can take long.
    assert "step 1 of 30" in lines[1]
    assert lines[3] == "step 3/30  loss 5.2000  40 tokens/s  1 min 8 s left"


def test_the_first_lines_say_what_warming_up_took() -> None:
    warm = dataclasses.replace(START, warm_up_s={"dp": 0.0123, "tp": 0.5})
    lines = shown(False, lambda reporter: reporter.start(warm)).splitlines()
    assert lines[1] == "groups warmed up: dp 12.3 ms, tp 500.0 ms"


def test_without_a_terminal_slow_steps_are_not_kept_quiet() -> None:
    def tell(reporter: TrainingReporter) -> None:
        reporter.start(dataclasses.replace(START, steps=1000))
        for step in range(1, 6):
            reporter.step(Step(step, 5.0, 2.0, 0.1, step * 100, 40.0, step * 20.0))

    steps = [line.split("/")[0] for line in shown(False, tell).splitlines() if line.startswith("step")]
    assert steps == ["step 1", "step 3", "step 5"]


def test_on_a_terminal_there_is_one_bar_and_then_the_summary() -> None:
    out = shown(True, whole_run)
    assert "30/30" in out
    assert "loss 2.5000" in out
    assert "40 tokens/s" in out
    for fact in ("training finished", "5.5000 -> 2.6000", "1 min 15 s for 30 steps, 3,000 tokens"):
        assert fact in out


def test_an_interrupted_run_is_closed_with_one_line() -> None:
    def tell(reporter: TrainingReporter) -> None:
        reporter.start(START)
        reporter.step(Step(1, 5.4, 2.0, 0.1, 100, 40.0, 2.5))
        reporter.interrupted(dataclasses.replace(SUMMARY, steps=1, losses=(5.4,)))

    last = "stopped after step 1 of 30, loss 5.4000; metrics in runs/x/metrics.jsonl"
    assert shown(False, tell).splitlines()[-1] == last
    assert shown(True, tell).rstrip().endswith(last)


def test_the_curve_is_drawn_to_scale() -> None:
    assert curve([4.0, 3.0, 2.0, 1.0], columns=8, rows=4, braille=False) == [
        "4.00 |**",
        "     |  **",
        "     |    **",
        "1.00 |      **",
        "     +--------",
        "      1 step 4",
    ]
    # Dots of 2 x 4 in one character: bottom left, then up the right column without a gap.
    assert curve([1.0, 2.0], columns=1, rows=1)[0] == "1.00 ┤⡸"
    # Each column is the mean of its steps.
    assert curve([1.0, 3.0, 5.0, 7.0], columns=2, rows=2, braille=False)[:2] == ["6.00 | *", "2.00 |*"]
    flat = curve([3.0] * 5, columns=10, rows=3, braille=False)
    assert flat[0] == "3.00 |**********"
    assert max(len(line) for line in curve([1.0] * 500, columns=60)) <= 67


def test_a_console_without_unicode_gets_stars() -> None:
    console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="ascii"), width=100)
    console.print(summary_panel(SUMMARY, braille=console.encoding.startswith("utf")))


def test_durations() -> None:
    found = [duration(seconds) for seconds in (0, 7.24, 59.99, 83, 3599.7, 7260)]
    assert found == ["0.0 s", "7.2 s", "1 min 0 s", "1 min 23 s", "1 h 0 min", "2 h 1 min"]


# -- the quickstart -------------------------------------------------------------------------------


def test_the_quickstart_learns(pool: Pool, tmp_path: Path) -> None:
    dims = "mesh.dims={ pp = 1, dp = 2, tp = 1 }"  # the losses of any mesh
    config = load(QUICKSTART, [dims, "train.steps=12", f'train.out="{tmp_path}"'])
    summary, _ = pool.run(run_once, config, ranks=2, timeout_s=120)[0]
    assert abs(summary.losses[0] - math.log(256)) < 0.05
    assert summary.losses[-1] < 3.2
