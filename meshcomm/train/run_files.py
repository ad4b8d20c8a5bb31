"""A run's files in `train.out` other than checkpoints: metrics, the configuration, the outcome, and traces."""

from __future__ import annotations

import contextlib
import json
import math
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self, final

from meshcomm.config import Config, TrainConfig
from meshcomm.config.section import Table
from meshcomm.config.write import plain
from meshcomm.errors import TrainingError
from meshcomm.layout import Plan
from meshcomm.mesh import Mesh
from meshcomm.train.callbacks import Evaluation, Start, Step, Summary
from meshcomm.train.checkpoint.folder import FOLDER, opened, read, replace

METRICS: Final = "metrics.jsonl"
CONFIG: Final = "config.json"
RUN: Final = "run.json"
TRACE: Final = "trace.json"
TENSORBOARD: Final = "tensorboard"
WANDB: Final = "wandb"
_FORMAT: Final = 1


def check_folder(folder: Path) -> None:
    """Create `folder`. Raises TrainingError if it cannot be created or is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainingError(
            f"the folder for the run cannot be created: {(error.strerror or str(error)).lower()}",
            given=f"train.out = {folder}",
            expected="a folder, or a path where one can be created",
        ) from error
    if not os.access(folder, os.W_OK):
        raise TrainingError(
            "the folder for the run cannot be written to",
            given=f"train.out = {folder}",
            expected="a folder that this user can write to",
        )


def put_aside(folder: Path, *, with_checkpoints: bool = False) -> None:
    """Rename the files of an earlier run: metrics.jsonl -> metrics.1.jsonl, checkpoints -> checkpoints.1, and so on.

    The new number is higher than any number in use, so the highest number belongs to the latest run. Nothing is deleted.
    """
    files = {name: name.replace(".", ".{}.") for name in (METRICS, CONFIG, RUN, TRACE)}
    names = files | {name: name + ".{}" for name in (FOLDER, TENSORBOARD, WANDB)}
    number = 1
    while any((folder / aside.format(number)).exists() for aside in names.values()):
        number += 1
    for name, aside in names.items():
        if (folder / name).exists() and (with_checkpoints or name != FOLDER):
            (folder / name).rename(folder / aside.format(number))


@final
class MetricsFile:
    """Writes `folder`/metrics.jsonl. after: the step after which the run continues. Lines of later steps are removed.

    check: called before each write; raises if this job may no longer write.
    """

    def __init__(self, folder: Path, after: int = 0, check: Callable[[], None] = lambda: None) -> None:
        check_folder(folder)
        self.path, self._check = folder / METRICS, check
        with naming(self.path):
            if self.path.exists():
                os.truncate(self.path, _end_of(self.path, after))
            self._file = self.path.open("a", encoding="utf-8")

    def write(self, step: Step | Evaluation) -> None:
        """Append one line with all known fields. Numbers that are not finite are written as null."""
        facts = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in step.facts.items()
            if value not in ("", None)
        }
        with naming(self.path):
            self._check()
            self._file.write(json.dumps(facts) + "\n")
            self._file.flush()

    def sync(self) -> None:
        """Sync all lines to disk, so that a resumed run loses no lines from before its checkpoint."""
        with naming(self.path):
            os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Writing any remaining output has already failed.
        with contextlib.suppress(OSError):
            self._file.close()


def last_step(folder: Path) -> int:
    """Return the last step with a line in `folder`/metrics.jsonl; 0 if there is none."""
    with contextlib.suppress(OSError):
        lines = read(folder / METRICS).splitlines(keepends=True)
        for line in reversed(lines):
            with contextlib.suppress(ValueError):
                facts = json.loads(line)
                if line.endswith(b"\n") and "loss" in facts:
                    return int(facts["step"])
    return 0


def _end_of(path: Path, step: int) -> int:
    """Return the number of bytes up to the end of the last line for `step`. Reading stops at a truncated line."""
    end = 0
    with opened(path) as file:
        for line in file:
            try:
                if not line.endswith(b"\n") or json.loads(line)["step"] > step:
                    break
            except (ValueError, KeyError, TypeError):
                break
            end += len(line)
    return end


@contextlib.contextmanager
def recorded(
    folder: Path, config: Config, plan: Plan, start: Start, check: Callable[[], None] = lambda: None
) -> Iterator[list[Summary]]:
    """Write `folder`/config.json and `folder`/run.json now, and run.json again when the block ends.

    config.json contains `config` with the sizes of `plan`; `meshcomm.config.load_config` can read it. In run.json, `run` is an
    ID that changes at every start. `state` is "running", "finished" or "stopped". `ended` contains the Summary, with None for
    unknown values, and `reason`, which is why the run ended before its last step, or None. Each file contains either its
    old or its new text at all times. If a run is killed, its state stays "running". check: as in MetricsFile.

    Yields:    a list to which the block appends its Summary before it ends, with or without an error.
    Called by: the rank that writes metrics.jsonl.
    Raises:    TrainingError if a file cannot be written at the start or after the last step.
    """
    about: dict[str, Any] = {
        "format": _FORMAT,
        "run": uuid.uuid4().hex,
        "state": "running",
        "fingerprint": plan.fingerprint,
        "dims": dict(plan.layout.dims),
        "steps": start.steps,
        "tokens_per_step": start.tokens_per_step,
        "parameters": start.parameters,
        "resumed": None if start.resumed is None else start.resumed.step,
        "ended": None,
    }
    run, ended = folder / RUN, list[Summary]()
    _write(folder / CONFIG, settings_of(config, plan))
    _write(run, about)
    try:
        yield ended
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0].removesuffix(": ")
        reason = "interrupted" if isinstance(error, KeyboardInterrupt) else reason
        # The error that ended the run matters more than this file.
        with contextlib.suppress(TrainingError):
            _write(run, {**about, "state": "stopped", "ended": _facts(ended, reason)}, check)
        raise
    reason = ended[-1].stopped if ended else ""
    _write(run, {**about, "state": "finished", "ended": _facts(ended, reason or None)}, check)


def settings_of(config: Config, plan: Plan) -> dict[str, Any]:
    """Return `config` as plain data that can be loaded again, with every -1 filled in. Unset values remain unset."""
    views = Table({name: Table(sizes) for name, sizes in plan.layout.views.items()})
    sizes = {"dims": Table(plan.layout.dims), **({"views": views} if views else {})}
    filled = config.model_copy(update={"mesh": config.mesh.model_copy(update=sizes)})
    settings: dict[str, Any] = plain(filled.model_dump(mode="json", exclude_unset=True, exclude_none=True))
    return settings


def _facts(ended: Sequence[Summary], reason: str | None) -> dict[str, Any] | None:
    """Return the known facts of a run's end; None if there are none."""
    facts: dict[str, Any] = {}
    for last in ended[-1:]:
        facts = {
            "steps": last.steps,
            "tokens": last.tokens,
            "seconds": last.seconds,
            "late": {dim: {"rank": rank, "mean_s": mean_s} for dim, (rank, mean_s) in last.late.items()},
            "stats": [] if last.traffic is None else last.traffic.facts()["rows"],
            "stats_steps": last.traffic_steps,
            **{key: getattr(last.rates, key, None) for key in ("model_flops_per_s", "mfu")},
            "peak_memory_bytes": getattr(last.memory, "nbytes", None),
            "peak_memory_rank": getattr(last.memory, "rank", None),
        }
    return {**facts, "reason": reason} if facts or reason else None


def _write(path: Path, content: Mapping[str, Any], check: Callable[[], None] = lambda: None) -> None:
    with naming(path):
        check()
        replace(path, json.dumps(content, indent=2))


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Convert an OSError in the block to a TrainingError that names `path`."""
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"the record of the run cannot be written: {(error.strerror or str(error)).lower()}",
            given=str(path),
            expected="a folder that this user can write to, on a disk with space left",
            hint="make space or repair the disk; then train.resume = true continues from the last checkpoint",
        ) from error


@final
class TraceWindow(contextlib.ExitStack):
    """Traces the steps in `train.trace_steps`, in a run that has already completed its first `done` steps.

    Called by: every rank, `before` and `after` each step. On exit, a trace in progress is ended.
    """

    def __init__(self, mesh: Mesh, train: TrainConfig, done: int) -> None:
        super().__init__()
        self._mesh, self._path = mesh, Path(train.out) / TRACE
        # A resumed run may start inside the window.
        first, self._last = train.trace_steps or (0, 0)
        self._first = max(first, done + 1)

    def before(self, step: int) -> None:
        """Start the trace if this is its first step."""
        if step == self._first <= self._last:
            self.enter_context(self._mesh.debug.trace(self._path))

    def after(self, step: int) -> None:
        """End the trace if this is its last step."""
        if step == self._last:
            self.close()
