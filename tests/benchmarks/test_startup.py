"""Both programs start, cold and forked, and are measured. Times are printed but not judged."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from meshcomm.errors import LaunchError
from tests.benchmarks.startup import PROGRAMS, from_python, startup


@pytest.mark.parity
def test_both_programs_start_cold_and_forked(
    capsys: pytest.CaptureFixture[str], figures: Callable[[str], None]
) -> None:
    startup(4, 1)
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| 4 ")]
    assert [row[:2] for row in rows] == [
        [f"| 4 {how}", name]
        for how in ("cold", "forked", "forked, with the default group")
        for name in PROGRAMS
    ]
    for row in rows:
        created, used, cpu = (float(cell.strip("| s")) for cell in row[2:])
        assert 0 < created < used and cpu > 0
        figures(" ".join(row))


def test_a_start_that_fails_says_why() -> None:
    with pytest.raises(LaunchError, match=r"(?s)rank 0 of the start.*ZeroDivisionError"):
        from_python("1 / 0", {"dp": 1})
