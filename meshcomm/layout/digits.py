"""How is a position read as a coord along some dims, and back?"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ranks: TypeAlias = NDArray[np.int64]


class Digits(tuple[tuple[int, int], ...]):
    """How positions are read along some dims: (size, stride) pairs, outermost first.

    A position is a rank's index in the row-major rank grid. Its coord is the mixed-radix number
    whose digits are `position // stride % size`. Two dims have the same groups, in the same
    order, exactly when their canonical digits are equal.
    """

    __slots__ = ()

    @property
    def size(self) -> int:
        """Number of coords."""
        return math.prod(size for size, _ in self)

    def canonical(self) -> Digits:
        """Without digits of size 1, and neighbours that step evenly written as one."""
        joined: list[tuple[int, int]] = []
        for size, stride in self:
            if size == 1:
                continue
            if joined and joined[-1][1] == size * stride:
                joined[-1] = (joined[-1][0] * size, stride)
            else:
                joined.append((size, stride))
        return Digits(joined)

    def coord(self, position: int) -> int:
        """The coord of a position."""
        value = 0
        for size, stride in self:
            value = value * size + position // stride % size
        return value

    def coords(self, positions: Ranks) -> Ranks:
        """`coord` of every position, same shape."""
        values = np.zeros_like(positions)
        for size, stride in self:
            values = values * size + positions // stride % size
        return values

    def offset(self, coord: int) -> int:
        """How far the position with this coord lies from the one with coord 0."""
        value = 0
        for size, stride in reversed(self):
            value += coord % size * stride
            coord //= size
        return value

    def offsets(self) -> Ranks:
        """`offset` of every coord, shape (size,)."""
        grid = np.zeros(1, dtype=np.int64)
        for size, stride in self:
            grid = (grid[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
        return grid
