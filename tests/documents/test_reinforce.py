"""examples/reinforce: the reward rises from chance, and training on fsdp=2 tp=2 has the rewards of one process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import pytest
import torch

import meshcomm
from meshcomm.testing import Pool

pytestmark = pytest.mark.long

pytest.importorskip("transformers")

EXAMPLE = Path(__file__).parents[2] / "examples" / "reinforce"
CHANCE = 1 / 16


@contextmanager
def example(dtype: torch.dtype) -> Iterator[None]:
    """Make the example's files importable. Its policy has this dtype."""
    threads, modules = torch.get_num_threads(), set(sys.modules)
    sys.path.insert(0, str(EXAMPLE))
    torch.set_default_dtype(dtype)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(torch.float32)
        sys.path.remove(str(EXAMPLE))
        for name in set(sys.modules) - modules:
            if str(EXAMPLE) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]


def in_one_process(steps: int, dtype: torch.dtype, shares: int = 1) -> list[float]:
    with example(dtype):
        from one_process import train

        return list(islice(train(0, shares), steps))


def on_the_mesh(steps: int) -> list[float]:
    with example(torch.float64):
        from train import train

        with meshcomm.init(dims={"fsdp": 2, "tp": 2}, device="cpu") as mesh:
            return list(islice(train(mesh, 0), steps))


def test_the_reward_rises_from_chance() -> None:
    reward = in_one_process(40, torch.float32)
    assert sum(reward[:3]) / 3 == pytest.approx(CHANCE, abs=0.02)
    assert sum(reward[-3:]) / 3 > 0.3


def test_training_on_the_mesh_has_the_rewards_of_one_process(pool: Pool) -> None:
    """In float64, because rounding may change a sample."""
    alone = in_one_process(8, torch.float64, shares=4)
    assert pool.run(on_the_mesh, 8, ranks=4) == [alone] * 4
    assert alone[0] != alone[-1]


@pytest.mark.deep
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "command", [["one_process.py"], ["-m", "meshcomm", "run", "--world-size", "4", "train.py"]]
)
def test_the_reward_reaches_nine_tenths(command: list[str]) -> None:
    run = subprocess.run(
        [sys.executable, *command], cwd=EXAMPLE, capture_output=True, text=True, timeout=500, check=True
    )
    *_, last = run.stdout.splitlines()
    assert float(last.partition("reward ")[2].partition(",")[0]) >= 0.9
