"""The mesh as a tree: dims inside dims, down to the ranks of the innermost groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from meshcomm.config import TopologyConfig
from meshcomm.errors import UnknownDim
from meshcomm.layout import Plan, Ranks
from meshcomm.layout.names import did_you_mean
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
    if view and view not in layout.views:
        raise UnknownDim(
            f"the mesh has no view {view!r}",
            given=view,
            expected="one of " + ", ".join(layout.views) if layout.views else "no view: the mesh has none",
            hint=did_you_mean(view, layout.views) or "leave --view out",
        )
    dims = dict(layout.views[view] if view else layout.dims)
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
    """What is below one branch: more branches, or ranks."""
    dim, *inner = names
    if not inner:
        return {"along": dim, "ranks": grid.tolist()}
    size = len(grid)
    kept = size if most is None or size <= most + 1 else most - 1
    branches: list[Facts] = [_branch(grid[coord], dim, inner, coord, per_node, most) for coord in range(kept)]
    if kept < size:
        branches.append({"dim": dim, "coord": kept, "left_out": size - 1 - kept})
        branches.append(_branch(grid[-1], dim, inner, size - 1, per_node, most))
    return {"branches": branches}


def _branch(
    grid: Ranks, dim: str, inner: list[str], coord: int, per_node: int | None, most: int | None
) -> Facts:
    ends = (
        None
        if per_node is None
        else {"first": int(grid.min()) // per_node, "last": int(grid.max()) // per_node}
    )
    return {
        "dim": dim,
        "coord": coord,
        "count": grid.size,
        "first": int(grid.flat[0]),
        "last": int(grid.flat[-1]),
        "contiguous": bool((np.diff(grid.reshape(-1)) == 1).all()),
        "nodes": ends,
        **_inside(grid, inner, per_node, most),
    }


def headline(facts: Facts) -> str:
    """Number of ranks and sizes of the dims, as one line."""
    where = f"view {facts['view']} of the mesh" if facts["view"] else "mesh"
    each, world = facts["ranks_per_node"], facts["world_size"]
    node = "" if each is None else f", {'' if world % each == 0 else 'up to '}{each:,} on each node"
    return f"{where} of {world:,} ranks{node}: {coords_text(facts['dims'])}"


def tree_view(facts: Facts) -> Tree:
    """`tree_facts` of at most FOLDED branches for a rich console; a large tree is opened at its ends only."""
    from rich.text import Text
    from rich.tree import Tree

    def lines(branches: list[Facts]) -> int:
        return sum(1 + lines(branch.get("branches", [])) for branch in branches)

    def grow(tree: Tree, branches: list[Facts]) -> None:
        for branch in branches:
            grown = tree.add(Text(_line(branch)))
            if everywhere or branch is branches[0] or branch is branches[-1]:
                grow(grown, branch.get("branches", []))

    root = Tree(Text(headline(facts)))
    if "ranks" in facts:
        root.add(Text(f"{facts['along']}: ranks {fold(facts['ranks'])}"))
    branches = facts.get("branches", [])
    everywhere = lines(branches) <= _LINES
    grow(root, branches)
    return root


def _line(branch: Facts) -> str:
    first, last, at = branch.get("first"), branch.get("last"), f"{branch['dim']}={branch['coord']}"
    if "left_out" in branch:
        left = branch["left_out"]
        return f"{at} to {branch['coord'] + left - 1} ({left:,} not shown)"
    if branch["contiguous"]:
        ranks = f"{first}" if branch["count"] == 1 else f"{first} to {last}"
    else:
        ranks = fold(branch["ranks"]) if "ranks" in branch else f"{first} .. {last} ({branch['count']:,})"
    text = f"{at}  {branch['along'] + ': ' if 'along' in branch else ''}ranks {ranks}"
    if branch["nodes"] is None:
        return text
    node, other = branch["nodes"]["first"], branch["nodes"]["last"]
    return f"{text}, node {node}" if node == other else f"{text}, nodes {node} to {other}"
