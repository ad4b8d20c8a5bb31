"""The command line starts real jobs: their output, their errors (each reported once), and their exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from typer.testing import CliRunner

from meshcomm.commands import app
from meshcomm.testing import Pool
from tests.forked_jobs import Job

pytestmark = pytest.mark.long

CONFIG = """
[mesh]
dims = { dp = 2, tp = 2 }
device = "cpu"
timeout_s = 30
"""


def start(pool: Pool, folder: Path, script: str, *arguments: str) -> Job:
    """Start `meshcomm run` of a script on warm ranks."""
    return Job(pool, folder, *written(folder, script, CONFIG), *arguments)


def written(folder: Path, script: str, config: str) -> list[str]:
    (folder / "mesh.toml").write_text(config)
    (folder / "script.py").write_text("import os, signal, sys, time, torch, meshcomm\n" + script)
    return ["-m", "meshcomm", "run", "mesh.toml", "script.py"]


def alive(folder: Path) -> list[int]:
    """The processes whose working directory is `folder`."""
    here = str(folder.resolve())
    return [
        each.pid
        for each in psutil.process_iter(["cwd"])
        if each.info["cwd"] == here and each.pid != os.getpid()
    ]


LISTENERS = """
import psutil

def listening(pid):
    return sorted({each.laddr.ip for each in psutil.Process(pid).net_connections() if each.status == "LISTEN"})
"""


# A job of new processes that succeeds; several tests check it. Rank 0 leaves a process running in another session, and
# no rank closes its second mesh.
WELL = """
import subprocess
import beside
with meshcomm.init() as mesh:
    total = mesh.all_reduce("tp", torch.tensor([mesh.rank + 1]))
    mesh.all_reduce("dp", torch.ones(1))
    sys.stdout.write(f"{mesh.rank} {mesh.coords} {total.item()} {sys.argv[1:]} {beside.answer}\\n")
    elastic = [name for name in sys.modules if name.startswith("torch.distributed.elastic")]
    sys.stdout.write(f"rank {mesh.rank} loaded {elastic}\\n")
    sys.stdout.write(f"rank {mesh.rank} listens: {listening(os.getpid())}\\n")
    if mesh.rank == 0:
        sys.stdout.write(f"launcher listens: {listening(os.getppid())}\\n")
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    mesh.barrier("tp")
mesh = meshcomm.init()
mesh.all_reduce("tp", torch.ones(3))
handle = mesh.all_reduce("tp", torch.ones(3), async_op=True)
handle.wait()
"""


class Ended(NamedTuple):
    """A finished job. left: its processes that still run."""

    code: int
    lines: list[str]
    err: str
    left: list[int]


@pytest.fixture(scope="module")
def well(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    folder = tmp_path_factory.mktemp("well")
    (folder / "beside.py").write_text("answer = 42\n")
    command = written(folder, LISTENERS + WELL, CONFIG.replace("dp = 2", "dp = 1"))
    done = subprocess.run(
        [sys.executable, *command, "--steps", "3"], cwd=folder, capture_output=True, text=True, timeout=200
    )
    return Ended(done.returncode, sorted(done.stdout.splitlines()), done.stderr, alive(folder))


def test_run_gives_a_script_its_mesh_and_its_arguments(well: Ended) -> None:
    said = [line for line in well.err.splitlines() if "ranks are up" not in line]
    assert (well.code, said) == (0, ["meshcomm: starting 2 ranks of script.py: dp=1 tp=2"])
    assert well.lines[:2] == [f"{rank} {{'dp': 0, 'tp': {rank}}} 3 ['--steps', '3'] 42" for rank in range(2)]


def test_a_launcher_and_its_ranks_load_no_elastic_agent(well: Ended) -> None:
    assert [line for line in well.lines if "loaded" in line] == [f"rank {rank} loaded []" for rank in (0, 1)]


def test_a_job_of_one_host_listens_on_the_loopback_alone(well: Ended) -> None:
    assert [line for line in well.lines if "listens" in line] == [
        f"{who} listens: ['127.0.0.1']" for who in ("launcher", "rank 0", "rank 1")
    ]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_what_a_rank_has_left_running_does_not_outlive_a_job_that_ended_well(well: Ended) -> None:
    assert well.code == 0 and well.left == []


def test_an_error_is_told_once_with_its_coords_and_the_users_frame(pool: Pool, tmp_path: Path) -> None:
    script = """
mesh = meshcomm.init()
mesh.all_reduce("dp", torch.ones(1))
if mesh.rank == 3:
    raise ValueError("planted")
for _ in range(1000):
    mesh.all_reduce("dp", torch.ones(1))
    mesh.all_reduce("tp", torch.ones(1))
"""
    code, out, err = start(pool, tmp_path, script).finish()
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


def test_a_mesh_that_differs_is_told_once_without_a_traceback(pool: Pool, tmp_path: Path) -> None:
    script = """
if os.environ["RANK"] == "2":
    os.environ["MESHCOMM_SET"] = "mesh.dims={ dp = 4 }"
meshcomm.init()
"""
    code, out, err = start(pool, tmp_path, script).finish()
    assert (code, out) == (2, "")
    lines = err.splitlines()
    assert "MeshMismatchError: the mesh differs between ranks: rank 2 of 4 is mismatched" in lines[0]
    assert lines[1] == "  given:    rank 2: dims.dp = 4; the others: 2"
    # The mismatched rank's error is shown, whichever rank was first to raise.
    assert lines[0].startswith("rank 2 (dp=1 tp=0): ")
    assert lines[-2 - ("the same" in err and "followed" in err) :][0] == (
        "meshcomm: rank 2 (dp=1 tp=0) failed: MeshMismatchError: the mesh differs between ranks: "
        "rank 2 of 4 is mismatched, at script.py:5 in <module>"
    )
    assert lines[-1].startswith("meshcomm: rank") and lines[-1].endswith((": the same", "by the launcher"))
    assert "Traceback" not in err


def test_a_killed_rank_is_named_and_nothing_stays(pool: Pool, tmp_path: Path) -> None:
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
    code, out, err = start(pool, tmp_path, script).finish()
    assert (code, out) == (137, "")
    assert err.splitlines() == [
        "meshcomm: rank 1 (dp=0 tp=1) was ended by SIGKILL",
        "meshcomm: ranks 0 2 3 followed: lost a peer, or were ended by the launcher",
    ]
    assert alive(tmp_path) == []


def test_ctrl_c_ends_all_ranks(pool: Pool, tmp_path: Path) -> None:
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
    job = start(pool, tmp_path, script)
    job.until_printed("up")
    os.kill(job.pid, signal.SIGINT)
    began = time.monotonic()
    code, out, err = job.finish()
    assert (code, out) == (130, "up\n")
    assert err.startswith("meshcomm: SIGINT: where each rank was before it was ended\n")
    assert time.monotonic() - began < 20
    assert alive(tmp_path) == []


def test_json_is_all_of_stdout_and_has_the_cause(pool: Pool, tmp_path: Path) -> None:
    script = """
with meshcomm.init() as mesh:
    print("printed", flush=True)
    mesh.all_reduce("dp", torch.ones(1), op="summ" if mesh.rank == 3 else "sum")
"""
    words = written(tmp_path, script, CONFIG)
    words.insert(3, "--json")
    code, out, err = Job(pool, tmp_path, *words).finish()
    facts = json.loads(out)
    assert (code, facts["exit_code"], facts["world_size"]) == (2, 2, 4) and "printed\n" in err
    error = facts["error"]
    assert (error["type"], error["rank"], error["name"]) == ("UnsupportedOp", 3, "rank 3 (dp=1 tp=1)")
    assert "no reduce op 'summ'" in error["what"] and error["given"] == "op='summ'"
    assert error["try"] == 'op="sum"' and error["at"] == "script.py:5 in <module>"
    assert err.endswith("".join(f"meshcomm: {line}\n" for line in error["lines"]))
    # An exit code alone is no error of the rank's.
    words = written(tmp_path, "raise SystemExit(3)", CONFIG)
    words.insert(3, "--json")
    error = json.loads(Job(pool, tmp_path, *words).finish()[1])["error"]
    assert (error["type"], error["what"], error["given"]) == (None, "ended with exit code 3", None)


@pytest.mark.parametrize("shown", ["0", "1"])
def test_a_fault_after_the_compared_calls_begins_with_our_line(
    pool: Pool, tmp_path: Path, shown: str
) -> None:
    """Gloo ends the rank by a C++ exception that nothing catches; a SIGSEGV may be the end of it."""
    script = """
with meshcomm.init() as mesh:
    for call in range(70):
        mesh.all_reduce("tp", torch.ones(4000 if call < 66 or mesh.rank % 2 else 7))
"""
    words = written(tmp_path, script, CONFIG.replace("dp = 2", "dp = 1"))
    code, _, err = Job(pool, tmp_path, *words, env={"TORCH_SHOW_CPP_STACKTRACES": shown}).finish()
    name = {134: "SIGABRT", 139: "SIGSEGV"}[code]
    assert ("terminate called" in err) == (shown == "1"), err
    assert err.startswith(
        "terminate called" if shown == "1" else f"meshcomm: rank 0 (dp=0 tp=0) was ended by {name}"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "mesh.toml", "nothing.py"], "there is no script nothing.py"),
        (["run", "mesh.toml", "scirpt.py"], "try:      did you mean script.py?"),
        (["run", "mesh.toml", "--world-size", "6", "script.py"], "2*2 = 4, world is 6"),
        (["run", "script.py"], "how many ranks?"),
        (["simulate", "script.py", "8"], "try:      meshcomm simulate --world-size 8 SCRIPT"),
        (
            ["run", "--world-size", "2", "--set", "mesh.timeout_s=5", "script.py"],
            "--set has no effect without a CONFIG",
        ),
        (["run", "--world-size", "2", "nothing.py", "mesh.toml"], "there is no script nothing.py"),
        (["run", "mesh.toml"], "no SCRIPT was given after mesh.toml"),
        (["run"], "no SCRIPT was given\n"),
        (["simulate", "--world-size", "2"], "no SCRIPT was given\n"),
        (["dryrun"], "neither CONFIG nor SCRIPT was given\n"),
        (["train", "mesh.toml"], "mesh.toml has no settings for training"),
        (["run", "nothing.toml", "script.py"], "nothing.toml"),
        (["run", "--world-size", "6", "mesh.toml", "script.py"], "2*2 = 4, world is 6"),
        (["train", "mesh.toml", "--set", "mesh.dims.tp=runs/x"], "mesh.dims.tp"),
        (["run", "mesh.toml", "--set", "mesh.device=cuda", "script.py"], "this host has no cuda device"),
        (["run", "mesh.toml", "--set", "mesh.backend=mpi", "script.py"], "torch has no backend mpi"),
    ],
)
def test_a_wrong_call_ends_before_any_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    (tmp_path / "mesh.toml").write_text(CONFIG)
    (tmp_path / "script.py").write_text("raise SystemExit('started')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("meshcomm.job.spawn.Popen", lambda *_, **__: pytest.fail("processes were started"))
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2, done.exception
    assert message in done.stderr and "Traceback" not in done.stderr and "started" not in done.stderr


@pytest.mark.deep
def test_files_of_the_working_directory_hide_no_library(tmp_path: Path) -> None:
    # As with `python scripts/main.py`, the script's folder is on the import path, and the working directory is not.
    (tmp_path / "queue.py").write_text("raise ImportError('this is not the library')")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "main.py").write_text("import beside; print(beside.WORD)")
    (tmp_path / "scripts" / "beside.py").write_text("WORD = 'found'")
    command = [sys.executable, "-P", "-m", "meshcomm", "run", "--world-size", "1", "scripts/main.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "found\n"), done.stderr


def test_a_wrong_config_is_refused_before_torch_is_loaded(tmp_path: Path) -> None:
    program = """
import sys
from meshcomm.commands import app
from typer.testing import CliRunner
for words in (["train", "mesh.toml"], ["parity", "mesh.toml"], ["run", "mesh.toml", "script.py"]):
    command, *rest = words
    done = [CliRunner().invoke(app, [command, *more, *rest]) for more in (["--set", "mesh.dimz=1"], ["--world-size", "6"])]
    print(*(each.exit_code for each in done), "mesh.dims is set" in done[0].stderr, "is 6" in done[1].stderr)
print("torch" in sys.modules)
"""
    (tmp_path / "mesh.toml").write_text(CONFIG)
    (tmp_path / "script.py").touch()
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    # train first reports that this config has no training.
    assert done.stdout.splitlines() == ["2 2 True False", "2 2 True True", "2 2 True True", "False"], (
        done.stderr
    )


def test_a_script_that_says_its_own_mesh_needs_no_config(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(
        "import sys, torch, meshcomm\n"
        "with meshcomm.init(dims={'dp': -1}, device='cpu', timeout_s=60) as mesh:\n"
        "    total = mesh.all_reduce('dp', torch.tensor([mesh.rank + 1]))\n"
        "    sys.stdout.write(f'{mesh.label} {total.item()} {sys.argv[1:]}\\n')\n"
    )
    monkeypatch.chdir(tmp_path)
    words = ["--world-size", "2", "own.py", "./a//b", "--lr", "3"]
    ran = Job(pool, tmp_path, "-m", "meshcomm", "run", *words).finish()[1:]
    simulated = CliRunner().invoke(app, ["simulate", *words])
    for printed, err in (ran, (simulated.stdout, simulated.stderr)):
        lines = sorted(line for line in printed.splitlines() if line.startswith("rank"))
        arguments = ["./a//b", "--lr", "3"]
        assert lines == [f"rank {rank} (dp={rank}) 3 {arguments}" for rank in (0, 1)], err
