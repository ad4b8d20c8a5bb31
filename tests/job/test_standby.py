"""A process that stands by for the loss of a rank: it runs the command with the rank's variables, or ends and leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from meshcomm.job.standby import COMMAND, Process, Standby

_PLAN = (*COMMAND, "plan", "configs/quickstart.toml", "--rank")


def waiting(count: int = 1) -> list[psutil.Process]:
    """The standby processes. A command line is empty for a moment after a start, so it is read again."""
    deadline = time.monotonic() + 10
    while True:
        found = [each for each in psutil.Process().children() if "meshcomm.job.standby" in each.cmdline()]
        if len(found) == count or time.monotonic() > deadline:
            return found
        time.sleep(0.01)


def await_imports(standby: Standby) -> None:
    deadline = time.monotonic() + 60
    while not standby.is_ready():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait(process: Process | None) -> int:
    assert process is not None
    deadline = time.monotonic() + 60
    while (code := process.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return code


def test_copies_run_the_command_as_the_rank_that_they_are_told(capfd: pytest.CaptureFixture[str]) -> None:
    standby = Standby([*_PLAN, "3"], dict(os.environ))
    standby.start()
    # A rank that is lost before the imports are done is started without the standby process.
    assert standby.take({"RANK": "3"}) is None
    standby.start()
    (only,) = waiting()
    await_imports(standby)
    # The imports run at the lowest priority, but the rank must not: only root could raise the priority again.
    assert os.sched_getscheduler(only.pid) == os.SCHED_OTHER
    first, second, third = (standby.take({"RANK": "3"}) for _ in range(3))
    assert first is not None and os.getpgid(first.pid) == first.pid != only.pid
    assert second is not None
    second.send_signal(signal.SIGKILL)
    assert (wait(first), wait(second), wait(third)) == (0, -signal.SIGKILL, 0)
    assert capfd.readouterr().out.count("rank 3") >= 2
    assert waiting() == [only]
    standby.end()
    assert waiting(0) == []


def test_it_ends_when_it_is_not_needed_or_has_lost_its_launcher() -> None:
    standby = Standby([*_PLAN, "3"], dict(os.environ))
    standby.start()
    (process,) = waiting()
    standby.end()
    assert not process.is_running()
    # A launcher that is killed cannot end its standby process.
    program = f"""
import os, sys, time
from meshcomm.job.standby import Standby
standby = Standby({[*_PLAN, "3"]}, dict(os.environ))
standby.start()
print(standby._process.pid, flush=True)
time.sleep(60)
"""
    launcher = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    left = psutil.Process(int(launcher.stdout.readline()))
    launcher.kill()
    launcher.communicate()
    gone, _ = psutil.wait_procs([left], timeout=30)
    assert gone == [left]


def test_one_that_has_died_is_not_taken() -> None:
    standby = Standby([*_PLAN, "3"], dict(os.environ))
    standby.start()
    (process,) = waiting()
    process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert standby.take({"RANK": "3"}) is None
    assert not process.is_running()


def test_one_that_is_stopped_is_not_waited_for() -> None:
    """If the launcher waited for its answer, it could not look after the other ranks."""
    standby = Standby([*_PLAN, "3"], dict(os.environ))
    standby.start()
    (process,) = waiting()
    await_imports(standby)
    process.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 30
    while process.status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    began = time.monotonic()
    assert standby.take({"RANK": "3"}) is None
    assert time.monotonic() - began < 5
    assert not process.is_running()


def test_only_the_meshcomm_command_is_prepared(tmp_path: Path) -> None:
    standby = Standby(["script.py"], dict(os.environ))
    standby.start()
    assert waiting(0) == [] and standby.take({"RANK": "0"}) is None
