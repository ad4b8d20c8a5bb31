"""Processes of which one is lost as the others end: nobody can meet a new one, and the job ends by the name of the lost one."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.elastic.test_replaced import run

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
    """The others end before they notice: after half a second, or while Python ends in them."""
    script = tmp_path / "late.py"
    script.write_text(SCRIPT)
    ended = run("--world-size", "3", str(script), way)
    what = "failed: KeyError: 'at the end'" if way == "raises" else "was ended by SIGKILL"
    lines = [line for line in ended.stderr.splitlines() if line.startswith("meshcomm: ")]
    assert lines[0].startswith(f"meshcomm: rank 1 (dp=1) {what}"), ended.stderr
    assert lines[0].endswith("; replaced, replacements left: 0")
    assert lines[1].startswith(f"meshcomm: rank 1 (dp=1) {what}"), ended.stderr
    assert "had already completed, so new processes can no longer meet all ranks" in lines[-1]
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
