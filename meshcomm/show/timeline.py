"""Who did what when, as text: a row of characters for each rank, time from left to right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from string import ascii_lowercase
from typing import Final, NamedTuple

from meshcomm.show.units import seconds_text

_IDLE: Final = "."
# Passes of a stage have letters of their own, whatever dims there are.
_PASSES: Final = {"forward": "F", "backward": "B", "weights": "W"}


class Bar(NamedTuple):
    """A stretch of time on a row. kind: a dim's name, or a pass's; began, over: seconds."""

    kind: str
    began: float
    over: float


class TimelineRow(NamedTuple):
    """What one rank did in one lane: its calls, or its passes."""

    rank: int
    name: str
    bars: Sequence[Bar]


def timeline(rows: Sequence[TimelineRow], width: int = 100) -> list[str]:
    """The rows, a scale above and the meaning of the letters below, at most `width` characters wide.

    A character stands for what took most of its time, so that no call vanishes while another is not
    there; a dot for none. Behind each row is the share of the time that its bars cover.

    >>> print(*timeline([TimelineRow(0, "0", [Bar("tp", 0, 1)]), TimelineRow(1, "1", [Bar("tp", 3, 4)])], 25), sep="\\n")
    rank 0           4 s
       0 tttt...........  25%
       1 ...........tttt  25%
    t: tp
    """
    bars = [bar for row in rows for bar in row.bars]
    if not bars:
        return ["no calls"]
    first, last = min(bar.began for bar in bars), max(bar.over for bar in bars)
    letters = _letters(bars)
    margin = max(4, *(len(row.name) for row in rows))
    columns = max(10, width - margin - 6)
    span = max(last - first, 1e-9)
    end = seconds_text(last - first)
    lines = [f"{'rank':<{margin}} {'0':<{columns - len(end)}}{end}"]
    for row in rows:
        cells = _cells(row.bars, first, span / columns, columns)
        text = "".join(letters[kind] if kind else _IDLE for kind in cells)
        lines.append(f"{row.name:>{margin}} {text} {_covered(row.bars) / span:>4.0%}")
    return [*lines, "; ".join(f"{letter}: {kind}" for kind, letter in letters.items())]


def _letters(bars: Iterable[Bar]) -> dict[str, str]:
    """A letter for each kind: of its name where it is free."""
    found: dict[str, str] = {}
    for kind in dict.fromkeys(bar.kind for bar in bars):
        wished = _PASSES.get(kind) or [*filter(str.isalpha, kind.lower()), *ascii_lowercase]
        found[kind] = next((letter for letter in wished if letter not in found.values()), "#")
    return found


def _cells(bars: Sequence[Bar], first: float, scale: float, columns: int) -> list[str | None]:
    """The kind that takes most of each cell's time."""
    times: list[dict[str, float]] = [{} for _ in range(columns)]
    for bar in bars:
        began, over = (bar.began - first) / scale, (bar.over - first) / scale
        for cell in range(min(columns - 1, int(began)), min(columns - 1, int(over)) + 1):
            part = max(0.0, min(over, cell + 1) - max(began, cell))
            if part > 0 or began == over:
                times[cell][bar.kind] = times[cell].get(bar.kind, 0.0) + part
    return [max(each, key=each.__getitem__) if each else None for each in times]


def _covered(bars: Sequence[Bar]) -> float:
    """Seconds that any of the bars covers: calls inside calls count once."""
    total, reached = 0.0, float("-inf")
    for bar in sorted(bars, key=lambda bar: bar.began):
        total += max(0.0, bar.over - max(bar.began, reached))
        reached = max(reached, bar.over)
    return total
