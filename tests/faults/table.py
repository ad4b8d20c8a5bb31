"""The table as a page: `python -m tests.faults.table` runs every row and writes docs/reference/faults.md.

With names of rows, it runs only these rows and replaces or adds their lines. Run it on an otherwise idle machine: a row
that takes longer than promised counts as unexpected.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Final

from meshcomm.layout.sizes import fold
from tests.faults.row import BUSY_S, DIFFERS_S, MISSING_S, TIMEOUT_S, Row
from tests.faults.rows import ROWS
from tests.faults.runner import Result, Said, complaints, names, run

PAGE: Final = Path(__file__).parents[2] / "docs" / "reference" / "faults.md"

_HEAD: Final = f"""# What happens when something goes wrong

For each fault at each moment, this page shows the error that every surviving rank raised, and the time until it did.
`python -m tests.faults.table` runs every row on real processes and writes this page. `pytest -m faults` runs and checks the same rows.
Each row is a job of four or eight ranks with one fault and a timeout of {TIMEOUT_S:g} s. No row may hang or end with a wrong number: ranks that
continue check the numbers of every call.

- **seconds**: the time from the fault to the last error, or to the end of the last rank if no rank raises an error. If a call is skipped, or a
  rank does not arrive or is stopped, this time includes the timeout.
- **at most**: the guaranteed limit on 2 cores that run nothing else. If ranks differ, the limit is {DIFFERS_S:g} s after the last rank has arrived.
  If a rank is missing, the limit is {MISSING_S - TIMEOUT_S:g} s after the timeout. If only `mesh.step` can find the difference, the limit is 2 s later, because
  `mesh.step` compares calls once a second. A sleeping rank raises an error at most {DIFFERS_S:g} s after it wakes up. The tests run in parallel, and
  their limits are {BUSY_S:g} s later.
- **left**: the number of the row's processes that still exist at its end. The test itself ends ranks that the row has stopped (SIGSTOP), as a
  launcher does.
- *names*: the ranks in the error's `missing` or `mismatched_ranks`, or in its text.
- *without with*: the program opens its mesh with `mesh = meshcomm.init(...)` and never closes it. Python reports the errors when it exits.
"""


_YET: Final = "## Not as it should be yet"


def page(results: Mapping[str, Result]) -> str:
    """The page for the results of all rows, by name."""
    lines = [
        _HEAD,
        f"{len(ROWS)} rows on {os.cpu_count()} cores, torch {version('torch').partition('+')[0]}, {date.today():%-d %B %Y}.\n",
        "| row | fault | moment | dim | what the surviving ranks raised | seconds | at most | left |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [_line(row, results[name]) for name, row in ROWS.items()]
    return "\n".join(lines + _flaws()) + "\n"


def _flaws() -> list[str]:
    """The lines that explain the rows marked with (*)."""
    listed = [f"- `{name}`: {row.flaw}" for name, row in ROWS.items() if row.flaw]
    return ["", _YET, "", *listed] if listed else []


def _line(row: Row, result: Result) -> str:
    seconds = "-" if result.seconds is None else f"{max(0.0, result.seconds):.2f}"
    cells = [
        f"`{row.name}`" + (" (*)" if row.flaw else ""),
        row.fault,
        row.moment,
        row.dim,
        _raised(result),
        seconds,
        f"{row.promise_s:g}",
        str(result.left),
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _raised(result: Result) -> str:
    """Equal errors once, with all their ranks; the first line is taken from the lowest rank."""
    groups: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for rank, said in sorted(result.said.items()):
        groups.setdefault((said.kind, tuple(sorted(names(said))) if said.kind else ()), []).append(rank)
    parts = [_part(ranks, result.said[ranks[0]]) for ranks in groups.values()]
    parts += [f"rank {rank} hung" for rank in result.hung]
    return "<br>".join(parts)


def _part(ranks: list[int], said: Said) -> str:
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {fold(ranks)}"
    if not said.kind:
        return f"{who}: no error, numbers right"
    named = sorted(said.named or ())
    listed = f", names {fold(named)}" if named else ""
    return f"{who}: **{said.kind}**{listed}: {_first_line(said)}"


def _first_line(said: Said) -> str:
    lines = said.text.splitlines() or [""]
    # For an error that is not meshcomm's there is the whole traceback, whose last line is the message.
    text = lines[-1] if lines[0].startswith("Traceback") else lines[0]
    if said.kind.startswith("exit code"):
        # A process that was killed has written the reason to its stderr.
        text = next((line for line in lines if line.startswith("meshcomm.errors.")), text)
    text = re.sub(r"\S*/meshcomm-fault-\w+/", "", text)
    text = re.sub(r"/\S*/(\w+\.py)", r"\1", text)
    return text if len(text) <= 160 else text[:157] + "..."


def main(chosen: Sequence[str]) -> int:
    """Run the `chosen` rows, or all, and write the page. Return 1 if a row is not as expected."""
    results: dict[str, Result] = {}
    bad = 0
    for name in chosen or ROWS:
        row = ROWS[name]
        results[name] = result = run(row)
        wrong = complaints(row, result)
        unexpected = bool(wrong) != bool(row.flaw) and not row.sometimes
        bad += unexpected
        seconds = "   -" if result.seconds is None else f"{result.seconds:5.2f}"
        print(f"{seconds} s  {name}" + (f"  NOT AS EXPECTED: {wrong}" if unexpected else ""), flush=True)
    if not chosen:
        PAGE.write_text(page(results), encoding="utf-8")
        return 1 if bad else 0
    text = PAGE.read_text(encoding="utf-8").splitlines()
    first = next(i for i, line in enumerate(text) if line.startswith("| `"))
    lines = {line.split("`")[1]: line for line in text[first:] if line.startswith("| `")}
    lines |= {name: _line(ROWS[name], result) for name, result in results.items()}
    # This adds new rows and drops rows that no longer exist.
    kept = [lines[name] for name in ROWS if name in lines]
    head = re.sub(r"(?m)^\d+ rows,", f"{len(kept)} rows,", "\n".join(text[:first]))
    PAGE.write_text("\n".join([head, *kept, *_flaws()]) + "\n", encoding="utf-8")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
