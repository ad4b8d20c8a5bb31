"""A rank is lost and replaced while the others keep running: in a user-written loop, and in trainings with equal losses."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshcomm.testing import Pool
from tests.elastic.deaths import (
    MESHES,
    ROOT,
    config_of,
    forked_training,
    left_over,
    simulated,
    training,
    undisturbed,
)
from tests.forked_jobs import Job

STEPS = 8
SCRIPT = Path(__file__).parent / "own_loop.py"

RAISES = """
import meshcomm
from meshcomm.train import Callback, Trainer

class Raises(Callback):
    def on_step(self, step):
        mesh = self.trainer.mesh
        if (mesh.rank, step.step, mesh.elastic.generation.number) == (1, 3, 0):
            raise KeyError("a bad sample")

mesh = meshcomm.init()
Trainer(mesh, callbacks=[Raises()]).run()
mesh.close()
"""

FORGETS = """
import os, signal, meshcomm, torch
mesh = meshcomm.init(dims={"dp": 2})
for step in range(100):
    if (mesh.rank, step, mesh.elastic.generation.number) == (1, 3, 0):
        os.kill(os.getpid(), signal.SIGKILL)
    mesh.all_reduce("dp", torch.ones(2))
"""

# The new process arrives, but is slower at its first call than the timeout of the others.
IS_LATE = """
import os, signal, time, meshcomm, torch
mesh = meshcomm.init(dims={"dp": 2}, timeout_s=4)
if mesh.elastic.generation.number:
    time.sleep(60)
for step in range(100):
    if (mesh.rank, step, mesh.elastic.generation.number) == (1, 3, 0):
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        mesh.all_reduce("dp", torch.ones(2))
    except meshcomm.errors.RankLost as error:
        mesh.elastic.reopen(error)
"""

SWALLOWS = """
import os, signal, meshcomm, torch
mesh = meshcomm.init(dims={"dp": 2})
try:
    for step in range(100):
        if (mesh.rank, step, mesh.elastic.generation.number) == (1, 3, 0):
            os.kill(os.getpid(), signal.SIGKILL)
        mesh.all_reduce("dp", torch.ones(2))
except Exception:
    pass
"""

TORCH_ALONE = """
import os, signal, torch, torch.distributed as dist
dist.init_process_group("gloo")
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
for step in range(50):
    if dist.get_rank() == 1 and step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    net(torch.ones(2, 4)).sum().backward()
"""

MODULE = """
import torch, meshcomm
from torch import nn
from meshcomm.train import Trainer

mesh = meshcomm.init()
torch.manual_seed(mesh.rank)
module = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 3))

def data(step):
    draw = torch.Generator().manual_seed(100 * step + mesh.data_rank)
    x = torch.randn(4, 8, generator=draw, dtype=torch.float64)
    return x, torch.randint(3, (4,), generator=draw)

Trainer(mesh, None, module).run(data)
mesh.close()
"""


DTENSORS = """
import os, signal, torch, meshcomm
from torch.distributed.tensor import DTensor, Replicate, Shard

mesh = meshcomm.init(dims={"dp": 2, "tp": 2})
grid = mesh.device_mesh  # made before the loss, and used after it
held = DTensor.from_local(torch.full((2, 2), float(mesh.coord("tp"))), grid, [Replicate(), Shard(0)])

def latest(step):
    for dim in ("dp", "tp"):
        step = max(mesh.objects.all_gather(dim, step))
    return step

step = latest(0) if mesh.elastic.generation.number else 0
while step < 5:
    try:
        if (mesh.rank, step, mesh.elastic.generation.number) == (3, 2, 0):
            os.kill(os.getpid(), signal.SIGKILL)
        assert held.full_tensor()[:, 0].tolist() == [0, 0, 1, 1]
        torch.distributed.barrier()
        mesh.barrier()
        step += 1
    except Exception as error:
        mesh.elastic.reopen(error)
        step = latest(step)
print("whole", held.redistribute(placements=[Replicate(), Replicate()]).to_local().sum().item())
mesh.close()
"""


def run(*words: str, replace: int = 1) -> subprocess.CompletedProcess[str]:
    """Run a script with `meshcomm run`."""
    command = [sys.executable, "-m", "meshcomm", "run", "--replace", str(replace), *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=env, check=False)


def forked(pool: Pool, folder: Path, *words: str) -> tuple[int, str]:
    """The same in forks of a process that has loaded torch. Returns the exit code and stderr."""
    job = Job(pool, folder, "-m", "meshcomm", "run", "--replace", "1", *words, env={"PYTHONPATH": str(ROOT)})
    code, _, err = job.finish()
    return code, err


@pytest.mark.deep
def test_a_loop_of_ones_own_meets_the_new_process() -> None:
    ended = run("--world-size", "4", str(SCRIPT), "dies")
    assert ended.returncode == 0, ended.stderr
    lines = sorted(line for line in ended.stdout.splitlines() if line.startswith("rank"))
    # The sum over four ranks in 12 steps.
    whole = [float(sum(4 * step + 6 for step in range(12)))] * 3
    assert ended.stdout.count("lost (3,)") == 3
    assert "replaced {3: 'was ended by SIGKILL'}" in ended.stdout
    assert lines == [f"rank {rank}: {whole}" for rank in range(4)]
    assert "rank 3 (dp=1 tp=1) was ended by SIGKILL; replaced, replacements left: 0" in ended.stderr


@pytest.mark.deep
def test_a_program_that_does_not_reopen_ends_by_the_name_of_the_lost_rank(tmp_path: Path) -> None:
    script = tmp_path / "forgets.py"
    script.write_text(FORGETS)
    ended = run("--world-size", "2", str(script))
    assert ended.returncode == 128 + signal.SIGKILL
    lines = ended.stderr.splitlines()
    assert "meshcomm: rank 1 (dp=1) was ended by SIGKILL" in lines
    assert (
        "meshcomm: rank 0 ended by RankLost: a program continues with mesh.elastic.reopen(error), and a Trainer continues automatically"
        in lines
    )


@pytest.mark.faults
def test_a_later_failure_is_not_blamed_on_a_rank_that_has_been_replaced(pool: Pool, tmp_path: Path) -> None:
    script = tmp_path / "late.py"
    script.write_text(IS_LATE)
    code, err = forked(pool, tmp_path, "--world-size", "2", str(script))
    last = err.partition("replacements left: 0")[2]
    assert code == 1 and "SIGKILL" not in last, err
    assert "meshcomm: rank 0 (dp=0) failed: CollectiveTimeout: all_reduce along" in last, err
    assert "it waited for rank 1" in last, err


def test_a_program_that_swallows_the_loss_is_told_what_it_left_out(pool: Pool, tmp_path: Path) -> None:
    script = tmp_path / "swallows.py"
    script.write_text(SWALLOWS)
    code, err = forked(pool, tmp_path, "--world-size", "2", str(script))
    assert code == 128 + signal.SIGKILL, err
    said = "meshcomm: rank 0 completed without mesh.elastic.reopen, so new processes can no longer meet all ranks"
    assert said in err.splitlines(), err


@pytest.mark.faults
def test_a_script_of_torch_alone_ends_and_says_why(tmp_path: Path) -> None:
    script = tmp_path / "ddp.py"
    script.write_text(TORCH_ALONE)
    ended = run("--world-size", "2", str(script))
    assert ended.returncode == 128 + signal.SIGKILL
    lines = ended.stderr.splitlines()
    assert "meshcomm: rank 1 was ended by SIGKILL" in lines
    assert lines[-1] == (
        "meshcomm: no rank had opened a mesh: only a Trainer, or a program that reopens its mesh, can continue"
    )


@pytest.mark.faults
def test_dtensors_and_device_meshes_stay(tmp_path: Path) -> None:
    script = tmp_path / "dtensors.py"
    script.write_text(DTENSORS)
    ended = run("--world-size", "4", str(script))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("whole 4.0") == 4


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """The losses of undisturbed runs, by mesh."""
    return {}


def losses(expected: dict[str, list[float]], mesh: str, folder: Path) -> list[float]:
    """The losses of the undisturbed run."""
    if mesh not in expected:
        expected[mesh] = undisturbed(folder / "undisturbed", mesh, STEPS)
    return expected[mesh]


def test_a_training_goes_on_exactly(pool: Pool, tmp_path: Path) -> None:
    with forked_training(pool, tmp_path, config_of("dp2", STEPS), 1) as job:
        assert job.await_step(2)
        job.kill(0, signal.SIGKILL)
        assert job.process.wait(100) == 0, job.log.read_text()
        assert [line["loss"] for line in job.lines] == simulated(tmp_path, "dp2", STEPS)
        said = job.log.read_text()
    assert "rank 0 (dp=0) was ended by SIGKILL; replaced, replacements left: 0" in said
    assert "rank 0 replaced: continues after step" in (tmp_path / "out").read_text()


@pytest.mark.faults
@pytest.mark.parametrize("mesh", ["pp2 dp2 tp2", "dp4", "dp2 fsdp2"])
def test_two_ranks_are_lost_one_after_the_other(
    mesh: str, tmp_path: Path, expected: dict[str, list[float]]
) -> None:
    draw = random.Random(mesh)
    with training(tmp_path, config_of(mesh, STEPS), 2) as job:
        for step in (2, 4):
            assert job.await_step(step), job.log.read_text()
            job.kill(draw.choice(sorted(job.ranks())), signal.SIGSEGV)
            assert job.await_step(step + 1), job.log.read_text()
        assert job.process.wait(100) == 0, job.log.read_text()
        assert [line["loss"] for line in job.lines] == losses(expected, mesh, tmp_path)


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(4))
def test_a_second_rank_is_lost_while_the_first_is_replaced(
    seed: int, tmp_path: Path, expected: dict[str, list[float]]
) -> None:
    draw = random.Random(seed)
    with training(tmp_path, config_of("dp4", STEPS), 2) as job:
        assert job.await_step(2)
        first, second = draw.sample(range(4), 2)
        job.kill(first, signal.SIGKILL)
        # A copy of the standby process takes the rank's place in about a second.
        time.sleep(draw.random() * 1.5)
        job.kill(second, signal.SIGKILL)
        assert job.process.wait(100) == 0, job.log.read_text()
        assert [line["loss"] for line in job.lines] == losses(expected, "dp4", tmp_path)


@pytest.mark.faults
def test_more_ranks_are_lost_than_can_be_replaced(tmp_path: Path) -> None:
    with training(tmp_path, config_of("dp4", 1000), 1) as job:
        for rank in (2, 1):
            last = job.lines[-1]["step"] if job.lines else 0
            assert job.await_step(int(last) + 2)
            job.kill(rank, signal.SIGKILL)
            time.sleep(1)
        assert job.process.wait(60) == 128 + signal.SIGKILL
        last_line = [line for line in job.log.read_text().splitlines() if line.startswith("meshcomm:")][-1]
        assert "rank 1 (dp=1) was ended by SIGKILL" in job.log.read_text(), last_line
    assert not left_over(tmp_path)


@pytest.mark.faults
def test_a_new_process_with_another_config_is_named(tmp_path: Path) -> None:
    with training(tmp_path, config_of("dp2", 1000), 1) as job:
        assert job.await_step(2)
        path = tmp_path / "train.toml"
        path.write_text(path.read_text().replace("lr = 0.01", "lr = 0.02"))
        job.kill(1, signal.SIGKILL)
        assert job.process.wait(60) == 2
        assert "train.lr" in job.log.read_text(), job.log.read_text()
    assert not left_over(tmp_path)


@pytest.mark.faults
def test_the_launcher_is_killed_while_a_rank_is_replaced(tmp_path: Path) -> None:
    with training(tmp_path, config_of("dp4", 1000), 1) as job:
        assert job.await_step(2)
        job.kill(1, signal.SIGKILL)
        time.sleep(1)
        job.process.kill()
        job.process.wait(10)
    deadline = time.monotonic() + 10
    while left_over(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left_over(tmp_path)


def test_another_launcher_does_not_replace(pool: Pool, tmp_path: Path) -> None:
    words = ["-m", "meshcomm", "train", "--replace", "1", str(ROOT / "configs/quickstart.toml")]
    code, _, err = Job(pool, tmp_path, *words, env={"RANK": "0", "WORLD_SIZE": "8"}).finish()
    assert code == 2
    assert "replaced inside a job that torchrun started" in err


@pytest.mark.faults
def test_an_exception_ends_a_rank(tmp_path: Path, expected: dict[str, list[float]]) -> None:
    script = tmp_path / "raises.py"
    script.write_text(RAISES)
    with training(tmp_path, config_of("dp2", STEPS), 1, script=script) as job:
        assert job.process.wait(100) == 0, job.log.read_text()
        assert [line["loss"] for line in job.lines] == losses(expected, "dp2", tmp_path)
        assert "KeyError: 'a bad sample'" in job.log.read_text()


@pytest.mark.faults
def test_without_another_holder_the_last_checkpoint_counts(tmp_path: Path) -> None:
    """Along shard alone, no other rank has a rank's parts: all ranks go back to the checkpoint, and the losses are equal."""
    more = "checkpoint_every = 3\n"
    before = undisturbed(tmp_path / "before", "fsdp2", STEPS, more)
    with training(tmp_path, config_of("fsdp2", STEPS, more), 1) as job:
        assert job.await_step(5)
        job.kill(1, signal.SIGKILL)
        assert job.process.wait(100) == 0, job.log.read_text()
        assert [line["loss"] for line in job.lines] == before
        assert "resumed after step 3" in job.log.read_text()


@pytest.mark.faults
@pytest.mark.parametrize("background", [False, True])
def test_while_it_evaluates_and_saves(background: bool, tmp_path: Path) -> None:
    """Every step is evaluated and saved. A rank is lost at a random moment of this work, three times."""
    more = f"checkpoint_every = 1\neval_every = 1\nkeep = 100\ncheckpoint_async = {str(background).lower()}\n"
    config = config_of("dp2", STEPS, more).replace("[data]", "[data]\nvalidation = 0.3")
    with training(tmp_path / "before", config, 0) as job:
        assert job.process.wait(100) == 0, job.log.read_text()
        before = job.out.joinpath("metrics.jsonl").read_text().splitlines()
    draw = random.Random(str(background))
    with training(tmp_path / "after", config, 3) as job:
        for step in (1, 3, 5):
            assert job.await_step(step), job.log.read_text()
            time.sleep(draw.random() * 0.1)
            job.kill(draw.randrange(2), signal.SIGKILL)
            assert job.await_step(step + 1), job.log.read_text()
        assert job.process.wait(100) == 0, job.log.read_text()
        after = job.out.joinpath("metrics.jsonl").read_text().splitlines()
        folders = sorted(path.name for path in (job.out / "checkpoints").iterdir() if path.is_dir())
    assert [facts(line) for line in after] == [facts(line) for line in before]
    # A background save that was running when a rank was lost is not finished; the next one is.
    assert len(folders) >= (STEPS - 3 if background else STEPS), folders
    assert f"step-{STEPS:06}" in folders


def facts(line: str) -> tuple[object, ...]:
    """The values in a line of metrics that do not depend on the clock."""
    found = json.loads(line)
    return tuple(found.get(name) for name in ("step", "loss", "gradient_norm", "validation_loss"))


@pytest.mark.faults
def test_a_module_of_the_programs_own(tmp_path: Path) -> None:
    script = tmp_path / "module.py"
    script.write_text(MODULE)
    config = MESHES["dp2"] + "[train]\nsteps = 8\nglobal_batch_size = 8\nmicro_batch_size = 4\nlr = 0.1\n"
    config += 'seed = 1\ndtype = "float64"\nlog_every = 1\n'
    with training(tmp_path / "before", config, 0, script=script) as job:
        assert job.process.wait(100) == 0, job.log.read_text()
        before = [line["loss"] for line in job.lines]
    with training(tmp_path / "after", config, 1, script=script) as job:
        assert job.await_step(1)
        job.kill(0, signal.SIGKILL)
        assert job.process.wait(100) == 0, job.log.read_text()
        assert [line["loss"] for line in job.lines] == before
