"""A training run on the screen: lines, one bar, and the summary."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
from rich.console import Console

from meshcomm.train import Start, Step, Summary
from meshcomm.train.screen import TrainingReporter

START = Start(
    steps=30,
    tokens_per_step=100,
    parameters=1234,
    text_bytes=5000,
    text_files=3,
    threads=1,
)


SUMMARY = Summary(30, tuple(5.5 - step / 10 for step in range(30)), 3000, 75.0, Path("runs/x/metrics.jsonl"))


def shown(terminal: bool, tell: Callable[[TrainingReporter], None]) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None)
    tell(TrainingReporter(console))
    return cast(io.StringIO, console.file).getvalue()


def whole_run(reporter: TrainingReporter) -> None:
    reporter.on_start(START)
    for step in range(1, 31):
        reporter.on_step(Step(step, 5.5 - step / 10, 2.0, 0.1, step * 100, 40.0, step * 2.5))
    reporter.on_end(SUMMARY, None)


def test_without_a_terminal_a_line_comes_now_and_then() -> None:
    lines = shown(False, whole_run).splitlines()
    assert lines[0] == (
        "1,234 parameters, 5,000 bytes of text from 3 files, 30 steps of 100 tokens, 1 CPU thread per rank"
    )
    note = shown(False, lambda reporter: reporter.on_start(dataclasses.replace(START, note="3 are cut off")))
    assert note.splitlines()[1] == "3 are cut off"
    # This line comes before the end of the first step, which can take long.
    assert "step 1 of 30" in lines[1]
    assert lines[3] == "step 3/30  loss 5.2000  40 tokens/s  0:01:08 left"
    steps = [int(line.split("/")[0].removeprefix("step ")) for line in lines if line.startswith("step")]
    assert steps == [1, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30]

    # Slow steps are still shown.
    def slow(reporter: TrainingReporter) -> None:
        reporter.on_start(dataclasses.replace(START, steps=1000))
        for step in range(1, 6):
            reporter.on_step(Step(step, 5.0, 2.0, 0.1, step * 100, 40.0, step * 20.0))

    steps = [
        int(line.split("/")[0][5:]) for line in shown(False, slow).splitlines() if line.startswith("step")
    ]
    assert steps == [1, 3, 5]


def test_on_a_terminal_there_is_one_bar_and_then_the_summary() -> None:
    out = shown(True, whole_run)
    facts = ("30/30", "loss 2.5000", "40 tokens/s", "training finished", "5.5000 -> 2.6000")
    for fact in (*facts, "0:01:15 for 30 steps, 3,000 tokens"):
        assert fact in out


@pytest.mark.parametrize("terminal", [True, False])
def test_a_reporter_tells_a_second_run_as_the_first(terminal: bool) -> None:
    def again(reporter: TrainingReporter) -> None:
        whole_run(reporter)
        reporter._say("again")
        whole_run(reporter)

    first, second = shown(terminal, again).split("again\n")
    assert second.splitlines()[-1] == first.splitlines()[-1] and "loss 2.5000  40 tokens/s" in second
    assert terminal or first == second


def test_an_interrupted_run_is_closed_with_one_line() -> None:
    def tell(reporter: TrainingReporter) -> None:
        reporter.on_start(START)
        reporter.on_step(Step(1, 5.4, 2.0, 0.1, 100, 40.0, 2.5))
        reporter.on_end(dataclasses.replace(SUMMARY, steps=1, losses=(5.4,)), KeyboardInterrupt())

    last = "stopped after step 1 of 30, loss 5.4000; metrics in runs/x/metrics.jsonl"
    assert shown(False, tell).splitlines()[-1] == last
    assert shown(True, tell).rstrip().endswith(last)
