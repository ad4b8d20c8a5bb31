"""How much went along which dim, from whom, over which links: counted while the ranks run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, final

from meshcomm.collectives import ALL_TO_ALL, Collective
from meshcomm.simulator.group import SimulatedGroup

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

# Group, coord, collective (None: a message to coord `root`), bytes that the rank brings, root, bytes for
# each coord where they differ.
Move = tuple[SimulatedGroup, int, Collective | None, int, int, tuple[int, ...]]


@final
class Traffic:
    """Calls, bytes of their tensors, and bytes on links, by rank and group."""

    def __init__(self) -> None:
        self._moves: Counter[Move] = Counter()

    def add(
        self,
        group: SimulatedGroup,
        coord: int,
        row: Collective | None,
        nbytes: int,
        root: int,
        parts: tuple[int, ...] = (),
    ) -> None:
        """Coord `coord` starts a collective or a send; see `Move`."""
        self._moves[group, coord, row, nbytes, root, parts] += 1

    def calls(self) -> dict[tuple[int, SimulatedGroup, str], list[int]]:
        """(rank, group, operation) -> [calls, bytes of the tensors that the rank brought]."""
        found: dict[tuple[int, SimulatedGroup, str], list[int]] = defaultdict(lambda: [0, 0])
        for (group, coord, row, nbytes, _, _), count in self._moves.items():
            entry = found[group.ranks[coord], group, "send" if row is None else row.name]
            entry[0] += count
            entry[1] += count * nbytes
        return dict(found)

    def links(self) -> Iterator[tuple[int, int, SimulatedGroup, float]]:
        """(rank, other rank, group, bytes): messages as sent, collectives as a ring in coord order sends them."""
        for (group, coord, row, nbytes, root, parts), count in self._moves.items():
            size, rank = len(group.ranks), group.ranks[coord]
            if row is None:
                yield rank, group.ranks[root], group, count * nbytes
            elif row is ALL_TO_ALL:
                # Straight to each coord.
                for other in range(size):
                    if other != coord:
                        part = parts[other] if parts else nbytes // size
                        yield rank, group.ranks[other], group, count * part
            else:
                ring = _RING.get(row.name)
                load = float(row.bus(size) * row.moved(nbytes, size))
                if ring is not None:
                    load = ring(size, nbytes, coord, root)
                yield rank, group.ranks[(coord + 1) % size], group, count * load

    def facts(self, ranks_per_node: int | None = None) -> dict[str, Any]:
        """Plain data: one row per dim and operation, and per dim and class of link where known.

        dims:  name, operation, calls and bytes of all ranks together, the rank that brought most.
        links: bytes inside nodes and between them; None where `ranks_per_node` is.
        """
        calls: Counter[tuple[str, str]] = Counter()
        for (_, group, kind), (count, _) in self.calls().items():
            calls[group.name, kind] += count
        moved = ((group.name, kind, rank, each[1]) for (rank, group, kind), each in self.calls().items())
        dims = [
            {"dim": name, "operation": kind, "calls": calls[name, kind], **sums}
            for name, kind, sums in _summed(moved)
        ]
        if ranks_per_node is None:
            return {"dims": dims, "links": None}
        node = ranks_per_node
        linked = (
            (group.name, "node" if rank // node == other // node else "network", rank, nbytes)
            for rank, other, group, nbytes in self.links()
        )
        return {
            "dims": dims,
            "links": [{"dim": n, "link": link, **sums} for n, link, sums in _summed(linked)],
        }


def _summed(rows: Iterable[tuple[str, str, int, float]]) -> Iterator[tuple[str, str, dict[str, int]]]:
    """Rows of (dim, kind, rank, bytes) by dim and kind: the bytes of all ranks, and of the lowest with most."""
    found: dict[tuple[str, str], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for name, kind, rank, nbytes in rows:
        found[name, kind][rank] += nbytes
    for (name, kind), by_rank in found.items():
        rank = max(sorted(by_rank), key=lambda each: by_rank[each])
        sums = {
            "bytes": round(sum(by_rank.values())),
            "largest_rank": rank,
            "largest_bytes": round(by_rank[rank]),
        }
        yield name, kind, sums
