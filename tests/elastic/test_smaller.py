"""Lost ranks get no new process: the others continue with fewer ranks and the same global batch, and grow back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.elastic.deaths import ROOT, Run, config_of, left_over, simulated, training
from tests.forked_jobs import after_start

STEPS = 12
BATCH = ("--set", "train.global_batch_size=12", "--set", "train.micro_batch_size=1")

LOOP = """
import os, signal
import torch, meshcomm
from meshcomm.errors import RankLost

def latest(step):
    return max(mesh.objects.all_gather("dp", step))

mesh = meshcomm.init()
process = int(os.environ["RANK"])
step = latest(0) if mesh.elastic.generation.number else 0
done = False
while not done:
    try:
        while step < 40:
            mine = torch.tensor([1.0, process])
            mesh.all_reduce("dp", mine)
            if (process, step) == (1, 3) and not mesh.elastic.generation.number:
                os.kill(os.getpid(), signal.SIGKILL)
            mesh.barrier("dp")
            step += 1
            if mesh.size("dp") == 2 and mesh.elastic.generation.number == 1:
                step = min(step, 30)  # until the third one is there
        mesh.elastic.finish()
        done = True
    except RankLost as error:
        print(f"lost {error.missing}, {len(mesh.elastic.reopen(error).replaced)} new, dp={mesh.size('dp')}")
        step = latest(step)
print(f"process {process} is rank {mesh.rank} of {mesh.world_size}: {mine.tolist()}")
mesh.close()
"""


MODULE = """
import torch, meshcomm
from torch import nn
from meshcomm.train import Trainer

mesh = meshcomm.init()
torch.manual_seed(mesh.rank)
module = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 3))

def data(step):
    draw = torch.Generator().manual_seed(step)
    x, y = torch.randn(12, 8, generator=draw, dtype=torch.float64), torch.randint(3, (12,), generator=draw)
    share = 12 // mesh.data_world_size
    mine = slice(mesh.data_rank * share, (mesh.data_rank + 1) * share)
    return x[mine], y[mine]

Trainer(mesh, None, module).run(data)
mesh.close()
"""


def elastic(text: str) -> str:
    """The table to append to a config."""
    return f"\n[elastic]\n{text}\n"


def losses(job: Run) -> list[float]:
    """The loss of every step."""
    return [line["loss"] for line in job.lines]


@pytest.mark.deep
def test_a_loop_of_ones_own_goes_on_with_fewer_and_grows_back(tmp_path: Path) -> None:
    config, script = tmp_path / "mesh.toml", tmp_path / "loop.py"
    config.write_text(
        '[mesh]\ndims = { dp = 3 }\ndevice = "cpu"\n[elastic]\nmin = { dp = 2 }\nreplace = 1\ndelay_s = 0.5\n'
    )
    script.write_text(LOOP)
    command = [sys.executable, "-m", "meshcomm", "run", str(config), str(script)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("lost (1,), 0 new, dp=2") == 2
    assert ended.stdout.count("lost (), 1 new, dp=3") == 2
    for process in range(3):
        assert f"process {process} is rank {process} of 3: [3.0, 3.0]" in ended.stdout
    assert "meshcomm: rank 1 (dp=1) was ended by SIGKILL; continues with dp=2" in ended.stderr
    assert "meshcomm: new processes for rank 1; continues with dp=3" in ended.stderr


@pytest.mark.faults
def test_a_training_goes_on_with_fewer(tmp_path: Path) -> None:
    text = config_of("dp2", STEPS).replace("dp = 2", "dp = 3") + elastic("min = { dp = 2 }")
    with training(tmp_path, text, 0, words=BATCH) as job:
        assert job.await_step(3), job.log.read_text()
        job.kill(0, signal.SIGKILL)
        assert job.process.wait(100) == 0, job.log.read_text()
        assert losses(job) == pytest.approx(simulated(tmp_path, "dp2", STEPS, BATCH[1::2]), rel=1e-12)
        assert "rank 0 (dp=0) was ended by SIGKILL; continues with dp=2" in job.log.read_text()
        assert "with the state of the other ranks, dp=2" in job.log.read_text()
    assert not left_over(tmp_path)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("mesh", "deaths", "sizes"),
    [
        # Ranks 3 and 5 belong to two copies of the model; the remaining ranks form one copy.
        ("dp4 cp2", (3, 5, 0), ("dp=3", "dp=3", "dp=2")),
        ("pp2 dp2 tp2", (6,), ("dp=1",)),
        ("dp2 fsdp2", (1,), ("dp=1",)),
    ],
)
def test_some_are_lost_and_come_back(
    mesh: str, deaths: tuple[int, ...], sizes: tuple[str, ...], tmp_path: Path
) -> None:
    # A delay that is long enough for all the deaths, and too short for the others to end first.
    text = config_of(mesh, 12 * STEPS) + elastic(f"min = {{ dp = 1 }}\ndelay_s = {6 * len(deaths)}")
    with training(tmp_path / "before", config_of(mesh, 12 * STEPS), 0, words=BATCH) as job:
        assert job.process.wait(200) == 0, job.log.read_text()
        before = losses(job)
    with training(tmp_path, text, len(deaths), words=BATCH) as job:
        for number, process in enumerate(deaths):
            assert job.await_step(4 * number + 3), job.log.read_text()
            job.kill(process, signal.SIGKILL)
        assert job.process.wait(200) == 0, job.log.read_text()
        assert losses(job) == pytest.approx(before, rel=1e-12)
        said = [line.rstrip() for line in after_start(job.log.read_text()) if line.startswith("meshcomm:")]
        assert [line.rpartition(" ")[2] for line in said][: len(deaths)] == [*sizes], said
        assert said[-1].endswith(
            f"with {mesh.split()[0].replace('dp', 'dp=') if mesh[0] == 'd' else 'dp=2'}"
        ), said
    assert not left_over(tmp_path)


@pytest.mark.faults
def test_shards_go_on_from_the_checkpoint(tmp_path: Path) -> None:
    """No other rank has the parts of a lost rank, so the smaller mesh reads the last checkpoint."""
    mesh = '[mesh]\ndims = { fsdp = 4 }\ndevice = "cpu"\n[parallel]\nshard = "fsdp"\n'
    text = mesh + config_of("dp2", STEPS, "checkpoint_every = 2\n").partition('data = "dp"\n')[2]
    with training(tmp_path / "before", text, 0, words=BATCH) as job:
        assert job.process.wait(200) == 0, job.log.read_text()
        before = losses(job)
    with training(tmp_path, text + elastic("min = { fsdp = 2 }"), 0, words=BATCH) as job:
        assert job.await_step(5), job.log.read_text()
        job.kill(2, signal.SIGKILL)
        assert job.process.wait(100) == 0, job.log.read_text()
        assert losses(job) == pytest.approx(before, rel=1e-12)
        assert "resumed after step" in job.log.read_text()


@pytest.mark.faults
def test_too_few_are_left(tmp_path: Path) -> None:
    with training(tmp_path, config_of("dp4", 1000) + elastic("min = { dp = 3 }"), 0, words=BATCH) as job:
        for process in (1, 3):
            last = job.lines[-1]["step"] if job.lines else 0
            assert job.await_step(int(last) + 2)
            job.kill(process, signal.SIGKILL)
        assert job.process.wait(60) == 128 + signal.SIGKILL
        # The error names the rank by its number in the smaller mesh.
        assert "rank 2 (dp=2) was ended by SIGKILL\n" in job.log.read_text()
    assert not left_over(tmp_path)


@pytest.mark.faults
def test_a_module_of_the_programs_own(tmp_path: Path) -> None:
    script = tmp_path / "module.py"
    script.write_text(MODULE)
    text = '[mesh]\ndims = { dp = 3 }\ndevice = "cpu"\n[parallel]\ndata = "dp"\n[train]\nsteps = 30\nglobal_batch_size = 12\n'
    text += 'micro_batch_size = 2\nlr = 0.1\nseed = 1\ndtype = "float64"\nlog_every = 1\n'
    with training(tmp_path / "before", text, 0, script=script) as job:
        assert job.process.wait(100) == 0, job.log.read_text()
        before = losses(job)
    with training(tmp_path, text + elastic("min = { dp = 1 }"), 0, script=script) as job:
        assert job.await_step(2), job.log.read_text()
        job.kill(1, signal.SIGKILL)
        assert job.process.wait(100) == 0, job.log.read_text()
        assert losses(job) == pytest.approx(before, rel=1e-12)
        assert "continues with dp=2" in job.log.read_text()
