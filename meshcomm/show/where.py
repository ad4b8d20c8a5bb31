"""One rank's place: coords, node, groups, neighbours and whom it exchanges what with; and back from coords."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from meshcomm.config import Config, ParallelConfig, TopologyConfig
from meshcomm.errors import LayoutError
from meshcomm.layout import Dims, Layout, Plan
from meshcomm.layout.sizes import check_coord, coords_text, fold
from meshcomm.predict.lint import roles
from meshcomm.show.page import Cells, Column, Line, Part
from meshcomm.show.plan import plan_facts, rank_page

Facts = dict[str, Any]

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
        check_coord(name, coord, digits.size)
        positions = positions[digits.coord(positions) == coord]
    found: list[int] = layout.ranks[positions].tolist()
    return found


def where_facts(
    settings: Config, plan: Plan, place: int | dict[str, int], topology: TopologyConfig | None = None
) -> Facts:
    """What `meshcomm plan --rank` shows of a place, as data that JSON can hold.

    settings: with every -1 filled in. place: a rank, or coords.

    Keys: world_size, fingerprint, asked (the place), ranks: those that are there. Where it is one, rank:
    what `plan_facts` says of it; machine: its node, rack, local_rank and the ranks on its node, None where
    nobody says which ranks share a node; exchanges: see `exchange_facts`. Where there are more, or none,
    these three are None, and listed has coords and node of the first ones.
    Raises LayoutError, UnknownDim.
    """
    layout = plan.layout
    ranks = [place] if isinstance(place, int) else ranks_at(layout, place)
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
        return facts
    per_node = None if topology is None else topology.ranks_per_node
    facts["listed"] = [
        {"rank": rank, "coords": layout.coords(rank), "node": None if per_node is None else rank // per_node}
        for rank in ranks[:_LISTED]
    ]
    return facts


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


def exchange_facts(settings: Config, layout: Layout, rank: int) -> list[Facts]:
    """Whom a rank exchanges what with in training, by the part that each dim plays: one entry for each kind.

    Keys: part, dims, what, operation; ranks: all that take part, in coord order, or None for messages,
    which have to and from: ranks, or None at the ends. said_by: "parallel" where the configuration says
    which part the dim plays, "name" where only its name does. Parts of one rank exchange nothing.
    """
    found = []
    for part, along, operation, what, wraps in _exchanges(settings, layout):
        facts = {"part": part, "dims": list(layout.expand(along)), "what": what, "operation": operation}
        ranks, after, before = layout.group_of(rank, along).tolist(), None, None
        if len(ranks) == 1:
            continue
        if wraps is not None:
            ranks = None
            after, before = (layout.neighbor_rank(rank, along, step, wrap=wraps) for step in (1, -1))
        said_by = "name" if settings.parallel is None else "parallel"
        found.append({**facts, "ranks": ranks, "to": after, "from": before, "said_by": said_by})
    return found


def _exchanges(settings: Config, layout: Layout) -> Iterator[tuple[str, Dims, str, str, bool | None]]:
    """Part, dims, operation, what; and for messages to neighbours whether the last has the first as its next."""
    played = {part: dim for dim, part in roles(settings).items() if layout.size(dim) > 1}
    rules = settings.parallel or ParallelConfig()
    both, messages = "all_gather and reduce_scatter", "send and receive"
    if "tensor" in played:
        operation = both if rules.options.sequence_parallel else "all_reduce"
        yield "tensor", played["tensor"], operation, "activations of each layer", None
    if "context" in played and rules.options.attention == "ring":
        yield "context", played["context"], messages, "keys and values, around a ring", True
    elif "context" in played:
        yield "context", played["context"], "all_to_all", "heads in place of tokens", None
    if "expert" in played:
        yield "expert", played["expert"], "all_to_all", "tokens, to their experts and back", None
    if "pipeline" in played:
        wraps = rules.options.schedule in ("interleaved_1f1b", "zero_bubble")
        what = "activations onwards, their gradients back"
        yield "pipeline", played["pipeline"], messages, what, wraps
    shards = tuple(dim for dim in rules.shard_dims(layout.dims) if layout.size(dim) > 1)
    if shards:
        yield "shard", shards, both, "weights, and their gradients", None
    parts = ("data",) if shards else ("data", "context")
    gradients = {part: played[part] for part in parts if part in played}
    if gradients:
        yield next(iter(gradients)), tuple(gradients.values()), "all_reduce", "gradients", None
    experts = tuple(name for name in settings.expert_gradient_dims if layout.size(name) > 1)
    if settings.expert_view is not None and experts and rules.shard is not None:
        yield "expert", experts[-1], both, "experts' weights, and their gradients", None
        experts = experts[:-1]
    if settings.expert_view is not None and experts:
        yield "expert", experts, "all_reduce", "gradients of experts' weights", None


def where_page(facts: Facts) -> list[Part]:
    """`where_facts` as lines and tables."""
    if facts["rank"] is None:
        return _several(facts)
    machine, about = facts["machine"], list[Part]()
    if machine is not None:
        rack = "" if machine["rack"] is None else f" in rack {machine['rack']}"
        on_node = f"node {machine['node']}{rack}, local rank {machine['local_rank']}; "
        about.append(Line(on_node + f"ranks on the node: {fold(machine['ranks'])}"))
    parts = rank_page(facts["rank"], *about)
    if facts["exchanges"]:
        said = " (by the dims' names)" if facts["exchanges"][0]["said_by"] == "name" else ""
        columns: dict[str, Column] = {
            "part": "part",
            "along": ("dims", " ".join),
            "operation": "operation",
            "what": "what",
            "with": _peers,
        }
        parts += [Line(f"in training{said}:"), Cells.of(facts["exchanges"], columns)]
    return parts


def _peers(one: Facts) -> str:
    if one["ranks"] is not None:
        return f"ranks {fold(one['ranks'])}"
    return ", ".join(f"{way} {one[way]}" for way in ("to", "from") if one[way] is not None)


def _several(facts: Facts) -> list[Part]:
    asked, ranks, listed = coords_text(facts["asked"]), facts["ranks"], facts["listed"]
    if not ranks:
        return [Line(f"no rank has {asked}", heading=True)]
    columns: dict[str, Column] = {
        ">rank": ("rank", str),
        "coords": ("coords", coords_text),
        ">node": ("node", str),
    }
    parts: list[Part] = [Line(f"{len(ranks):,} ranks have {asked}: {fold(ranks)}", heading=True)]
    parts.append(Cells.of(listed, columns))
    left = len(ranks) - len(listed)
    return [*parts, Line(f"and {left:,} more; --json has all of them")] if left else parts
