"""The mesh as a tree: dims inside dims, down to the ranks of the innermost groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from meshcomm.config import TopologyConfig
from meshcomm.errors import UnknownDim
from meshcomm.layout import Plan, Ranks
from meshcomm.layout.names import did_you_mean
from meshcomm.layout.sizes import fold
from meshcomm.show.grid.facts import factorisation
from meshcomm.show.page import Cells, Line, Part

if TYPE_CHECKING:
    from rich.tree import Tree

Facts = dict[str, Any]

# Branches of one dim that are shown, lines with every branch open, rows of the Markdown table, at most.
FOLDED: Final = 4
_LINES: Final = 48
_ROWS: Final = 64


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
    dims = factorisation(layout, view)
    inner = {name: size for name, size in dims.items() if size > 1} or dict(list(dims.items())[-1:])
    per_node = None if topology is None else topology.ranks_per_node
    grid = layout.ranks.reshape(tuple(inner.values()))
    facts: Facts = {
        "world_size": layout.world_size,
        "fingerprint": plan.fingerprint,
        "view": view,
        "dims": dims,
        "ranks_per_node": per_node,
    }
    facts.update(_inside(grid, list(inner), per_node, most))
    return facts


def _inside(grid: Ranks, names: list[str], per_node: int | None, most: int | None) -> Facts:
    """What is below one branch: more branches, or ranks."""
    if len(names) == 1:
        return {"along": names[0], "ranks": grid.tolist()}
    size = len(grid)
    shown = list(range(size))
    if most is not None and size > most + 1:
        shown = [*range(most - 1), size - 1]
    branches: list[Facts] = []
    after = 0
    for coord in shown:
        if coord != after:
            branches.append({"dim": names[0], "coord": after, "left_out": coord - after})
        branches.append(_branch(grid[coord], names, coord, per_node, most))
        after = coord + 1
    return {"branches": branches}


def _branch(grid: Ranks, names: list[str], coord: int, per_node: int | None, most: int | None) -> Facts:
    first, last = int(grid.flat[0]), int(grid.flat[-1])
    contiguous = bool((np.diff(grid.reshape(-1)) == 1).all())
    nodes = None
    if per_node is not None:
        nodes = {"first": int(grid.min()) // per_node, "last": int(grid.max()) // per_node}
    return {
        "dim": names[0],
        "coord": coord,
        "count": grid.size,
        "first": first,
        "last": last,
        "contiguous": contiguous,
        "nodes": nodes,
        **_inside(grid, names[1:], per_node, most),
    }


def headline(facts: Facts) -> str:
    """Number of ranks and sizes of the dims, as one line."""
    dims = " ".join(f"{name}={size}" for name, size in facts["dims"].items())
    where = f"view {facts['view']} of the mesh" if facts["view"] else "mesh"
    each, world = facts["ranks_per_node"], facts["world_size"]
    node = "" if each is None else f", {'' if world % each == 0 else 'up to '}{each:,} on each node"
    return f"{where} of {world:,} ranks{node}: {dims}"


def tree_view(facts: Facts) -> Tree:
    """`tree_facts` for a rich console; long dims are folded, and a large tree is opened at its ends only."""
    from rich.text import Text
    from rich.tree import Tree

    root = Tree(Text(headline(facts)))
    if "ranks" in facts:
        root.add(Text(f"{facts['along']}: ranks {_ranks(facts)}"))
    branches = facts.get("branches", [])
    _grow(root, branches, _lines(branches) <= _LINES)
    return root


def _grow(tree: Tree, branches: list[Facts], everywhere: bool) -> None:
    from rich.text import Text

    for branch in _folded(branches):
        if "left_out" in branch:
            tree.add(Text(_left_out(branch)))
            continue
        grown = tree.add(Text(_line(branch)))
        if everywhere or branch is branches[0] or branch is branches[-1]:
            _grow(grown, branch.get("branches", []), everywhere)


def _lines(branches: list[Facts]) -> int:
    """Lines of the folded tree, every branch opened."""
    return sum(1 + _lines(branch.get("branches", [])) for branch in _folded(branches))


def _folded(branches: list[Facts]) -> list[Facts]:
    """At most so many as are shown; what the facts leave out already stays one entry."""
    if len(branches) <= FOLDED + 1:
        return branches
    kept, last = branches[: FOLDED - 1], branches[-1]
    first = branches[FOLDED - 1]
    return [
        *kept,
        {"dim": first["dim"], "coord": first["coord"], "left_out": last["coord"] - first["coord"]},
        last,
    ]


def _left_out(branch: Facts) -> str:
    first, count = branch["coord"], branch["left_out"]
    return f"{branch['dim']}={first} to {first + count - 1} ({count:,} not shown)"


def _line(branch: Facts) -> str:
    inner = f"{branch['along']}: " if "along" in branch else ""
    text = f"{branch['dim']}={branch['coord']}  {inner}ranks {_ranks(branch)}"
    nodes = branch["nodes"]
    if nodes is None:
        return text
    first, last = nodes["first"], nodes["last"]
    return f"{text}, node {first}" if first == last else f"{text}, nodes {first} to {last}"


def _ranks(branch: Facts) -> str:
    if branch.get("contiguous"):
        return str(branch["first"]) if branch["count"] == 1 else f"{branch['first']} to {branch['last']}"
    if "ranks" in branch:
        return fold(branch["ranks"])
    return f"{branch['first']} .. {branch['last']} ({branch['count']:,})"


def tree_page(facts: Facts) -> list[Part]:
    """`tree_facts` as a table, a row for each innermost group, for Markdown."""
    rows: list[tuple[str, ...]] = []
    left = 0

    def walk(branches: list[Facts], path: str) -> None:
        nonlocal left
        for branch in branches:
            here = f"{path} {branch['dim']}={branch['coord']}".strip()
            if "branches" in branch:
                walk(branch["branches"], here)
            elif "ranks" in branch and len(rows) < _ROWS:
                nodes = branch["nodes"]
                node = "-" if nodes is None else " ".join(map(str, sorted({nodes["first"], nodes["last"]})))
                rows.append((here, branch["along"], fold(branch["ranks"]), node))
            elif "ranks" in branch:
                left += 1

    if "ranks" in facts:
        rows.append(("-", facts["along"], fold(facts["ranks"]), "-"))
    walk(facts.get("branches", []), "")
    parts: list[Part] = [Line(headline(facts), heading=True)]
    parts.append(Cells(("at", "along", "ranks, in coord order", "nodes"), tuple(rows)))
    return [*parts, Line(f"and {left:,} more groups")] if left else parts
