"""Measure the figures of docs/benchmarks.md again: `python -m tests.benchmarks [WORD ...]`.

A block of the page between `<!-- measured by: COMMAND -->` and `<!-- end of measured -->` has the output of COMMAND, and a line with
the date, the version of torch and the duration. With WORDs, only blocks whose command contains one of them are measured.
The machine should do nothing else. All blocks take about an hour on 2 cores.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Final

import psutil

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "benchmarks.md"
_BLOCK: Final = re.compile(
    r"(<!-- measured by: (?P<command>.+?) -->\n).*?(?=<!-- end of measured -->)", re.DOTALL
)
_TIMEOUT_S: Final = 3600.0
# Percent of all cores.
_BUSY: Final = 20.0


def commands(page: str) -> list[str]:
    """Return the commands of the blocks, in the order of the page."""
    return [found["command"] for found in _BLOCK.finditer(page)]


def written(page: str, command: str, text: str) -> str:
    """Return the page with `text` in the block of `command`."""
    return _BLOCK.sub(
        lambda found: f"{found[1]}\n{text}\n\n" if found["command"] == command else found[0], page
    )


def measured(command: str) -> str:
    """Run a command and return what it printed, with the circumstances. Raises CalledProcessError if it fails."""
    program, *words = shlex.split(command)
    modules = {"python": [], "torchrun": ["-m", "torch.distributed.run"], "pytest": ["-m", "pytest"]}
    busy, began = psutil.cpu_percent(1.0), time.monotonic()
    if busy > _BUSY:
        print(f"the machine is {busy:.0f} % busy with other work", file=sys.stderr, flush=True)
    said = subprocess.run(
        [sys.executable, *modules[program], *words],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True, check=True, timeout=_TIMEOUT_S,
    ).stdout  # fmt: skip
    minutes = (time.monotonic() - began) / 60
    today = f"{date.today():%-d %B %Y}"
    circumstances = f"{today}, torch {version('torch').split('+')[0]}, {minutes:.1f} min"
    return f"{said.strip()}\n\n`{command}` ({circumstances})"


def main(words: list[str]) -> int:
    """Measure the chosen blocks, one after the other. Returns the number of commands that failed."""
    chosen = [each for each in commands(PAGE.read_text()) if not words or any(word in each for word in words)]
    if not chosen:
        print(f"no command of {PAGE} contains one of {words}", file=sys.stderr)
        return 1
    failed = 0
    for command in chosen:
        print(f"{command} ...", file=sys.stderr, flush=True)
        try:
            text = measured(command)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print(error, file=sys.stderr)
            failed += 1
        else:
            # Read the page again: it may have been edited meanwhile.
            PAGE.write_text(written(PAGE.read_text(), command, text))
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
