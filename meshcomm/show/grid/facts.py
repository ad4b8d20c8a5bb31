"""The rank grid as plain facts: which rank sits where, in which group of one dim, on which node; and their words."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshcomm.config import TopologyConfig
from meshcomm.layout import Dims, Plan
from meshcomm.layout.sizes import coords_text, fold
from meshcomm.show.grid.frame import Frame
from meshcomm.show.units import count

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
    size, view = layout.digits(chosen).size, layout.home(chosen)
    if rank is not None:
        layout.position(rank)
    positions = np.arange(layout.world_size, dtype=np.int64)
    per_node = None if topology is None else topology.ranks_per_node
    nodes = None if per_node is None else layout.ranks // per_node
    return {
        "world_size": layout.world_size,
        "fingerprint": plan.fingerprint,
        "by": chosen if isinstance(chosen, str) else " ".join(chosen),
        "by_dims": list(layout.expand(chosen)),
        "size": size,
        "groups": layout.world_size // size,
        "view": view,
        "dims": dict(layout.views[view] if view else layout.dims),
        "ranks_per_node": per_node,
        "nodes": None if nodes is None else len(np.unique(nodes)),
        "ranks": layout.ranks.tolist(),
        "group": layout.others(chosen).coord(positions).tolist(),
        "node": None if nodes is None else nodes.tolist(),
        "rank": rank,
    }


def place_coords(facts: Facts, place: int) -> dict[str, int]:
    """The coords of a place of the grid, by dim."""
    sizes = facts["dims"]
    return dict(zip(sizes, map(int, np.unravel_index(place, tuple(sizes.values()))), strict=True))


def group_label(facts: Facts, place: int) -> str:
    """The group of a place, as in `tp[pp=0 dp=1]`."""
    coords = place_coords(facts, place)
    common = {name: coord for name, coord in coords.items() if name not in facts["by_dims"]}
    return f"{facts['by']}[{coords_text(common)}]"


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


def legend(facts: Facts, drawn: Frame, most: int) -> tuple[list[tuple[int, str, str]], list[str]]:
    """(index, name, ranks in coord order) of the first groups that are drawn, and a line on the others."""
    first: dict[int, int] = {}
    for place in drawn.places():
        first.setdefault(facts["group"][place], place)
    ranks, groups = np.array(facts["ranks"]), np.array(facts["group"])
    chosen = sorted(first)[:most]
    entries = [
        (group, group_label(facts, first[group]), fold(ranks[groups == group].tolist())) for group in chosen
    ]
    rest = facts["groups"] - len(entries)
    return entries, [f"and {rest:,} more groups"] if rest else []


def headlines(facts: Facts) -> list[str]:
    """What is drawn, what the colours and what the lines mean."""
    where = f" of view {facts['view']}" if facts["view"] else ""
    drawn = f"{coords_text(facts['dims'])}{where}, by {facts['by']}"
    lines = [f"{drawn}: {count(facts['groups'], 'group')} of {facts['size']:,}"]
    nodes, each = facts["nodes"], facts["ranks_per_node"]
    if nodes is None:
        return [*lines, "nodes are not known: topology.ranks_per_node says which ranks share one"]
    full = "" if nodes * each == facts["world_size"] else "up to "
    return [*lines, f"lines part nodes: {count(nodes, 'node')}, {full}{each:,} ranks on each"]
