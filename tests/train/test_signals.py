"""SIGTERM and SIGUSR1 end a run on all ranks after a step and a checkpoint. A resumed run continues as if undisturbed."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import meshcomm
from meshcomm.config import Config, load_config
from meshcomm.testing import Pool
from meshcomm.train import Callback, Trainer
from tests.train.parity_cases import small

STEPS = 40


class _Sends(Callback):
    """Sends this process a signal at some moment after a step."""

    def __init__(self, number: int, step: int, seconds: float) -> None:
        self._number, self._step, self._seconds = number, step, seconds

    def on_step(self, step: Any) -> None:
        """See Callback."""
        if step.step == self._step:
            thread = threading.Thread(target=self._later)
            thread.start()

    def _later(self) -> None:
        time.sleep(self._seconds)
        os.kill(os.getpid(), self._number)
        # Slurm signals the ranks, and a launcher passes the same signal on to them.
        time.sleep(0.005)
        os.kill(os.getpid(), self._number)


def trained(config: Config, sender: tuple[int, int, int, float] | None) -> tuple[list[float], bool, str]:
    """Losses, whether a signal ended the run, and the reason. sender: rank, signal, step, seconds after the step."""
    with meshcomm.init(config) as mesh:
        callbacks: list[Callback] = []
        if sender is not None and sender[0] == mesh.rank:
            callbacks = [_Sends(*sender[1:])]
        found = Trainer(mesh, config, callbacks=callbacks).run()
        # This process runs other tests later.
        ignored = [signal.signal(each, signal.SIG_DFL) for each in (signal.SIGTERM, signal.SIGUSR1)]
        assert ignored == [signal.SIG_IGN if found.asked_to_stop else signal.SIG_DFL] * 2
        return list(found.losses), found.asked_to_stop, found.stopped


def config_of(out: Path) -> Config:
    settings = small("pp=2 dp=2", num_layers=2, num_kv_heads=4)
    changes = [f"train.steps={STEPS}", f"train.out={out}", "train.resume=true", "train.log_every=1"]
    return load_config(settings, changes)


@pytest.mark.parametrize(
    "count", [pytest.param(20, marks=pytest.mark.parity), 2], ids=["twenty moments", "two moments"]
)
@pytest.mark.deep_cases(r"two moments")
def test_a_run_that_is_asked_to_end_goes_on_bit_for_bit(pool: Pool, tmp_path: Path, count: int) -> None:
    whole, asked, why = pool.run(trained, config_of(tmp_path / "whole"), None, ranks=4)[0]
    assert len(whole) == STEPS and not asked and not why
    draw = random.Random(count)
    ended = set()
    for moment in range(count):
        number = draw.choice([signal.SIGTERM, signal.SIGUSR1])
        rank, step = draw.randrange(4), draw.randrange(1, STEPS - 5)
        config = config_of(tmp_path / f"{moment}")
        sender = (rank, number, step, draw.uniform(0, 0.03))
        ranks = pool.run(trained, config, sender, ranks=4)
        losses, asked, why = ranks[0]
        assert all(each == ranks[0] for each in ranks)
        assert asked and why.startswith(f"{signal.Signals(number).name} to rank {rank} (pp={rank // 2} dp=")
        assert step < len(losses) < STEPS and losses == whole[: len(losses)]
        ended.add(len(losses))
        losses, asked, why = pool.run(trained, config, None, ranks=4)[0]
        assert losses == whole and not asked and not why
    assert len(ended) > 1
