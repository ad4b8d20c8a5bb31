"""How much went along which dim, from whom, over which links: counted while the ranks run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, final

if TYPE_CHECKING:
    from meshcomm.simulator.rendezvous import Rendezvous

# What rank c of n puts on its link to the next coord when a collective runs as a ring in coord order,
# for a tensor of `s` bytes that it brings and `root` that has or gets the whole: the textbook counts,
# as in the PERFORMANCE.md of nccl-tests. An all_to_all sends straight to each coord instead.
_RING: Final[dict[str, Callable[[int, int, int, int], float]]] = {
    "all_reduce": lambda n, s, c, root: 2 * (n - 1) / n * s,
    "reduce_scatter": lambda n, s, c, root: (n - 1) / n * s,
    "all_gather": lambda n, s, c, root: (n - 1) * s,
    "broadcast": lambda n, s, c, root: 0 if (c + 1) % n == root else s,
    "reduce": lambda n, s, c, root: 0 if c == root else s,
    # Along the ring to the root: each passes on what came from behind it, and its own.
    "gather": lambda n, s, c, root: 0 if c == root else ((c - root - 1) % n + 1) * s,
    "scatter": lambda n, s, c, root: (n - 1 - (c - root) % n) * s,
    "barrier": lambda n, s, c, root: 0,
}
_STRAIGHT: Final = ("all_to_all", "all_to_all_uneven")


@final
class Ledger:
    """Calls, bytes of their tensors, and bytes on links, by rank and group.

    calls:  (rank, group's id, operation) -> [calls, bytes of the tensors that the rank brought].
    links:  (rank, group's id, other rank) -> bytes from the rank to the other: of messages as they
            were sent, of collectives as a ring in coord order would send them.
    groups: by id.
    """

    def __init__(self) -> None:
        self.calls: dict[tuple[int, int, str], list[int]] = defaultdict(lambda: [0, 0])
        self.links: dict[tuple[int, int, int], float] = defaultdict(float)
        self.groups: dict[int, Rendezvous] = {}

    def collective(
        self,
        group: Rendezvous,
        coord: int,
        kind: str,
        nbytes: int,
        root: int,
        parts: list[int] | None,
    ) -> None:
        """Coord `coord` brings `nbytes` to a collective; parts: bytes for each coord, where they differ."""
        ranks, size = group.ranks, len(group.ranks)
        rank, key = ranks[coord], id(group)
        self.groups[key] = group
        entry = self.calls[rank, key, kind]
        entry[0] += 1
        entry[1] += nbytes
        if kind in _STRAIGHT:
            for other in range(size):
                if other != coord:
                    part = nbytes // size if parts is None else parts[other]
                    self.links[rank, key, ranks[other]] += part
        else:
            self.links[rank, key, ranks[(coord + 1) % size]] += _RING[kind](size, nbytes, coord, root)

    def message(self, group: Rendezvous, coord: int, dst: int, nbytes: int) -> None:
        """Coord `coord` sends `nbytes` to coord `dst`."""
        rank, key = group.ranks[coord], id(group)
        self.groups[key] = group
        entry = self.calls[rank, key, "send"]
        entry[0] += 1
        entry[1] += nbytes
        self.links[rank, key, group.ranks[dst]] += nbytes

    def facts(self, ranks_per_node: int | None = None) -> dict[str, Any]:
        """Plain data: one row per dim and operation, the largest ranks, and link classes where known.

        dims:  name, operation, calls and bytes of all ranks together, the rank that brought most.
        ranks: the rank whose links carry most, and how much.
        links: bytes inside nodes and between them; None where `ranks_per_node` is.
        """
        rows: dict[tuple[str, str], dict[int, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
        for (rank, key, kind), (calls, nbytes) in self.calls.items():
            entry = rows[self.groups[key].name, kind][rank]
            entry[0] += calls
            entry[1] += nbytes
        dims = []
        for (name, kind), by_rank in rows.items():
            largest = max(sorted(by_rank), key=lambda rank: by_rank[rank][1])
            dims.append(
                {
                    "dim": name,
                    "operation": kind,
                    "calls": sum(calls for calls, _ in by_rank.values()),
                    "bytes": sum(nbytes for _, nbytes in by_rank.values()),
                    "largest_rank": largest,
                    "largest_bytes": by_rank[largest][1],
                }
            )
        return {"dims": dims, "links": self._links(ranks_per_node)}

    def _links(self, ranks_per_node: int | None) -> list[dict[str, Any]] | None:
        if ranks_per_node is None:
            return None
        found: dict[tuple[str, str], dict[int, float]] = defaultdict(lambda: defaultdict(float))
        for (rank, key, other), nbytes in self.links.items():
            inside = rank // ranks_per_node == other // ranks_per_node
            found[self.groups[key].name, "node" if inside else "network"][rank] += nbytes
        rows = []
        for (name, link), by_rank in found.items():
            largest = max(sorted(by_rank), key=lambda rank: by_rank[rank])
            rows.append(
                {
                    "dim": name,
                    "link": link,
                    "bytes": round(sum(by_rank.values())),
                    "largest_rank": largest,
                    "largest_bytes": round(by_rank[largest]),
                }
            )
        return rows
