"""`meshcomm train`: a configuration without a model, and what a job that has not finished leaves."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from meshcomm.commands.train import left, view
from meshcomm.config import load_config
from meshcomm.errors import ConfigError
from meshcomm.show.page import as_text
from meshcomm.testing import Pool
from tests.forked_jobs import Job


def test_a_configuration_without_a_model_is_told_by_the_command(tmp_path: Path) -> None:
    from meshcomm.commands.train import train

    path = tmp_path / "mine.toml"
    path.write_text(
        '[mesh]\ndims = { dp = 2 }\ndevice = "cpu"\n[parallel]\ndata = "dp"\n[train]\nsteps = 1\nglobal_batch_size = 2\nmicro_batch_size = 1\n'
    )
    with pytest.raises(ConfigError, match=r"has no settings for a model\n.*\n.*meshcomm run with a script"):
        train(path)


def test_what_is_left_is_that_of_this_job_alone(tmp_path: Path) -> None:
    nothing = {"folder": str(tmp_path), **dict.fromkeys(("run", "step", "loss", "checkpoint", "resume"))}
    assert left(tmp_path, "", ["train", "x.toml"], ()) == nothing
    run = {"run": "7", "state": "stopped", "steps": 9, "ended": {"steps": 5}}
    (tmp_path / "run.json").write_text(json.dumps(run))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 5.5}\n{"step": 4, "loss": 2.25}\n')
    begun = left(tmp_path, "", ["train", "x.toml"], ())
    # The run knows of a step that was not logged.
    assert (begun["step"], begun["loss"], begun["checkpoint"], begun["run"]) == (5, 2.25, None, run)
    first, second = as_text(view(begun), 1000).splitlines()
    assert first == f"meshcomm: step 5 of 9 was the last, loss 2.2500; {tmp_path} has its metrics"
    assert "no checkpoint: train.checkpoint_every" in second
    # An incomplete checkpoint cannot be continued.
    for name, files in {"step-000002": (".metadata", "lock.json"), "step-000004": ("lock.json",)}.items():
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        for file in files:
            (tmp_path / "checkpoints" / name / file).touch()
    sets = ["train.resume=false", "data.files=['a b']"]
    saved = left(tmp_path, "", ["train", "x.toml", "--world-size", "8"], sets)
    assert saved["checkpoint"] == str(tmp_path / "checkpoints/step-000002")
    assert as_text(view(saved), 1000).splitlines()[1:] == [
        f"meshcomm: last checkpoint: {tmp_path}/checkpoints/step-000002",
        "meshcomm: to continue: meshcomm train x.toml --world-size 8 --set 'data.files=['\"'\"'a b'\"'\"']' "
        "--set train.resume=true",
    ]
    # The files of a run that was there before say nothing of this job.
    name = f"7-{(tmp_path / 'metrics.jsonl').stat().st_ino:x}"
    assert left(tmp_path, name, ["train", "x.toml"], ()) == nothing


TRAINING = """
mesh = { dims = { dp = 2 }, device = "cpu", timeout_s = 60 }
parallel = { data = "dp" }
model = { num_layers = 1, hidden_size = 16, num_heads = 2, num_kv_heads = 2, intermediate_size = 16 }
data = { files = ["text"], seq_len = 16 }
train = { steps = 100000, global_batch_size = 2, micro_batch_size = 1, checkpoint_every = 1, out = "run", check = false }
"""


@pytest.mark.deep
def test_ctrl_c_leaves_a_step_a_checkpoint_and_the_way_on(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text(TRAINING)
    (tmp_path / "text").write_text("some text " * 100)
    job = Job(pool, tmp_path, "-m", "meshcomm", "train", "t.toml", "--json")
    saved = tmp_path / "run/checkpoints"
    while not [*saved.glob("step-00000[2-9]")]:
        assert job.poll() is None, job.finish()
    os.kill(job.pid, signal.SIGINT)
    code, out, err = job.finish()
    facts = json.loads(out)
    assert code == facts["exit_code"] == 130 and facts["error"]["what"] == "the job was ended by SIGINT", err
    assert facts["run"]["steps"] == 100_000 and facts["step"] >= 2 and facts["loss"] > 0
    assert Path(tmp_path, facts["checkpoint"], "lock.json").exists()
    assert facts["resume"] == "meshcomm train t.toml --set train.resume=true"
    # The command that is shown is taken.
    _, _, config, _, resume = facts["resume"].split()
    settings = load_config(tmp_path / config, [resume])
    assert settings.train is not None and settings.train.resume
