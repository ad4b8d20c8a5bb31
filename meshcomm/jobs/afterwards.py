"""`meshcomm report`, `export` and `import`: what is left of a job, read together, drawn, or carried elsewhere."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from meshcomm.comm.diagnosis import doing_of, name_of_rank, root_cause
from meshcomm.comm.spans import PASSES
from meshcomm.errors import ConfigError, LaunchError
from meshcomm.layout.names import did_you_mean
from meshcomm.show.timeline import Bar, Row, timeline

_DTYPES = ("float32", "bfloat16", "float16")
# Direction, the other rank, tag, number.
_Message = tuple[Literal["send", "recv"], int | None, int, int]


class _Waiting(BaseModel):
    dim: str
    call: str
    callsite: str
    parts: list[_Message]


class _Last(BaseModel):
    dim: str
    call: str
    callsite: str
    number: int
    bytes: int
    inside: bool
    shape: list[int] | None


class _Messages(BaseModel):
    begun: list[_Message]
    waiting: _Waiting | None


class _Group(BaseModel):
    label: str
    ranks: list[int]
    started: int
    last: _Last | None
    recent: list[tuple[int, str, str, int | None]]
    messages: _Messages


class _Failed(BaseModel):
    label: str
    call: str
    callsite: str
    error: list[str]
    waiting: _Waiting | None = None
    waited_for: list[int] | None = None


class _TorchCall(BaseModel):
    call: str
    number: int
    group: str | int


class _Clock(BaseModel):
    host: str
    now_s: float
    ahead_s: float


class _Timed(BaseModel):
    dim: str
    began: float
    over: float | None


class _Report(BaseModel):
    """What is read of the file that a rank leaves, see `Watch.status`. Other keys are not looked at."""

    rank: int
    coords: dict[str, int]
    main: str
    failed: _Failed | None
    groups: list[_Group]
    torch: list[_TorchCall] = []
    clock: _Clock | None = None
    history: list[_Timed] = []


class _Event(BaseModel):
    ph: str
    name: str
    pid: int
    tid: int | str = 0
    ts: float = 0.0
    dur: float = 0.0
    cat: str = ""
    args: dict[str, Any] = {}


class _Trace(BaseModel):
    traceEvents: list[_Event]


def _reports_in(folder: Path) -> Iterator[tuple[int, Path]]:
    """The files that ranks left in a folder, and the rank of each. Copies under other names are none."""
    for path in folder.glob("rank*.json"):
        if found := re.fullmatch(r"rank(\d+)\.json", path.name):
            yield int(found[1]), path


def newest_run(folder: Path) -> Path:
    """The folder of the last run that left reports in `folder`, which may be that run's itself."""
    if any(_reports_in(folder)):
        return folder
    # Their names begin with the time.
    return max((path for path in folder.glob("*/") if any(_reports_in(path))), default=folder)


def _read(file: Path, kind: type[BaseModel], what: str, expected: str, hint: str) -> Any:
    """The content of a file as JSON. Raises LaunchError, `what`, where it has not all that is read of `kind`."""
    try:
        text = file.read_text(encoding="utf-8")
        kind.model_validate_json(text, strict=True)
        return json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        said = str(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            said = f"{'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}"
        raise LaunchError(f"{file} {what}", given=said, expected=expected, hint=hint) from None


def read_reports(folder: Path) -> dict[int, Any]:
    """The reports in a folder, by rank. Raises LaunchError where there are none, or something else is."""
    files = sorted(_reports_in(folder))
    if not files:
        raise LaunchError(
            f"there are no reports in {folder}",
            given=f"{folder}" if folder.is_dir() else f"{folder}, which is no folder",
            expected="rank0.json, rank1.json, ... as ranks leave them when a call fails",
            hint="mesh.reports in the config says where they go; default meshcomm-reports",
        )
    statuses = {}
    for rank, file in files:
        expected = "a file that this version of meshcomm wrote on that rank"
        status = _read(file, _Report, "is not a report", expected, f"remove {file}")
        if status["rank"] != rank:
            raise LaunchError(
                f"{file} is not a report of rank {rank}",
                given=f"rank: {status['rank']}",
                expected=expected,
                hint=f"remove {file}",
            )
        statuses[rank] = status
    return statuses


def report(folder: Path) -> str:
    """What the reports in a folder say together, as text."""
    runs = {path for path in folder.glob("*/") if any(_reports_in(path))}
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


def timeline_of(source: Path, width: int | None = None) -> str:
    """What the ranks did, from a file of `mesh.trace` or a folder of reports.

    width: characters; None: as wide as the terminal.
    Raises: LaunchError where there is neither.
    """
    source = newest_run(source)
    rows = _of_reports(source) if source.is_dir() else _of_trace(source)
    return "\n".join([str(source), *timeline(rows, width or shutil.get_terminal_size((100, 24)).columns)])


def _of_trace(file: Path) -> list[Row]:
    expected, hint = (
        "a file that mesh.trace wrote, or a folder of reports",
        'with mesh.trace("trace.json"): ...',
    )
    events = _read(file, _Trace, "is no trace of a mesh", expected, hint)["traceEvents"]
    try:
        names = {e["pid"]: _name(e) for e in events if e.get("name") == "process_name"}
        lanes = {(e["pid"], e["tid"]): _name(e) for e in events if e.get("name") == "thread_name"}
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
    except (KeyError, TypeError, IndexError) as error:
        raise LaunchError(
            f"{file} is no trace of a mesh",
            given=f"{type(error).__name__}: {error}, in an event, or the name of its process or thread",
            expected=expected,
            hint=hint,
        ) from None
    rows = []
    for pid in calls:
        if passes[pid]:
            rows.append(Row(pid, f"{pid} {PASSES}", passes[pid]))
        rows.append(Row(pid, f"{pid} calls" if passes[pid] else str(pid), calls[pid]))
    return rows


def _name(event: Mapping[str, Any]) -> str:
    """That an event gives to its process or thread."""
    name = event["args"]["name"]
    if not isinstance(name, str):
        raise TypeError(f"{name!r} as a name")
    return name


def _of_reports(folder: Path) -> list[Row]:
    reports = read_reports(folder)
    known = {rank: status for rank, status in reports.items() if "history" in status and status.get("clock")}
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


def export(
    source: Path,
    target: Path,
    weights: bool,
    pretrained: bool = False,
    dtype: str | None = None,
    shard_gb: float | None = None,
) -> str:
    """Write a checkpoint, or a run's last one, into a safetensors file or a folder; what was done, as text.

    Raises: ConfigError for options that do not go together, TrainingError.
    """
    import torch

    from meshcomm.train.export import export_checkpoint
    from meshcomm.train.pretrained import SHARD_BYTES, export_pretrained

    if pretrained and not weights:
        if dtype not in (None, *_DTYPES):
            raise ConfigError(
                f"weights are not written as {dtype}",
                given=f"--dtype {dtype}",
                expected=" or ".join(_DTYPES),
                hint=did_you_mean(dtype, _DTYPES) or "leave it out, for the dtype of the weights",
            )
        most = SHARD_BYTES if shard_gb is None else int(shard_gb * 1e9)
        kind = None if dtype is None else getattr(torch, dtype)
        return _moved(export_pretrained(source, target, dtype=kind, shard_bytes=most))
    if pretrained or dtype is not None or shard_gb is not None:
        given = {"--weights": weights, "--dtype": dtype, "--shard-gb": shard_gb}
        raise ConfigError(
            "these options do not go together",
            given=", ".join(
                [*(name for name, value in given.items() if value), *["--pretrained"][:pretrained]]
            ),
            expected="--dtype and --shard-gb with --pretrained, and --weights without it",
            hint="meshcomm export RUN FOLDER --pretrained",
        )
    return _moved(export_checkpoint(source, target, weights=weights))


def import_file(source: Path, out: Path) -> str:
    """Make a checkpoint of the run `out` from an exported file; what was done, as text."""
    from meshcomm.train.export import import_checkpoint

    return _moved(import_checkpoint(source, out))


def _moved(moved: Any) -> str:
    size = f"{moved.tensors} tensors, {moved.bytes / 1e6:.1f} MB"
    return f"{moved.source} -> {moved.target}: step {moved.step}, {size}"
