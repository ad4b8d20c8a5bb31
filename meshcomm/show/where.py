"""One rank's place: coords, node, groups and neighbours; and back from coords."""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from meshcomm.config import TopologyConfig
from meshcomm.errors import LayoutError
from meshcomm.layout import Layout, Plan
from meshcomm.layout.sizes import check_coord, coords_text, fold
from meshcomm.show.page import Cells, Facts, Line, PagePart
from meshcomm.show.plan import rank_facts, rank_page

# Ranks that are listed where several have the coords.
_LISTED: Final = 16


def read_place(text: str) -> int | dict[str, int]:
    """A rank, or coords by dim, as they are typed. Raises LayoutError.

    >>> read_place("5"), read_place("pp=1,tp=0")
    (5, {'pp': 1, 'tp': 0})
    """
    if re.fullmatch(r"\s*-?\d+\s*", text):
        return int(text)
    coords: dict[str, int] = {}
    for part in re.findall(r"[^,\s]+", text) or [text]:
        match = re.fullmatch(r"(\w+)=(\d+)", part)
        if match is None or match[1] in coords:
            raise LayoutError(
                f"{part!r} is not a coord" if match is None else f"{match[1]} is there twice",
                given=repr(text),
                expected="a rank, or DIM=COORD pairs, each dim once, with commas between",
                hint="5, or pp=1,dp=0,tp=1",
            )
        coords[match[1]] = int(match[2])
    return coords


def ranks_at(layout: Layout, coords: dict[str, int]) -> list[int]:
    """All ranks with these coords, by grid place. Raises UnknownDim, and LayoutError where a coord is outside."""
    positions = np.arange(layout.world_size, dtype=np.int64)
    for name, coord in coords.items():
        digits = layout.digits(name)
        check_coord(name, coord, digits.size)
        positions = positions[digits.coord(positions) == coord]
    found: list[int] = layout.ranks[positions].tolist()
    return found


def where_facts(plan: Plan, place: int | dict[str, int], topology: TopologyConfig | None = None) -> Facts:
    """What `meshcomm plan --rank` shows of a place, as data that JSON can hold.

    place: a rank, or coords.

    If one rank is there, rank is that of `rank_facts`, and machine its node, rack, local_rank and the ranks on its node
    (None if unknown); else these are None, and listed has coords and node of the first.
    Raises LayoutError, UnknownDim.
    """
    layout = plan.layout
    ranks = [place] if isinstance(place, int) else ranks_at(layout, place)
    facts = {"world_size": layout.world_size, "fingerprint": plan.fingerprint, "asked": place, "ranks": ranks}
    if len(ranks) == 1:
        return facts | {
            "rank": rank_facts(plan, ranks[0], topology),
            "machine": _machine(layout, ranks[0], topology),
        }
    per_node = None if topology is None else topology.ranks_per_node
    listed = [
        {"rank": rank, "coords": layout.coords(rank), "node": None if per_node is None else rank // per_node}
        for rank in ranks[:_LISTED]
    ]
    return facts | {"rank": None, "machine": None, "listed": listed}


def _machine(layout: Layout, rank: int, topology: TopologyConfig | None) -> Facts | None:
    if topology is None or topology.ranks_per_node is None:
        return None
    per_node, racks = topology.ranks_per_node, topology.nodes_per_rack
    node = rank // per_node
    members = np.sort(layout.ranks[layout.ranks // per_node == node])
    return {
        "node": node,
        "rack": None if racks is None else node // racks,
        "local_rank": rank % per_node,
        "ranks": members.tolist(),
    }


def where_page(facts: Facts) -> list[PagePart]:
    """`where_facts` as lines and tables."""
    if facts["rank"] is None:
        return _several(facts)
    machine, about = facts["machine"], list[PagePart]()
    if machine is not None:
        rack = "" if machine["rack"] is None else f" in rack {machine['rack']}"
        on_node = f"node {machine['node']}{rack}, local rank {machine['local_rank']}; "
        about.append(Line(on_node + f"ranks on the node: {fold(machine['ranks'])}"))
    return rank_page(facts["rank"], *about)


def _several(facts: Facts) -> list[PagePart]:
    asked, ranks, listed = coords_text(facts["asked"]), facts["ranks"], facts["listed"]
    if not ranks:
        return [Line(f"no rank has {asked}")]
    table = Cells.of(
        listed, {">rank": ("rank", str), "coords": ("coords", coords_text), ">node": ("node", str)}
    )
    left = len(ranks) - len(listed)
    more = [Line(f"and {left:,} more; --json has all of them")] if left else []
    return [Line(f"{len(ranks):,} ranks have {asked}: {fold(ranks)}"), table, *more]
