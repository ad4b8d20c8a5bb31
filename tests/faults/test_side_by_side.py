"""Jobs that start at once on one host, by default settings: none meets another one's ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

JOBS = 4
RANKS = 8
# Each is 32 processes that import torch, and so a minute of CPU time.
ROUNDS = 2
SCRIPT = """
import sys, torch, meshcomm
with meshcomm.init(dims={"dp": -1}) as mesh:
    job = int(sys.argv[1])
    everyone = mesh.all_reduce("dp", torch.tensor([1, 100**job * (1 + mesh.rank)]))
    sys.stdout.write(f"{mesh.rank} {mesh.size('dp')} {everyone.tolist()}\\n")
"""


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(ROUNDS))
def test_jobs_of_one_host_keep_apart(tmp_path: Path, number: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    jobs: list[subprocess.Popen[str]] = []
    try:
        for job in range(JOBS):
            jobs.append(
                subprocess.Popen(
                    [
                        sys.executable,
                        *("-m", "meshcomm", "run", "--world-size", str(RANKS), str(script), str(job)),
                    ],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "RES_OPTIONS": "timeout:1 attempts:1"},
                    start_new_session=True,
                )
            )
        ended = [(*job.communicate(timeout=800), job.returncode) for job in jobs]
    finally:
        for process in jobs:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    for job, (out, err, code) in enumerate(ended):
        assert code == 0, err
        # A rank of another job would bring another power of 100.
        total = 100**job * RANKS * (RANKS + 1) // 2
        assert sorted(out.splitlines()) == [f"{rank} {RANKS} [{RANKS}, {total}]" for rank in range(RANKS)]
