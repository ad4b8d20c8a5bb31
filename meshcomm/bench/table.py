"""Comparisons as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from meshcomm.bench.measure import Row
from meshcomm.show.units import seconds_text


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
