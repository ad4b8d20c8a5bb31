"""`meshcomm report --timeline`: a trace, or the last calls of a failed job's ranks, as rows of text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshcomm.comm.spans import PASSES
from meshcomm.errors import LaunchError
from meshcomm.jobs.report import newest_run, read_reports
from meshcomm.show.timeline import Bar, Row, timeline


def timeline_of(source: Path, width: int | None = None) -> str:
    """What the ranks did, from a file of `mesh.trace` or a folder of reports.

    width: characters; None: as wide as the terminal.
    Raises: LaunchError where there is neither.
    """
    source = newest_run(source)
    rows = _of_reports(source) if source.is_dir() else _of_trace(source)
    return "\n".join([str(source), *timeline(rows, width or shutil.get_terminal_size((100, 24)).columns)])


def _of_trace(file: Path) -> list[Row]:
    try:
        events = json.loads(file.read_text())["traceEvents"]
        names = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
        lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
        calls: dict[int, list[Bar]] = {pid: [] for pid in sorted(names)}
        passes: dict[int, list[Bar]] = {pid: [] for pid in sorted(names)}
        for event in events:
            if event["ph"] != "X":
                continue
            lane, pid = lanes[event["pid"], event["tid"]], event["pid"]
            bar = Bar(lane, event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
            if lane == PASSES:
                passes[pid].append(bar._replace(kind=event["name"].split()[0]))
            elif event["cat"] != "program":
                calls[pid].append(bar)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LaunchError(
            f"{file} is no trace of a mesh",
            given=f"{type(error).__name__}: {error}",
            expected="a file that mesh.trace wrote, or a folder of reports",
            hint='with mesh.trace("trace.json"): ...',
        ) from None
    rows = []
    for pid in calls:
        if passes[pid]:
            rows.append(Row(pid, f"{pid} {PASSES}", passes[pid]))
        rows.append(Row(pid, f"{pid} calls" if passes[pid] else str(pid), calls[pid]))
    return rows


def _of_reports(folder: Path) -> list[Row]:
    reports = read_reports(folder)
    known = {rank: status for rank, status in reports.items() if "history" in status}
    if not known:
        raise LaunchError(
            f"the reports in {folder} hold no calls with their times",
            given=f"{len(reports)} report(s) without them",
            expected="reports that this version of meshcomm wrote",
            hint="meshcomm report without --timeline",
        )
    # On one host the monotonic clock is the same for all; across hosts only the wall clock is.
    one = len({status["clock"]["host"] for status in known.values()}) == 1
    return [Row(rank, str(rank), _bars(status, one)) for rank, status in sorted(known.items())]


def _bars(status: Mapping[str, Any], one_host: bool) -> list[Bar]:
    ahead = 0.0 if one_host else status["clock"]["ahead_s"]
    now = status["clock"]["now_s"]
    return [
        Bar(call["dim"], call["began"] + ahead, (now if call["over"] is None else call["over"]) + ahead)
        for call in status["history"]
    ]
