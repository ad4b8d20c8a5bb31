"""Calls, bytes and time by dim and call, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshcomm.show.page import Cells, Line, Part
from meshcomm.show.units import bytes_text, seconds_text

Facts = Mapping[str, Any]


def stats_page(facts: Facts, steps: int | None = None) -> list[Part]:
    """A line for each call of each dim of one rank, from `Stats.facts`.

    steps: show calls, bytes and seconds of one of so many steps.
    """
    each = steps or 1
    rows = facts["rows"]
    predicted = any(row["predicted_s"] is not None for row in rows)
    spent = "in each step" if steps else f"in {seconds_text(facts['seconds'])}"
    names = ("calls", "bytes", "inside", "share", "algbw", "busbw")
    right = (*names, "predicted", "ratio") if predicted else names
    whole = facts["seconds"] or 1.0
    listed = []
    for row in rows:
        cells = [
            row["dim"],
            _call(row),
            _number(row["calls"] / each),
            bytes_text(row["nbytes"] / each) if row["nbytes"] else "-",
            _seconds(row["seconds"], each),
            "-" if row["seconds"] is None else f"{row['seconds'] / whole:.1%}",
            _rate(row["algbw"]),
            _rate(row["busbw"]),
        ]
        if predicted:
            cells.append(_seconds(row["predicted_s"], each))
            cells.append(_ratio(row["ratio"]))
        listed.append(tuple(cells))
    notes = []
    if any(row["call"].endswith("(torch)") for row in rows):
        notes.append("(torch): calls past the mesh, by hand or by FSDP, DDP, DTensor and pipelining")
    if any(row["seconds"] is None for row in rows):
        notes.append("-: not known, as these calls return before they are over, or were not the mesh's")
    if any(row["async_op"] and row["seconds"] is not None for row in rows):
        notes.append("async: inside is what the program spent on starting and waiting")
    return [
        Line(f"communication of {facts['rank']} {spent}", heading=True),
        _table(right, listed),
        Line("\n".join(notes)),
    ]


def spread_page(facts: Facts) -> list[Part]:
    """A line for each call of each dim over all ranks, from `StatsOfAll.facts`."""
    right = ("ranks", "calls", "bytes", "mean inside", "fastest", "slowest")
    listed = [
        (
            row["dim"],
            _call(row),
            str(row["ranks"]),
            _number(row["calls"]),
            bytes_text(row["nbytes"]) if row["nbytes"] else "-",
            _seconds(row["mean_s"]),
            *(
                "-" if row[f"{who}_s"] is None else f"{_seconds(row[f'{who}_s'])}, rank {row[who]}"
                for who in ("fastest", "slowest")
            ),
        )
        for row in facts["rows"]
    ]
    title = f"communication of all ranks in {seconds_text(facts['seconds'])}"
    return [Line(title, heading=True), _table(right, listed)]


def _table(right: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Part:
    if not rows:
        return Line("no call along a dim of two ranks or more")
    return Cells(("dim", "call", *right), tuple(rows), frozenset(right), once=1)


def _call(row: Facts) -> str:
    return f"{row['call']}, async" if row["async_op"] else str(row["call"])


def _number(number: float) -> str:
    return f"{number:,.0f}" if number == int(number) else f"{number:,.1f}"


def _seconds(seconds: float | None, each: int = 1) -> str:
    return "-" if seconds is None else seconds_text(seconds / each)


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}" if ratio < 10 else f"{ratio:,.0f}"


def _rate(bytes_per_s: float | None) -> str:
    return "-" if bytes_per_s is None else f"{bytes_text(bytes_per_s)}/s"
