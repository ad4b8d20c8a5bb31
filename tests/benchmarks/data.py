"""`meshcomm bench` along one dim of 4 ranks, a column for each size: `python -m tests.benchmarks.data [--rounds 15]`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from meshcomm.show.units import seconds_text
from tests.benchmarks.table import markdown

SIZES: Final = {"256 B": 256, "64 KiB": 64 << 10, "1 MiB": 1 << 20, "64 MiB": 64 << 20}


def _cell(rows: Mapping[tuple[str, int], Mapping[str, Any]], size: int, operation: str) -> str:
    row = rows[operation, size]
    return f"{seconds_text(row['meshcomm']['seconds'])} ({row['ratio']:.2f})"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    words = ["bench", "--world-size", "4", "--rounds", str(given.rounds), "--json"]
    for size in SIZES.values():
        words += ["--bytes", str(size)]
    said = subprocess.run(
        [sys.executable, "-m", "meshcomm", *words], stdout=subprocess.PIPE, check=True
    ).stdout
    rows = {(row["operation"], row["bytes"]): row for row in json.loads(said)["rows"]}
    columns: dict[str, Callable[[str], str]] = {"4 ranks": lambda operation: operation}
    columns |= {label: partial(_cell, rows, size) for label, size in SIZES.items()}
    print(markdown(columns, dict.fromkeys(operation for operation, _ in rows)))


if __name__ == "__main__":
    main()
