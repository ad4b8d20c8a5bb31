"""Checkpoints of a run are whole or absent, load on any mesh, and let a run continue as if undisturbed."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorProperties
from typer.testing import CliRunner

import meshcomm
from meshcomm.commands import app
from meshcomm.config import Config, load_config
from meshcomm.errors import CommunicationError, MeshcommError, TrainingError
from meshcomm.parallel import whole
from meshcomm.testing import Pool
from meshcomm.train import Attempt, Callback, Resumed, Start, Step, Summary, Trainer, run
from meshcomm.train.checkpoint import writer as checkpoint_writer
from meshcomm.train.checkpoint.checkpoints import Checkpoints, read, resume
from meshcomm.train.checkpoint.lock import Lock
from meshcomm.train.checkpoint.reader import Saved, unpickle
from meshcomm.train.export import export_weights
from tests.train import runs

pytestmark = pytest.mark.long

TINY: dict[str, Any] = {
    "mesh": {"dims": {"pp": 2, "dp": 1, "tp": 2}, "device": "cpu", "timeout_s": 60.0},
    "parallel": {"data": "dp", "tensor": "tp", "pipeline": "pp", "options": {"bucket_mb": 0.01}},
    "model": {"num_layers": 2, "hidden_size": 32, "num_heads": 8, "num_kv_heads": 4, "intermediate_size": 64},
    "data": {"seq_len": 32, "max_bytes": 200_000},
    "train": {"steps": 10, "global_batch_size": 8, "micro_batch_size": 2, "warmup_steps": 5, "seed": 7},
}
TWO = "mesh.dims={ pp = 1, dp = 2, tp = 1 }"
ONE = "mesh.dims={ pp = 1, dp = 1, tp = 1 }"


def tiny(out: Path, *overrides: str) -> Config:
    return load_config(TINY, [f'train.out="{out}"', *overrides])


class Notes(Callback):
    """Records how the run started. Stops it after a step, if one is given."""

    def __init__(self, stop: int = 0) -> None:
        self.resumed: Resumed | None = None
        self.last = stop

    def on_start(self, start: Start) -> None:
        self.resumed = start.resumed

    def on_step(self, step: Step) -> None:
        if step.step == self.last:
            raise KeyboardInterrupt


def run_once(config: Config, attempt: Attempt | None = None) -> tuple[Summary, Resumed | None]:
    notes = Notes()
    with meshcomm.init(config) as mesh:
        return run(mesh, config, notes, attempt), notes.resumed


def metrics(out: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without times and memory."""
    measured = ("tokens_per_s", "seconds", "model_flops_per_s", "peak_memory_bytes", "peak_memory_rank")
    return [{k: v for k, v in line.items() if k not in measured} for line in runs.metrics(out)]


def tensors(step: Path) -> dict[str, torch.Tensor]:
    """The whole tensors of a checkpoint, read by torch's own converter."""
    file = step.parent.parent / "whole.pt"
    dcp_to_torch_save(step, file)
    found: dict[str, torch.Tensor] = torch.load(file, weights_only=True)
    file.unlink()
    return found


def equal(ours: Path, theirs: Path) -> bool:
    """Whether two checkpoints have the same tensors, bit by bit."""
    a, b = tensors(ours), tensors(theirs)
    return a.keys() == b.keys() and all(torch.equal(a[name], value) for name, value in b.items())


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def undisturbed(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Summary]:
    """A run of 10 steps on pp2 tp2 with checkpoints at steps 4, 8 and 10."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    config = tiny(out, "train.checkpoint_every=4", "train.keep=3")
    results = pool.run(run_once, config, env={"SOME_API_TOKEN": "s3cret-in-the-environment"}, ranks=4)
    assert names(out) == ["job", "latest", "step-000004", "step-000008", "step-000010"]
    assert (out / "checkpoints" / "latest").read_text() == "step-000010\n"
    assert {resumed for _, resumed in results} == {None}
    return out, results[0][0]


@pytest.fixture
def at_step_4(undisturbed: tuple[Path, Summary], tmp_path: Path) -> Path:
    """The same run, as if it had been killed during the save of step 8, in the middle of a line of metrics."""
    out = tmp_path / "run"
    shutil.copytree(undisturbed[0], out)
    shutil.rmtree(out / "checkpoints" / "step-000010")
    (out / "checkpoints" / "step-000008").rename(out / "checkpoints" / "step-000008.saving")
    (out / "checkpoints" / "latest").write_text("step-000010\n")
    lines = (out / "metrics.jsonl").read_text().splitlines(True)
    (out / "metrics.jsonl").write_text("".join(lines[:8]) + lines[8][:20])
    return out


# -- the same training, from there on -------------------------------------------------------------


@pytest.mark.parity
def test_a_resumed_run_is_bit_equal(pool: Pool, undisturbed: tuple[Path, Summary], at_step_4: Path) -> None:
    """The resumed run saves during training, and the other run saves between two steps."""
    out, summary = undisturbed
    more = ("train.checkpoint_every=4", "train.keep=2", "train.checkpoint_async=true")
    for again, resumed in pool.run(run_once, tiny(at_step_4, "train.resume=true", *more), ranks=4):
        assert (again.losses, again.steps, again.tokens) == (summary.losses, 10, summary.tokens)
        # A change of train.keep or train.checkpoint_async is not a difference.
        assert resumed == Resumed(4, at_step_4 / "checkpoints" / "step-000004", ())
    assert metrics(at_step_4) == metrics(out)
    seconds = [line["seconds"] for line in runs.metrics(at_step_4)]
    assert seconds == sorted(seconds)
    assert names(at_step_4) == ["job", "latest", "step-000008", "step-000010"]
    assert (at_step_4 / "checkpoints" / "latest").read_text() == "step-000010\n"
    for step in ("checkpoints/step-000008", "checkpoints/step-000010"):
        assert equal(at_step_4 / step, out / step)
    found = tensors(at_step_4 / "checkpoints/step-000010")
    # For each weight: the weight, two averages and a count of steps. For the run: its losses and the name of its optimizer.
    weights = [name for name in found if name.startswith("model.")]
    assert len(found) == 4 * len(weights) + 2 and len(weights) == 3 + 2 * 9
    assert found["model.layers.1.attn.wq.weight"].shape == (32, 32)


def loaded_and_continued(config: Config, path: Path) -> Any:
    """The whole tensors right after loading, and the run that continues from them; None on a rank outside the mesh."""
    with meshcomm.init(config) as mesh:
        if not mesh.is_member:
            return None
        trainer = Trainer(mesh, config).engine
        resume(mesh, trainer, path)
        state = trainer.state()
        tensors = {name: whole(value).numpy().copy() for name, value in state.items()}
        # Loading fills the module's own memory, not a copy.
        name, parameter = next(iter(trainer.named_parameters()))
        assert (whole(parameter).numpy() == tensors[f"model.{name}"]).all()
        notes = Notes()
        return tensors, run(mesh, config, notes), notes.resumed


@pytest.mark.parametrize(
    ("dims", "started", "overrides"),
    [
        pytest.param(
            "{ dp = 2, tp = 2, pp = 1 }", 4, ["mesh.rank_order=[3, 1, 0, 2]"], marks=pytest.mark.parity
        ),
        # Half of the ranks: dp takes the remaining ranks, with the same global batch.
        ("{ pp = 2, dp = -1, tp = 1 }", 2, []),
        # A mesh on some of the ranks.
        ("{ pp = 1, dp = 2, tp = 1 }", 3, ["mesh.ranks=[1, 2]", "train.micro_batch_size=4"]),
    ],
)
@pytest.mark.deep_cases(r"\[\{ pp = 1")
def test_a_checkpoint_fits_any_mesh(
    pool: Pool,
    undisturbed: tuple[Path, Summary],
    at_step_4: Path,
    dims: str,
    started: int,
    overrides: list[str],
) -> None:
    config = tiny(at_step_4, f"mesh.dims={dims}", "train.resume=true", "train.checkpoint_every=5", *overrides)
    path = at_step_4 / "checkpoints" / "step-000004"
    expected = tensors(path)
    seen: set[str] = set()
    results = [each for each in pool.run(loaded_and_continued, config, path, ranks=started) if each]
    assert len(results) == (2 if started == 3 else started)
    for found, summary, resumed in results:
        for name, value in found.items():
            assert torch.equal(torch.from_numpy(value), expected[name]), name
        seen |= found.keys()
        assert summary.losses[:4] == undisturbed[1].losses[:4]
        # Only the order of sums differs between meshes; the measured difference is 2e-7.
        assert summary.losses == pytest.approx(undisturbed[1].losses, rel=1e-6)
        assert resumed.step == 4
        assert any(
            line.startswith("mesh.dims: { pp = 2, dp = 1, tp = 2 } -> {") for line in resumed.differences
        )
    assert seen == expected.keys() - {"run.losses"}
    assert [line["step"] for line in metrics(at_step_4)] == list(range(1, 11))
    # The checkpoints that this mesh saves are whole too.
    assert tensors(at_step_4 / "checkpoints" / "step-000010").keys() == expected.keys()


# -- jobs: a killed rank, a full disk -------------------------------------------------------------


def job(folder: Path) -> Path:
    """Write TINY as a job of 30 steps on two ranks with the output folder "run"."""
    every = ("train.steps=30", "train.warmup_steps=0", "train.micro_batch_size=4", "train.checkpoint_every=5")
    path = folder / "job.json"
    path.write_text(tiny(Path("run"), TWO, *every).model_dump_json(exclude_unset=True))
    return path


# Every process imports this at its start. Rank 1 of the first attempt kills itself as soon as the checkpoint is there:
# no step can be made without it, however long the machine takes to run a thread.
KILLER = """
import os, signal, threading, time

def watch():
    while not os.path.exists("run/checkpoints/step-000010"):
        time.sleep(0.002)
    os.kill(os.getpid(), signal.SIGKILL)

if os.environ.get("RANK") == "1" and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
    threading.Thread(target=watch, daemon=True).start()
"""


def started(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a job of processes in `folder`. If it takes too long, kill all of them."""
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    # One thread per process, as in the pool: with more threads, the order of sums may differ.
    more = {"PYTHONPATH": path, "RES_OPTIONS": "timeout:1 attempts:1", "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(
        command,
        cwd=folder,
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
    return subprocess.CompletedProcess(command, job.returncode, out, err)


@pytest.mark.faults
def test_a_job_with_a_killed_rank_restarts_and_ends_like_one_without(pool: Pool, tmp_path: Path) -> None:
    path = job(tmp_path)
    # A restart must not take the checkpoints of this earlier run for its own.
    before = ["train.steps=2", "train.checkpoint_every=1", ONE, f'train.out="{tmp_path}/run"']
    pool.run(run_once, load_config(path, before), Attempt("another"), ranks=1)

    (tmp_path / "sitecustomize.py").write_text(KILLER)
    done = started(tmp_path, sys.executable, "-m", "meshcomm", "train", "--max-restarts", "1", "job.json")
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"^meshcomm: rank 1 \(.*\) was ended by SIGKILL; restart 1 of 1$", done.stderr, re.MULTILINE
    )
    (line,) = [line for line in done.stdout.splitlines() if "resumed" in line]
    step = int(line.split("after step ")[1].split()[0])
    assert line == f"restart 1: resumed after step {step} from run/checkpoints/step-{step:06d}"
    assert 10 <= step < 30

    pool.run(run_once, load_config(path, [f'train.out="{tmp_path}/other"']), ranks=2)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "other")
    assert len(metrics(tmp_path / "run")) == 30
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        *("checkpoints", "checkpoints.1", "config.1.json", "config.json"),
        *("metrics.1.jsonl", "metrics.jsonl", "run.1.json", "run.json"),
    ]
    last = "checkpoints/step-000030"
    assert content(tmp_path / "run" / last).keys() == content(tmp_path / "other" / last).keys()
    assert equal(tmp_path / "run" / last, tmp_path / "other" / last)


# The file system has room for about three checkpoints. It ends with the namespace, so its files are copied out.
FULL = """
mount -t tmpfs -o size=1500k tmpfs run || exit 77
"$@" --set train.checkpoint_every=1 --set train.keep=9; code=$?
cp -r run/. left
mount -o remount,size=100m run
"$@" --set train.checkpoint_every=30 --set train.resume=true > again.txt || exit 78
exit $code
"""


@pytest.mark.faults
def test_a_file_system_that_fills_up_while_saving_loses_nothing(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("this machine refuses user namespaces, in which a test may mount a file system")
    job(tmp_path)
    for name in ("run", "left"):
        (tmp_path / name).mkdir()
    train = (sys.executable, "-m", "meshcomm", "train", "job.json")
    done = started(tmp_path, "unshare", "-rm", "sh", "-c", FULL, "sh", *train)
    assert done.returncode not in (0, 77, 78), done.stderr
    *older, newest = complete = [name for name in names(tmp_path / "left") if name.startswith("step-")]
    assert older and not [name for name in complete if "." in name]
    folder = "run/checkpoints"
    failed = int(newest[-6:]) + 1
    assert re.search(
        rf"rank \d \(pp=0 dp=\d tp=0\) could not save into {folder}/step-{failed:06d}\.saving\n"
        rf" +given: +No space left on device: {folder}/step-{failed:06d}\.saving\S*; [01]\.\d MB are free there\n"
        r" +expected: a folder that every rank can write to, with space for its part\n"
        rf" +try: +make space, then train\.resume = true continues from {folder}/{newest}$",
        done.stderr,
        re.MULTILINE,
    ), done.stderr
    # Nothing is lost: each complete checkpoint has all of its tensors, and the run continues from the newest.
    for name in complete:
        step = tmp_path / "left/checkpoints" / name
        Lock.read(step)
        saved = Saved(step)
        saved.fill({name: torch.empty(kind.shape, dtype=kind.dtype) for name, kind in saved.kinds.items()})
    assert f"resumed after step {failed - 1} from {folder}/{newest}" in (tmp_path / "again.txt").read_text()


def interrupted(config: Config, attempt: Attempt, stop: int) -> Resumed | None:
    notes = Notes(stop)
    with meshcomm.init(config) as mesh, pytest.raises(KeyboardInterrupt):
        run(mesh, config, notes, attempt)
    return notes.resumed


def test_only_restarts_of_the_same_job_go_on_by_themselves(pool: Pool, tmp_path: Path) -> None:
    few = (ONE, "train.checkpoint_every=2", "train.steps=6", "train.global_batch_size=2")
    config = tiny(tmp_path, *few)
    files = [("checkpoints", ""), ("config", ".json"), ("metrics", ".jsonl"), ("run", ".json")]

    def left() -> list[str]:
        return sorted(path.name for path in tmp_path.iterdir())

    assert pool.run(interrupted, config, Attempt("a", 0), 1, ranks=1) == [None]
    # A restart before the first checkpoint writes the same file from its first line.
    (resumed,) = pool.run(interrupted, config, Attempt("a", 1), 3, ranks=1)
    assert resumed == Resumed(0, tmp_path / "checkpoints", (), 1)
    assert left() == [f"{name}{end}" for name, end in files]
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3]
    ((_, resumed),) = pool.run(run_once, config, Attempt("a", 2), ranks=1)
    assert resumed == Resumed(2, tmp_path / "checkpoints" / "step-000002", (), 2)
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]
    # A finished run that is resumed has nothing left to do.
    ((summary, resumed),) = pool.run(run_once, tiny(tmp_path, *few, "train.resume=true"), ranks=1)
    assert summary.steps == 6 and resumed is not None and resumed.step == 6
    assert len(metrics(tmp_path)) == 6 and left() == [f"{name}{end}" for name, end in files]
    # Another job, restarted or not, starts from scratch and loses nothing.
    first = content(tmp_path)
    for attempt in (Attempt("b", 1), Attempt("", 1), Attempt("b", 0)):
        assert pool.run(interrupted, config, attempt, 3, ranks=1) == [None]
    kept = content(tmp_path)
    assert kept["metrics.1.jsonl"] == first["metrics.jsonl"]
    assert kept["checkpoints.1/step-000006/.metadata"] == first["checkpoints/step-000006/.metadata"]
    assert left() == sorted(f"{name}{n}{end}" for n in ("", ".1", ".2", ".3") for name, end in files)


# -- a rank that is killed while it saves ---------------------------------------------------------


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_at(config: Config, moment: str) -> None:
    """Save step 2 completely, and kill this rank at a given moment of saving step 4."""
    rank = int(os.environ["RANK"])
    folder = Path(config.train.out if config.train else "") / "checkpoints"
    write_part, write_metadata = checkpoint_writer.write_part, checkpoint_writer.write_metadata
    rename, rmtree = Path.rename, shutil.rmtree

    def armed() -> bool:
        return (folder / "step-000002").exists()

    def writing(*args: Any) -> None:
        if armed() and rank == 1:
            (folder / "step-000004.saving").mkdir(exist_ok=True)
            (folder / "step-000004.saving" / "__1_0.distcp").write_bytes(b"half a ")
            die()
        write_part(*args)

    def finishing(*args: Any) -> None:
        write_metadata(*args)
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
        checkpoint_writer.write_part = writing
    elif moment == "after the metadata":
        checkpoint_writer.write_metadata = finishing
    elif moment == "while removing the old one":
        shutil.rmtree = removing  # type: ignore[assignment]
    else:
        Path.rename = renaming  # type: ignore[method-assign, assignment]
    run_once(config)


def killed_some_time(config: Config, seed: int) -> None:
    """Kill one rank or both at a random moment of the third save. The duration of the first save bounds the moment."""
    chance = random.Random(seed)
    victims = chance.choice([{0}, {1}, {0, 1}])
    save = Checkpoints.save
    took: list[float] = []

    def saving(self: Checkpoints, lock: Lock, state: Any) -> Path:
        began = time.perf_counter()
        if lock.step == 6 and int(os.environ["RANK"]) in victims:
            threading.Timer(chance.uniform(0, 1.5 * took[0]), die).start()
        path = save(self, lock, state)
        if not took:
            self.finish()
        took.append(time.perf_counter() - began)
        return path

    Checkpoints.save = saving  # type: ignore[method-assign]
    run_once(config)
    time.sleep(10)  # in case the save was faster


TWO_STEPS, FOUR = ["job", "latest", "step-000002"], ["job", "latest", "step-000004"]
MOMENTS: list[tuple[Any, list[str] | None, int | None]] = [
    ("before the rename", [*TWO_STEPS, "step-000004.saving"], 2),
    ("while writing", [*TWO_STEPS, "step-000004.saving"], 2),
    ("while removing the old one", [*FOUR[:2], "step-000002.removing", *FOUR[2:]], 4),
    ("after the metadata", [*TWO_STEPS, "step-000004.saving"], 2),
    ("after the rename", [*TWO_STEPS, "step-000004"], 4),
    *((seed, None, None) for seed in range(10)),
]


@pytest.mark.parametrize(
    ("moment", "left", "step"),
    [MOMENTS[0], *(pytest.param(*each, marks=pytest.mark.faults) for each in MOMENTS[1:])],
)
def test_a_rank_killed_while_saving_harms_no_complete_checkpoint(
    pool: Pool, tmp_path: Path, moment: str | int, left: list[str] | None, step: int | None
) -> None:
    in_background = isinstance(moment, int) and bool(moment % 2)
    config = tiny(tmp_path, TWO, "train.checkpoint_every=2", "train.keep=1", "train.steps=8")
    config = load_config(config, [f"train.checkpoint_async={str(in_background).lower()}"])
    how = killed_some_time if isinstance(moment, int) else killed_at
    results = pool.run(how, config, moment, ranks=2, allow=True)
    assert any(isinstance(each, ChildProcessError) for each in results)
    assert all(isinstance(each, ChildProcessError | CommunicationError) for each in results)
    if left is not None:
        assert names(tmp_path) == left
    else:
        complete = [int(name[-6:]) for name in names(tmp_path) if re.fullmatch(r"step-\d+", name)]
        assert complete and set(complete) <= {2, 4, 6, 8}
        step = max(complete)
    results = pool.run(run_once, load_config(config, ["train.resume=true"]), ranks=2)
    assert {resumed.step for _, resumed in results} == {step}
    assert names(tmp_path) == ["job", "latest", "step-000008"]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-000008\n"
    assert [line["step"] for line in metrics(tmp_path)] == list(range(1, 9))


# -- what is refused ------------------------------------------------------------------------------


def test_another_training_is_refused_with_both_values(pool: Pool, at_step_4: Path) -> None:
    folder = at_step_4 / "checkpoints" / "step-000004"
    before, metrics = content(folder), (at_step_4 / "metrics.jsonl").read_bytes()
    config = tiny(
        at_step_4, TWO, "train.resume=true", "model.intermediate_size=32", "train.seed=8", "train.lr=0.1"
    )
    for text in pool.run(runs.losses_or_error, config, ranks=2):
        assert text == (
            "this configuration trains something different from the checkpoint: model.intermediate_size, train.seed\n"
            f"  given:    model.intermediate_size = 32, and 64 in {folder}\n"
            f"            train.seed = 8, and 7 in {folder}\n"
            "  expected: the checkpoint's own model, data, batch, seed and dtype\n"
            "  try:      restore them; or set train.resume = false, or choose another train.out, for a separate run"
        )
    # The attempt loses nothing.
    assert content(folder) == before and (at_step_4 / "metrics.jsonl").read_bytes() == metrics


def test_checkpoints_hold_no_environment(undisturbed: tuple[Path, Summary]) -> None:
    for name, value in content(undisturbed[0]).items():
        assert b"s3cret" not in value and b"SOME_API" not in value, name
    lock = json.loads((undisturbed[0] / "checkpoints" / "step-000004" / "lock.json").read_text())
    facts = {"format", "step", "seconds", "fingerprint", "plan", "config", "versions", "skipped"}
    assert lock.keys() == facts | {"samples", "best", "metadata", "sha256"}
    assert lock["config"].keys() == {"mesh", "parallel", "model", "data", "train"}
    assert lock["plan"]["dims"] == {"pp": 2, "dp": 1, "tp": 2}


# torch has no public name for the enum of memory formats, so it is taken from pickled tensor properties.
ENCODING: Any = TensorProperties().__getstate__()[3].__class__


class ByName:
    """Pickles the member of an enum as Python 3.11.0 to 3.11.3 do."""

    def __init__(self, kind: type, name: str) -> None:
        self.given = kind, name

    def __reduce__(self) -> Any:
        return getattr, self.given


def test_members_of_an_enum_are_read_as_each_python_writes_them() -> None:
    assert unpickle(pickle.dumps(ByName(ENCODING, "TORCH_PRESERVE_FORMAT"))) is ENCODING.TORCH_PRESERVE_FORMAT
    for kind, name in ((ENCODING, "mro"), (TensorProperties, "__init__")):
        with pytest.raises(pickle.UnpicklingError, match=f"{name} is not allowed"):
            unpickle(pickle.dumps(ByName(kind, name)))


def refused_each(config: Config, files: list[str]) -> list[str]:
    """The errors on a rank after each damage in turn: a bit of each byte flipped, half of a file cut off, or a file removed."""
    folder = Path(config.train.out if config.train else "") / "checkpoints" / "step-000008"
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
                run(mesh, config, Callback())
            found.append(str(caught.value))
            mesh.barrier()
            if mesh.rank == 0:
                path.write_bytes(content)
    return found


def test_a_damaged_checkpoint_ends_every_rank_and_names_the_one_before(pool: Pool, at_step_4: Path) -> None:
    folder = at_step_4 / "checkpoints"
    (folder / "step-000008.saving").rename(folder / "step-000008")
    files = [
        *("__3_0.distcp flipped", "__3_0.distcp cut short", "__3_0.distcp gone"),
        *(".metadata flipped", ".metadata gone", "lock.json cut short", "lock.json gone"),
    ]
    config = tiny(at_step_4, TWO, "train.resume=true")
    told = pool.run(refused_each, config, files, ranks=2)
    for name, texts in zip(files, zip(*told, strict=True), strict=True):
        for text in texts:
            assert f"{folder}/step-000008/{name.split()[0]}: " in text
            file, _, damage = name.partition(" ")
            lost = damage == "gone" and ".distcp" not in file
            assert text.endswith(
                f"  try:      {f'restore {file}, or ' * lost}move {folder}/step-000008 away; "
                f"train.resume = true continues from {folder}/step-000004"
            )
            assert not lost or f"a checkpoint's {file} is missing" in text
            if ".distcp" in name:
                what = r"the checkpoint is damaged: (model|optimizer)\.\S+ in __3_0\.distcp\n"
                assert re.search(what, text)
    # The restored checkpoint is read again.
    assert {resumed.step for _, resumed in pool.run(run_once, config, ranks=2) if resumed} == {8}


def test_a_damaged_last_checkpoint_is_not_passed_over(pool: Pool, at_step_4: Path, tmp_path: Path) -> None:
    """A resumed run and an export refuse it; a new run moves it away with the others; an empty folder does not count."""
    folder = at_step_4 / "checkpoints"
    last = folder / "step-000008"
    config = tiny(at_step_4, ONE, "train.resume=true", "train.checkpoint_every=4")
    for damage, words in (
        (
            lambda: shutil.copytree(folder / "step-000004", last, ignore=shutil.ignore_patterns(".*")),
            "missing",
        ),
        (lambda: shutil.copytree(folder / "step-000004", last), "named after step 8 for .* step 4"),
        (lambda: last.write_text("a note"), "lock.json cannot be read"),
    ):
        damage()
        before = content(folder)
        for source in (at_step_4, folder, last):
            with pytest.raises(TrainingError, match=words) as caught:
                export_weights(source, tmp_path / "w.safetensors")
            assert str(last) in caught.value.given
        with meshcomm.init(config) as mesh, pytest.raises(TrainingError, match=words):
            run(mesh, config, Callback())
        assert (
            content(folder).items()
            >= {
                name: value
                for name, value in before.items()
                if name.startswith(("step-000004/", "step-000008/"))
            }.items()
        )
        shutil.rmtree(last) if last.is_dir() else last.unlink()
    last.mkdir()
    assert export_weights(at_step_4, tmp_path / "w.safetensors").step == 4
    assert run_once(config)[1].step == 4  # type: ignore[union-attr]
    for path in folder.glob("step-*"):
        (path / "lock.json").unlink()
    again = tiny(at_step_4, ONE, "train.steps=8", "train.checkpoint_every=8")
    assert run_once(again)[1] is None
    assert names(at_step_4) == ["job", "latest", "step-000008"]
    assert not (at_step_4 / "checkpoints.1" / "step-000008" / "lock.json").exists()


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("when", ["before", "during"])
def test_a_save_whose_name_is_taken_says_so_and_harms_nothing(
    tmp_path: Path, when: str, in_background: bool
) -> None:
    config = tiny(
        tmp_path,
        ONE,
        "train.steps=3",
        "train.warmup_steps=1",
        "train.checkpoint_every=1",
        f"train.checkpoint_async={str(in_background).lower()}",
    )
    taken = tmp_path / "checkpoints" / "step-000002"

    def take() -> None:
        taken.mkdir()
        (taken / "foreign").write_text("kept")

    class Take(Callback):
        def on_step(self, step: Step) -> None:
            if step.step == 2 and when == "before":
                take()

    write = checkpoint_writer.write_metadata

    def in_between(folder: Path, ranks: Any) -> None:
        write(folder, ranks)
        if when == "during" and folder.name.startswith(taken.name):
            take()

    with pytest.MonkeyPatch.context() as patch, meshcomm.init(config) as mesh:
        patch.setattr(checkpoint_writer, "write_metadata", in_between)
        with pytest.raises(TrainingError) as caught:
            run(mesh, config, Take())
    text = str(caught.value)
    assert f"a checkpoint cannot be saved as {taken}, which is there already" in text and "foreign" in text
    assert f"move {taken} away; train.resume = true continues from {taken.with_name('step-000001')}" in text
    assert names(tmp_path) == ["job", "latest", "step-000001", "step-000002"]
    assert [each.name for each in taken.iterdir()] == ["foreign"]


def saved_twice(config: Config, folder: Path) -> str:
    with meshcomm.init(config) as mesh:
        trainer = Trainer(mesh, config)
        trainer.save(folder)
        with pytest.raises(TrainingError) as caught:
            trainer.save(folder)
        trainer.load(folder)
        with pytest.raises(TrainingError, match="a folder named after step 4 for the checkpoint of step 0"):
            trainer.save(folder.with_name("step-000004"))
    return str(caught.value)


def test_a_trainer_does_not_save_over_its_own_checkpoint(pool: Pool, tmp_path: Path) -> None:
    for text in pool.run(saved_twice, tiny(tmp_path, TWO), tmp_path / "mine", ranks=2):
        assert "which is there already" in text and "or save into another folder" in text


# -- every rank the same, or nothing ---------------------------------------------------------------


def weights_of(trainer: Trainer) -> list[torch.Tensor]:
    return [whole(parameter).detach().clone() for _, parameter in trainer.engine.named_parameters()]


def same(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


def loaded_differently(config: Config, folder: Path) -> tuple[str, str, str]:
    """The errors of ranks that load, read, and resume from, different checkpoints; their weights stay as they were."""
    with meshcomm.init(config) as mesh:
        trainer = Trainer(mesh, config)
        for name in "ab":
            trainer.save(folder / name)
            with torch.no_grad():
                for _, parameter in trainer.engine.named_parameters():
                    parameter.add_(1.0)
        mine = folder / "ab"[mesh.rank]
        before = weights_of(trainer)
        with pytest.raises(TrainingError) as load:
            trainer.load(mine)
        state = {"model.norm.weight": torch.zeros(32)}
        with pytest.raises(TrainingError) as both:
            read(mesh, state, mine)
        assert same(before, weights_of(trainer)) and not state["model.norm.weight"].any()
        # Hosts may have different paths for the same folder.
        if mesh.rank == 0:
            shutil.copytree(folder / "a", folder / "copy")
        mesh.barrier()
        trainer.load(folder / ("a" if mesh.rank else "copy"))
        assert not same(before, weights_of(trainer))
        with pytest.raises(TrainingError) as resumed:
            run(mesh, load_config(config, [f'train.out="{folder}/run-{mesh.rank}"']), Callback())
    return str(load.value), str(both.value), str(resumed.value)


def test_ranks_that_would_load_different_checkpoints_all_refuse(
    pool: Pool, undisturbed: tuple[Path, Summary], tmp_path: Path
) -> None:
    for rank in range(2):
        shutil.copytree(undisturbed[0], tmp_path / f"run-{rank}")
    last = tmp_path / "run-1" / "checkpoints" / "step-000010"
    # The same step of another run.
    replace(Lock.read(last), seconds=1e6).write(last)
    for errors in pool.run(loaded_differently, tiny(tmp_path, TWO, "train.resume=true"), tmp_path, ranks=2):
        for text in errors:
            assert text.startswith("ranks would load different checkpoints\n")
        for text in errors[:2]:
            assert f"rank 0: step 0 in {tmp_path}/a\n" in text and f"rank 1: step 0 in {tmp_path}/b\n" in text
        assert f"rank 1: step 10 in {last}\n" in errors[2]


def test_a_checkpoint_that_is_replaced_while_a_run_begins_is_refused(at_step_4: Path) -> None:
    path = at_step_4 / "checkpoints" / "step-000004"
    config = tiny(at_step_4, ONE)
    with meshcomm.init(config) as mesh:
        engine = Trainer(mesh, config).engine
        begun = replace(Lock.read(path), seconds=9.0)
        with pytest.raises(TrainingError, match="has changed since the run began to read it"):
            resume(mesh, engine, path, run=True, begun=begun)


def test_a_pipe_in_a_run_is_refused_on_every_rank(pool: Pool, at_step_4: Path) -> None:
    config = tiny(at_step_4, TWO, "train.resume=true")
    for file in (at_step_4 / "metrics.jsonl", at_step_4 / "checkpoints" / "step-000004" / ".metadata"):
        file.unlink()
        os.mkfifo(file)
        for text in pool.run(runs.losses_or_error, config, ranks=2):
            assert "not a regular file" in text and str(file) in text, text


def refused_loads(config: Config, path: Path) -> tuple[str, str, str]:
    """The errors of loads with another optimizer and with a file cut short, which change nothing, and of one that fails in between."""
    with meshcomm.init(config) as mesh:
        trainer = Trainer(mesh, config, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1))
        before = weights_of(trainer)
        with pytest.raises(TrainingError) as other:
            trainer.load(path)
        assert same(before, weights_of(trainer)) and trainer.engine.done == 0
        trainer, file = Trainer(mesh, config), path / "__3_0.distcp"
        before = weights_of(trainer)
        content = bytearray(file.read_bytes())
        mesh.barrier()
        if mesh.rank == 0:
            os.truncate(file, len(content) - 9)
        mesh.barrier()
        with pytest.raises(TrainingError) as cut:
            trainer.load(path)
        assert same(before, weights_of(trainer))
        mesh.barrier()
        if mesh.rank == 0:
            content[len(content) // 2] ^= 16
            file.write_bytes(content)
        mesh.barrier()
        with pytest.raises(TrainingError) as damaged:
            trainer.load(path)
    return str(other.value), str(cut.value), str(damaged.value)


def test_a_load_that_does_not_fit_changes_nothing(pool: Pool, at_step_4: Path) -> None:
    path = at_step_4 / "checkpoints" / "step-000004"
    for other, cut, damaged in pool.run(refused_loads, tiny(at_step_4, TWO), path, ranks=2):
        assert "the checkpoint does not fit: the optimizer's state\n  given:    that of AdamW" in other
        assert "__3_0.distcp: ends within the" in cut and "neither" not in other + cut
        assert "the checkpoint is damaged: " in damaged
        assert (
            f"the state is now neither the earlier one nor that of {path}, until a load succeeds" in damaged
        )


def given_no_path(config: Config) -> list[str]:
    texts = []
    with meshcomm.init(config) as mesh:
        trainer = Trainer(mesh, config)
        for folder in (None, 3, b"x", ["x"], ""):
            # On all ranks, and on one.
            for mine in (folder, folder if mesh.rank else "x"):
                for call in (trainer.save, trainer.load):
                    with pytest.raises(MeshcommError) as caught:
                        call(mine)  # type: ignore[arg-type]
                    texts.append(str(caught.value))
    return texts


def test_a_folder_that_is_no_path_is_refused_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    for texts in pool.run(given_no_path, tiny(tmp_path, TWO), ranks=2):
        assert len(texts) == 20
        for text in texts:
            assert "the folder of a checkpoint is not a path\n" in text or "x/lock.json: " in text, text


def test_a_tensor_of_another_shape_is_refused(undisturbed: tuple[Path, Summary]) -> None:
    folder = undisturbed[0] / "checkpoints" / "step-000004"
    for state, given in (
        ({"model.norm.weight": torch.zeros(33)}, "torch.float32 of shape (32,)"),
        ({"model.norm.weight": torch.zeros(32, dtype=torch.float64)}, "torch.float32 of shape (32,)"),
        ({"model.norm.bias": torch.zeros(32)}, "no such tensor"),
    ):
        with pytest.raises(TrainingError, match=r"does not fit: model\.norm") as caught:
            Saved(folder).fill(state)
        assert caught.value.given == f"{given} in {folder}"


def test_restarts_are_left_to_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = job(tmp_path)
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(app, ["train", "--max-restarts", "2", str(path)])
    assert done.exit_code == 2
    assert done.stderr.startswith("--max-restarts 2 inside a job that torchrun started\n")


@pytest.mark.parametrize(
    "more", ["train.checkpoint_every=0", "train.checkpoint_every=2", "train.trace_steps=[1, 9]"]
)
def test_a_folder_removed_while_training_ends_the_run_with_one_error(tmp_path: Path, more: str) -> None:
    config = tiny(tmp_path / "run", ONE, "train.warmup_steps=1", more)

    class Remove(Callback):
        def on_step(self, step: Step) -> None:
            if step.step == 1:
                shutil.rmtree(tmp_path / "run")

    with meshcomm.init(config) as mesh, pytest.raises(TrainingError, match="cannot be written") as caught:
        run(mesh, config, Remove())
    assert caught.value.given == str(tmp_path / "run" / "metrics.jsonl") and caught.value.hint
