"""Tables of a run's calls, bytes and time, by dim and call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from meshcomm.show.page import Cells, Column, Line, PagePart
from meshcomm.show.units import bytes_text, seconds_text

Facts = Mapping[str, Any]


def stats_page(facts: Facts, steps: int | None = None) -> list[PagePart]:
    """Return a table of one rank's calls with a row for each call along each dim. facts: see `Stats.facts`.

    steps: the number of steps to divide calls, bytes and seconds by.
    """
    rows, step_count, whole = facts["rows"], steps or 1, facts["seconds"] or 1.0
    spent = "in each step" if steps else f"in {seconds_text(facts['seconds'])}"
    # If one of the numbers is not whole, all have decimals.
    count = _number if all(row["calls"] % step_count == 0 for row in rows) else _decimal
    columns: dict[str, Column] = {
        ">calls": lambda row: count(row["calls"] / step_count),
        ">bytes": lambda row: bytes_text(row["nbytes"] / step_count) if row["nbytes"] else None,
        ">inside": lambda row: _seconds(row["seconds"], step_count),
        ">share": lambda row: None if row["seconds"] is None else f"{row['seconds'] / whole:.1%}",
        ">algbw": ("algbw", _rate),
        ">busbw": ("busbw", _rate),
    }
    if any(row["predicted_s"] is not None for row in rows):
        columns[">predicted"] = lambda row: _seconds(row["predicted_s"], step_count)
        columns[">ratio"] = ("ratio", _ratio)
    notes = []
    if any(row["call"].endswith("(torch)") for row in rows):
        notes.append("(torch): calls outside the mesh, made directly or by FSDP, DDP, DTensor and pipelining")
    if any(row["seconds"] is None for row in rows):
        notes.append(
            "-: unknown, because these calls return before they complete or were made outside the mesh"
        )
    if any(row["async_op"] and row["seconds"] is not None for row in rows):
        notes.append("async: inside is the time that the program spent on starting and waiting")
    head = Line(f"communication of {facts['rank']} {spent}")
    return [head, _table(columns, rows), Line("\n".join(notes))]


def spread_page(facts: Facts) -> list[PagePart]:
    """Return a table of all ranks' calls with a row for each call along each dim. facts: see `StatsOfAll.facts`."""
    columns: dict[str, Column] = {
        ">ranks": ("ranks", str),
        ">calls": ("calls", _number),
        ">bytes": lambda row: bytes_text(row["nbytes"]) if row["nbytes"] else None,
        ">mean inside": ("mean_s", seconds_text),
        ">fastest": partial(_by, "fastest"),
        ">slowest": partial(_by, "slowest"),
    }
    title = f"communication of all ranks in {seconds_text(facts['seconds'])}"
    return [Line(title), _table(columns, facts["rows"])]


def _table(columns: Mapping[str, Column], rows: Sequence[Facts]) -> PagePart:
    if not rows:
        return Line("no call along a dim of two ranks or more")
    call: dict[str, Column] = {"dim": "dim", "call": lambda row: row["call"] + ", async" * row["async_op"]}
    return Cells.of(rows, {**call, **columns}, once=1)


def _by(who: str, row: Facts) -> str | None:
    return None if row[f"{who}_s"] is None else f"{_seconds(row[f'{who}_s'])}, rank {row[who]}"


def _number(number: float) -> str:
    return f"{number:,.0f}"


def _decimal(number: float) -> str:
    """Return the number with one decimal, or with one digit that is not zero.

    >>> _decimal(1234), _decimal(3.97), _decimal(1 / 60)
    ('1,234.0', '4.0', '0.02')
    """
    return f"{number:.1g}" if 0 < number < 0.05 else f"{number:,.1f}"


def _seconds(seconds: float | None, step_count: int = 1) -> str | None:
    return None if seconds is None else seconds_text(seconds / step_count)


def _ratio(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:,.0f}"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_text(bytes_per_s)}/s"
