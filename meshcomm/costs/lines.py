"""Times that grow evenly with the size: which is least, and exactly from which size on."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple


class Line(NamedTuple):
    """One algorithm: fixed_s seconds, and byte_s more for every byte; exact.

    chunks: pieces that it cuts the data into; 1 where that is not a choice.
    """

    name: str
    chunks: int
    fixed_s: Fraction
    byte_s: Fraction

    def seconds(self, size_bytes: float) -> float:
        """The time for so many bytes."""
        return float(self.fixed_s + self.byte_s * Fraction(size_bytes))


def best(lines: Sequence[Line], size_bytes: float) -> Line:
    """The line with the least time; of equals the first."""
    size = Fraction(size_bytes)
    return min(lines, key=lambda line: line.fixed_s + line.byte_s * size)


def fastest_by_size(lines: Sequence[Line]) -> list[tuple[Fraction, Line]]:
    """From which size on which line is least, ascending from 0 bytes: the lower envelope, exact.

    Where lines are equal over a whole range the first of `lines` stands for them.

    >>> ring = Line("ring", 1, Fraction(14), Fraction(1))
    >>> tree = Line("tree", 1, Fraction(6), Fraction(3))
    >>> [(str(size), line.name) for size, line in fastest_by_size([ring, tree])]
    [('0', 'tree'), ('4', 'ring')]
    """
    # min keeps the first of equals, so the order of `lines` settles ties.
    here = min(lines, key=lambda line: (line.fixed_s, line.byte_s))
    found = [(Fraction(0), here)]
    while True:
        better = [line for line in lines if line.byte_s < here.byte_s]
        if not better:
            return found

        def crossing(line: Line, now: Line = here) -> Fraction:
            return (line.fixed_s - now.fixed_s) / (now.byte_s - line.byte_s)

        # Of those that cross at the same size the one that is least behind it.
        here = min(better, key=lambda line: (crossing(line), line.byte_s))
        found.append((crossing(here, found[-1][1]), here))
