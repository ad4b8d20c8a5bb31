"""`meshcomm report`: combine the reports that the ranks of a job wrote when a call failed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from meshcomm.commands.app import AsJson, command, show_facts
from meshcomm.errors import LaunchError, MeshcommError
from meshcomm.show.page import Facts, Line

_OURS: Final = "a file that this version of meshcomm wrote on that rank"


@command()
def report(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="[DIR]",
            help="Folder with the reports of one or more runs. The newest run is read. Default: meshcomm-reports.",
        ),
    ] = Path("meshcomm-reports"),
    json: AsJson = False,
) -> None:
    """Combine the reports of a job with failed calls. Show which ranks waited, for which ranks, and where.

    With --json, the result has folder, runs (how many are in the folder that was given), cause (the lines about the root
    cause, from the launcher if meshcomm run or train was one) and ranks: of each, its rank, coords, the line about it, and failed: its first call that failed, or null.
    """
    show_facts(facts_of(source), json, view, width=10_000)


def facts_of(folder: Path) -> Facts:
    """Return the root cause according to the launcher, or to the newest run's reports in `folder`, or in a run's folder, and each rank's failed call.

    Raises LaunchError if there are no reports, or if one is invalid.
    """
    from meshcomm.mesh.rank_failure import TOLD
    from meshcomm.watching.verdict import root_cause

    runs = [path for path in folder.glob("*/") if any(_reports_in(path))]
    found = 1
    if runs and not any(_reports_in(folder)):
        # Folder names begin with the time.
        folder, found = max(runs), len(runs)
    statuses = _read(folder)
    ranks = [
        {"rank": rank, "coords": status["coords"], "line": _line(rank, status), "failed": status["failed"]}
        for rank, status in statuses.items()
    ]
    # Ranks that a launcher has ended left no report, so the launcher knows more.
    cause = _told(folder / TOLD) or root_cause(statuses)
    return {"folder": str(folder), "runs": found, "cause": cause, "ranks": ranks}


def _told(file: Path) -> list[str]:
    """Return the lines about the root cause that the launcher of the job has written; [] if there are none."""
    from json import loads

    if not file.exists():
        return []
    with _reading(file):
        told = loads(file.read_text(encoding="utf-8"))
        first, *more = told["lines"]
        error = MeshcommError(first, given=told["given"], expected=told["expected"], hint=told["try"])
        return [*str(error).splitlines(), *map(str, more)]


def view(facts: Facts) -> Line:
    """Return the lines about the root cause, and a line per rank."""
    newest = f", the newest of {facts['runs']} runs" if facts["runs"] > 1 else ""
    head = f"{len(facts['ranks'])} report(s) in {facts['folder']}{newest}"
    return Line("\n".join([head, *facts["cause"], *(rank["line"] for rank in facts["ranks"])]))


def _reports_in(folder: Path) -> Iterator[tuple[int, Path]]:
    """Yield the rank and the path of each report file in a folder. Copies with other names are ignored."""
    for path in folder.glob("rank*.json"):
        if match := re.fullmatch(r"rank(\d+)\.json", path.name):
            yield int(match[1]), path


def _read(folder: Path) -> dict[int, Any]:
    """Return the reports in a folder, by rank. Raises LaunchError if there are no reports, or if a report is invalid."""
    from json import loads

    from meshcomm.watching.verdict import root_cause

    files = sorted(_reports_in(folder))
    if not files:
        raise LaunchError(
            f"there are no reports in {folder}",
            given=f"{folder}" if folder.is_dir() else f"{folder}, which is not a folder",
            expected="rank0.json, rank1.json, ..., which ranks write when a call fails",
            hint="mesh.reports in the config sets the folder; the default is meshcomm-reports",
        )
    statuses = {}
    for rank, file in files:
        with _reading(file):
            status = loads(file.read_text(encoding="utf-8"))
            if status["rank"] != rank:
                raise LaunchError(
                    f"{file} is not a report of rank {rank}",
                    given=f"rank: {status['rank']}",
                    expected=_OURS,
                    hint=f"remove {file}",
                )
            # Check each file separately, so that the error names the file.
            root_cause({rank: status})
            _line(rank, status)
        statuses[rank] = status
    return statuses


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Raise a LaunchError if the block cannot use the file's content, for example because another program wrote the file."""
    try:
        yield
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        given = f"{type(error).__name__}: {error}"
        raise LaunchError(
            f"{file} is not a report", given=given, expected=_OURS, hint=f"remove {file}"
        ) from None


def _line(rank: int, status: Mapping[str, Any]) -> str:
    from meshcomm.watching.words import activity, made_at, name_of_rank

    failed = status["failed"]
    if failed is None:
        return activity(rank, status)
    call = f"{failed['call']} on {failed['label']}, {made_at(failed)}"
    return f"{name_of_rank(rank, status)}: {call}: {' '.join(failed['error'])}"
