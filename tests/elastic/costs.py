"""What replacing a rank takes beside a restart from a checkpoint, and what it costs while no rank dies: `python -m tests.elastic.costs`."""

from __future__ import annotations

import argparse
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

import psutil

from tests.benchmarks.table import markdown
from tests.elastic.deaths import Run, config_of, training

_MESH: Final = "pp2 dp2 tp2"
_STEPS: Final = 60
_COPIES: Final = "[elastic]\ncopy_every = 1\n"


class Cost(NamedTuple):
    """Seconds of a step, the median, and the memory of all ranks together at its last step."""

    step_s: float
    rss: int


def lost_s(folder: Path, more: str, replace: int, words: Sequence[str] = ()) -> float:
    """Return the seconds from SIGKILL until there was one more step than before."""
    with training(folder, config_of(_MESH, 40, more), replace, words=words) as job:
        assert job.await_step(10), job.log.read_text()
        began = time.monotonic()
        death = job.kill(3, signal.SIGKILL)
        # A restart writes the lines after its checkpoint again.
        time.sleep(1.0)
        assert job.await_step(death.after + 1), job.log.read_text()
        return time.monotonic() - began


def cost(folder: Path, replace: int, more: str = "") -> Cost:
    """Return the cost of a run in which no rank dies."""
    with training(folder, config_of(_MESH, _STEPS, more), replace) as job:
        assert job.await_step(_STEPS - 5), job.log.read_text()
        rss = _rss(job)
        assert job.process.wait(200) == 0, job.log.read_text()
        at = [line["seconds"] for line in job.lines]
    return Cost(median(later - before for before, later in pairwise(at[5:])), rss)


def _rss(job: Run) -> int:
    """Return the memory of all processes that the launcher has started, without the launcher's own."""
    # Pages of a library that several processes use are divided among them.
    processes = psutil.Process(job.process.pid).children(recursive=True)
    return sum(int(each.memory_full_info().pss) for each in processes)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    restarts = ("--max-restarts", "1")
    lost: dict[str, list[float]] = {"`--replace 1`": [], "a restart from a checkpoint of the last step": []}
    costs: dict[str, list[Cost]] = {
        "without `--replace`": [],
        "`--replace 1`": [],
        "the same, `copy_every = 1`": [],
    }
    with tempfile.TemporaryDirectory() as name:
        for number in range(rounds):
            folder = Path(name, str(number))
            runs = iter(range(9))
            times, found = list(lost.values()), list(costs.values())
            times[0].append(lost_s(folder / str(next(runs)), "", 1))
            times[1].append(lost_s(folder / str(next(runs)), "checkpoint_every = 1\n", 0, restarts))
            found[0].append(cost(folder / str(next(runs)), 0))
            found[1].append(cost(folder / str(next(runs)), 1))
            found[2].append(cost(folder / str(next(runs)), 1, _COPIES))
    until: dict[str, Callable[[str], str]] = {
        _MESH: lambda way: way,
        "from SIGKILL to the next step": lambda way: f"{median(lost[way]):.1f} s",
        "from, to": lambda way: f"{min(lost[way]):.1f} s, {max(lost[way]):.1f} s",
    }
    base = costs["without `--replace`"]

    def ratios(way: str) -> list[float]:
        return sorted(one.step_s / other.step_s for one, other in zip(costs[way], base, strict=True))

    steps: dict[str, Callable[[str], str]] = {
        "no rank dies": lambda way: way,
        "a step": lambda way: f"{1e3 * median(each.step_s for each in costs[way]):.0f} ms",
        "ratio": lambda way: f"{median(ratios(way)):.3f}",
        "from, to": lambda way: f"{ratios(way)[0]:.3f}, {ratios(way)[-1]:.3f}",
        "memory of all processes": lambda way: f"{median(each.rss for each in costs[way]) / 1e6:,.0f} MB",
    }
    print(markdown(until, lost) + "\n\n" + markdown(steps, costs))


if __name__ == "__main__":
    main()
