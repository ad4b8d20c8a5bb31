"""metrics.jsonl: one JSON object per logged step, complete after every line."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self, final

from meshcomm.errors import TrainingError
from meshcomm.train.report import Step


def check_folder(folder: Path) -> None:
    """Make `folder`. Raises TrainingError where nothing can be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainingError(
            f"the folder for the run cannot be made: {(error.strerror or str(error)).lower()}",
            given=f"train.out = {folder}",
            expected="a folder, or a path where one can be made",
        ) from error
    if not os.access(folder, os.W_OK):
        raise TrainingError(
            "the folder for the run cannot be written to",
            given=f"train.out = {folder}",
            expected="a folder that this user may write to",
        )


def put_aside(folder: Path, *, with_checkpoints: bool = False) -> None:
    """Rename what an earlier run left: metrics.jsonl -> metrics.1.jsonl, checkpoints -> checkpoints.1.

    config.json, run.json and trace.json likewise. Or the next number that is free of all, the highest being the
    latest. Nothing is deleted.
    """
    left = ("metrics.jsonl", "config.json", "run.json", "trace.json")
    files = {name: name.replace(".", ".{}.") for name in left}
    names = {**files, **({"checkpoints": "checkpoints.{}"} if with_checkpoints else {})}
    number = 1
    while any((folder / aside.format(number)).exists() for aside in (*files.values(), "checkpoints.{}")):
        number += 1
    for name, aside in names.items():
        if (folder / name).exists():
            (folder / name).rename(folder / aside.format(number))


@final
class MetricsFile:
    """Writes `folder`/metrics.jsonl.

    Args:
        folder: made where it is not there.
        after: None for a new run; a file that an earlier one left is put aside, see `put_aside`.
            The step whose checkpoint a run goes on from: the lines up to it stay, the rest is
            cut off, and new lines follow.
    """

    def __init__(self, folder: Path, after: int | None = None) -> None:
        check_folder(folder)
        self.path = folder / "metrics.jsonl"
        if after is None:
            put_aside(folder)
        elif self.path.exists():
            os.truncate(self.path, _end_of(self.path, after))
        self._file = self.path.open("x" if after is None else "a", encoding="utf-8")

    def write(self, step: Step) -> None:
        """Append one line: step, loss, gradient_norm, lr, tokens, tokens_per_s, seconds, skipped.

        A number that is not finite is null. fault stands on lines of steps that were left out.
        """
        facts = {
            key: None if _endless(value) else value for key, value in asdict(step).items() if value != ""
        }
        self._file.write(json.dumps(facts) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Have every line on the disk: what a checkpoint goes on from must not be lost."""
        os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _endless(value: float | str) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _end_of(path: Path, step: int) -> int:
    """Bytes of the lines up to that of `step`. A line that was cut short ends them."""
    end = 0
    with path.open("rb") as file:
        for line in file:
            try:
                if not line.endswith(b"\n") or json.loads(line)["step"] > step:
                    break
            except (ValueError, KeyError, TypeError):
                break
            end += len(line)
    return end
