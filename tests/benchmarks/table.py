"""Comparisons of times, and tables in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median, quantiles
from typing import NamedTuple, TypeVar

from meshcomm.show.units import seconds_text

T = TypeVar("T")


class Row(NamedTuple):
    """Median seconds of one call of each way; the median of the round-by-round ratios and its middle half."""

    name: str
    ours_s: float
    theirs_s: float
    ratio: float
    low: float
    high: float


def compare(name: str, ours: Sequence[float], theirs: Sequence[float]) -> Row:
    """Compare the times of two ways, round by round."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, _, high = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return Row(name, median(ours), median(theirs), median(ratios), low, high)


def markdown(columns: Mapping[str, Callable[[T], str]], rows: Iterable[T]) -> str:
    """Return a table: a heading and a function of the row for each column."""
    lines = [list(columns), ["---"] * len(columns)]
    lines += [[cell(row) for cell in columns.values()] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def comparisons(rows: Iterable[Row]) -> str:
    """Return a table with a line for each comparison."""
    columns: dict[str, Callable[[Row], str]] = {
        "ours / theirs": lambda row: row.name,
        "ours": lambda row: seconds_text(row.ours_s),
        "theirs": lambda row: seconds_text(row.theirs_s),
        "ratio": lambda row: f"{row.ratio:.3g}",
        "half of the rounds": lambda row: f"{row.low:.3g} to {row.high:.3g}",
    }
    return markdown(columns, rows)
