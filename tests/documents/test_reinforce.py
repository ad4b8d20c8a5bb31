"""examples/reinforce: the reward rises from chance, and two jobs have the rewards of one process, also if a generator is lost."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshcomm.errors import CommunicationError
from meshcomm.testing import Pool
from tests.ports import free_port
from tests.two_jobs import Place, run

pytestmark = pytest.mark.long

pytest.importorskip("transformers")

EXAMPLE = Path(__file__).parents[2] / "examples" / "reinforce"
CHANCE = 1 / 16
STEPS, KILLED_AT = 5, 3


@contextmanager
def example() -> Iterator[None]:
    """Make the example's files importable."""
    threads, modules = torch.get_num_threads(), set(sys.modules)
    sys.path.insert(0, str(EXAMPLE))
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        sys.path.remove(str(EXAMPLE))
        for name in set(sys.modules) - modules:
            if str(EXAMPLE) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]


def in_one_process(steps: int) -> list[float]:
    with example():
        from one_process import train

        return list(islice(train(0), steps))


def in_two_jobs(place: Place, port: int, moment: str) -> Any:
    """Train for a few steps. moment: when a generator is killed, in step KILLED_AT; "" for never."""
    store = f"tcp://127.0.0.1:{port}"
    with example():
        if place.job == "trainers":
            from train import Generators, parallel_policy, train

            with place.mesh(dims={"fsdp": 2, "tp": 2}) as mesh:
                policy = parallel_policy(mesh, 0)
                generators = Generators(mesh, policy, store)
                rewards = list(islice(train(mesh, policy, generators), STEPS))
                generators.end()
                return rewards, generators.reconnects
        import generate

        if place.job == "again":
            place.until("lost", 4)
        elif moment and place.rank == 1:
            generate.sample = killed(generate.sample, moment)
        with place.mesh(dims={"copy": 2}) as mesh:
            try:
                return list(generate.generate(mesh, 0, store))
            except CommunicationError:
                # As its launcher would do.
                place.tell("lost")
                os.kill(os.getpid(), signal.SIGKILL)


def killed(sample: Any, moment: str) -> Any:
    """`sample` of a generator that dies in step KILLED_AT: when it samples, or when it has sent the first of two tensors."""

    def parts(policy: Any, seed: int, step: int, *shares: int) -> Iterator[Tensor]:
        for x in sample(policy, seed, step, *shares):
            if step == KILLED_AT and (moment == "sampling" or x.is_floating_point()):
                os.kill(os.getpid(), signal.SIGKILL)
            yield x

    return parts


def test_the_reward_rises_from_chance() -> None:
    reward = in_one_process(28)
    assert sum(reward[:3]) / 3 == pytest.approx(CHANCE, abs=0.02)
    assert sum(reward[-3:]) / 3 > 0.25


@pytest.mark.parametrize("moment", ["", "sampling", "sending"])
# A generator that is killed while it sends also shows the rewards of a run without a loss, before and after.
@pytest.mark.deep_cases(r"\[(sampling)?\]")
def test_two_jobs_have_the_rewards_of_one_process(pool: Pool, tmp_path: Path, moment: str) -> None:
    sizes = {"trainers": 4, "generators": 2} | ({"again": 2} if moment else {})
    ended = run(pool, tmp_path, in_two_jobs, free_port(), moment, timeout_s=200.0, **sizes)
    states = ["returned"] * 4 + (["died"] * 2 if moment else []) + ["returned"] * 2
    assert [end.state for end in ended] == states, "\n".join(end.text for end in ended)
    rewards = in_one_process(STEPS)
    assert [end.value for end in ended[:4]] == [(rewards, 1 if moment else 0)] * 4
    assert [end.value for end in ended[-2:]] == [[*range(KILLED_AT if moment else 1, STEPS + 1)]] * 2
    assert rewards[0] != rewards[-1]


def output_of(script: str) -> str:
    """What a script of the example prints. It ends its own jobs."""
    with subprocess.Popen(
        [sys.executable, script], cwd=EXAMPLE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            text, _ = process.communicate(timeout=500)
        finally:
            process.terminate()
    assert process.returncode == 0, text
    return text


@pytest.mark.deep
@pytest.mark.timeout(900)
def test_the_reward_reaches_nine_tenths() -> None:
    """The rewards are those of one process until the end, and across the loss of a generator."""
    rewards = [
        re.findall(r"^step (\d+): reward ([\d.]+)", output_of(script), re.M)
        for script in ("one_process.py", "run.py")
    ]
    assert rewards[0] == rewards[1]
    assert float(rewards[0][-1][1]) >= 0.9
