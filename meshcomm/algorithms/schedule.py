"""Schedules: the messages that each rank sends and receives in each step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from meshcomm.errors import LayoutError


class Send(NamedTuple):
    """Send chunks `first` to `last - 1`, as they were before the step, to coord `peer`."""

    peer: int
    first: int
    last: int


class Receive(NamedTuple):
    """Receive chunks `first` to `last - 1` from coord `peer`.

    reduce: if True, combine the received chunks with this rank's, with the lower coord's operand on the left.
      If False, the received chunks replace this rank's.
    """

    peer: int
    first: int
    last: int
    reduce: bool


class ScheduleStep(NamedTuple):
    """One rank's part of one step. All messages run concurrently, then the receives take effect in this order.

    Between two ranks, the first send of a step matches the first receive, and so on.
    """

    sends: tuple[Send, ...] = ()
    receives: tuple[Receive, ...] = ()


IDLE = ScheduleStep()


@dataclass(frozen=True, slots=True)
class Schedule:
    """An all-reduce over `size` ranks in `steps` steps, without a barrier. The data is cut into `chunks` pieces; see `bounds`.

    A rank's program depends only on the arguments, so each rank computes its own program with `of(coord)`.
    """

    name: str
    size: int
    chunks: int
    steps: int
    program: Callable[[int], tuple[ScheduleStep, ...]]

    def of(self, coord: int) -> tuple[ScheduleStep, ...]:
        """Return the program of coord `coord`: `steps` steps, some of which may be idle."""
        if not 0 <= coord < self.size:
            raise LayoutError(
                f"the {self.name} all-reduce has no coord {coord}",
                given=f"coord {coord}",
                expected=f"0 to {self.size - 1}",
            )
        return self.program(coord)


def bounds(length: int, chunks: int) -> list[int]:
    """Return the offsets that cut `length` elements into `chunks` pieces: chunk i is [bounds[i], bounds[i + 1]).

    If the pieces cannot all be equal, the first pieces are one element longer. Pieces may be empty.

    >>> bounds(10, 4)
    [0, 3, 6, 8, 10]
    """
    even, more = divmod(length, chunks)
    return [i * even + min(i, more) for i in range(chunks + 1)]


def check_counts(name: str, size: int, chunks: int = 1) -> None:
    """Raise LayoutError unless `size` and `chunks` are integers of 1 or more."""
    for unit, value in (("ranks", size), ("chunks", chunks)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise LayoutError(
                f"no {name} all-reduce over {value!r} {unit}",
                given=f"{unit}: {value!r}",
                expected="an integer, 1 or more",
            )


def check_inner(size: int, inner: int) -> None:
    """Raise LayoutError unless `size` ranks can be divided into groups of `inner`."""
    check_counts("two_level", size)
    check_counts("two_level", inner)
    if size % inner:
        raise LayoutError(
            f"no two_level all-reduce over {size} ranks in groups of {inner}",
            given=f"{size} ranks, {inner} in a group",
            expected=f"a group size that divides {size}",
        )
