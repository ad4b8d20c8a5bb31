"""A rank is lost while the others end: no new process can meet them, and the job's error names the lost rank."""

from __future__ import annotations

import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from meshcomm.testing import Pool
from tests.elastic.deaths import config_of, training
from tests.elastic.test_replaced import forked, run
from tests.forked_jobs import after_start

SCRIPT = """
import os, signal, sys, time, meshcomm, torch

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(2)

mesh = meshcomm.init(dims={"dp": 3})
mesh.all_reduce("dp", torch.ones(2))
mesh.barrier()
if mesh.rank == 1:
    time.sleep(0.5 if sys.argv[1] == "finalizing" else 0)
    if sys.argv[1] == "raises":
        raise KeyError("at the end")
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "finalizing":
    meshcomm.slow = Slow()  # until the interpreter is gone
else:
    time.sleep(0.5)
"""


@pytest.mark.faults
@pytest.mark.parametrize("way", ["dies", "raises", "finalizing"])
def test_a_rank_that_is_lost_as_others_end_is_named(way: str, tmp_path: Path) -> None:
    """The others end before they notice the loss: after half a second, or while Python shuts down in them."""
    script = tmp_path / "late.py"
    script.write_text(SCRIPT)
    ended = run("--world-size", "3", str(script), way)
    what = "failed: KeyError: 'at the end'" if way == "raises" else "was ended by SIGKILL"
    lines = [line.rstrip() for line in after_start(ended.stderr) if line.startswith("meshcomm: ")]
    assert lines[0].startswith(f"meshcomm: rank 1 (dp=1) {what}"), ended.stderr
    assert lines[0].endswith("; replaced, replacements left: 0")
    assert lines[1].startswith(f"meshcomm: rank 1 (dp=1) {what}"), ended.stderr
    # It depends on timing whether the loss was announced before the others ended.
    assert "completed" in lines[-1] and "so new processes can no longer meet all ranks" in lines[-1]
    assert "terminate called" not in ended.stderr
    assert ended.returncode == (1 if way == "raises" else 128 + signal.SIGKILL)


@pytest.mark.faults
def test_a_program_without_a_mesh_is_not_waited_for(tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text(
        "import os, time\n"
        'if os.environ["RANK"] == "1" and os.environ["MESHCOMM_GENERATION"] == "0":\n    os._exit(3)\n'
        'time.sleep(0 if os.environ["MESHCOMM_GENERATION"] == "1" else 2)\n'
    )
    ended = run("--world-size", "2", str(script))
    assert ended.returncode == 0, ended.stderr
    assert "rank 1 ended with exit code 3; replaced, replacements left: 0" in ended.stderr


ENDS = """
import os, signal, sys, time, meshcomm, torch
mesh = meshcomm.init(dims={"dp": 3})
mesh.all_reduce("dp", torch.ones(2))
mesh.elastic.finish()
if mesh.rank == 1:
    if sys.argv[1] == "raises":
        raise KeyError("at the end")
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0.5)
"""


@pytest.mark.parametrize("way", ["dies", "raises"])
def test_after_the_end_a_signal_is_no_failure(pool: Pool, way: str, tmp_path: Path) -> None:
    """All work is done, so a signal loses nothing. An exception of the program is still a failure."""
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    code, err = forked(pool, tmp_path, "--world-size", "3", str(script), way)
    lines = [line for line in err.splitlines() if line.startswith("meshcomm: ")]
    if way == "raises":
        assert code == 1 and "rank 1 (dp=1) failed: KeyError: 'at the end'" in err
    else:
        assert code == 0, err
        assert lines == ["meshcomm: rank 1 (dp=1) was ended by SIGKILL after the end; nothing is lost"], err


AFTER_A_TRAINER = """
import os, signal, time, meshcomm
from meshcomm.train import Trainer
mesh = meshcomm.init()
Trainer(mesh).run()
if mesh.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0.5)
mesh.close()
"""


def test_a_program_may_still_work_after_its_trainer(pool: Pool, tmp_path: Path) -> None:
    config, script = tmp_path / "train.toml", tmp_path / "after.py"
    config.write_text(config_of("dp2", 2))
    script.write_text(AFTER_A_TRAINER)
    out = f'train.out="{tmp_path / "trained"}"'
    code, err = forked(pool, tmp_path, "--set", out, str(config), str(script))
    assert code == 128 + signal.SIGKILL, err


@pytest.mark.faults
def test_a_rank_of_a_training_is_killed_when_all_is_saved(tmp_path: Path) -> None:
    """The rank is killed after the last line of metrics. Either it is replaced, or nothing was lost."""
    draw = random.Random(5)
    for number in range(6):
        with training(tmp_path / str(number), config_of("dp2", 3), 1) as job:
            assert job.await_step(3)
            time.sleep(0.1 * number)
            with suppress(psutil.Error, KeyError):
                job.kill(draw.randrange(2), signal.SIGKILL)
            code, said = job.process.wait(100), job.log.read_text()
        if "replaced" not in said or "had already completed" not in said:
            assert code == 0, said
        assert [line["step"] for line in job.lines] == [1, 2, 3]
