"""Comparisons, and how they are shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rich import box
from rich.table import Table

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


def rows_table(title: str, rows: Sequence[Row]) -> Table:
    """One row per comparison: both medians, the median of the ratios, what that has to reach."""
    table = Table(
        title=f"{title}; times: medians of the rounds; ratio: the median of the rounds' ratios;\nGB/s: the bytes over the median time",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("ours / theirs", no_wrap=True)
    for column in ("ours", "theirs", "ratio", "GB/s ours", "target"):
        table.add_column(column, justify="right")
    for row in rows:
        speed = "-" if row.bytes_moved is None else f"{row.bytes_moved / row.ours_s / 1e9:.2f}"
        table.add_row(
            row.name,
            seconds_text(row.ours_s),
            seconds_text(row.theirs_s),
            f"{row.ratio:.3f}",
            speed,
            row.target or "-",
        )
    return table
