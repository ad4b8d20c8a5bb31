"""Seconds from the death of a generator to the next version on its successor: `python -m tests.benchmarks.restart [--rounds 3]`."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

from meshcomm.show.units import seconds_text
from tests.benchmarks.table import markdown
from tests.transfer.restarted import lives


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.restart", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = []
    for _ in range(parser.parse_args().rounds):
        with tempfile.TemporaryDirectory() as folder:
            rounds.append(lives(Path(folder))[0])
    columns: dict[str, Callable[[str], str]] = {
        "two trainers, two generators": str,
        "median": lambda step: seconds_text(median(steps[step] for steps in rounds)),
        "longest": lambda step: seconds_text(max(steps[step] for steps in rounds)),
    }
    print(markdown(columns, rounds[0]))


if __name__ == "__main__":
    main()
