"""Follows chains of waiting to their ends: the ranks that others wait for, or ranks that wait for each other."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

Node = TypeVar("Node")


class ChainEnd(NamedTuple):
    """Where chains of waiting end.

    ranks: a rank that waits for no other or, if there are several, a circle: each rank waits for the next, and the last for
        the first.
    waiters: the ranks outside the circle that wait for these ranks, directly or through others.
    """

    ranks: tuple[int, ...]
    waiters: tuple[int, ...]

    @property
    def is_circle(self) -> bool:
        """Whether the ranks wait for each other."""
        return len(self.ranks) > 1


def chain_ends(waits: Mapping[int, Collection[int]]) -> list[ChainEnd]:
    """Return the ends of all chains of waiting: first the circles, then the other ends, those with the most waiters first.

    waits: rank -> the ranks that it waits for. A rank that is not a key, or has an empty value, waits for no other.
    """
    circles: list[ChainEnd] = []
    waiters: dict[int, list[int]] = {}
    for rank, others in waits.items():
        for other in others:
            waiters.setdefault(other, []).append(rank)
    waiting: dict[int, Collection[int]] = {rank: others for rank, others in waits.items() if others}
    while circle := find_circle(waiting):
        circles.append(_end(circle, waiters))
        # What leads to a circle cannot be part of another one that is independent of it.
        for rank in (*circle, *circles[-1].waiters):
            waiting.pop(rank, None)
    roots = [rank for rank in waiters if not waits.get(rank)]
    return circles + sorted((_end([rank], waiters) for rank in roots), key=lambda end: -len(end.waiters))


def ends_of(start: int, waits: Mapping[int, Collection[int]]) -> list[ChainEnd]:
    """Return the ends of the chains that begin at the rank `start`."""
    on_the_way = {start, *_reached([start], waits)}
    return chain_ends({rank: waits[rank] for rank in on_the_way if rank in waits})


def _end(ranks: Sequence[int], waiters: Mapping[int, Collection[int]]) -> ChainEnd:
    return ChainEnd(tuple(ranks), tuple(sorted({*_reached(ranks, waiters)} - {*ranks})))


def _reached(sources: Iterable[int], after: Mapping[int, Iterable[int]]) -> list[int]:
    """Return what follows the sources, nearest first; a source only if it also follows one."""
    reached: dict[int, None] = {}
    front = list(sources)
    for node in front:
        for later in after.get(node, ()):
            if later not in reached:
                reached[later] = None
                front.append(later)
    return list(reached)


def find_circle(waits: Mapping[int, Collection[int]]) -> list[int]:
    """Return ranks in a cycle: each waits for the next, and the last for the first. Return [] if there is no cycle.

    waits: rank -> the ranks that it waits for. The result is a shortest cycle through the lowest rank that is in any cycle.
    """
    waiting = dict(waits)
    # A rank that waits only for removed ranks is in no cycle.
    while free := [rank for rank, others in waiting.items() if waiting.keys().isdisjoint(others)]:
        for rank in free:
            del waiting[rank]
    ways = (shortest_way(waiting, rank, rank) for rank in sorted(waiting))
    return next((way[:-1] for way in ways if way), [])


def shortest_way(after: Mapping[Node, Iterable[Node]], source: Node, target: Node) -> list[Node]:
    """Return the nodes on a path from one node to another, both included; [] if there is no path of at least one step."""
    came = dict.fromkeys(after.get(source, ()), source)
    front = list(came)
    for node in front:
        for later in after.get(node, ()):
            if later not in came:
                came[later] = node
                front.append(later)
    if target not in came:
        return []
    way = [target]
    while way[-1] != source or len(way) == 1:
        way.append(came[way[-1]])
    return way[::-1]
