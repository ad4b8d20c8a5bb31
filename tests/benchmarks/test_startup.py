"""Measured starts: what is measured, and that both programs start; the times are printed, not judged."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from meshcomm.errors import LaunchError
from tests.benchmarks.startup import PROGRAMS, from_python, startup


@pytest.mark.parity
def test_both_programs_start_cold_and_forked(
    capsys: pytest.CaptureFixture[str], figures: Callable[[str], None]
) -> None:
    startup(4, 1, True)
    starts = json.loads(capsys.readouterr().out)["starts"]
    assert [(row["forked"], row["program"], row["processes"]) for row in starts] == [
        (fork, name, 4) for fork in (False, True) for name in PROGRAMS
    ]
    for row in starts:
        assert 0 < row["created_s"] < row["used_s"] and row["cpu_s"] > 0
        figures(
            f"4 processes, {'forked' if row['forked'] else 'from python on'}: {row['program']:<17}"
            f"created {row['created_s']:.2f} s, used {row['used_s']:.2f} s, CPU of a rank {row['cpu_s']:.2f} s"
        )


def test_a_start_that_fails_says_why() -> None:
    with pytest.raises(LaunchError, match=r"(?s)rank 0 of the start.*ZeroDivisionError"):
        from_python("1 / 0", {"dp": 1})
