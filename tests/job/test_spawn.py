"""The environment that the launcher of one host gives its ranks, and how it ends them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshcomm.config import load_config
from meshcomm.config.elastic import ElasticConfig
from meshcomm.job.replacing import SAVED
from meshcomm.job.spawn import launch
from meshcomm.testing import Pool
from tests.commands.test_run import CONFIG, start, written
from tests.forked_jobs import Job

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def same_handlers() -> Iterator[None]:
    """The launcher restores the signal handlers that it replaced."""
    watched = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
    before = [signal.getsignal(each) for each in watched]
    yield
    assert [signal.getsignal(each) for each in watched] == before


def run(script: str, world_size: int = 3, max_restarts: int = 0) -> int:
    head = "import os, signal, sys, time\nrank = int(os.environ['RANK'])\n"
    return launch(
        ["-c", head + script], world_size, max_restarts, load_config({"mesh": {"dims": {"dp": world_size}}})
    )


def send_when_up(folder: Path, number: signal.Signals, after_s: float = 0.0) -> None:
    """Send this process a signal once three ranks have reported that they are up."""

    def send() -> None:
        while len(list(folder.glob("* is up"))) < 3:
            time.sleep(0.02)
        time.sleep(after_s)
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()


def test_ranks_get_what_torchrun_would_set(pool: Pool, tmp_path: Path) -> None:
    script = """
import torch.distributed as dist
names = ("RANK", "LOCAL_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE", "GROUP_RANK",
         "GROUP_WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
said = [os.environ[name] for name in names]
dist.init_process_group("gloo")
everyone = [None] * 2
dist.all_gather_object(everyone, said)
if dist.get_rank() == 0:
    print(dist.is_torchelastic_launched(), *everyone, sep="\\n")
dist.destroy_process_group()
"""
    command = written(tmp_path, script, CONFIG.replace("dp = 2", "dp = 1"))
    code, out, err = Job(pool, tmp_path, *command).finish()
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "True",
        *(str([*[str(rank)] * 3, *["2"] * 3, "0", "1", "127.0.0.1", "0", "0"]) for rank in range(2)),
    ]


def test_each_restart_is_told_and_has_a_store_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    script = """
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
assert os.environ["TORCHELASTIC_MAX_RESTARTS"] == "2"
print(os.environ["MASTER_PORT"] if rank == 0 else "", end="", flush=True)
if attempt < 2:
    if rank == 1:
        sys.exit(5 + attempt)
    time.sleep(1000)
"""
    assert run(script, max_restarts=2) == 0
    followed = "meshcomm: ranks 0 2 followed: lost a peer, or were ended by the launcher"
    assert capfd.readouterr().err.splitlines() == [
        "meshcomm: rank 1 (dp=1) ended with exit code 5; restart 1 of 2",
        followed,
        "meshcomm: rank 1 (dp=1) ended with exit code 6; restart 2 of 2",
        followed,
    ]
    assert run("sys.exit(3 if rank == 1 else 0)", max_restarts=1) == 3
    # It depends on timing whether other ranks followed, because they end by themselves.
    ended = [line for line in capfd.readouterr().err.splitlines() if line.startswith("meshcomm: rank 1 ")]
    assert ended == [
        "meshcomm: rank 1 (dp=1) ended with exit code 3; restart 1 of 1",
        "meshcomm: rank 1 (dp=1) ended with exit code 3",
    ]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_for_the_launcher_goes_to_every_rank(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, number: signal.Signals, code: int
) -> None:
    script = f"""
from pathlib import Path
def note(number, _):
    Path({str(tmp_path)!r}, f"{{rank}} got {{number}}").touch()
    sys.exit(1)
for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(each, note)
Path({str(tmp_path)!r}, f"{{rank}} is up").touch()
time.sleep(1000)
"""

    send_when_up(tmp_path, number)
    assert run(script) == code
    assert sorted(path.name for path in tmp_path.glob("*got*")) == [
        f"{rank} got {int(number)}" for rank in range(3)
    ]
    told = "meshcomm: SIGINT: no rank had an open mesh\n" if number == signal.SIGINT else ""
    assert capfd.readouterr().err == told


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_ranks_that_saved_what_they_had_end_the_job_with_a_code_that_says_so(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, number: signal.Signals
) -> None:
    script = f"""
from pathlib import Path
def saved(number, _):
    for each in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    time.sleep(0.3 * rank)
    sys.exit({SAVED})
for each in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(each, saved)
Path({str(tmp_path)!r}, f"{{rank}} is up").touch()
time.sleep(1000)
"""

    send_when_up(tmp_path, number)
    send_when_up(tmp_path, number, after_s=0.3)
    assert run(script) == SAVED == 75
    assert capfd.readouterr().err == ""
    # If another rank fails, that rank is the cause.
    assert run(f"sys.exit({SAVED} if rank else 3)") == 3


def test_a_job_of_one_rank_waits_for_the_process_that_replaces_it(capfd: pytest.CaptureFixture[str]) -> None:
    script = """
import os, signal
if os.environ["MESHCOMM_GENERATION"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert launch(["-c", script], 1, elastic=ElasticConfig(replace=1, delay_s=0.3)) == 0
    assert capfd.readouterr().err == "meshcomm: rank 0 was ended by SIGKILL; replaced, replacements left: 0\n"


def test_an_ignored_hangup_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run("os.kill(os.getppid(), signal.SIGHUP) if rank == 0 else None") == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_interrupt_of_one_rank_names_the_rank(pool: Pool, tmp_path: Path) -> None:
    # No user has pressed Ctrl-C, so the end of this one rank needs an explanation.
    script = """
mesh = meshcomm.init()
mesh.barrier("dp")
if mesh.rank == 2:
    raise KeyboardInterrupt
time.sleep(1000)
"""
    code, out, err = start(pool, tmp_path, script).finish()
    assert (code, out) == (130, "")
    assert err.splitlines()[-3:] == [
        "KeyboardInterrupt",
        "meshcomm: rank 2 (dp=1 tp=0) failed: KeyboardInterrupt, at script.py:6 in <module>",
        "meshcomm: ranks 0 1 3 followed: lost a peer, or were ended by the launcher",
    ]


@pytest.mark.deep
def test_a_rank_that_left_out_a_call_is_named_with_both_operations(pool: Pool, tmp_path: Path) -> None:
    script = """
import torch, meshcomm
facts = {"dims": {"dp": 4}, "device": "cpu", "validate_calls": 0, "reports": ""}
with meshcomm.init({"mesh": {**facts, "timeout_s": 60, "options": {"dp": {"timeout_s": 3}}}}) as mesh:
    for step in range(10):
        if step != 6 or mesh.rank != 2:
            mesh.all_reduce("dp", torch.ones(1000))
    mesh.barrier("dp")
"""
    (tmp_path / "script.py").write_text(script)
    words = ("-m", "meshcomm", "run", "--world-size", "4", "script.py")
    code, out, err = Job(pool, tmp_path, *words).finish()
    last = [line for line in err.splitlines() if line.startswith("meshcomm: ")]
    assert (code != 0, out) == (True, "")
    assert last[0].startswith("meshcomm: rank 2 (dp=2) failed: ")
    assert "rank 2 (dp=2) made barrier, at script.py:8, as call 10" in err
    assert "ranks 0 1 3 made all_reduce, at script.py:7, as call 10" in err


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.deep_cases(r"\[2")
def test_a_size_that_ends_a_rank_by_sigabrt_is_told_with_the_callsites(
    pool: Pool, tmp_path: Path, ranks: int
) -> None:
    """If calls are no longer compared, Gloo aborts a rank that receives more data than its call expects."""
    script = """
import torch, meshcomm
facts = {"dims": {"dp": -1}, "device": "cpu", "validate_calls": 0, "reports": "", "timeout_s": 5}
with meshcomm.init({"mesh": facts}) as mesh:
    mesh.all_reduce("dp", torch.ones(4))
    mesh.all_reduce("dp", torch.ones(100_000 if mesh.rank == 1 else 4))
    mesh.all_reduce("dp", torch.ones(4))
"""
    (tmp_path / "script.py").write_text(script)
    words = ("-m", "meshcomm", "run", "--world-size", str(ranks), "script.py")
    code, out, err = Job(pool, tmp_path, *words).finish()
    assert (code != 0, out) == (True, "")
    # It is random which of the other ranks aborts. The ranks that are left report their call.
    assert "SIGABRT" in err and "terminate called" not in err
    assert "all_reduce of 400000 bytes, call 2 on dp, at script.py:6" in err or (
        "rank 1 (dp=1) made all_reduce of 400000 bytes, at script.py:6, as call 2" in err
    )
