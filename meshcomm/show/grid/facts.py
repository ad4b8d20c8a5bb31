"""The rank grid as plain facts: which rank sits where, in which group of one dim, on which node."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshcomm.config import TopologyConfig
from meshcomm.layout import Dims, Layout, Plan
from meshcomm.layout.sizes import fold
from meshcomm.show.grid.frame import Frame

Facts = dict[str, Any]


def grid_facts(
    plan: Plan, by: Dims | None = None, topology: TopologyConfig | None = None, rank: int | None = None
) -> Facts:
    """The rank grid, with the groups along `by`, as data that JSON can hold.

    by: a dim, a merged dim, a view's dim, or a tuple of them. None: the innermost dim of the base.
    rank: one to mark.

    Keys: world_size, fingerprint; by (its name), by_dims, size (ranks of a group), groups (their
    number); view (whose dims are drawn, "" for the base), dims (their sizes, outermost first); ranks,
    group, node: for each place of the grid, row-major over dims, its rank, the index of the rank's
    group and the rank's node; node, nodes (their number) and ranks_per_node are None where nobody says
    which ranks share a node; rank.
    Raises UnknownDim, and LayoutError where the mesh does not have `rank`.
    """
    layout = plan.layout
    chosen: Dims = list(layout.dims)[-1] if by is None else by
    digits = layout.digits(chosen)
    if rank is not None:
        layout.position(rank)
    view = layout.home(chosen)
    ranks = layout.ranks
    positions = np.arange(layout.world_size, dtype=np.int64)
    per_node = None if topology is None else topology.ranks_per_node
    nodes = None if per_node is None else ranks // per_node
    return {
        "world_size": layout.world_size,
        "fingerprint": plan.fingerprint,
        "by": chosen if isinstance(chosen, str) else " ".join(chosen),
        "by_dims": list(layout.expand(chosen)),
        "size": digits.size,
        "groups": layout.world_size // digits.size,
        "view": view,
        "dims": dict(factorisation(layout, view)),
        "ranks_per_node": per_node,
        "nodes": None if nodes is None else len(np.unique(nodes)),
        "ranks": ranks.tolist(),
        "group": layout.others(chosen).coord(positions).tolist(),
        "node": None if nodes is None else nodes.tolist(),
        "rank": rank,
    }


def factorisation(layout: Layout, view: str) -> dict[str, int]:
    """The dims of the base, "", or of a view."""
    return dict(layout.views[view] if view else layout.dims)


def place_coords(facts: Facts, place: int) -> dict[str, int]:
    """The coords of a place of the grid, by dim."""
    coords: dict[str, int] = {}
    for name, size in reversed(facts["dims"].items()):
        place, coords[name] = divmod(place, size)
    return dict(reversed(coords.items()))


def group_label(facts: Facts, place: int) -> str:
    """The group of a place, as in `tp[pp=0 dp=1]`."""
    coords = place_coords(facts, place)
    common = " ".join(f"{name}={coord}" for name, coord in coords.items() if name not in facts["by_dims"])
    return f"{facts['by']}[{common}]"


def tag(index: int) -> str:
    """Letters for a group's index, where colours do not tell.

    >>> tag(0), tag(25), tag(26), tag(16383)
    ('a', 'z', 'aa', 'xfd')
    """
    letters = ""
    index += 1
    while index:
        index, rest = divmod(index - 1, 26)
        letters = chr(ord("a") + rest) + letters
    return letters


def legend(facts: Facts, drawn: Frame, most: int) -> list[tuple[int, str, str]]:
    """(index, name, ranks in coord order) of the first groups that are drawn."""
    first: dict[int, int] = {}
    for place in drawn.places():
        group = facts["group"][place]
        if group not in first:
            if len(first) == most and group > max(first):
                continue
            first[group] = place
    chosen = sorted(first)[:most]
    members: dict[int, list[int]] = {group: [] for group in chosen}
    for rank, group in zip(facts["ranks"], facts["group"], strict=True):
        if group in members:
            members[group].append(rank)
    return [(group, group_label(facts, first[group]), fold(members[group])) for group in chosen]


def headlines(facts: Facts) -> list[str]:
    """What is drawn, what the colours and what the lines mean."""
    dims = " ".join(f"{name}={size}" for name, size in facts["dims"].items())
    where = f" of view {facts['view']}" if facts["view"] else ""
    count = facts["groups"]
    lines = [
        f"{dims}{where}, by {facts['by']}: {count:,} group{'' if count == 1 else 's'} of {facts['size']:,}"
    ]
    if facts["nodes"] is None:
        lines.append("nodes are not known: topology.ranks_per_node says which ranks share one")
    else:
        nodes, each = facts["nodes"], facts["ranks_per_node"]
        full = "" if nodes * each == facts["world_size"] else "up to "
        lines.append(
            f"lines part nodes: {nodes:,} node{'' if nodes == 1 else 's'}, {full}{each:,} ranks on each"
        )
    return lines
