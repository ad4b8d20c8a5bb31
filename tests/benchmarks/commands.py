"""Seconds and memory of whole commands that start no ranks: `python -m tests.benchmarks.commands`."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from meshcomm.show.units import seconds_text
from tests.benchmarks.table import markdown

COMMANDS: Final = (
    "plan configs/gpt_1024.toml --world-size 131072 --rank 777",
    "tune configs/llama_405b.toml --world-size 16384",
    "dryrun configs/quickstart.toml",
)
_ONE: Final = """
import resource, subprocess, sys
code = subprocess.run([sys.executable, "-m", "meshcomm", *sys.argv[1:]], stdout=subprocess.DEVNULL).returncode
print(code, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


class Command(NamedTuple):
    """peak_kb: of the largest process. code: the exit code."""

    words: str
    seconds: float
    peak_kb: int
    code: int


def measured(words: str) -> Command:
    """Run a command once."""
    began = time.perf_counter()
    said = subprocess.run(
        [sys.executable, "-c", _ONE, *shlex.split(words)], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    code, peak = map(int, said.split())
    return Command(words, time.perf_counter() - began, peak, code)


def main() -> None:
    """Print the table."""
    columns: dict[str, Callable[[Command], str]] = {
        "command": lambda row: f"`meshcomm {row.words}`",
        "time": lambda row: seconds_text(row.seconds),
        "largest process": lambda row: f"{row.peak_kb * 1024 / 1e6:,.0f} MB",
        "exit code": lambda row: str(row.code),
    }
    print(markdown(columns, map(measured, COMMANDS)))


if __name__ == "__main__":
    main()
