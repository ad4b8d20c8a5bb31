"""Comparisons as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from meshcomm.bench.timing import Row


def console() -> Console:
    """As wide as the terminal, or 110 columns where there is none."""
    found = Console()
    return found if found.is_terminal else Console(width=110)


def rows_table(title: str, rows: Sequence[Row]) -> Table:
    """One row per comparison: both medians, the median of the ratios, what that has to reach."""
    table = Table(
        title=f"{title}; times: medians of the rounds, ratio: the median of the rounds' ratios",
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
            row.name, seconds(row.ours_s), seconds(row.theirs_s), f"{row.ratio:.3f}", speed, row.target or "-"
        )
    return table


def seconds(value: float) -> str:
    """
    >>> seconds(1.5e-6), seconds(0.0123), seconds(2)
    ('1.50 us', '12.3 ms', '2.00 s')
    """
    if value < 1e-3:
        return f"{value * 1e6:.2f} us"
    if value < 1:
        return f"{value * 1e3:.1f} ms"
    return f"{value:.2f} s"
