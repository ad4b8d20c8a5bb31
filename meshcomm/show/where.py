"""One rank's place: coords, node, groups, neighbours and whom it exchanges what with; and back from coords."""

from __future__ import annotations

import re
from typing import Any, Final

import numpy as np

from meshcomm.config import Config, TopologyConfig
from meshcomm.errors import LayoutError
from meshcomm.layout import Layout, Plan
from meshcomm.layout.sizes import fold
from meshcomm.show.exchanges import exchange_facts
from meshcomm.show.page import Cells, Line, Part
from meshcomm.show.plan import plan_facts, rank_line, rank_table

Facts = dict[str, Any]

# Ranks that are listed where several have the coords.
_LISTED: Final = 16


def read_place(text: str) -> int | dict[str, int]:
    """A rank, or coords by dim, as they are typed. Raises LayoutError.

    >>> read_place("5"), read_place("pp=1,tp=0")
    (5, {'pp': 1, 'tp': 0})
    """
    if re.fullmatch(r"\s*\d+\s*", text):
        return int(text)
    coords: dict[str, int] = {}
    for part in filter(None, re.split(r"[,\s]+", text)):
        match = re.fullmatch(r"(\w+)=(\d+)", part)
        if match is None or match[1] in coords:
            raise LayoutError(
                f"{part!r} is not a coord" if match is None else f"{match[1]} is there twice",
                given=text,
                expected="a rank, or DIM=COORD pairs, each dim once, with commas between",
                hint="5, or pp=1,dp=0,tp=1",
            )
        coords[match[1]] = int(match[2])
    if not coords:
        raise LayoutError(
            "neither a rank nor coords", given=repr(text), expected="a rank, or DIM=COORD pairs", hint="pp=1"
        )
    return coords


def ranks_at(layout: Layout, coords: dict[str, int]) -> list[int]:
    """All ranks with these coords, of any dims, merged dims and views' dims; ascending by grid place.

    Raises UnknownDim, and LayoutError where a coord is outside.
    """
    positions = np.arange(layout.world_size, dtype=np.int64)
    for name, coord in coords.items():
        digits = layout.digits(name)
        if not 0 <= coord < digits.size:
            raise LayoutError(
                f"{name}={coord} is outside the mesh",
                given=f"{name}={coord}",
                expected=f"0 to {digits.size - 1}",
                hint=f"{name} has size {digits.size}; coords count from 0",
            )
        positions = positions[digits.coord(positions) == coord]
    found: list[int] = layout.ranks[positions].tolist()
    return found


def where_facts(
    settings: Config, plan: Plan, place: int | dict[str, int], topology: TopologyConfig | None = None
) -> Facts:
    """What `meshcomm where` shows, as data that JSON can hold.

    settings: with every -1 filled in. place: a rank, or coords.

    Keys: world_size, fingerprint, asked (the place), ranks: those that are there. Where it is one, rank:
    what `plan_facts` says of it; machine: its node, rack, local_rank and the ranks on its node, None where
    nobody says which ranks share a node; exchanges: see `exchange_facts`. Where there are more, or none,
    these three are None.
    Raises LayoutError, UnknownDim.
    """
    layout = plan.layout
    if isinstance(place, int):
        layout.position(place)
        ranks = [place]
    else:
        ranks = ranks_at(layout, place)
    facts: Facts = {
        "world_size": layout.world_size,
        "fingerprint": plan.fingerprint,
        "asked": place,
        "ranks": ranks,
        "rank": None,
        "machine": None,
        "exchanges": None,
    }
    if len(ranks) == 1:
        facts["rank"] = plan_facts(plan, ranks[0], topology)["rank"]
        facts["machine"] = _machine(layout, ranks[0], topology)
        facts["exchanges"] = exchange_facts(settings, layout, ranks[0])
    else:
        per_node = None if topology is None else topology.ranks_per_node
        facts["listed"] = [
            {
                "rank": rank,
                "coords": layout.coords(rank),
                "node": None if per_node is None else rank // per_node,
            }
            for rank in ranks[:_LISTED]
        ]
    return facts


def _machine(layout: Layout, rank: int, topology: TopologyConfig | None) -> Facts | None:
    if topology is None or topology.ranks_per_node is None:
        return None
    per_node = topology.ranks_per_node
    node = rank // per_node
    members = layout.ranks
    members = np.sort(members[members // per_node == node])
    racks = topology.nodes_per_rack
    return {
        "node": node,
        "rack": None if racks is None else node // racks,
        "local_rank": rank % per_node,
        "ranks": members.tolist(),
    }


def where_page(facts: Facts) -> list[Part]:
    """`where_facts` as lines and tables."""
    ranks = facts["ranks"]
    if facts["rank"] is None:
        return _several(facts, ranks)
    parts: list[Part] = [Line(rank_line(facts), heading=True)]
    machine = facts["machine"]
    if machine is None:
        parts.append(Line("its node is not known: topology.ranks_per_node says which ranks share one"))
    else:
        rack = "" if machine["rack"] is None else f" in rack {machine['rack']}"
        parts.append(
            Line(
                f"node {machine['node']}{rack}, local rank {machine['local_rank']}; "
                f"ranks on the node: {fold(machine['ranks'])}"
            )
        )
    parts.append(rank_table(facts))
    if facts["exchanges"]:
        said = " (by the dims' names)" if facts["exchanges"][0]["said_by"] == "name" else ""
        parts += [Line(f"in training{said}:"), _exchanges(facts["exchanges"])]
    return parts


def _several(facts: Facts, ranks: list[int]) -> list[Part]:
    asked = " ".join(f"{name}={coord}" for name, coord in facts["asked"].items())
    if not ranks:
        return [Line(f"no rank has {asked}", heading=True)]
    parts: list[Part] = [Line(f"{len(ranks):,} ranks have {asked}: {fold(ranks)}", heading=True)]
    rows = []
    for one in facts["listed"]:
        coords = " ".join(f"{name}={coord}" for name, coord in one["coords"].items())
        rows.append((str(one["rank"]), coords, "-" if one["node"] is None else str(one["node"])))
    parts.append(Cells(("rank", "coords", "node"), tuple(rows), frozenset({"rank", "node"})))
    left = len(ranks) - len(rows)
    return [*parts, Line(f"and {left:,} more; --json has all of them")] if left else parts


def _exchanges(found: list[Facts]) -> Cells:
    rows = []
    for one in found:
        if one["ranks"] is not None:
            peers = f"ranks {fold(one['ranks'])}"
        else:
            ends = (("to", one["to"]), ("from", one["from"]))
            peers = ", ".join(f"{way} {rank}" for way, rank in ends if rank is not None)
        rows.append((one["part"], " ".join(one["dims"]), one["operation"], one["what"], peers))
    return Cells(("part", "along", "operation", "what", "with"), tuple(rows))
