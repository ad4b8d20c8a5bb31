"""Metrics of a run: cut back on a resume, and an error if they cannot be written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from meshcomm.errors import TrainingError
from meshcomm.train import Step
from meshcomm.train.run_files import MetricsFile


@pytest.mark.parametrize(
    ("text", "after", "kept"),
    [
        ('{"step": 1}\n{"step": 3}\n{"step": 6}\n', 5, '{"step": 1}\n{"step": 3}\n'),
        ('{"step": 1}\n{"step": 3}\n{"step": 6}\n', 6, '{"step": 1}\n{"step": 3}\n{"step": 6}\n'),
        ('{"step": 1}\n{"step": 3}\n{"st', 9, '{"step": 1}\n{"step": 3}\n'),
        ('{"step": 1}\n{"step": 3}', 9, '{"step": 1}\n'),
        ('{"step": 1}\nnot json\n{"step": 2}\n', 9, '{"step": 1}\n'),
        ('{"step": 1}\n', 0, ""),
        (None, 4, ""),
    ],
)
def test_metrics_are_cut_back_and_continued(tmp_path: Path, text: str | None, after: int, kept: str) -> None:
    path = tmp_path / "metrics.jsonl"
    if text is not None:
        path.write_text(text)
    with MetricsFile(tmp_path, after) as file:
        assert path.read_text() == kept
        file.write(Step(after + 1, 1.0, 2.0, 0.1, 10, 5.0, 2.0))
        file.sync()
    lines = path.read_text()
    assert lines.startswith(kept) and json.loads(lines[len(kept) :])["step"] == after + 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_pipe_in_place_of_metrics_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(TrainingError, match="cannot be written: not a regular file"):
        MetricsFile(tmp_path)


def test_metrics_that_cannot_be_written_end_the_run_with_an_error_that_names_them(tmp_path: Path) -> None:
    with (
        pytest.raises(TrainingError, match="cannot be written: no space left on device") as caught,
        MetricsFile(tmp_path) as file,
    ):
        file._file.close()
        file._file = open("/dev/full", "a", encoding="utf-8")  # noqa: SIM115
        file.write(Step(1, 1.0, 2.0, 0.1, 10, 5.0, 2.0))
    assert caught.value.given == str(tmp_path / "metrics.jsonl") and caught.value.hint
