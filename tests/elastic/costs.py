"""What replacing a rank takes beside a restart from a checkpoint, and what it costs when nobody dies: `python -m tests.elastic.costs`."""

from __future__ import annotations

import signal
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Final

from tests.elastic.deaths import config_of, training

_MESH: Final = "pp2 dp2 tp2"
_TIMES: Final = 5
_STEPS: Final = 60


def lost_s(folder: Path, more: str, replace: int, words: list[str]) -> float:
    """Seconds from SIGKILL to the next step that was not there before."""
    with training(folder, config_of(_MESH, 40, more), replace, words=words) as job:
        assert job.await_step(10), job.log.read_text()
        began = time.monotonic()
        death = job.kill(3, signal.SIGKILL)
        # A restart writes the lines after its checkpoint again.
        time.sleep(1.0)
        assert job.await_step(death.after + 1), job.log.read_text()
        return time.monotonic() - began


def step_s(folder: Path, replace: int) -> float:
    """Seconds of a step, by the clock of the run: the median of the differences between lines."""
    with training(folder, config_of(_MESH, _STEPS), replace) as job:
        assert job.process.wait(200) == 0, job.log.read_text()
        at = [line["seconds"] for line in job.lines]
    return median(later - before for before, later in pairwise(at[5:]))


def main() -> None:
    """Print both."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        every = "checkpoint_every = 1\n"
        replaced, restarted, with_it, without = [], [], [], []
        for number in range(_TIMES):
            replaced.append(lost_s(folder / f"replace{number}", "", 1, []))
            restarted.append(lost_s(folder / f"restart{number}", every, 0, ["--max-restarts", "1"]))
            with_it.append(step_s(folder / f"with{number}", 1))
            without.append(step_s(folder / f"without{number}", 0))
        print(f"SIGKILL to the next step, {_MESH}, median of {_TIMES}")
        print(f"replaced   {median(replaced):.1f} s  ({min(replaced):.1f} to {max(replaced):.1f})")
        print(
            f"restarted  {median(restarted):.1f} s  ({min(restarted):.1f} to {max(restarted):.1f}), a checkpoint each step"
        )
        pairs = [one / other for one, other in zip(with_it, without, strict=True)]
        print(
            f"a step with --replace 1 / without: {median(pairs):.3f} ({min(pairs):.3f} to {max(pairs):.3f})"
        )
        print(f"{1e3 * median(with_it):.1f} ms, {1e3 * median(without):.1f} ms")


if __name__ == "__main__":
    main()
