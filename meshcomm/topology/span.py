"""Which nodes and racks do the groups along a dim lie on, and which links do they cross?"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshcomm.layout import Ranks
from meshcomm.topology.machine import Level, Machine


class Span(NamedTuple):
    """All groups of one family on a machine.

    size: ranks of a group. fewest, most: nodes that one group lies on.
    crosses: level's name -> number of groups whose slowest link is of that class.
    hops: ranks of a group within each level, as factors, innermost first: (4, 2, 3) are 4 ranks on each
        node, 2 nodes in each rack, 3 racks. None where groups do not all lie in the same even way.
    """

    size: int
    fewest: int
    most: int
    crosses: dict[str, int]
    hops: tuple[int, ...] | None

    @property
    def slowest(self) -> str | None:
        """The slowest link class that any group crosses; None for groups of one."""
        return next((name for name, groups in reversed(self.crosses.items()) if groups), None)


def span(groups: Ranks, machine: Machine) -> Span:
    """The span of groups, shape (number of groups, size), as `Layout.groups` gives them."""
    count, size = groups.shape
    units = [_units(groups, level) for level in machine.levels]
    # Distinct units of every group, level by level.
    distinct = [1 + (np.diff(unit, axis=1) != 0).sum(axis=1) for unit in units]
    crosses: dict[str, int] = {}
    left = np.full(count, size > 1)
    for level, number in zip(machine.levels, distinct, strict=True):
        inside = left & (number == 1)
        crosses[level.name] = int(inside.sum())
        left &= ~inside
    return Span(size, int(distinct[0].min()), int(distinct[0].max()), crosses, _hops(units, size))


def slowest_level(found: Span, machine: Machine) -> Level:
    """The level of the slowest link that a group crosses; the innermost for groups of one."""
    return next((level for level in machine.levels if level.name == found.slowest), machine.levels[0])


def _units(groups: Ranks, level: Level) -> Ranks:
    """Which unit of a level each rank is in, sorted inside each group."""
    if level.ranks == 0:
        return np.zeros_like(groups)
    return np.sort(groups // level.ranks, axis=1)


def _hops(units: list[Ranks], size: int) -> tuple[int, ...] | None:
    """Factors of the size, or None where some unit holds more ranks of a group than another does."""
    hops: list[int] = []
    inner = 1
    for unit in units:
        number = int(1 + (np.diff(unit[0]) != 0).sum())
        each, rest = divmod(size, number)
        if rest or each % inner:
            return None
        blocks = unit.reshape(len(unit), number, each)
        if (blocks != blocks[:, :, :1]).any() or (np.diff(blocks[:, :, 0], axis=1) == 0).any():
            return None
        hops.append(each // inner)
        inner = each
    return tuple(hops)
