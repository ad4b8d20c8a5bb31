"""Where the slots of a frame lie in a picture, in pixels, along one direction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from meshcomm.show.grid.frame import Slot

# Between ranks of a block, between blocks, and what stands for something left out.
INNER: Final = 8
OUTER: Final = 34
GAP: Final = 22


class Box(NamedTuple):
    """A slot in one direction: where it begins, how much room it takes, the middle of the gap before it."""

    at: float
    size: float
    before: float


def boxes(slots: list[Slot], start: float, cell: float) -> list[Box]:
    boxes: list[Box] = []
    at = start
    for number, slot in enumerate(slots):
        between = 0 if number == 0 else OUTER if slot.starts_block else INNER
        size = GAP if slot.inner is None else cell
        before = at - INNER * 2 if number == 0 else at + between / 2
        at += between
        boxes.append(Box(at, size, before))
        at += size
    return boxes


def middles(boxes: list[Box]) -> list[float]:
    """The middles of all gaps, the edges of the picture included."""
    last = boxes[-1]
    return [box.before for box in boxes] + [last.at + last.size + INNER * 2]


def blocks(slots: list[Slot], boxes: list[Box]) -> Iterator[tuple[float, float]]:
    """Where each block begins and ends."""
    begin = end = 0.0
    open_block = False
    for slot, box in zip(slots, boxes, strict=True):
        if slot.starts_block:
            if open_block:
                yield begin, end
            open_block = slot.outer is not None
            begin = box.at
        end = box.at + box.size
    if open_block:
        yield begin, end


def runs(lines: Iterator[bool]) -> list[tuple[int, int]]:
    """Neighbouring pieces of a line as (first, one after the last)."""
    runs: list[tuple[int, int]] = []
    for number, there in enumerate(lines):
        if there and runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        elif there:
            runs.append((number, number + 1))
    return runs
