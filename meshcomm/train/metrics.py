"""metrics.jsonl: one JSON object per logged step, complete after every line."""

from __future__ import annotations

import json
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


@final
class MetricsFile:
    """Writes `folder`/metrics.jsonl.

    A file that an earlier run left there is put aside as metrics.1.jsonl, or the next number that
    is free, the highest being the latest.
    """

    def __init__(self, folder: Path) -> None:
        check_folder(folder)
        self.path = folder / "metrics.jsonl"
        if self.path.exists():
            number = 1
            while (aside := folder / f"metrics.{number}.jsonl").exists():
                number += 1
            self.path.rename(aside)
        self._file = self.path.open("x", encoding="utf-8")

    def write(self, step: Step) -> None:
        """Append one line: step, loss, lr, tokens, tokens_per_s, seconds."""
        self._file.write(json.dumps(asdict(step)) + "\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
