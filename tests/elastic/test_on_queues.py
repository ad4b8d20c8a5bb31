"""A rank is lost while calls are queued, as on NCCL: survivors continue only after their communicators are aborted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshcomm.testing.emulated_nccl import NAME, PEERS_DUMP_S, STACK_S
from tests.elastic.deaths import ROOT, config_of, left_over, training
from tests.elastic.queued_loop import WAITS

SCRIPT = Path(__file__).parent / "queued_loop.py"
STEPS = 6
# Seconds from a death until all others have raised; a rank that is not released waits for 600.
LEFT_S = 5.0

TRAINS = """
import meshcomm
from meshcomm.testing.emulated_nccl import emulated_nccl
from meshcomm.train import Trainer

with emulated_nccl(), meshcomm.init() as mesh:
    Trainer(mesh).run()
"""

# Rank 3 dies when ranks 0 and 2 can end step 3; rank 1 then has the norm of an aborted call.
SPOILS = """
import os, signal, time
import meshcomm
from meshcomm.parallel.norm import GradientNorm
from meshcomm.testing.emulated_nccl import emulated_nccl
from meshcomm.train import Trainer

measured = GradientNorm.norm

def norm(self):
    found = measured(self)
    if (trainer.engine.done, mesh.elastic.generation.number) == (2, 0) and mesh.rank in (1, 3):
        found.item()
        if mesh.rank == 3:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        while mesh.elastic.lost() is None:
            time.sleep(0.01)
        found = found * 1e6
    return found

with emulated_nccl(), meshcomm.init() as mesh:
    trainer = Trainer(mesh)
    GradientNorm.norm = norm
    trainer.run()
"""

DP_TP = """
[mesh]
dims = { dp = 2, tp = 2 }
device = "cpu"
[parallel]
data = "dp"
tensor = "tp"
"""


def loop(world_size: int, validate_calls: int, *words: str, deaths: int) -> str:
    """Run the loop, in which `deaths` ranks die one after the other. Return its stderr."""
    command = ["-m", "meshcomm", "run", "--replace", str(deaths), "--world-size", str(world_size)]
    ended = subprocess.run(
        [sys.executable, *command, str(SCRIPT), str(validate_calls), *words],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    events = re.findall(r"(dies|lost \([\d, ]+\)) (\S+)", ended.stdout)
    assert [what for what, _ in events].count("dies") == deaths, ended.stdout
    died = 0.0
    for what, moment in events:
        died = float(moment) if what == "dies" else died
        assert float(moment) - died < LEFT_S, ended.stdout
    steps = 2 * len([word for word in words if word in WAITS])
    whole = float(sum(range(steps + 1)) * 3 * sum(range(world_size)))
    assert sorted(re.findall(r"rank .*", ended.stdout)) == [
        f"rank {rank}: {whole}" for rank in range(world_size)
    ]
    return ended.stderr


@pytest.mark.faults
def test_a_value_that_never_comes() -> None:
    said = loop(2, 0, "value", deaths=1)
    assert "rank 1 (dp=1 tp=0) was ended by SIGKILL; replaced, replacements left: 0" in said


@pytest.mark.faults
def test_a_rank_on_another_host_is_lost() -> None:
    """torch's watchdog then neither ends nor delays the others: see docs/design/emulated_nccl.md."""
    began = time.monotonic()
    loop(4, 0, "value", "network", deaths=1)
    assert time.monotonic() - began < STACK_S + PEERS_DUMP_S


@pytest.mark.faults
def test_data_of_a_dropped_call_is_not_taken_for_a_result() -> None:
    """A rank that has dropped a call sends its data in the next one, which then ends normally on the other side."""
    loop(4, 0, "value", "late", deaths=1)


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize("validate_calls", [0, 64])
@pytest.mark.parametrize(
    "words", [("value", "message", "handle", "barrier"), ("objects", "first", "torchs")], ids="_".join
)
def test_whatever_the_others_wait_for(words: tuple[str, ...], validate_calls: int) -> None:
    """With validate_calls=64, the host waits for the comparison of a call before the call itself."""
    loop(4, validate_calls, *words, deaths=len(words))


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize("when", ["reopening", "joining"])
def test_a_second_rank_is_lost_while_the_groups_are_made_again(when: str) -> None:
    loop(4, 0, "value", when, deaths=2)


def queued(text: str) -> str:
    """The config with the backend that emulates NCCL; gradients are clipped in every step."""
    return text.replace('device = "cpu"', f'device = "cpu"\nbackend = "{NAME}"') + "clip_norm = 0.1\n"


def losses(folder: Path, config: str, script: str, kills: dict[int, int]) -> list[float]:
    """The losses of a training in which ranks are killed after steps; in SPOILS, a rank kills itself."""
    deaths = len(kills) or int(script is SPOILS)
    folder.mkdir()
    path = folder / "script.py"
    path.write_text(script)
    with training(folder, config, deaths, script=path) as job:
        for step, rank in kills.items():
            assert job.await_step(step), job.log.read_text()
            job.kill(rank, signal.SIGKILL)
        assert job.process.wait(250) == 0, job.log.read_text()
        assert job.log.read_text().count("; replaced, ") == deaths
        assert not left_over(folder)
        return [line["loss"] for line in job.lines]


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mesh", ["dp2", "dp4", "dp2 fsdp2"])
def test_a_training_goes_on_exactly(mesh: str, tmp_path: Path) -> None:
    config = queued(config_of(mesh, STEPS))
    expected = losses(tmp_path / "before", config, TRAINS, {})
    assert losses(tmp_path / "after", config, TRAINS, {2: 1, 4: 0}) == expected


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_shards_go_back_to_copies(tmp_path: Path) -> None:
    config = queued(config_of("fsdp2", STEPS))
    expected = losses(tmp_path / "before", config, TRAINS, {})
    copies = config + "[elastic]\ncopy_every = 1\n"
    assert losses(tmp_path / "after", copies, TRAINS, {2: 1, 4: 0}) == expected


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_a_norm_that_was_given_up_scales_nothing(tmp_path: Path) -> None:
    """Ranks 0 and 2 have applied the step, and rank 1 completes it."""
    config = queued(DP_TP + config_of("dp2", STEPS).partition('data = "dp"\n')[2])
    expected = losses(tmp_path / "before", config, TRAINS, {})
    assert losses(tmp_path / "after", config, SPOILS, {}) == expected
