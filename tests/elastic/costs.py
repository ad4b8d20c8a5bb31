"""The time to replace a rank or to restart all from a checkpoint, and the cost while no rank dies: `python -m tests.elastic.costs`."""

from __future__ import annotations

import argparse
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

import psutil

from tests.benchmarks.table import markdown
from tests.elastic.deaths import Run, config_of, training

_MESH: Final = "pp2 dp2 tp2"
_STEPS: Final = 60


class Cost(NamedTuple):
    """The mean seconds of a step, and the memory of all processes at the end of the run."""

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
    # The mean, because copies are not made in every step.
    return Cost((at[-1] - at[4]) / (len(at) - 5), rss)


def _rss(job: Run) -> int:
    """Return the memory of all processes that the launcher has started, without the launcher's own."""
    # Pages of a library that several processes use are divided among them.
    processes = psutil.Process(job.process.pid).children(recursive=True)
    return sum(int(each.memory_full_info().pss) for each in processes)


def lost(rounds: int) -> str:
    """Return the table of recoveries."""
    found: dict[str, list[float]] = {"`--replace 1`": [], "a restart from a checkpoint of the last step": []}
    with tempfile.TemporaryDirectory() as name:
        for number in range(rounds):
            replaced, restarted = found.values()
            replaced.append(lost_s(Path(name, f"replace{number}"), "", 1))
            more, words = "checkpoint_every = 1\n", ("--max-restarts", "1")
            restarted.append(lost_s(Path(name, f"restart{number}"), more, 0, words))
    columns: dict[str, Callable[[str], str]] = {
        _MESH: lambda way: way,
        "from SIGKILL to the next step": lambda way: f"{median(found[way]):.1f} s",
        "from, to": lambda way: f"{min(found[way]):.1f} s, {max(found[way]):.1f} s",
    }
    return markdown(columns, found)


def steps(rounds: int) -> str:
    """Return the table of steps while no rank dies."""
    ways = {"without `--replace`": (0, ""), "`--replace 1`": (1, "")}
    ways |= {f"the same, `copy_every = {k}`": (1, f"[elastic]\ncopy_every = {k}\n") for k in (1, 10)}
    found: dict[str, list[Cost]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as name:
        for number in range(rounds):
            for place, (way, (replace, more)) in enumerate(ways.items()):
                found[way].append(cost(Path(name, f"{number}-{place}"), replace, more))
    base = next(iter(found.values()))

    def ratios(way: str) -> list[float]:
        return sorted(one.step_s / other.step_s for one, other in zip(found[way], base, strict=True))

    columns: dict[str, Callable[[str], str]] = {
        "no rank dies": lambda way: way,
        "a step": lambda way: f"{1e3 * median(each.step_s for each in found[way]):.0f} ms",
        "ratio": lambda way: f"{median(ratios(way)):.2f}",
        "from, to": lambda way: f"{ratios(way)[0]:.2f}, {ratios(way)[-1]:.2f}",
        "memory of all processes": lambda way: f"{median(each.rss for each in found[way]) / 1e6:,.0f} MB",
    }
    return markdown(columns, found)


def main() -> None:
    """Print one of the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=["lost", "steps"])
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    print({"lost": lost, "steps": steps}[given.table](given.rounds))


if __name__ == "__main__":
    main()
