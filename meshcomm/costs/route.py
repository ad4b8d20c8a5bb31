"""The links that a group's data crosses: how many ranks meet at each level, with which alpha and beta."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

from meshcomm.topology import Machine, Span


class Hop(NamedTuple):
    """One level of a group. ranks: how many units of the level below meet here.

    alpha_s: seconds of a message; beta_s: seconds of a byte; exact.
    """

    ranks: int
    alpha_s: Fraction
    beta_s: Fraction


class Route(NamedTuple):
    """The levels of a group, innermost first.

    hops: those with two units or more. even: whether all units hold equally many ranks, as hierarchical
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


def route(found: Span, machine: Machine) -> Route:
    """The route of the groups of a family, from their span."""
    call_s = machine.call_s
    if found.size == 1:
        return Route((), call_s=call_s)
    hops = [Hop(1, level.alpha_s, level.beta_s) for level in machine.levels]
    if found.hops is None:
        name = found.slowest
        index = next(i for i, level in enumerate(machine.levels) if level.name == name)
        return Route((hops[index]._replace(ranks=found.size),), even=False, call_s=call_s)
    sized = (hop._replace(ranks=n) for hop, n in zip(hops, found.hops, strict=True))
    return Route(tuple(hop for hop in sized if hop.ranks > 1), call_s=call_s)
