"""Measured calls and lists have every row. Times are printed but not checked."""

from __future__ import annotations

import subprocess
import sys

import pytest

import meshcomm
from meshcomm.testing import Pool
from tests.benchmarks.overhead import many


def lists() -> list[str]:
    with meshcomm.init(dims={"dp": -1}, device="cpu", validate_calls=0) as mesh:
        return [row.name for row in many(mesh, "dp", 1)]


def test_lists_are_measured_between_processes(pool: Pool) -> None:
    names = [f"list of 1,000, {dtypes} / the faster of two" for dtypes in ("float32", "float32 and bfloat16")]
    assert pool.run(lists, ranks=2) == [names, names]


@pytest.mark.parity
def test_the_command_prints_a_row_for_each_call() -> None:
    command = [sys.executable, "-m", "tests.benchmarks.overhead", "1"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True).stdout
    assert printed.count(" / ") >= 14 and "the backend's own call" in printed
