"""The mesh as a tree: dims inside dims, down to the ranks of the innermost groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from meshcomm.config import TopologyConfig
from meshcomm.layout import Plan, Ranks
from meshcomm.layout.sizes import coords_text, fold

if TYPE_CHECKING:
    from rich.tree import Tree

Facts = dict[str, Any]

# Branches of one dim that are shown, and lines with every branch open, at most.
FOLDED: Final = 4
_LINES: Final = 48


def tree_facts(
    plan: Plan, view: str = "", topology: TopologyConfig | None = None, most: int | None = None
) -> Facts:
    """The dims of the base, or of a view, as branches, outermost first, as data that JSON can hold.

    most: branches of one dim that are listed, the first ones and the last; None: all of them.

    Keys: world_size, fingerprint, view, dims, ranks_per_node, branches. A branch: dim, coord, count,
    first and last (ranks, in coord order), contiguous (whether those are all from first to last),
    nodes (first and last, or None), and either branches or, where only one dim is left, along (that
    dim) and ranks. In place of those that are left out stands one entry with dim, coord (the first),
    and left_out (their number). Dims of size 1 have no branches of their own.
    Raises UnknownDim where the mesh has no such view.
    """
    layout = plan.layout
    dims = {name: layout.size(name) for name in layout.coords(int(layout.ranks[0]), view or None)}
    inner = {name: size for name, size in dims.items() if size > 1} or dict(list(dims.items())[-1:])
    per_node = None if topology is None else topology.ranks_per_node
    return {
        "world_size": layout.world_size,
        "fingerprint": plan.fingerprint,
        "view": view,
        "dims": dims,
        "ranks_per_node": per_node,
        **_inside(layout.ranks.reshape(tuple(inner.values())), list(inner), per_node, most),
    }


def _inside(grid: Ranks, names: list[str], per_node: int | None, most: int | None) -> Facts:
    """What is below one branch: more branches, or ranks. grid: an axis for each name."""
    dim, *inner = names
    if not inner:
        return {"along": dim, "ranks": grid.tolist()}
    size = len(grid)
    first = size if most is None or size <= most + 1 else most - 1
    branches: list[Facts] = []
    for coord in range(size) if first == size else [*range(first), size - 1]:
        if coord > first:
            branches.append({"dim": dim, "coord": first, "left_out": coord - first})
        ranks = grid[coord]
        nodes = None if per_node is None else ranks // per_node
        branches.append(
            {
                "dim": dim,
                "coord": coord,
                "count": ranks.size,
                "first": int(ranks.flat[0]),
                "last": int(ranks.flat[-1]),
                "contiguous": bool((np.diff(ranks.reshape(-1)) == 1).all()),
                "nodes": None if nodes is None else {"first": int(nodes.min()), "last": int(nodes.max())},
                **_inside(ranks, inner, per_node, most),
            }
        )
    return {"branches": branches}


def headline(facts: Facts) -> str:
    """Number of ranks and sizes of the dims, as one line."""
    where = f"view {facts['view']} of the mesh" if facts["view"] else "mesh"
    each, world = facts["ranks_per_node"], facts["world_size"]
    node = "" if each is None else f", {'' if world % each == 0 else 'up to '}{each:,} on each node"
    return f"{where} of {world:,} ranks{node}: {coords_text(facts['dims'])}"


def tree_view(facts: Facts) -> Tree:
    """`tree_facts` of at most FOLDED branches for a rich console; a large tree is opened at its ends only."""
    from rich.tree import Tree

    root = Tree(headline(facts), highlight=False)
    if "ranks" in facts:
        root.add(f"{facts['along']}: ranks {fold(facts['ranks'])}")
    _grow(root, facts, ends_only=_lines(facts) > _LINES)
    return root


def _lines(facts: Facts) -> int:
    """Lines with every branch open."""
    return sum(1 + _lines(branch) for branch in facts.get("branches", []))


def _grow(tree: Tree, facts: Facts, ends_only: bool) -> None:
    branches = facts.get("branches", [])
    for branch in branches:
        grown = tree.add(_line(branch))
        if not ends_only or branch in (branches[0], branches[-1]):
            _grow(grown, branch, ends_only)


def _line(branch: Facts) -> str:
    at = f"{branch['dim']}={branch['coord']}"
    if "left_out" in branch:
        return f"{at} to {branch['coord'] + branch['left_out'] - 1} ({branch['left_out']:,} not shown)"
    first, last = branch["first"], branch["last"]
    if branch["contiguous"]:
        ranks = _span(first, last)
    else:
        ranks = fold(branch["ranks"]) if "ranks" in branch else f"{first} .. {last} ({branch['count']:,})"
    text = f"{at}  {branch['along'] + ': ' if 'along' in branch else ''}ranks {ranks}"
    if (nodes := branch["nodes"]) is None:
        return text
    return f"{text}, node{'s' * (nodes['first'] != nodes['last'])} {_span(nodes['first'], nodes['last'])}"


def _span(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first} to {last}"
