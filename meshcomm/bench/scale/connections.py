"""To how many ranks does a rank hold a connection, once its mesh has been used along every dim?

Gloo: counted on real processes. NCCL: by its algorithms, an assumption and a bound: it has rings and
two binary trees, and connects along both when a group is first used; how many connections and of which
sort go to one peer (channels, sockets, queue pairs) depends on the machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from meshcomm.layout import Plan

# Of a rank in a double binary tree: a parent and two children in each.
_TREE_PEERS: Final = 6


def ring_peers(size: int) -> int:
    """Neighbours in a ring: what Gloo's all_reduce, all_gather and reduce_scatter need."""
    return min(2, size - 1)


def nccl_peers(size: int) -> int:
    """Peers that NCCL connects a rank to at most: its ring and its two trees."""
    return min(size - 1, 2 + _TREE_PEERS)


def sizes_of(plan: Plan) -> list[int]:
    """Sizes of the groups that a rank creates."""
    return [family.size for family in plan.families if family.creates]


def rings(sizes: Iterable[int]) -> int:
    """Connections of a rank to ranks after one all_reduce on groups of these sizes, Gloo, one by one."""
    return sum(ring_peers(size) for size in sizes)


def meshed(sizes: Iterable[int]) -> int:
    """Connections of a rank where Gloo connects all ranks of a group with all, torch's default."""
    return sum(size - 1 for size in sizes)
