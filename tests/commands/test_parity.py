"""`meshcomm parity`: its table, its verdict, and a script that makes a Trainer, compared with itself on one process."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshcomm.commands.parity import view
from meshcomm.config import load_config
from meshcomm.testing import Pool
from meshcomm.train.parity import Difference, first
from meshcomm.train.parity_job import Blame, Parity
from tests.forked_jobs import Job
from tests.train.parity_cases import CASES
from tests.train.test_parity import TOLERANCE

CONFIG = """
[mesh]
dims = { dp = 2, tp = 1 }
device = "cpu"
timeout_s = 60
[parallel]
data = "dp"
tensor = "tp"
[train]
steps = 30
global_batch_size = 8
micro_batch_size = 2
schedule = "constant"
"""
SCRIPT = """
import sys
import meshcomm
import torch
from torch import nn
from meshcomm.parallel import tensor_parallel
from meshcomm.train import Trainer

how = sys.argv[1]
with meshcomm.init() as mesh:
    if how == "nothing":
        sys.exit()
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
    tensor_parallel(net, mesh, "tp", {"0": "column", "2": "row"})
    make = lambda groups: torch.optim.SGD(groups, lr=0.02, momentum=0.9)
    trainer = Trainer(mesh, model=net, loss=nn.functional.mse_loss, optimizer=make)

    def batch(step):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        x = x.chunk(mesh.size("dp"))[0 if how == "wrong" else mesh.coord("dp")]
        return x, x.square().sum(1, keepdim=True)

    try:
        trainer.run(batch)
    except Exception:
        pass
"""


def parity(pool: Pool, folder: Path, how: str, *options: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command."""
    (folder / "mine.toml").write_text(CONFIG)
    (folder / "mine.py").write_text(SCRIPT)
    words = ("parity", *options, "--steps", "2", "--json", "mine.toml", "mine.py", how)
    return Job(pool, folder, "-m", "meshcomm", *words, env={"OMP_NUM_THREADS": "1"}).finish()


@pytest.mark.parity
@pytest.mark.timeout(300)
def test_a_script_is_compared_with_itself_on_one_process(pool: Pool, tmp_path: Path) -> None:
    code, out, err = parity(pool, tmp_path, "right")
    facts = json.loads(out)
    assert code == 0 and facts["agrees"] and facts["steps"] == 2, err
    assert {one["name"] for one in facts["differences"] if one["kind"] == "weight"} == {
        "0.weight", "0.bias", "2.weight", "2.bias",
    }  # fmt: skip
    # The command writes nothing next to the script.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["err", "mine.py", "mine.toml", "out"]


@pytest.mark.parity
@pytest.mark.timeout(300)
def test_samples_that_ranks_share_are_found_and_their_dim_is_named(pool: Pool, tmp_path: Path) -> None:
    code, out, err = parity(pool, tmp_path, "wrong")
    facts = json.loads(out)
    assert code == 1, err
    assert facts["first"]["kind"] == "loss" and facts["first"]["name"] == "step 1"
    assert facts["blame"]["dims"] == ["dp"]


@pytest.mark.timeout(300)
def test_a_script_without_a_trainer_is_told(pool: Pool, tmp_path: Path) -> None:
    code, _, err = parity(pool, tmp_path, "nothing")
    assert code != 0
    assert "the script runs no Trainer steps, so there is nothing to compare" in err
    assert "Traceback" not in err


def shown(parity: Parity) -> str:
    from rich.console import Console

    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(view(parity.facts()))
    console.file.close()
    return console.export_text()


def test_the_table_has_the_worst_ten_and_a_verdict() -> None:
    found = [Difference("loss", "step 1", 0.0, 0.0), Difference("gradient norm", "step 1", 2e-3, 1e-3)]
    for number in range(12):
        found += [
            Difference("weight", f"w{number}", number * 1e-3, number * 1e-3, number),
            Difference("gradient", f"w{number}", 0.0, 0.0),
        ]
    found.append(Difference("weight", "gone", math.inf, math.inf, 0, "on one side only"))
    config = load_config(CASES["dp8"])
    blamed = Blame(("dp",), 8, found[2])
    text = shown(Parity(config, 20, 1e-9, ("a",), tuple(found), first(found, 1e-9), blamed))
    lines = [line.split() for line in text.splitlines()]
    assert text.startswith(
        "dp=8 compared with one process: the first 20 steps, float64\nchanged for the comparison: a\n"
    )
    assert ["gradient", "norm", "2.0e-03", "1.0e-03", "step", "1", "0"] in lines
    assert ["weight", "-", "-", "gone:", "on", "one", "side", "only", "0"] in lines
    assert ["weight", "3.0e-03", "3.0e-03", "w3", "3"] in lines
    assert ["others", "2.0e-03", "2.0e-03", "3", "more", "parameters,", "none", "worse"] in lines
    assert "differs: 13 of 27 quantities by more than 1e-09; first the gradient norm of step 1" in text
    assert "first dim to blame: dp (alone, 8 ranks: weight of w0, 0.0e+00)" in text
    good = shown(Parity(config, 20, 1e-9, (), tuple(found[:2]), first(found[:2], 0.1), None))
    assert good.rstrip().endswith("agrees: all differences are within 1e-09 (worst: 1.0e-03)")
    json.dumps(Parity(config, 20, 1e-9, (), tuple(found), None, None).facts(), allow_nan=False)


def command(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "meshcomm", "parity", "job.json", *words],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder / "tmp"), "RES_OPTIONS": "timeout:1 attempts:1", **env},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A folder with a configuration for two ranks."""
    case = CASES["dp8"]
    mesh = {**case["mesh"], "dims": {"dp": -1}}
    train = {**case["train"], "dtype": "float32"}
    (tmp_path / "job.json").write_text(json.dumps({**case, "mesh": mesh, "train": train}))
    (tmp_path / "tmp").mkdir()
    return tmp_path


@pytest.mark.parity
def test_the_command_runs_both_and_leaves_nothing(job: Path) -> None:
    done = command(job, "--world-size", "2", "--steps", "2", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["agrees"] and facts["steps"] == 2 and facts["dims"] == {"dp": 2}
    assert facts["notes"] == ['train.dtype = "float64", was "float32"']
    assert max(one["relative"] for one in facts["differences"]) < TOLERANCE
    assert {one["name"] for one in facts["differences"]} >= {"step 2", "embed.weight", "norm.weight"}
    assert sorted(path.name for path in job.rglob("*")) == ["job.json", "tmp"]


# Every process imports this at its start: the launcher and the ranks.
BROKEN = """
import os
if "RANK" in os.environ:
    from meshcomm.parallel.data import GradientSync
    GradientSync._send = lambda self, end: setattr(self, "_sent", end)
"""


@pytest.mark.parity
@pytest.mark.timeout(900)
def test_the_command_names_the_dim_to_blame(job: Path) -> None:
    (job / "sitecustomize.py").write_text(BROKEN)
    words = ("--steps", "2", "--set", "mesh.dims={ dp = 2, tp = 2 }", "--set", 'parallel.tensor="tp"')
    done = command(job, *words, PYTHONPATH=str(job))
    assert done.returncode == 1, done.stderr
    assert "first the gradient norm of step 1" in done.stdout
    assert "\nfirst dim to blame: dp (alone, 2 ranks: " in done.stdout
    assert not list((job / "tmp").iterdir())


@pytest.mark.parametrize(
    ("words", "env", "message"),
    [
        (("--world-size", "2", "--steps", "21"), {}, "--steps 21 exceeds the number of training steps"),
        (("--world-size", "1"), {}, "a mesh of one rank is already a single process"),
        (
            (),
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
            "meshcomm parity inside a job that torchrun started",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(
    job: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], env: dict[str, str], message: str
) -> None:
    from typer.testing import CliRunner

    from meshcomm.commands import app

    for name, value in env.items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(app, ["parity", str(job / "job.json"), *words])
    assert done.exit_code == 2
    # A mesh is named first, before torch is loaded.
    error = done.stderr.splitlines()[0 if env else 1 :]
    assert error[0].startswith(message), done.stderr
