"""The network splits a job into two halves: only the half with the launcher continues."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.elastic.deaths import ROOT, Run, config_of, undisturbed
from tests.two_hosts.hosts import Host, Link, refusal, two_hosts

pytestmark = [pytest.mark.netns, pytest.mark.timeout(280)]

STEPS, TIMEOUT_S = 40, 8.0
MORE = "\n[elastic]\nmin = { dp = 1 }\n"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(10)


def test_only_one_half_goes_on(tmp_path: Path) -> None:
    if (reason := refusal(tmp_path)) is not None:
        pytest.skip(f"this machine cannot have two hosts: {reason}")
    mesh = f'[mesh]\ndims = {{ dp = 2, tp = 2 }}\ndevice = "cpu"\ntimeout_s = {TIMEOUT_S}\n'
    mesh += '[parallel]\ndata = "dp"\ntensor = "tp"\n'
    text = mesh + config_of("dp2", STEPS).partition('data = "dp"\n')[2]
    config = tmp_path / "train.toml"
    config.write_text(text + MORE)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    words = [
        sys.executable,
        "-m",
        "meshcomm",
        "train",
        "--set",
        f'train.out="{tmp_path / "out"}"',
        str(config),
    ]
    logs = [tmp_path / f"{rank}.txt" for rank in range(4)]
    with ExitStack() as stack:
        hosts: tuple[Host, Host] = stack.enter_context(two_hosts(tmp_path, Link()))

        def start(host: Host, command: list[str], log: Path, more: dict[str, str]) -> subprocess.Popen[bytes]:
            process = host.start(command, ROOT, log, env | more)
            stack.callback(_end, process)
            return process

        serves = [sys.executable, "-m", "tests.elastic.parted", hosts[0].address, str(tmp_path), str(config)]
        launcher = start(hosts[0], serves, tmp_path / "launcher.txt", {})
        deadline = time.monotonic() + 60
        while not (tmp_path / "port").exists():
            assert launcher.poll() is None and time.monotonic() < deadline, (
                tmp_path / "launcher.txt"
            ).read_text()
            time.sleep(0.05)
        common = {
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": (tmp_path / "port").read_text(),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "MESHCOMM_GENERATION": "0",
        }
        ranks = [
            start(
                hosts[rank // 2], words, logs[rank], common | {"RANK": str(rank), "LOCAL_RANK": str(rank % 2)}
            )
            for rank in range(4)
        ]
        job = Run(ranks[0], tmp_path / "out", logs[0])
        assert job.await_step(5), [log.read_text() for log in logs]
        hosts[1].cut()
        parted = time.monotonic()
        last = int(job.lines[-1]["step"])
        time.sleep(2.0)
        # Calls of a step that had begun may complete; no step begins after it.
        assert int(job.lines[-1]["step"]) <= last + 1
        (tmp_path / "lost").write_text("2 3")
        assert job.await_step(last + 3), logs[0].read_text()
        print(f"goes on {time.monotonic() - parted:.1f} s after it was parted, 2.0 of them until it was said")
        codes = [each.wait(60) for each in ranks[2:]]
        print(f"the other half has ended {time.monotonic() - parted:.1f} s after it was parted")
        said = logs[2].read_text() + logs[3].read_text()
        assert 0 not in codes
        assert "PeerLost" in said or "CollectiveTimeout" in said, said
        assert "the job's store does not answer" in said, said
        assert "goes on" not in said
        assert [each.wait(200) for each in ranks[:2]] == [0, 0], logs[0].read_text()
        losses = [line["loss"] for line in job.lines]
        assert "with the state of the other ranks, dp=1" in logs[0].read_text()
    assert losses == pytest.approx(undisturbed(tmp_path / "before", "dp2", STEPS), rel=1e-12)
