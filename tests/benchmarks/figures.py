"""The figures that tests record while they run: `python -m tests.benchmarks.figures PYTEST_ARGUMENT ...`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).parents[2]


def figures(said: str) -> list[str]:
    """Return the lines of the section "measured" of what pytest printed.

    >>> figures("== measured ==\\nflat: 2 s\\n1 passed in 3 s")
    ['flat: 2 s']
    """
    found = re.search(r"^=+ measured =+\n(.*?)^(?:=+ |\d+ (?:passed|failed))", said, re.DOTALL | re.MULTILINE)
    return found[1].splitlines() if found else []


def main(words: list[str]) -> int:
    """Print a list of the figures. Returns pytest's exit code."""
    command = [sys.executable, "-m", "pytest", "-n", "0", *words]
    done = subprocess.run(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True)
    for line in figures(done.stdout):
        print(f"- {line}")
    if done.returncode:
        print(done.stdout, file=sys.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
