"""How much went along which dim, from whom, over which links: from the moves that each group counted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from meshcomm.collectives import ALL_TO_ALL, Collective
from meshcomm.simulator.transport import SimulatedGroup

# What rank c of n puts on its link to the next coord when a collective with a root runs as a ring in coord
# order, for a tensor of `s` bytes that it brings: the textbook counts, as in the PERFORMANCE.md of
# nccl-tests. Those without a root load all links alike, by the factor of their row.
_RING: Final[dict[str, Callable[[int, int, int, int], float]]] = {
    "broadcast": lambda n, s, c, root: 0 if (c + 1) % n == root else s,
    "reduce": lambda n, s, c, root: 0 if c == root else s,
    # Along the ring to the root: each passes on what came from behind it, and its own.
    "gather": lambda n, s, c, root: 0 if c == root else ((c - root - 1) % n + 1) * s,
    "scatter": lambda n, s, c, root: (n - 1 - (c - root) % n) * s,
}


def traffic_facts(groups: Iterable[SimulatedGroup], ranks_per_node: int | None) -> dict[str, Any]:
    """Plain data: one row per dim and operation, and per dim and class of link where known.

    dims:  name, operation, calls and bytes of all ranks together, the rank that brought most.
    links: bytes inside nodes and between them, messages as sent, collectives as a ring in coord order sends
           them; None where `ranks_per_node` is.
    """
    calls: Counter[tuple[str, str]] = Counter()
    brought: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)
    linked: dict[tuple[str, str], defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
    for group in groups:
        for (coord, row, nbytes, root, parts), count in group.moves.items():
            operation, rank = "send" if row is None else row.name, group.ranks[coord]
            calls[group.name, operation] += count
            brought[group.name, operation][rank] += count * nbytes
            for other, load in _links(len(group.ranks), coord, row, nbytes, root, parts):
                if ranks_per_node is not None:
                    same = rank // ranks_per_node == group.ranks[other] // ranks_per_node
                    linked[group.name, "node" if same else "network"][rank] += count * load
    return {
        "dims": [
            {"dim": name, "operation": operation, "calls": calls[name, operation], **_sums(by_rank)}
            for (name, operation), by_rank in brought.items()
        ],
        "links": None
        if ranks_per_node is None
        else [{"dim": name, "link": link, **_sums(by_rank)} for (name, link), by_rank in linked.items()],
    }


def _links(
    size: int, coord: int, row: Collective | None, nbytes: int, root: int, parts: tuple[int, ...]
) -> Iterator[tuple[int, float]]:
    """(other coord, bytes on the link to it) of one move."""
    if row is None:
        yield root, nbytes
    elif row is ALL_TO_ALL:
        # Straight to each coord.
        for other in range(size):
            if other != coord:
                yield other, parts[other] if parts else nbytes // size
    else:
        ring = _RING.get(row.name)
        load = float(row.bus(size) * row.moved(nbytes, size))
        yield (coord + 1) % size, load if ring is None else ring(size, nbytes, coord, root)


def _sums(by_rank: dict[int, float] | Counter[int]) -> dict[str, int]:
    """The bytes of all ranks, and of the lowest with most."""
    largest = max(sorted(by_rank), key=lambda rank: by_rank[rank])
    return {
        "bytes": round(sum(by_rank.values())),
        "largest_rank": largest,
        "largest_bytes": round(by_rank[largest]),
    }
