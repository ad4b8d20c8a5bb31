"""Which links does a group cross? The same function for one dim of a live mesh and for every mesh that place tries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from meshcomm.layout import Ranks
from meshcomm.predict.machine import Level, Machine


class Hop(NamedTuple):
    """One level of a group. ranks: how many units of the level below meet here.

    alpha_s: seconds of a message; beta_s: seconds of a byte; exact.
    """

    ranks: int
    alpha_s: Fraction
    beta_s: Fraction


class Route(NamedTuple):
    """What a group's data crosses, innermost first: all that the time of a call depends on.

    hops: levels with two units or more. even: whether all units hold equally many ranks, as hierarchical
    algorithms need; otherwise one hop over all ranks on the slowest link. call_s: of every call.
    """

    hops: tuple[Hop, ...]
    even: bool = True
    call_s: Fraction = Fraction(0)

    @property
    def ranks(self) -> int:
        """Ranks of the group."""
        return math.prod(hop.ranks for hop in self.hops)

    @property
    def slowest(self) -> Hop:
        """All ranks on the outermost link: what an algorithm meets that knows no levels."""
        if not self.hops:
            return Hop(1, Fraction(0), Fraction(0))
        return self.hops[-1]._replace(ranks=self.ranks)


class Span(NamedTuple):
    """All groups of one family on a machine.

    size: ranks of a group. fewest, most: nodes that one group lies on. route: of its data.
    crosses: level's name -> number of groups whose slowest link is of that class.
    """

    size: int
    fewest: int
    most: int
    crosses: dict[str, int]
    route: Route

    @property
    def slowest(self) -> str | None:
        """The slowest link class that any group crosses; None for groups of one."""
        return next((name for name, groups in reversed(self.crosses.items()) if groups), None)


def span(groups: Ranks, machine: Machine) -> Span:
    """Which links groups cross. groups: global ranks, shape (number of groups, size), as `Layout.groups` gives them."""
    size = groups.shape[1]
    levels = machine.levels
    # Which unit of each level a rank is in, sorted inside each group.
    units = [np.sort(groups // level.ranks if level.ranks else 0 * groups, axis=1) for level in levels]
    distinct = np.array([1 + (np.diff(unit, axis=1) != 0).sum(axis=1) for unit in units])
    # Of each group the innermost level that joins all of it.
    joins = (distinct == 1).argmax(axis=0)
    crosses = {level.name: int((joins == i).sum()) * (size > 1) for i, level in enumerate(levels)}
    factors = _factors(units, size)
    pairs = zip(factors, levels, strict=True) if factors is not None else [(size, levels[joins.max()])]
    hops = tuple(Hop(n, level.alpha_s, level.beta_s) for n, level in pairs if n > 1)
    route = Route(hops, factors is not None, machine.call_s)
    return Span(size, int(distinct[0].min()), int(distinct[0].max()), crosses, route)


def slowest_level(found: Span, machine: Machine) -> Level:
    """The level of the slowest link that a group crosses; the innermost for groups of one."""
    return next((level for level in machine.levels if level.name == found.slowest), machine.levels[0])


def strided(dims: Sequence[tuple[int, int]], world: int, machine: Machine) -> Ranks:
    """Groups along dims of these (size, stride), in a world whose ranks lie in the mesh's row-major order.

    Not all of them: one of each kind, as where a group lies follows from its first rank modulo the largest unit.
    """
    period = max(level.ranks for level in machine.levels)
    block = max(size * stride for size, stride in dims)
    first = np.arange(min(world, math.lcm(block, period)))
    group = np.zeros(1, dtype=np.int64)
    for size, stride in dims:
        first = first[first // stride % size == 0]
        group = np.add.outer(group, stride * np.arange(size)).reshape(-1)
    first = first[np.unique(first % period, return_index=True)[1]]
    return np.add.outer(first, group)


def _factors(units: list[Ranks], size: int) -> list[int] | None:
    """Ranks of a group in each unit of each level, as factors: [4, 2, 3] are 4 on each node, 2 nodes in each
    rack, 3 racks. None where some unit holds more ranks of a group than another does.
    """
    factors: list[int] = []
    inner = 1
    for unit in units:
        number = int(1 + (np.diff(unit[0]) != 0).sum())
        each, rest = divmod(size, number)
        if rest:
            return None
        blocks = unit.reshape(len(unit), number, each)
        if (blocks != blocks[:, :, :1]).any() or (np.diff(blocks[:, :, 0], axis=1) == 0).any():
            return None
        factors.append(each // inner)
        inner = each
    return factors
