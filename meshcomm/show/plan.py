"""Converts a plan to plain facts, and the facts to tables of dims, groups, and one rank's groups."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from meshcomm.config import TopologyConfig
from meshcomm.config.rules_mesh import DEFAULTS
from meshcomm.errors import LayoutError
from meshcomm.layout import Family, Layout, Plan
from meshcomm.layout.sizes import coords_text, fold
from meshcomm.predict.links import Level, Machine, machine, places_of, slowest_level, span
from meshcomm.show.page import Cells, Column, Facts, Line, PagePart, View, page_view
from meshcomm.show.units import count


def plan_facts(plan: Plan, rank: int | None = None, topology: TopologyConfig | None = None) -> Facts:
    """Return the output of `meshcomm plan` as JSON-serializable data.

    dims: one entry for each dim, merged dim and view dim, in plan order. With ranks_per_node, an entry has nodes (the smallest
    and largest number of nodes that a group spans), crosses (link class -> the number of groups whose slowest link is of this
    class) and link (the slowest of those links). backend is "auto" only if the device is; each process then chooses a backend.
    Time and memory grow with the number of ranks, as one integer for each, and not with the number of groups.
    Raises LayoutError if the mesh does not have `rank`.
    """
    plan = _on_its_device(plan)
    created = [family for family in plan.families if family.creates]
    where = None if topology is None else machine(topology)
    facts: Facts = {
        "world_size": plan.layout.world_size,
        "fingerprint": plan.fingerprint,
        "device": plan.device,
        "groups": sum(family.count for family in created),
        "groups_per_rank": len(created),
        "dims": [_dim_facts(plan.layout, family, where) for family in plan.families],
    }
    if rank is not None:
        facts["rank"] = rank_facts(plan, rank, topology)
    return facts


def _dim_facts(layout: Layout, family: Family, where: Machine | None) -> Facts:
    facts: Facts = {
        "name": family.name,
        "kind": family.kind,
        "dims": list(family.dims),
        "size": family.size,
        "stride": _stride(layout, family),
        "groups": family.count if family.size > 1 else 0,
        "created": family.creates,
        **family.options.facts(),
        "shares": family.shares,
    }
    if where is not None:
        crossed = span(layout.groups(family.name), where)
        facts["nodes"] = {"fewest": crossed.fewest, "most": crossed.most}
        facts["crosses"] = crossed.crosses
        facts["link"] = None if family.size == 1 else _link(slowest_level(crossed, where))
    return facts


def _stride(layout: Layout, family: Family) -> int | None:
    """Return the distance in ranks from one coord to the next, if it is the same everywhere in the mesh, or None."""
    if family.size == 1:
        return None
    digits = layout.digits(family.name).canonical()
    if layout.rank_order is None:
        return digits[0][1] if len(digits) == 1 else None
    steps = np.diff(layout.groups(family.name), axis=1)
    return int(steps.flat[0]) if (steps == steps.flat[0]).all() else None


def _link(level: Level) -> Facts:
    """Return a link class with its latency and bandwidth, which are None if they were not configured."""
    speeds = {"latency_us": level.alpha_s * 10**6, "bandwidth_gbytes_s": 1 / level.beta_s / 10**9}
    return {"name": level.name, **{key: None if level.assumed else float(n) for key, n in speeds.items()}}


def _on_its_device(plan: Plan) -> Plan:
    return plan.on(plan.device, DEFAULTS[plan.device]) if plan.device in DEFAULTS else plan


def read_rank(text: str, layout: Layout) -> int:
    """Parse a rank given as a number, such as 5, or by its coords in the base or in a view, such as pp=1,dp=0,tp=1.

    Raises LayoutError, or UnknownDim for a dim that the layout does not have.
    """
    if re.fullmatch(r"\s*-?\d+\s*", text):
        return int(text)
    coords: dict[str, int] = {}
    for part in re.findall(r"[^,\s]+", text) or [text]:
        match = re.fullmatch(r"(\w+)=(\d+)", part)
        if match is None or match[1] in coords:
            raise LayoutError(
                f"{part!r} is not a coord" if match is None else f"{match[1]} is given twice",
                given=repr(text),
                expected="a rank, or DIM=COORD pairs separated by commas, with each dim once",
                hint="5, or pp=1,dp=0,tp=1",
            )
        coords[match[1]] = int(match[2])
    # Dims of size 1 may be omitted.
    ones = {dim: 0 for dim, size in layout.dims.items() if size == 1 and coords.keys() <= layout.dims.keys()}
    return layout.get_rank(**{**ones, **coords})


def rank_facts(plan: Plan, rank: int, topology: TopologyConfig | None = None) -> Facts:
    """Return the part of `plan_facts` about one rank: its coords, and its group along each dim.

    machine: the rank's node, rack and local_rank, and the ranks on its node; None without ranks_per_node.
    Raises LayoutError if the mesh does not have `rank`.
    """
    layout, seen = plan.layout, _on_its_device(plan).for_rank(rank)
    groups = {group.name: list(group.ranks) for group in seen.groups}
    per_node = None if topology is None else topology.ranks_per_node
    listed: list[Facts] = []
    for family in plan.families:
        name, coord, alone = family.name, layout.coord(rank, family.name), family.size == 1
        ranks = groups.get(name, [rank])
        facts: Facts = {
            "name": name,
            "coord": coord,
            "size": family.size,
            "index": layout.group_index(rank, name),
            "ranks": ranks,
            "shares": family.shares,
            "prev": None if alone else layout.neighbor_rank(rank, name, -1),
            "next": None if alone else layout.neighbor_rank(rank, name, +1),
            "first": coord == 0,
            "last": coord == family.size - 1,
        }
        if topology is not None and per_node is not None:
            facts["nodes"] = len({*(places_of(topology, np.array(ranks)) // per_node).tolist()})
        listed.append(facts)
    return {
        "rank": rank,
        "coords": dict(seen.coords),
        "views": {view: layout.coords(rank, view) for view in layout.views},
        "creations": seen.creations,
        "groups": listed,
        "machine": None if topology is None else _machine(layout, rank, topology),
    }


def _machine(layout: Layout, rank: int, topology: TopologyConfig) -> Facts | None:
    per_node, racks = topology.ranks_per_node, topology.nodes_per_rack
    if per_node is None:
        return None
    place = int(places_of(topology, np.array(rank)))
    node = place // per_node
    members = np.sort(layout.ranks[places_of(topology, layout.ranks) // per_node == node])
    return {
        "node": node,
        "rack": None if racks is None else node // racks,
        "local_rank": place % per_node,
        "ranks": members.tolist(),
    }


def plan_view(
    plan: Plan,
    rank: int | None = None,
    topology: TopologyConfig | None = None,
    existing: Mapping[str, Facts] = MappingProxyType({}),
) -> View:
    """Return `plan_facts` for a rich console. existing: the backend and timeout_s of groups that the program has created,
    by name.
    """
    facts = plan_facts(plan, rank, topology)
    for dim in facts["dims"]:
        if dim["name"] in existing:
            dim.update(existing[dim["name"]], created=False, shares="the program")
    facts["groups_per_rank"] = sum(dim["created"] for dim in facts["dims"])
    return page_view(plan_page(facts))


def plan_page(facts: Facts) -> list[PagePart]:
    """Return `plan_facts` as lines and tables: a headline, the dims, and the rank if one was given."""
    headline = (
        f"mesh of {count(facts['world_size'], 'rank')}, plan {facts['fingerprint']}: "
        f"{count(facts['groups'], 'group')}, {facts['groups_per_rank']} created per rank"
    )
    parts: list[PagePart] = [Line(headline), dims_table(facts["dims"])]
    if "footprint" in facts:
        cost = facts["footprint"]
        held, size = count(cost["nccl"], "NCCL communicator"), cost["nccl_mb"] / 1000
        parts.append(Line(f"a rank has up to {held}: about {size:.1f} GB, an estimate from NVIDIA/nccl#964"))
    return [*parts, *_rank_page(facts["rank"])] if "rank" in facts else parts


def _rank_page(rank: Facts) -> list[PagePart]:
    """Return one rank's coords in the base and in every view, its node, and a table of its group and ring neighbors along
    each dim.
    """
    text = f"rank {rank['rank']}: {coords_text(rank['coords'])}"
    for view, coords in rank["views"].items():
        text += f"; {view}: {coords_text(coords)}"
    machine = rank["machine"]
    if machine is not None:
        rack = "" if machine["rack"] is None else f" in rack {machine['rack']}"
        text += f"\nnode {machine['node']}{rack}, local rank {machine['local_rank']}; "
        text += f"ranks on the node: {fold(machine['ranks'])}"
    columns: dict[str, Column] = {
        "dim": "name",
        ">coord": "{coord} of {size}",
        ">prev": lambda group: _neighbour(group["prev"], group["first"]),
        ">next": lambda group: _neighbour(group["next"], group["last"]),
        "my group, in coord order": lambda group: (
            fold(group["ranks"]) + (" (alone: no group)" if group["size"] == 1 else "")
        ),
    }
    if "nodes" in rank["groups"][0]:
        columns[">nodes"] = "{nodes}"
    return [Line(text), Cells.of(rank["groups"], columns)]


def _neighbour(rank: int | None, wraps: bool) -> str | None:
    return None if rank is None else f"{rank} (wraps)" if wraps else str(rank)


def dims_table(dims: list[Facts]) -> Cells:
    """Return a table with one row for each dim, merged dim and view dim."""
    columns: dict[str, Column] = {
        "dim": "name",
        "kind": lambda dim: dim["kind"] + (" " + " ".join(dim["dims"])) * (dim["kind"] == "merged"),
        ">size": "size",
        ">stride": lambda dim: "uneven" if dim["stride"] is None and dim["size"] > 1 else dim["stride"],
        ">groups": "groups",
        "backend": _backend,
        ">timeout": "{timeout_s:g} s",
    }
    if any(dim["comm_id"] for dim in dims):
        columns["comm_id"] = lambda dim: dim["comm_id"] or None
    if any(dim["shares"] for dim in dims):
        columns["shared with"] = "shares"
    if "nodes" in dims[0]:
        columns[">nodes"] = ("nodes", _span)
        columns["link"] = lambda dim: _link_text(dim["link"], dim["crosses"])
    return Cells.of(dims, columns)


def _backend(dim: Facts) -> str:
    """Return the backend's name and options. Options with a value come first, then the names of enabled options."""
    extra = dim["extra"].items()
    valued = [f"{name}={value}" for name, value in extra if value is not True]
    return " ".join([dim["backend"], *valued, *(name for name, value in extra if value is True)])


def _span(nodes: Facts) -> str:
    fewest, most = nodes["fewest"], nodes["most"]
    return f"{most:,}" if fewest == most else f"{fewest:,} to {most:,}"


def _link_text(link: Facts | None, crosses: dict[str, int]) -> str | None:
    """Return the slowest link if it is the same for all groups, or the share of groups for each slowest link."""
    if link is None:
        return None
    total = sum(crosses.values())
    if crosses[link["name"]] < total:
        return ", ".join(f"{name} {_percent(n, total)}" for name, n in crosses.items() if n)
    if link["latency_us"] is None:
        return str(link["name"])
    return f"{link['name']}, {link['latency_us']:g} us, {link['bandwidth_gbytes_s']:g} GB/s"


def _percent(part: int, whole: int) -> str:
    """Return a percentage as text. Shares below 1% and above 99% are not rounded to 0% or 100%."""
    share = 100 * part / whole
    return "below 1%" if share < 1 else "above 99%" if share > 99 else f"{share:.0f}%"
