"""Calls, bytes and time by dim and call, as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from meshcomm.show.units import bytes_text, seconds_text

if TYPE_CHECKING:
    from rich.table import Table

Facts = Mapping[str, Any]


def stats_table(facts: Facts, steps: int | None = None) -> Table:
    """A line for each call of each dim of one rank, from `Stats.facts`.

    steps: show calls, bytes and seconds of one of so many steps.
    """
    each = steps or 1
    rows = facts["rows"]
    predicted = any(row["predicted_s"] is not None for row in rows)
    title = f"communication of {facts['rank']} " + (
        "in each step" if steps else f"in {seconds_text(facts['seconds'])}"
    )
    table = _table(title)
    names = ("calls", "bytes", "inside", "share", "algbw", "busbw")
    for name in (*names, "predicted", "ratio") if predicted else names:
        table.add_column(name, justify="right", no_wrap=True)
    whole = facts["seconds"] or 1.0
    last = ""
    for row in rows:
        cells = [
            _number(row["calls"] / each),
            bytes_text(row["nbytes"] / each) if row["nbytes"] else "-",
            seconds_text(row["seconds"] / each),
            f"{row['seconds'] / whole:.1%}",
            _rate(row["algbw"]),
            _rate(row["busbw"]),
        ]
        if predicted:
            cells.append("-" if row["predicted_s"] is None else seconds_text(row["predicted_s"] / each))
            cells.append(_ratio(row["ratio"]))
        _add(table, row, last, cells)
        last = row["dim"]
    notes = ["torch's own calls (FSDP, pipelining, DTensor) are not counted"]
    if any(row["async_op"] for row in rows):
        notes.append("async: inside is what the program spent on starting and waiting")
    table.caption = "\n".join(notes)
    table.caption_justify = "left"
    return table


def spread_table(facts: Facts) -> Table:
    """A line for each call of each dim over all ranks, from `StatsOfAll.facts`."""
    table = _table(f"communication of all ranks in {seconds_text(facts['seconds'])}")
    for name in ("ranks", "calls", "bytes", "mean inside", "fastest", "slowest"):
        table.add_column(name, justify="right", no_wrap=True)
    last = ""
    for row in facts["rows"]:
        cells = [
            str(row["ranks"]),
            _number(row["calls"]),
            bytes_text(row["nbytes"]) if row["nbytes"] else "-",
            seconds_text(row["mean_s"]),
            f"{seconds_text(row['fastest_s'])}, rank {row['fastest']}",
            f"{seconds_text(row['slowest_s'])}, rank {row['slowest']}",
        ]
        _add(table, row, last, cells)
        last = row["dim"]
    return table


def _table(title: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("dim", overflow="fold")
    table.add_column("call", no_wrap=True)
    return table


def _add(table: Table, row: Facts, last: str, cells: list[str]) -> None:
    if row["dim"] != last and last:
        table.add_section()
    dim = row["dim"] if row["dim"] != last else ""
    table.add_row(dim, row["call"] + (", async" if row["async_op"] else ""), *cells)


def _number(number: float) -> str:
    return f"{number:,.0f}" if number == int(number) else f"{number:,.1f}"


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}" if ratio < 10 else f"{ratio:,.0f}"


def _rate(bytes_per_s: float | None) -> str:
    return "-" if bytes_per_s is None else f"{bytes_text(bytes_per_s)}/s"
