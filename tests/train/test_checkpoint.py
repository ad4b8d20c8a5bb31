"""Checkpoints: whole or not there, loadable on any mesh, and a run that goes on as if undisturbed."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from typer.testing import CliRunner

import meshcomm
from meshcomm.cli import app
from meshcomm.config import Config, load
from meshcomm.errors import CommunicationError, ConfigError, TrainingError
from meshcomm.parallel import whole
from meshcomm.testing import Pool
from meshcomm.train import Attempt, Checkpoints, Resumed, Silent, Start, Step, Summary, run, trainer_for
from meshcomm.train.checkpoint import find_attempt
from meshcomm.train.lock import Lock, compare
from meshcomm.train.metrics import MetricsFile
from meshcomm.train.sharded import read_alone

TINY: dict[str, Any] = {
    "mesh": {"dims": {"pp": 2, "dp": 2, "tp": 2}, "device": "cpu", "timeout_s": 60.0},
    "parallel": {"data": "dp", "tensor": "tp", "pipeline": "pp", "bucket_mb": 0.01},
    "model": {"layers": 4, "width": 32, "heads": 8, "kv_heads": 4, "ff": 64},
    "data": {"sequence": 32, "max_bytes": 200_000},
    "train": {"steps": 10, "global_batch": 16, "microbatch": 2, "warmup_steps": 5, "seed": 7},
}
TWO = "mesh.dims={ pp = 1, dp = 2, tp = 1 }"
ONE = "mesh.dims={ pp = 1, dp = 1, tp = 1 }"


def tiny(out: Path, *overrides: str) -> Config:
    return load(TINY, [f'train.out="{out}"', *overrides])


class Notes(Silent):  # type: ignore[misc]
    """Remembers how the run started; stops it after a step, if told to."""

    def __init__(self, stop: int = 0) -> None:
        self.resumed: Resumed | None = None
        self.stop = stop

    def start(self, start: Start) -> None:
        self.resumed = start.resumed

    def step(self, step: Step) -> None:
        if step.step == self.stop:
            raise KeyboardInterrupt


def run_once(config: Config, attempt: Attempt | None = None) -> tuple[Summary, Resumed | None]:
    notes = Notes()
    with meshcomm.init(config) as mesh:
        return run(mesh, config, notes, attempt), notes.resumed


def metrics(out: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without times."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if key not in ("tokens_per_s", "seconds")}
        for line in lines
    ]


def tensors(checkpoint: Path, scratch: Path) -> dict[str, torch.Tensor]:
    """The whole tensors, read by torch's own converter."""
    dcp_to_torch_save(checkpoint, scratch / "whole.pt")
    found: dict[str, torch.Tensor] = torch.load(scratch / "whole.pt", weights_only=True)
    return found


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def undisturbed(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Summary]:
    """A run of 10 steps on pp2 dp2 tp2 with checkpoints of 4, 8 and 10."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    config = tiny(out, "train.checkpoint_every=4", "train.keep=3")
    results = pool.run(run_once, config, env={"SOME_API_TOKEN": "s3cret-in-the-environment"})
    assert names(out) == ["job", "latest", "step-000004", "step-000008", "step-000010"]
    assert (out / "checkpoints" / "latest").read_text() == "step-000010\n"
    assert {resumed for _, resumed in results} == {None}
    return out, results[0][0]


@pytest.fixture
def at_step_4(undisturbed: tuple[Path, Summary], tmp_path: Path) -> Path:
    """That run, as if it had been killed while step 8 was saved, in the middle of a line of metrics."""
    out = tmp_path / "run"
    shutil.copytree(undisturbed[0], out)
    shutil.rmtree(out / "checkpoints" / "step-000010")
    (out / "checkpoints" / "step-000008").rename(out / "checkpoints" / "step-000008.saving")
    (out / "checkpoints" / "latest").write_text("step-000010\n")
    lines = (out / "metrics.jsonl").read_text().splitlines(True)
    (out / "metrics.jsonl").write_text("".join(lines[:8]) + lines[8][:20])
    return out


# -- the same training, from there on -------------------------------------------------------------


def test_on_the_same_mesh_a_resumed_run_is_the_undisturbed_one_bit_by_bit(
    pool: Pool, undisturbed: tuple[Path, Summary], at_step_4: Path, tmp_path: Path
) -> None:
    out, summary = undisturbed
    config = tiny(at_step_4, "train.checkpoint_every=4", "train.keep=2", "train.resume=true")
    results = pool.run(run_once, config)
    for again, resumed in results:
        assert again.losses == summary.losses
        assert (again.steps, again.tokens) == (10, summary.tokens)
        assert resumed is not None
        assert (resumed.step, resumed.folder) == (4, at_step_4 / "checkpoints" / "step-000004")
        assert resumed.differences == ()  # train.keep is one of those that change nothing
    assert metrics(at_step_4) == metrics(out)
    seconds = [json.loads(line)["seconds"] for line in (at_step_4 / "metrics.jsonl").read_text().splitlines()]
    assert seconds == sorted(seconds)
    assert names(at_step_4) == ["job", "latest", "step-000008", "step-000010"]
    assert (at_step_4 / "checkpoints" / "latest").read_text() == "step-000010\n"
    for step in ("step-000008", "step-000010"):
        expected = tensors(out / "checkpoints" / step, tmp_path)
        found = tensors(at_step_4 / "checkpoints" / step, tmp_path)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        # Of every weight: itself, two averages, and a count of steps.
        weights = [name for name in expected if name.startswith("model.")]
        assert len(expected) == 4 * len(weights) + 1 and len(weights) == 3 + 4 * 9
        assert found["model.layers.3.attn.wq.weight"].shape == (32, 32)


def test_checkpoints_written_beside_the_training_are_the_same(
    pool: Pool, undisturbed: tuple[Path, Summary], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    config = tiny(out, "train.checkpoint_every=4", "train.keep=3", "train.checkpoint_async=true")
    summary, _ = pool.run(run_once, config)[0]
    assert summary.losses == undisturbed[1].losses
    assert names(out) == names(undisturbed[0])
    for step in ("step-000004", "step-000010"):
        ours, theirs = (tensors(each / "checkpoints" / step, tmp_path) for each in (out, undisturbed[0]))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def loaded_and_continued(config: Config, checkpoint: Path) -> tuple[dict[str, Any], Summary, Resumed | None]:
    """The whole tensors right after loading, and the run that goes on from them."""
    with meshcomm.init(config) as mesh:
        trainer = trainer_for(mesh, config)
        state = trainer.state()
        assert config.train is not None
        Checkpoints(mesh, config.train).load(checkpoint, state)
        tensors = {name: whole(value).numpy().copy() for name, value in state.items()}
        # What was loaded is the module's own memory, not a copy.
        name, parameter = next(iter(trainer.named_parameters()))
        assert (whole(parameter).numpy() == tensors[f"model.{name}"]).all()
        notes = Notes()
        return tensors, run(mesh, config, notes), notes.resumed


@pytest.mark.parametrize(
    ("dims", "ranks", "overrides"),
    [
        ("{ dp = 2, tp = 2, pp = 1 }", 4, ["mesh.rank_order=[3, 1, 0, 2]"]),
        # A node less: dp fills what is left, with the same global batch.
        ("{ pp = 2, dp = -1, tp = 2 }", 4, []),
        # A mesh on part of the ranks.
        ("{ pp = 1, dp = 2, tp = 1 }", 2, ["mesh.ranks=[1, 2]", "train.microbatch=4"]),
        ("{ pp = 1, dp = 1, tp = 1 }", 1, ["train.microbatch=8"]),
    ],
)
def test_a_checkpoint_fits_any_mesh(
    pool: Pool,
    undisturbed: tuple[Path, Summary],
    at_step_4: Path,
    tmp_path: Path,
    dims: str,
    ranks: int,
    overrides: list[str],
) -> None:
    config = tiny(at_step_4, f"mesh.dims={dims}", "train.resume=true", "train.checkpoint_every=5", *overrides)
    checkpoint = at_step_4 / "checkpoints" / "step-000004"
    expected = tensors(checkpoint, tmp_path)
    members = [1, 2] if "mesh.ranks" in str(overrides) else list(range(ranks))
    started = 3 if len(members) < ranks or members != list(range(ranks)) else ranks
    results = pool.run(loaded_if_member, config, checkpoint, ranks=started)
    seen: set[str] = set()
    for found, summary, resumed in (results[rank] for rank in members):
        for name, value in found.items():
            assert torch.equal(torch.from_numpy(value), expected[name]), name
        seen |= found.keys()
        assert summary.losses[:4] == undisturbed[1].losses[:4]
        # Only the order of sums differs between meshes; measured: 2e-7.
        assert summary.losses == pytest.approx(undisturbed[1].losses, rel=1e-6)
        assert resumed is not None and resumed.step == 4
        assert any(
            line.startswith("mesh.dims: { pp = 2, dp = 2, tp = 2 } -> {") for line in resumed.differences
        )
    assert seen == expected.keys() - {"run.losses"}
    assert [line["step"] for line in metrics(at_step_4)] == list(range(1, 11))
    # And what this mesh saves is whole too.
    assert tensors(at_step_4 / "checkpoints" / "step-000010", tmp_path).keys() == expected.keys()


def loaded_if_member(config: Config, checkpoint: Path) -> Any:
    if config.mesh.ranks is not None and int(os.environ["RANK"]) not in config.mesh.ranks:
        with meshcomm.init(config):
            return None
    return loaded_and_continued(config, checkpoint)


# -- a killed rank --------------------------------------------------------------------------------

JOB = """
[mesh]
dims = { pp = 1, dp = 3, tp = 1 }
device = "cpu"
timeout_s = 30.0
[parallel]
data = "dp"
tensor = "tp"
pipeline = "pp"
[model]
layers = 2
width = 32
heads = 8
kv_heads = 4
ff = 64
[data]
sequence = 32
max_bytes = 200_000
[train]
steps = 60
global_batch = 12
microbatch = 4
checkpoint_every = 10
out = "run"
"""


# Imported by every process at its start. Rank 2 of the first attempt ends itself as soon as the checkpoint is
# there: no step can be made without it, however long the machine takes to run a thread.
KILLER = """
import os, signal, threading, time

def watch():
    while not os.path.exists("run/checkpoints/step-000020"):
        time.sleep(0.002)
    os.kill(os.getpid(), signal.SIGKILL)

if os.environ.get("RANK") == "2" and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
    threading.Thread(target=watch, daemon=True).start()
"""


def test_a_job_with_a_killed_rank_restarts_and_ends_like_one_without(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    # A run from before, with a checkpoint further on, that a restart must not take for its own.
    before = load(
        tmp_path / "job.toml",
        ["train.steps=2", "train.checkpoint_every=1", ONE, f'train.out="{tmp_path}/run"'],
    )
    pool.run(run_once, before, Attempt("another"), ranks=1)

    (tmp_path / "sitecustomize.py").write_text(KILLER)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    # One thread each, as the pool's ranks have: with more, sums may be taken in another order.
    more = {"PYTHONPATH": path, "RES_OPTIONS": "timeout:1 attempts:1", "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(
        [sys.executable, "-m", "meshcomm", "train", "--max-restarts", "1", "job.toml"],
        cwd=tmp_path,
        env={**os.environ, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = job.communicate(timeout=250)
    except BaseException:
        os.killpg(job.pid, signal.SIGKILL)
        raise
    assert job.returncode == 0, err
    assert re.search(r"^meshcomm: rank 2 \(.*\) was ended by SIGKILL; restart 1 of 1$", err, re.MULTILINE), (
        err
    )
    words = [line for line in out.splitlines() if "resumed" in line]
    assert len(words) == 1
    step = int(words[0].split("after step ")[1].split()[0])
    assert words == [f"restart 1: resumed after step {step} from run/checkpoints/step-{step:06d}"]
    assert 20 <= step < 60

    config = load(tmp_path / "job.toml", [f'train.out="{tmp_path}/other"'])
    pool.run(run_once, config, ranks=3)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "other")
    assert len(metrics(tmp_path / "run")) == 60
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "checkpoints",
        "checkpoints.1",
        "config.1.json",
        "config.json",
        "metrics.1.jsonl",
        "metrics.jsonl",
        "run.1.json",
        "run.json",
    ]
    assert content(tmp_path / "run/checkpoints/step-000060").keys() == (
        content(tmp_path / "other/checkpoints/step-000060").keys()
    )
    ours, theirs = (
        tensors(tmp_path / name / "checkpoints" / "step-000060", tmp_path) for name in ("run", "other")
    )
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def interrupted(config: Config, attempt: Attempt, stop: int) -> Resumed | None:
    notes = Notes(stop)
    with meshcomm.init(config) as mesh, pytest.raises(KeyboardInterrupt):
        run(mesh, config, notes, attempt)
    return notes.resumed


def test_only_restarts_of_the_same_job_go_on_by_themselves(pool: Pool, tmp_path: Path) -> None:
    config = tiny(tmp_path, ONE, "train.checkpoint_every=2", "train.steps=6")

    def left() -> list[str]:
        return sorted(path.name for path in tmp_path.iterdir())

    assert pool.run(interrupted, config, Attempt("a", 0), 1, ranks=1) == [None]
    # Restarted before the first checkpoint: the same file from its first line.
    (resumed,) = pool.run(interrupted, config, Attempt("a", 1), 3, ranks=1)
    assert resumed == Resumed(0, tmp_path / "checkpoints", (), 1)
    assert left() == ["checkpoints", "config.json", "metrics.jsonl", "run.json"]
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3]
    ((_, resumed),) = pool.run(run_once, config, Attempt("a", 2), ranks=1)
    assert resumed == Resumed(2, tmp_path / "checkpoints" / "step-000002", (), 2)
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]
    # A finished run that resumes has nothing left to do.
    again = tiny(tmp_path, ONE, "train.checkpoint_every=2", "train.steps=6", "train.resume=true")
    ((summary, resumed),) = pool.run(run_once, again, ranks=1)
    assert summary.steps == 6 and resumed is not None and resumed.step == 6
    assert len(metrics(tmp_path)) == 6 and left() == [
        "checkpoints",
        "config.json",
        "metrics.jsonl",
        "run.json",
    ]
    # Another job, restarted or not, starts anew, and nothing is lost.
    first = content(tmp_path)
    for attempt in (Attempt("b", 1), Attempt("", 1), Attempt("b", 0)):
        assert pool.run(interrupted, config, attempt, 3, ranks=1) == [None]
    kept = content(tmp_path)
    assert kept["metrics.1.jsonl"] == first["metrics.jsonl"]
    assert kept["checkpoints.1/step-000006/.metadata"] == first["checkpoints/step-000006/.metadata"]
    assert left() == sorted(
        [
            f"{name}{n}{end}"
            for n in ("", ".1", ".2", ".3")
            for name, end in (
                ("checkpoints", ""),
                ("config", ".json"),
                ("metrics", ".jsonl"),
                ("run", ".json"),
            )
        ]
    )


def test_the_launcher_says_which_attempt_this_is() -> None:
    assert find_attempt({}) == Attempt("", 0)
    assert find_attempt({"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "2"}) == Attempt("", 2)
    assert find_attempt({"TORCHELASTIC_RUN_ID": "x1", "TORCHELASTIC_RESTART_COUNT": "1"}) == Attempt("x1", 1)


# -- a save that breaks off -----------------------------------------------------------------------


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_while_saving(config: Config, moment: str) -> None:
    """Save step 2 well, and end this rank at a moment of saving step 4."""
    from meshcomm.train.sharded import _Writer

    rank = int(os.environ["RANK"])
    folder = Path(config.train.out if config.train else "") / "checkpoints"

    def armed() -> bool:
        return (folder / "step-000002").exists()

    write_data, finish, rename, rmtree = _Writer.write_data, _Writer.finish, Path.rename, shutil.rmtree

    def writing(self: Any, plan: Any, planner: Any) -> Any:
        if armed() and rank == 1:
            (folder / "step-000004.saving" / "__1_0.distcp").write_bytes(b"half a ")
            die()
        return write_data(self, plan, planner)

    def finishing(self: Any, metadata: Any, results: Any) -> None:
        finish(self, metadata, results)
        if armed():
            die()

    def renaming(self: Path, target: Any) -> Path:
        now = armed() and self.suffix == ".saving"
        if now and moment == "before the rename":
            die()
        done = rename(self, target)
        if now:
            die()
        return done

    def removing(path: Path, **options: Any) -> None:
        if path.suffix == ".removing":
            next(path.iterdir()).unlink()
            die()
        rmtree(path, **options)

    if moment == "while writing":
        _Writer.write_data = writing  # type: ignore[method-assign, misc]
    elif moment == "after the metadata":
        _Writer.finish = finishing  # type: ignore[method-assign, misc]
    elif moment == "while removing the old one":
        shutil.rmtree = removing  # type: ignore[assignment]
    else:
        Path.rename = renaming  # type: ignore[method-assign, assignment]
    run_once(config)


@pytest.mark.parametrize(
    ("moment", "left", "step"),
    [
        ("while writing", ["job", "latest", "step-000002", "step-000004.saving"], 2),
        pytest.param(
            *("after the metadata", ["job", "latest", "step-000002", "step-000004.saving"], 2),
            marks=pytest.mark.faults,
        ),
        ("before the rename", ["job", "latest", "step-000002", "step-000004.saving"], 2),
        pytest.param(
            *("after the rename", ["job", "latest", "step-000002", "step-000004"], 4),
            marks=pytest.mark.faults,
        ),
        ("while removing the old one", ["job", "latest", "step-000002.removing", "step-000004"], 4),
    ],
)
def test_a_rank_killed_while_saving_harms_no_complete_checkpoint(
    pool: Pool, tmp_path: Path, moment: str, left: list[str], step: int
) -> None:
    config = tiny(tmp_path, TWO, "train.checkpoint_every=2", "train.keep=1", "train.steps=6")
    results = pool.run(killed_while_saving, config, moment, ranks=2, allow=True)
    victim = 1 if moment == "while writing" else 0
    assert isinstance(results[victim], ChildProcessError)
    assert isinstance(results[1 - victim], CommunicationError)
    assert names(tmp_path) == left
    results = pool.run(run_once, load(config, ["train.resume=true"]), ranks=2)
    assert {resumed.step for _, resumed in results} == {step}
    assert names(tmp_path) == ["job", "latest", "step-000006"]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-000006\n"
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]


def without_space(config: Config) -> str:
    """Run; from the first checkpoint on, rank 1 cannot write a file of more than 4 KiB."""
    assert config.train is not None
    first = Path(config.train.out) / "checkpoints" / "step-000002"

    class Limit(Notes):
        def step(self, step: Step) -> None:
            if step.step == 3 and os.environ["RANK"] == "1":
                assert first.exists()
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))

    try:
        with meshcomm.init(config) as mesh, pytest.raises(TrainingError) as caught:
            run(mesh, config, Limit())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return str(caught.value)


def test_a_full_disk_ends_the_run_with_its_rank_and_path(pool: Pool, tmp_path: Path) -> None:
    config = tiny(tmp_path, TWO, "train.checkpoint_every=2", "train.steps=6")
    told = pool.run(without_space, config, ranks=2)
    folder = tmp_path / "checkpoints"
    lines = told[1].splitlines()
    assert lines[0] == f"rank 1 (pp=0 dp=1 tp=0) could not save into {folder}/step-000004.saving"
    assert "File too large" in lines[1]
    assert lines[2:] == [
        "  expected: a folder that every rank can write to, with space for its part",
        "  try:      make space or mend the disk, then train.resume = true; "
        "the checkpoints before this one are whole",
    ]
    # The others say the same, of the same rank.
    assert told[0] == told[1]
    assert names(tmp_path) == ["job", "latest", "step-000002"]
    results = pool.run(run_once, load(config, ["train.resume=true"]), ranks=2)
    assert {resumed.step for _, resumed in results} == {2}


# -- what is refused ------------------------------------------------------------------------------


def refused(config: Config) -> tuple[str, str]:
    with meshcomm.init(config) as mesh, pytest.raises((ConfigError, TrainingError)) as caught:
        run(mesh, config, Silent())
    return type(caught.value).__name__, str(caught.value)


def test_another_training_is_refused_with_both_values(pool: Pool, at_step_4: Path) -> None:
    folder = at_step_4 / "checkpoints" / "step-000004"
    before = content(at_step_4)
    del before["checkpoints/step-000008.saving/.metadata"]
    config = tiny(at_step_4, TWO, "train.resume=true", "model.ff=32", "train.seed=8", "train.lr=0.1")
    for kind, text in pool.run(refused, config, ranks=2):
        assert kind == "ConfigError"
        assert text == (
            "this configuration trains something else than the checkpoint: model.ff, train.seed\n"
            f"  given:    model.ff = 32, and 64 in {folder}\n"
            f"            train.seed = 8, and 7 in {folder}\n"
            "  expected: the checkpoint's own model, data, batch, seed and dtype\n"
            "  try:      put them back; or train.resume = false or another train.out, for a run of its own"
        )
    # Nothing was lost by trying.
    assert content(folder) == {
        name.removeprefix("checkpoints/step-000004/"): value
        for name, value in before.items()
        if name.startswith("checkpoints/step-000004/")
    }
    assert (at_step_4 / "metrics.jsonl").read_bytes() == before["metrics.jsonl"]


LOCK = Lock(
    step=40,
    seconds=1.0,
    fingerprint="f",
    plan={"device": "cpu"},
    config={
        "mesh": {"dims": {"pp": 2, "dp": 2}},
        "model": {"width": 32},
        "data": {"sequence": 8, "files": [], "sha256": "aa"},
        "train": {"lr": 0.1, "seed": 7, "global_batch": 16, "dtype": "float32", "steps": 60},
    },
    versions={"torch": "2.13.0"},
)


def changed(section: str, **values: Any) -> Lock:
    return dataclasses.replace(
        LOCK, config={**LOCK.config, section: {**LOCK.config.get(section, {}), **values}}
    )


@pytest.mark.parametrize(
    ("now", "line"),
    [
        (changed("mesh", dims={"dp": 4}), "mesh.dims: { pp = 2, dp = 2 } -> { dp = 4 }"),
        (changed("mesh", dims={"dp": 2, "pp": 2}), "mesh.dims: { pp = 2, dp = 2 } -> { dp = 2, pp = 2 }"),
        (changed("train", lr=0.2), "train.lr: 0.1 -> 0.2"),
        (changed("train", steps=80), "train.steps: 60 -> 80"),
        (changed("train", new=1), "train.new: null -> 1"),
        (changed("train", clip_norm=1.0), "train.clip_norm: null -> 1.0"),
        (changed("train", compute_dtype="bfloat16"), 'train.compute_dtype: null -> "bfloat16"'),
        (changed("parallel", stages_per_rank=2), "parallel.stages_per_rank: 1 -> 2"),
        (changed("data", files=["x"]), 'data.files: [] -> ["x"]'),
        (dataclasses.replace(LOCK, versions={"torch": "2.14"}), 'versions.torch: "2.13.0" -> "2.14"'),
        (dataclasses.replace(LOCK, plan={"device": "cuda"}), 'device: "cpu" -> "cuda"'),
    ],
)
def test_what_may_differ_is_shown(now: Lock, line: str) -> None:
    assert compare(LOCK, now, Path("x"), 60) == (line,)


def test_settings_that_an_older_lock_does_not_know_have_their_defaults_there() -> None:
    # As a version wrote it that had fewer settings, compared with all of today's.
    today = json.loads(json.dumps(load(TINY).model_dump(mode="json")))
    now = dataclasses.replace(
        LOCK, config={name: today[name] for name in ("parallel", "model", "data", "train")}
    )
    older = {name: {key: today[name][key] for key in TINY[name]} for name in ("model", "data", "train")}
    saved = dataclasses.replace(
        LOCK, config={**older, "parallel": {"data": "dp", "pipeline": "pp", "tensor": "tp"}}
    )
    assert today["model"].keys() > older["model"].keys()
    assert compare(saved, now, Path("x"), 60) == ("parallel.bucket_mb: 25.0 -> 0.01",)
    # And the other way round: a setting of today, at its default, for a version that has none.
    assert compare(now, saved, Path("x"), 60) == ("parallel.bucket_mb: 0.01 -> 25.0",)
    tied = dataclasses.replace(
        now, config={**now.config, "model": {**today["model"], "tied_embeddings": True}}
    )
    with pytest.raises(
        ConfigError, match=r"trains something else than the checkpoint: model\.tied_embeddings"
    ) as caught:
        compare(saved, tied, Path("x"), 60)
    assert caught.value.given == "model.tied_embeddings = true, and false in x"


@pytest.mark.parametrize("name", ["checkpoint_async", "checkpoint_every", "keep", "log_every"])
def test_how_a_run_is_written_down_is_no_difference(name: str) -> None:
    assert compare(LOCK, changed("train", **{name: 3}), Path("x"), 60) == ()


@pytest.mark.parametrize(
    ("now", "values"),
    [
        (changed("model", width=64), "model.width = 64, and 32 in x"),
        (changed("data", sequence=16), "data.sequence = 16, and 8 in x"),
        (changed("data", sha256="bb"), 'data.sha256 = "bb", and "aa" in x'),
        (changed("train", seed=1), "train.seed = 1, and 7 in x"),
        (changed("train", global_batch=8), "train.global_batch = 8, and 16 in x"),
        (changed("train", dtype="float64"), 'train.dtype = "float64", and "float32" in x'),
    ],
)
def test_what_may_not_differ_is_refused(now: Lock, values: str) -> None:
    assert compare(LOCK, LOCK, Path("x"), 60) == ()
    with pytest.raises(ConfigError) as caught:
        compare(LOCK, now, Path("x"), 60)
    assert caught.value.given == values


def test_a_checkpoint_behind_the_last_step_is_refused() -> None:
    assert compare(LOCK, LOCK, Path("x"), 40) == ()
    with pytest.raises(ConfigError, match=r"further than this training goes: 40 > 30") as caught:
        compare(LOCK, LOCK, Path("x"), 30)
    assert caught.value.hint == "train.steps = 60, as it was; or another train.out"


def test_checkpoints_hold_no_environment(undisturbed: tuple[Path, Summary]) -> None:
    for name, value in content(undisturbed[0]).items():
        assert b"s3cret" not in value and b"SOME_API" not in value, name
    lock = json.loads((undisturbed[0] / "checkpoints" / "step-000004" / "lock.json").read_text())
    facts = {"format", "step", "seconds", "fingerprint", "plan", "config", "versions", "skipped"}
    assert lock.keys() == facts | {"metadata", "sha256"}
    assert lock["config"].keys() == {"mesh", "parallel", "model", "data", "train"}
    assert lock["plan"]["dims"] == {"pp": 2, "dp": 2, "tp": 2}


class Evil:
    """Would run a command while it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch run-by-pickle",)


def test_metadata_that_would_run_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(TrainingError) as caught:
        read_alone({}, tmp_path)
    assert str(caught.value).startswith(
        f"the checkpoint's metadata cannot be read\n  given:    {tmp_path}/.metadata: posix.system has no place"
    )
    assert not (tmp_path / "run-by-pickle").exists()


def refused_each(config: Config, files: list[str]) -> list[tuple[str, str]]:
    """What a rank hears of each damage in turn: each byte of a file another, half of it, or none of it there."""
    folder = Path(config.train.out if config.train else "") / "checkpoints" / "step-000004"
    found = []
    for name in files:
        file, _, damage = name.partition(" ")
        path = folder / file
        with meshcomm.init(config) as mesh:
            if mesh.rank == 0:
                content = path.read_bytes()
                path.unlink()
                if damage == "flipped":
                    path.write_bytes(bytes(byte ^ 1 for byte in content))
                elif damage == "cut short":
                    path.write_bytes(content[: len(content) // 2])
            mesh.barrier()
            with pytest.raises(TrainingError) as caught:
                run(mesh, config, Silent())
            found.append(str(caught.value))
            mesh.barrier()
            if mesh.rank == 0:
                path.write_bytes(content)
    return found


def test_a_damaged_checkpoint_ends_every_rank(pool: Pool, at_step_4: Path) -> None:
    folder = at_step_4 / "checkpoints" / "step-000004"
    files = [
        *("__3_0.distcp flipped", "__3_0.distcp cut short", "__3_0.distcp gone"),
        *(".metadata flipped", "lock.json cut short"),
    ]
    config = tiny(at_step_4, TWO, "train.resume=true")
    told = pool.run(refused_each, config, files, ranks=2)
    for name, texts in zip(files, zip(*told, strict=True), strict=True):
        for text in texts:
            assert f"{folder}/{name.split()[0]}: " in text
            assert f"\n  try:      move {folder} away; none is before it, so start afresh" in text
            if ".distcp" in name:
                assert re.search(
                    r"the checkpoint is damaged: (model|optimizer)\.\S+ in __3_0\.distcp\n", text
                )
    assert all("the CRC-32 of " in text or "File is not a zip file" in text for text, *_ in told)
    # And whole again, it is read.
    assert {resumed.step for _, resumed in pool.run(run_once, config, ranks=2) if resumed} == {4}


def test_a_tensor_of_another_shape_is_refused(undisturbed: tuple[Path, Summary]) -> None:
    folder = undisturbed[0] / "checkpoints" / "step-000004"
    for state, given in (
        ({"model.norm.weight": torch.zeros(33)}, "torch.float32 of shape (32,)"),
        ({"model.norm.weight": torch.zeros(32, dtype=torch.float64)}, "torch.float32 of shape (32,)"),
        ({"model.norm.bias": torch.zeros(32)}, "nothing"),
    ):
        with pytest.raises(TrainingError, match=r"does not fit: model\.norm") as caught:
            read_alone(state, folder)
        assert caught.value.given == f"{given} in {folder}"
    good = {"model.norm.weight": torch.zeros(32)}
    read_alone(good, folder)
    assert good["model.norm.weight"].abs().min() > 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.keep=3"], "train.keep: no effect: no checkpoints are saved"),
        (["train.keep=0", "train.checkpoint_every=1"], "train.keep"),
        (["train.checkpoint_every=-1"], "train.checkpoint_every"),
        (['train.resume="yes"'], "train.resume"),
    ],
)
def test_settings_of_checkpoints_are_checked(tmp_path: Path, overrides: list[str], message: str) -> None:
    tiny(tmp_path, "train.keep=3", "train.checkpoint_every=1", "train.resume=true")
    with pytest.raises(ConfigError) as caught:
        tiny(tmp_path, *overrides)
    assert message in str(caught.value)


def test_restarts_are_the_launchers_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    launched = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(app, ["train", "--max-restarts", "2", str(tmp_path / "job.toml")])
    assert done.exit_code == 2
    assert done.stderr.startswith("--max-restarts 2 inside a job that torchrun started\n")


# -- metrics --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "after", "kept"),
    [
        ('{"step": 1}\n{"step": 3}\n{"step": 6}\n', 5, '{"step": 1}\n{"step": 3}\n'),
        ('{"step": 1}\n{"step": 3}\n{"step": 6}\n', 6, '{"step": 1}\n{"step": 3}\n{"step": 6}\n'),
        ('{"step": 1}\n{"step": 3}\n{"st', 9, '{"step": 1}\n{"step": 3}\n'),
        ('{"step": 1}\n{"step": 3}', 9, '{"step": 1}\n'),
        ('{"step": 1}\nnot json\n{"step": 2}\n', 9, '{"step": 1}\n'),
        ('{"step": 1}\n', 0, ""),
        (None, 4, ""),
    ],
)
def test_metrics_are_cut_back_and_continued(tmp_path: Path, text: str | None, after: int, kept: str) -> None:
    path = tmp_path / "metrics.jsonl"
    if text is not None:
        path.write_text(text)
    with MetricsFile(tmp_path, after) as file:
        assert path.read_text() == kept
        file.write(Step(after + 1, 1.0, 2.0, 0.1, 10, 5.0, 2.0))
        file.sync()
    lines = path.read_text()
    assert lines.startswith(kept) and json.loads(lines[len(kept) :])["step"] == after + 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]
