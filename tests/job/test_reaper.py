"""No process outlives its job, however the job ends; with real launchers."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshcomm.job import reaper
from meshcomm.job.spawn import launch
from meshcomm.testing import Pool
from tests.commands.test_run import CONFIG, alive
from tests.forked_jobs import Job
from tests.ports import free_port

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def gone(folder: Path, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while alive(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    return alive(folder) == []


# One rank is stopped, one ignores SIGTERM, and each starts a process, one of them in a new session. Without torch.
STUBBORN = """
import os, signal, subprocess, sys, time
from pathlib import Path
rank = int(os.environ["RANK"])
if rank == 2:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "1000"], start_new_session=rank == 1)
Path(f"{rank} is up").touch()
while len(list(Path(".").glob("* is up"))) < 4:
    time.sleep(0.02)
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_nothing_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(STUBBORN + "print('up\\n', end='', flush=True)\ntime.sleep(1000)\n")
    program = "from meshcomm.job.spawn import launch; launch(['rank.py'], 4)"
    launcher = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert launcher.stdout is not None
    assert [launcher.stdout.readline() for _ in range(3)] == ["up\n"] * 3
    # The launcher, four ranks, and the processes that they started.
    assert len(alive(tmp_path)) >= 9
    launcher.kill()
    assert gone(tmp_path, 30)
    launcher.communicate(timeout=100)


def test_nothing_outlives_a_job_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rank.py").write_text(STUBBORN + "if rank == 3:\n    sys.exit(5)\ntime.sleep(1000)\n")
    began = time.monotonic()
    assert launch(["rank.py"], 4) == 5
    assert time.monotonic() - began < 25
    assert capfd.readouterr().err.splitlines() == [
        "meshcomm: rank 3 ended with exit code 5",
        "meshcomm: ranks 0-2 followed: lost a peer, or were ended by the launcher",
    ]
    monkeypatch.undo()
    assert alive(tmp_path) == []


def test_a_torchrun_of_ones_own_restarts_and_tells_each_error_once(pool: Pool, tmp_path: Path) -> None:
    # By default, torchrun keeps its store across restarts. In the first attempt, one rank opens a mesh and the other
    # one raises.
    script = f"""
import os, torch, meshcomm
again = os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
if not again and os.environ["RANK"] == "1":
    raise ValueError("first")
with meshcomm.init() as mesh:
    mesh.all_reduce("dp", torch.ones(1))
place = {{"init": "tcp", "address": "127.0.0.1:{free_port()}"}}
with meshcomm.init({{"mesh": {{"dims": {{"dp": 2}}, "device": "cpu"}}, "process": place}}) as mesh:
    total = mesh.all_reduce("dp", torch.tensor([mesh.rank + 1]))
    if mesh.rank == 0:
        print(total.item(), flush=True)
    mesh.barrier("dp")
    if mesh.rank == 1:
        raise ValueError("second")
    for _ in range(1000):
        mesh.all_reduce("dp", torch.ones(1))
"""
    (tmp_path / "mesh.toml").write_text(CONFIG.replace("{ dp = 2, tp = 2 }", "{ dp = 2 }"))
    (tmp_path / "script.py").write_text(script)
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    command += ["--master-port", str(free_port()), "-m", "meshcomm", "run", "mesh.toml", "script.py"]
    code, out, err = Job(pool, tmp_path, *command, env={"OMP_NUM_THREADS": "1"}).finish()
    if "ProcessLookupError" in err and "os.killpg(self.proc.pid" in err:
        # torch's agent fails if it ends a process group that has just ended, and then restarts nothing.
        code, out, err = Job(pool, tmp_path, *command, env={"OMP_NUM_THREADS": "1"}).finish()
    assert code == 1
    assert out == "3\n", err
    assert err.count("ValueError: first\n") == err.count("ValueError: second\n") == 1
    assert "PeerLost" not in err and "meshcomm: rank" not in err
    # The agent's store listens on every address, but only the doctor reports that.
    assert "ExposedRendezvous" not in err
    assert alive(tmp_path) == []


@pytest.mark.parametrize("how", ["", "poll=True"])
def test_a_process_ends_with_its_parent(how: str) -> None:
    child = (
        "import sys, time, importlib.util as u\n"
        f"spec = u.spec_from_file_location('reaper', {reaper.__file__!r})\n"
        "reaper = u.module_from_spec(spec); spec.loader.exec_module(reaper)\n"
        f"reaper.end_with_parent({how}); print('up', flush=True); time.sleep(1000)"
    )
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {child!r}])"
    parent = subprocess.Popen([sys.executable, "-S", "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "up\n"
    parent.kill()
    # The child holds the other end of the pipe as long as it lives.
    assert parent.communicate(timeout=100)[0] == ""
