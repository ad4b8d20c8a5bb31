"""Finds the run to show, and reads what it has written to its folder since the last request."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from meshcomm.config import Config, load_config
from meshcomm.errors import ViewError

Facts = dict[str, Any]

METRICS: Final = "metrics.jsonl"
RUN: Final = "run.json"
# The fields of a metrics line that the page plots.
COLUMNS: Final = ("step", "loss", "tokens_per_s", "gradient_norm", "lr", "seconds")
# The most bytes read per request. A page that is opened late repeats its request until it has the whole file.
_MOST_BYTES: Final = 1 << 20


class Target(NamedTuple):
    """settings: the configuration to show. folder: the run's folder, which may not exist yet, or None without training."""

    settings: Config
    folder: Path | None


def find_target(target: Path, overrides: Sequence[str] = ()) -> Target:
    """Return the target for a file or a folder. A file must be a configuration, whose run writes to its train.out. A folder
    must be a run's folder with config.json.

    Raises ViewError if `target` is neither, and ConfigError if the configuration is invalid.
    """
    if target.is_dir():
        config = target / "config.json"
        if not config.is_file():
            raise ViewError(
                f"{target} is not the folder of a run",
                given=f"a folder without config.json: {_content(target)}",
                expected="the train.out of `meshcomm train`, which writes config.json, run.json and metrics.jsonl",
                hint=f"meshcomm view CONFIG, which waits for its run; meshcomm report {target}, if ranks wrote reports there",
            )
        return Target(load_config(config, overrides), target)
    if not target.exists() and target.suffix.lower() not in (".toml", ".json", ".yaml", ".yml"):
        raise ViewError(
            f"there is no {target}",
            given=str(target),
            expected="a configuration's file, or the folder of a run",
            hint="before a run has started, use meshcomm view CONFIG, which waits for train.out",
        )
    settings = load_config(target, overrides)
    return Target(settings, None if settings.train is None else Path(settings.train.out))


def _content(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") if names else "empty"


def run_news(folder: Path | None, known: str = "", offset: int = 0, most_bytes: int = _MOST_BYTES) -> Facts:
    """Return the metrics lines since `offset`, and the state of the run.

    known, offset: the id and offset that the previous call returned; "" and 0 for the first call. most_bytes: how many
    bytes to read at most; -1 reads everything.

    state: "none" (the configuration does not train), "waiting" (nothing was written yet), "running", "finished",
    "stopped", or "unknown" (metrics without a readable run.json). about: the content of run.json.
    reset: whether the lines start again from the first line, because they belong to a different run than `known`.
    more: whether there is more to read. age_s: the number of seconds since metrics were last written.
    columns: the values of each of COLUMNS, with None for a value that is not a finite number. A missing folder is not an
    error.
    """
    about = None if folder is None else _about(folder)
    run = "" if about is None else about["run"]
    news: Facts = {
        "state": "none" if folder is None else "waiting" if about is None else about["state"],
        "folder": None if folder is None else str(folder),
        "about": about,
        "id": run,
        "reset": folder is not None and known != run,
        "offset": 0,
        "more": False,
        "age_s": None,
        "columns": {key: [] for key in COLUMNS},
    }
    try:
        if folder is None:
            return news
        with (folder / METRICS).open("rb") as file:
            status = os.fstat(file.fileno())
            # A run that resumes from a checkpoint truncates the file and has a new `run` id.
            name = f"{run}-{status.st_ino:x}"
            whole = name == known and 0 < offset <= status.st_size
            if whole:
                file.seek(offset - 1)
                whole = file.read(1) == b"\n"
            start = offset if whole else 0
            file.seek(start)
            text = file.read(most_bytes)
    except OSError:
        return news
    # Drop the last line if it is incomplete.
    text = text[: text.rfind(b"\n") + 1]
    end = start + len(text)
    lines = [line for raw in text.splitlines() if (line := _line(raw)) is not None]
    return {
        **news,
        "state": "unknown" if about is None else news["state"],
        "id": name,
        "reset": name != known or not whole,
        "offset": end,
        "more": bool(text) and end < status.st_size,
        "age_s": max(0.0, time.time() - status.st_mtime),
        "columns": {key: [_number(line.get(key)) for line in lines] for key in COLUMNS},
    }


def _about(folder: Path) -> Facts | None:
    try:
        about = json.loads((folder / RUN).read_text(encoding="utf-8"), parse_constant=lambda _: None)
    except (OSError, ValueError):
        return None
    valid = isinstance(about, dict) and about.get("state") in ("running", "finished", "stopped")
    return about if valid and isinstance(about.get("run"), str) else None


def _line(raw: bytes) -> Facts | None:
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    # Lines of evaluations are skipped.
    valid = isinstance(line, dict) and "loss" in line and _number(line.get("step")) is not None
    return line if valid else None


def _number(value: object) -> float | int | None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return value if good else None  # type: ignore[return-value]
