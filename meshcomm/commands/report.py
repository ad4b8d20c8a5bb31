"""`meshcomm report` and `meshcomm export`: analyze or export the output of a finished job."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from meshcomm.comm.diagnosis import activity, name_of_rank, root_cause
from meshcomm.errors import ConfigError, LaunchError
from meshcomm.layout.names import did_you_mean

_OURS: Final = "a file that this version of meshcomm wrote on that rank"
_DTYPES: Final = ("float32", "bfloat16", "float16")


def _reports_in(folder: Path) -> Iterator[tuple[int, Path]]:
    """Yield the rank and the path of each report file in a folder. Copies with other names are ignored."""
    for path in folder.glob("rank*.json"):
        if found := re.fullmatch(r"rank(\d+)\.json", path.name):
            yield int(found[1]), path


def newest_run(folder: Path) -> Path:
    """Return the folder of the most recent run in `folder` that has reports, or `folder` itself if it is a run's folder."""
    if any(_reports_in(folder)):
        return folder
    # Folder names begin with the time.
    return max((path for path in folder.glob("*/") if any(_reports_in(path))), default=folder)


@contextmanager
def _reading_report(file: Path) -> Iterator[None]:
    """Raise a LaunchError if the block cannot use the file's content, for example because another program wrote the file."""
    try:
        yield
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        given = f"{type(error).__name__}: {error}"
        raise LaunchError(
            f"{file} is not a report", given=given, expected=_OURS, hint=f"remove {file}"
        ) from None


def read_reports(folder: Path) -> dict[int, Any]:
    """Return the reports in a folder, by rank. Raises LaunchError if there are no reports, or if a report is invalid."""
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
        with _reading_report(file):
            status = json.loads(file.read_text(encoding="utf-8"))
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


def report(folder: Path) -> str:
    """Return the root cause according to all reports in a folder, and a line for each rank."""
    runs = {path for path in folder.glob("*/") if any(_reports_in(path))}
    folder = newest_run(folder)
    statuses = read_reports(folder)
    older = f", the newest of {len(runs)} runs" if folder in runs and len(runs) > 1 else ""
    lines = [f"{len(statuses)} report(s) in {folder}{older}", *root_cause(statuses)]
    return "\n".join([*lines, *(_line(rank, status) for rank, status in statuses.items())])


def _line(rank: int, status: Mapping[str, Any]) -> str:
    failed = status["failed"]
    if failed is None:
        return activity(rank, status)
    call = f"{failed['call']} on {failed['label']}, at {failed['callsite']}"
    return f"{name_of_rank(rank, status)}: {call}: {' '.join(failed['error'])}"


def export(
    source: Path,
    target: Path,
    pretrained: bool = False,
    merged: bool = False,
    dtype: str | None = None,
    shard_gb: float | None = None,
) -> str:
    """Export the weights of a checkpoint, or of a run's last checkpoint, to a safetensors file or a folder. Return a summary.

    Raises: ConfigError for options that cannot be combined; TrainingError if the export fails.
    """
    import torch

    from meshcomm.train.export import SHARD_BYTES, export_merged, export_pretrained, export_weights

    if pretrained and merged:
        raise ConfigError(
            "two kinds of output are requested",
            given="--pretrained, --merged",
            expected="one of them",
            hint="use --merged for the full model, or --pretrained for only the adapters",
        )
    if pretrained or merged:
        if dtype not in (None, *_DTYPES):
            raise ConfigError(
                f"weights cannot be written as {dtype}",
                given=f"--dtype {dtype}",
                expected=" or ".join(_DTYPES),
                hint=did_you_mean(dtype, _DTYPES) or "remove it to keep the dtype of the weights",
            )
        most = SHARD_BYTES if shard_gb is None else int(shard_gb * 1e9)
        kind = None if dtype is None else getattr(torch, dtype)
        export = export_merged if merged else export_pretrained
        return _summary(export(source, target, dtype=kind, shard_bytes=most))
    given = {"--dtype": dtype, "--shard-gb": shard_gb}
    if named := [name for name, value in given.items() if value is not None]:
        raise ConfigError(
            f"{' and '.join(named)} without --pretrained or --merged",
            given=", ".join(named),
            expected="--dtype and --shard-gb only with one of these options",
            hint="meshcomm export RUN FOLDER --pretrained",
        )
    return _summary(export_weights(source, target))


def _summary(moved: Any) -> str:
    size = f"{moved.tensors} tensors, {moved.bytes / 1e6:.1f} MB"
    return f"{moved.source} -> {moved.target}: step {moved.step}, {size}"
