"""Ratios that a noisy machine cannot fake: both ways in turn, round by round, the median of the ratios."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median


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


def in_turn(
    ways: Mapping[str, Callable[[], object]],
    rounds: int,
    calls: int,
    align: Callable[[], object] | None = None,
    finish: Callable[[], object] | None = None,
) -> dict[str, list[float]]:
    """Seconds per call of each way: `rounds` times `calls` calls of one, then of the next.

    Every other round goes through the ways backwards, so that none always has the same one before it.
    align: called before each block, so that all ranks start together. finish: called after each, before
        the clock stops: returns when what the calls have begun is done.
    One round before the others is not counted.
    """
    found: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways.items())
    for number in range(rounds + 1):
        for name, call in order if number % 2 else order[::-1]:
            if align is not None:
                align()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            if finish is not None:
                finish()
            seconds = (time.perf_counter() - start) / calls
            if number > 0:
                found[name].append(seconds)
    return found


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
