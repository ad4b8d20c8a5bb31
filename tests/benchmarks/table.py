"""Comparisons, and how they are shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rich.console import Group

from meshcomm.show.page import Cells, Column, Line, page_view
from meshcomm.show.units import seconds_text


@dataclass(frozen=True)
class Row:
    """One comparison: seconds per call of each way, and the first way's ratio to the second.

    target: what the ratio has to reach; "at most" or "at least" it.
    """

    name: str
    ours_s: float
    theirs_s: float
    ratio: float
    bytes_moved: int | None = None
    target: str = ""


def compare(
    name: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    bytes_moved: int | None = None,
    target: str = "",
) -> Row:
    """The medians, and the median of the round-by-round ratios."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return Row(name, median(ours), median(theirs), median(ratios), bytes_moved, target)


def rows_table(title: str, rows: Sequence[Row]) -> Group:
    """One row per comparison: both medians, the median of the ratios, what that has to reach."""
    note = "times: medians of the rounds; ratio: the median of the rounds' ratios;\nGB/s: the bytes over the median time"
    columns: dict[str, Column] = {
        "ours / theirs": lambda row: row.name,
        ">ours": lambda row: seconds_text(row.ours_s),
        ">theirs": lambda row: seconds_text(row.theirs_s),
        ">ratio": lambda row: f"{row.ratio:.3f}",
        ">GB/s ours": lambda row: (
            None if row.bytes_moved is None else f"{row.bytes_moved / row.ours_s / 1e9:.2f}"
        ),
        ">target": lambda row: row.target or None,
    }
    return page_view([Line(f"{title}; {note}"), Cells.of(rows, columns)])
