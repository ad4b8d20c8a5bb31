"""`meshcomm report`: what the ranks of a failed job left, put together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshcomm.comm.diagnosis import doing_of, name_of_rank, root_cause
from meshcomm.errors import LaunchError


def newest_run(folder: Path) -> Path:
    """The folder of the last run that left reports in `folder`, which may be that run's itself."""
    if any(folder.glob("rank*.json")):
        return folder
    # Their names begin with the time.
    return max((path.parent for path in folder.glob("*/rank*.json")), default=folder)


def read_reports(folder: Path) -> dict[int, Any]:
    """The reports in a folder, by rank. Raises LaunchError where there are none, or something else is."""
    files = sorted(folder.glob("rank*.json"), key=lambda path: int("0" + path.stem[4:]))
    if not files:
        raise LaunchError(
            f"there are no reports in {folder}",
            given=f"{folder}" if folder.is_dir() else f"{folder}, which is no folder",
            expected="rank0.json, rank1.json, ... as ranks leave them when a call fails",
            hint="mesh.reports in the config says where they go; default meshcomm-reports",
        )
    statuses = {}
    for file in files:
        try:
            status = json.loads(file.read_text())
            statuses[int(status["rank"])] = status
        except (ValueError, KeyError, TypeError) as error:
            raise LaunchError(
                f"{file} is not a report",
                given=str(error),
                expected="a file that a rank wrote",
                hint=f"remove {file}",
            ) from None
    return statuses


def report(folder: Path) -> str:
    """What the reports in a folder say together, as text."""
    runs = {path.parent for path in folder.glob("*/rank*.json")}
    folder = newest_run(folder)
    statuses = read_reports(folder)
    older = f", the newest of {len(runs)} runs" if folder in runs and len(runs) > 1 else ""
    lines = [f"{len(statuses)} report(s) in {folder}{older}", *root_cause(statuses)]
    for rank, status in statuses.items():
        if status["failed"] is not None:
            failed = status["failed"]
            lines.append(
                f"{name_of_rank(rank, status)}: {failed['call']} on "
                f"{failed['label']}, at {failed['callsite']}: {' '.join(failed['error'])}"
            )
        else:
            lines.append(f"{name_of_rank(rank, status)} {doing_of(status)}")
    return "\n".join(lines)
