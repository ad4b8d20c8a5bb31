"""The table of a run's calls."""

from __future__ import annotations

import pytest

from meshcomm.mesh.stats import Stats
from meshcomm.show.page import Cells, Line
from meshcomm.show.stats import stats_page
from tests.mesh.test_stats import ROWS


def test_the_table() -> None:
    stats = Stats("rank 0 (dp=0 tp=0)", 2.0, ROWS)
    assert str(stats).split("\n") == [
        "communication of rank 0 (dp=0 tp=0) in 2 s",
        "dim  call               calls  bytes  inside  share     algbw     busbw  predicted  ratio",
        "─────────────────────────────────────────────────────────────────────────────────────────",
        "dp   all_reduce, async     10  40 MB    2 ms   0.1%         -         -          -      -",
        "tp   all_gather            20   2 MB   10 ms   0.5%  200 MB/s  100 MB/s       4 ms   2.50",
        "     barrier                1      -    1 ms   0.1%         -         -          -      -",
        "async: inside is the time that the program spent on starting and waiting",
    ]
    facts = stats.facts()
    assert facts["rows"][1]["algbw"] == pytest.approx(2e8)
    head, table, *_ = stats_page(facts, steps=4)
    assert isinstance(head, Line) and head.text.endswith("in each step")
    assert isinstance(table, Cells) and table.rows[0][table.columns.index("calls")] == "2.5"
    assert "no call along a dim" in str(Stats("rank 0", 1.0, ()))
