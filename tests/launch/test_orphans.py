"""No process outlives its job, however it ends; real launchers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshcomm.launch import reaper
from tests.jobs.test_jobs import CONFIG, alive, finish, start
from tests.ports import free_port

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def gone(folder: Path, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while alive(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    return alive(folder) == []


# A rank that is stopped, one that ignores SIGTERM, and what ranks start: in their own session too.
STUBBORN = """
import subprocess
mesh = meshcomm.init()
mesh.all_reduce("dp", torch.ones(1))
mesh.all_reduce("tp", torch.ones(1))
subprocess.Popen(["sleep", "1000"], start_new_session=mesh.rank == 1)
if mesh.rank == 2:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
mesh.barrier("dp")
mesh.barrier("tp")
"""


def test_nothing_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    script = (
        STUBBORN
        + """
if mesh.rank == 0:
    print("up", flush=True)
if mesh.rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(1000)
"""
    )
    job = start(tmp_path, script)
    assert job.stdout is not None
    assert job.stdout.readline() == "up\n"
    # The launcher, four ranks, and what each has started.
    assert len(alive(tmp_path)) >= 9
    job.kill()
    assert gone(tmp_path, 30)
    job.communicate(timeout=100)


def test_nothing_outlives_a_job_that_fails(tmp_path: Path) -> None:
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "1"
    script = (
        STUBBORN
        + """
if mesh.rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
if mesh.rank == 3:
    open("failed", "w").close()
    raise KeyError("planted")
time.sleep(1000)
"""
    )
    try:
        code, out, err = finish(start(tmp_path, script))
    finally:
        del os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
    assert time.time() - (tmp_path / "failed").stat().st_mtime < 25
    assert (code, out) == (1, "")
    assert err.splitlines()[-2:] == [
        "meshcomm: rank 3 (dp=1 tp=1) failed: KeyError: 'planted', at script.py:17 in <module>",
        "meshcomm: ranks 0-2 followed: lost a peer, or were ended by the launcher",
    ]
    assert alive(tmp_path) == []


def test_a_torchrun_of_ones_own_restarts_and_tells_each_error_once(tmp_path: Path) -> None:
    # torchrun's default keeps its store over restarts: of the ranks of the first attempt one has
    # opened a mesh, and one has told an error.
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
    env = {**os.environ, "RES_OPTIONS": "timeout:1 attempts:1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 1
    assert done.stdout == "3\n", done.stderr
    assert done.stderr.count("ValueError: first\n") == done.stderr.count("ValueError: second\n") == 1
    assert "PeerLost" not in done.stderr and "meshcomm: rank" not in done.stderr
    # That the store of its agent listens on every address is for the doctor to say.
    assert "ExposedRendezvous" not in done.stderr
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
    # The child holds the other end of the pipe for as long as it lives.
    assert parent.communicate(timeout=100)[0] == ""
