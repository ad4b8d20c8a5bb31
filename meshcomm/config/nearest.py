"""Which values near a wrong one are right?"""

from __future__ import annotations

from collections.abc import Callable

# Far enough for batch sizes and widths, and quick to search.
_FURTHEST = 4096


def nearest(value: int, fits: Callable[[int], bool], most: int = 2) -> list[int]:
    """The whole numbers of 1 or more nearest to `value` for which `fits` holds, nearest first.

    >>> nearest(8, lambda n: n % 3 == 0)
    [9, 6]
    """
    found: list[int] = []
    for distance in range(1, _FURTHEST):
        for candidate in (value + distance, value - distance):
            if candidate >= 1 and fits(candidate):
                found.append(candidate)
                if len(found) == most:
                    return found
    return found
