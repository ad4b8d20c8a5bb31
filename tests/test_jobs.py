"""The command line starts real jobs: their output, their errors told once, and their exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

CONFIG = """
[mesh]
dims = { dp = 2, tp = 2 }
device = "cpu"
timeout_s = 30
"""


def start(folder: Path, script: str, *arguments: str) -> subprocess.Popen[str]:
    (folder / "mesh.toml").write_text(CONFIG)
    (folder / "script.py").write_text("import os, signal, sys, time, torch, meshcomm\n" + script)
    command = [sys.executable, "-m", "meshcomm", "run", "mesh.toml", "script.py", *arguments]
    env = {**os.environ, "RES_OPTIONS": "timeout:1 attempts:1"}
    return subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(job: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = job.communicate(timeout=100)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        raise
    assert job.returncode is not None
    # torch's store and Gloo write their own notes about peers that vanish; they are not ours.
    err = "".join(line for line in err.splitlines(True) if not line.startswith(("[W", "[/", "[E")))
    return job.returncode, out, err


def alive(folder: Path) -> list[int]:
    """Processes that run a script in `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if entry.joinpath("cwd").resolve() == folder.resolve() and int(entry.name) != os.getpid():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def test_run_gives_a_script_its_mesh_and_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("answer = 42\n")
    script = """
import beside
with meshcomm.init() as mesh:
    total = mesh.all_reduce("tp", torch.tensor([mesh.rank]))
    sys.stdout.write(f"{mesh.rank} {mesh.coords} {total.item()} {sys.argv[1:]} {beside.answer}\\n")
"""
    code, out, err = finish(start(tmp_path, script, "--steps", "3"))
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [
        f"{rank} {{'dp': {rank // 2}, 'tp': {rank % 2}}} {1 if rank < 2 else 5} ['--steps', '3'] 42"
        for rank in range(4)
    ]


def test_an_error_is_told_once_with_its_coords_and_the_users_frame(tmp_path: Path) -> None:
    script = """
mesh = meshcomm.init()
mesh.all_reduce("dp", torch.ones(1))
if mesh.rank == 3:
    raise ValueError("planted")
for _ in range(1000):
    mesh.all_reduce("dp", torch.ones(1))
    mesh.all_reduce("tp", torch.ones(1))
"""
    code, out, err = finish(start(tmp_path, script))
    assert (code, out) == (1, "")
    assert err.splitlines() == [
        "rank 3 (dp=1 tp=1):",
        "Traceback (most recent call last):",
        '  File "script.py", line 6, in <module>',
        '    raise ValueError("planted")',
        "ValueError: planted",
        "meshcomm: rank 3 (dp=1 tp=1) failed: ValueError: planted, at script.py:6 in <module>",
        "meshcomm: ranks 0-2 followed: lost a peer, or were ended by the launcher",
    ]
    assert alive(tmp_path) == []


def test_a_mesh_that_differs_is_told_once_without_a_traceback(tmp_path: Path) -> None:
    script = (
        'meshcomm.init(dims={"dp": 4} if os.environ["RANK"] == "2" else {"dp": 2, "tp": 2}, device="cpu")'
    )
    code, out, err = finish(start(tmp_path, script))
    assert (code, out) == (2, "")
    lines = err.splitlines()
    assert "MeshMismatchError: the mesh differs between ranks: rank 2 of 4 is odd" in lines[0]
    assert lines[1] == "  given:    rank 2: dims.dp = 4; the others: 2"
    # Whoever was first to raise: what is shown is the error of the rank that differs.
    assert lines[0].startswith("rank 2 (dp=1 tp=0): ")
    assert lines[-2 - ("the same" in err and "followed" in err) :][0] == (
        "meshcomm: rank 2 (dp=1 tp=0) failed: MeshMismatchError: the mesh differs between ranks: "
        "rank 2 of 4 is odd, at script.py:2 in <module>"
    )
    assert lines[-1].startswith("meshcomm: rank") and lines[-1].endswith((": the same", "by the launcher"))
    assert "Traceback" not in err


def test_a_killed_rank_is_named_and_nothing_stays(tmp_path: Path) -> None:
    script = """
mesh = meshcomm.init()
mesh.all_reduce("dp", torch.ones(1))
mesh.all_reduce("tp", torch.ones(1))
if mesh.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    mesh.all_reduce("dp", torch.ones(1))
    mesh.all_reduce("tp", torch.ones(1))
"""
    code, out, err = finish(start(tmp_path, script))
    assert (code, out) == (137, "")
    assert err.splitlines() == [
        "meshcomm: rank 1 (dp=0 tp=1) was ended by SIGKILL",
        "meshcomm: ranks 0 2 3 followed: lost a peer, or were ended by the launcher",
    ]
    assert alive(tmp_path) == []


def test_ctrl_c_ends_all_ranks(tmp_path: Path) -> None:
    script = """
mesh = meshcomm.init()
mesh.barrier("dp")
mesh.barrier("tp")
if mesh.rank == 0:
    print("up", flush=True)
while True:
    mesh.all_reduce("dp", torch.ones(1))
    time.sleep(0.01)
"""
    job = start(tmp_path, script)
    assert job.stdout is not None
    assert job.stdout.readline() == "up\n"
    os.kill(job.pid, signal.SIGINT)
    began = time.monotonic()
    code, out, err = finish(job)
    assert (code, out, err) == (130, "", "")
    assert time.monotonic() - began < 20
    assert alive(tmp_path) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "mesh.toml", "nothing.py"], "there is no script nothing.py"),
        (
            ["run", "mesh.toml", "--world", "8", "script.py"],
            "options come first: meshcomm run --world ... [CONFIG] SCRIPT",
        ),
        (["run", "script.py"], "how many ranks?"),
        (["simulate", "script.py", "8"], "try:      meshcomm simulate --world 8 SCRIPT"),
        (
            ["run", "--world", "2", "--set", "mesh.timeout_s=5", "script.py"],
            "--set has no effect without a CONFIG",
        ),
        (["run", "--world", "2", "nothing.py", "mesh.toml"], "there is no script nothing.py"),
        (["run", "mesh.toml"], "there is no script beside mesh.toml"),
        (["train", "mesh.toml"], "mesh.toml says nothing about training"),
        (["run", "nothing.toml", "script.py"], "nothing.toml"),
        (["run", "--world", "6", "mesh.toml", "script.py"], "2*2 = 4, world is 6"),
    ],
)
def test_a_wrong_call_ends_before_any_process_starts(tmp_path: Path, words: list[str], message: str) -> None:
    (tmp_path / "mesh.toml").write_text(CONFIG)
    (tmp_path / "script.py").write_text("raise SystemExit('started')")
    done = subprocess.run(
        [sys.executable, "-m", "meshcomm", *words], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr and "started" not in done.stderr


def test_a_script_that_says_its_own_mesh_needs_no_config(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import sys, torch, meshcomm\n"
        "with meshcomm.init(dims={'dp': -1}, device='cpu', timeout_s=60) as mesh:\n"
        "    total = mesh.all_reduce('dp', torch.tensor([mesh.rank + 1]))\n"
        "    print(mesh.label, total.item(), sys.argv[1:])\n"
    )
    for command in ("run", "simulate"):
        words = [command, "--world", "2", "own.py", "./a//b", "--lr", "3"]
        done = subprocess.run(
            [sys.executable, "-m", "meshcomm", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
        )
        lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
        arguments = ["./a//b", "--lr", "3"]
        assert lines == [f"rank {rank} (dp={rank}) 3 {arguments}" for rank in (0, 1)], done.stderr
