"""A plan as plain facts, and the facts as tables: dims, groups, and one rank's place among them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from meshcomm.config import TopologyConfig
from meshcomm.config.rules_mesh import DEFAULTS
from meshcomm.layout import Family, Layout, Plan, RankPlan
from meshcomm.layout.sizes import fold
from meshcomm.predict.links import slowest_level, span
from meshcomm.predict.machine import Machine, machine
from meshcomm.show.page import Cells, Line, Part, page_view

if TYPE_CHECKING:
    from rich.console import Group

Facts = dict[str, Any]


def plan_facts(plan: Plan, rank: int | None = None, topology: TopologyConfig | None = None) -> Facts:
    """All that `meshcomm plan` shows, as data that JSON can hold.

    Keys: world_size (ranks of the mesh), fingerprint, device, groups (created over all ranks),
    groups_per_rank (created by each of them), dims: one entry for each dim, merged dim and view's
    dim, in plan order; and rank, where one is asked for: its coords, and its group and ring
    neighbours for each name.

    With ranks_per_node each dim has nodes (fewest and most that one of its groups lies on), crosses
    (link class -> number of groups whose slowest link it is) and link, the slowest of all.
    `meshcomm plan` adds footprint, that of meshcomm.predict.lint, where all is known to run on NCCL.
    backend is "auto" only where the device is too: then each process finds out.
    Time and memory grow with the number of ranks as one array of integers, never as groups.
    Raises LayoutError where the mesh does not have `rank`.
    """
    if plan.device in DEFAULTS:
        plan = plan.on(plan.device, DEFAULTS[plan.device])
    families = plan.families
    created = [family for family in families if family.creates]
    where = None if topology is None else machine(topology)
    facts: Facts = {
        "world_size": plan.layout.world_size,
        "fingerprint": plan.fingerprint,
        "device": plan.device,
        "groups": sum(family.count for family in created),
        "groups_per_rank": len(created),
        "dims": [_dim_facts(plan.layout, family, topology, where) for family in families],
    }
    if rank is not None:
        facts["rank"] = _rank_facts(plan, plan.for_rank(rank), topology)
    return facts


def _dim_facts(
    layout: Layout, family: Family, topology: TopologyConfig | None, where: Machine | None
) -> Facts:
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
    if topology is not None and where is not None:
        found = span(layout.groups(family.name), where)
        facts["nodes"] = {"fewest": found.fewest, "most": found.most}
        facts["crosses"] = found.crosses
        facts["link"] = None if family.size == 1 else _link(topology, slowest_level(found, where).name)
    return facts


def _stride(layout: Layout, family: Family) -> int | None:
    """Ranks from one coord to the next, where that is the same everywhere in the mesh."""
    if family.size == 1:
        return None
    digits = layout.digits(family.name).canonical()
    if layout.rank_order is None:
        return digits[0][1] if len(digits) == 1 else None
    steps = np.diff(layout.groups(family.name), axis=1)
    return int(steps.flat[0]) if (steps == steps.flat[0]).all() else None


def _link(topology: TopologyConfig, name: str) -> Facts:
    """A link class with its speed; None where nobody has said it."""
    links = topology.links
    link = {"node": links.node, "rack": links.rack or links.network, "network": links.network}[name]
    return {
        "name": name,
        "latency_us": None if link is None else link.latency_us,
        "bandwidth_gbytes_s": None if link is None else link.bandwidth_gbytes_s,
    }


def _rank_facts(plan: Plan, seen: RankPlan, topology: TopologyConfig | None) -> Facts:
    layout, rank = plan.layout, seen.rank
    groups = {group.name: group for group in seen.groups}
    listed: list[Facts] = []
    for family in plan.families:
        name = family.name
        coord = layout.coord(rank, name)
        facts: Facts = {
            "name": name,
            "coord": coord,
            "size": family.size,
            "index": layout.group_index(rank, name),
            "ranks": list(groups[name].ranks) if name in groups else [rank],
            "shares": family.shares,
            "prev": layout.peer_rank(rank, name, -1) if family.size > 1 else None,
            "next": layout.peer_rank(rank, name, +1) if family.size > 1 else None,
            "first": coord == 0,
            "last": coord == family.size - 1,
        }
        if topology is not None and topology.ranks_per_node is not None:
            facts["nodes"] = len({member // topology.ranks_per_node for member in facts["ranks"]})
        listed.append(facts)
    return {
        "rank": rank,
        "coords": dict(seen.coords),
        "views": {view: layout.coords(rank, view) for view in layout.views},
        "creations": seen.creations,
        "groups": listed,
    }


def plan_view(plan: Plan, rank: int | None = None, topology: TopologyConfig | None = None) -> Group:
    """Everything that `plan_facts` says, for a rich console."""
    return facts_view(plan_facts(plan, rank, topology))


def facts_view(facts: Facts) -> Group:
    """`plan_facts` for a rich console: a headline, the dims, and the rank where there is one."""
    return page_view(plan_page(facts))


def plan_page(facts: Facts) -> list[Part]:
    """`plan_facts` as lines and tables."""
    parts: list[Part] = [Line(headline(facts), heading=True), dims_table(facts)]
    if "footprint" in facts:
        parts.append(Line(_footprint(facts["footprint"])))
    if "rank" in facts:
        parts += [Line(rank_line(facts), heading=True), rank_table(facts)]
    return parts


def headline(facts: Facts) -> str:
    """World size, fingerprint and number of groups, as one line."""
    return (
        f"mesh of {_count(facts['world_size'], 'rank')}, plan {facts['fingerprint']}: "
        f"{_count(facts['groups'], 'group')}, {facts['groups_per_rank']} created per rank"
    )


def _footprint(cost: Facts) -> str:
    """What a rank's communicators take, and how anybody knows."""
    count, size = _count(cost["nccl"], "NCCL communicator"), cost["nccl_mb"] / 1000
    return f"a rank has up to {count}: about {size:.1f} GB, an estimate from NVIDIA/nccl#964"


def rank_line(facts: Facts) -> str:
    """One rank's coords, in the base and in every view, as one line."""
    rank = facts["rank"]
    text = f"rank {rank['rank']}: {_coords(rank['coords'])}"
    for view, coords in rank["views"].items():
        text += f"; {view}: {_coords(coords)}"
    return text


def dims_table(facts: Facts) -> Cells:
    """One row for each dim, merged dim and view's dim."""
    with_nodes = any("nodes" in dim for dim in facts["dims"])
    with_lanes = any(dim["lane"] for dim in facts["dims"])
    with_shares = any(dim["shares"] for dim in facts["dims"])
    right = ["size", "stride", "groups"]
    columns = ["dim", "kind", *right, "backend", "timeout"]
    columns += ["lane"] * with_lanes + ["shared with"] * with_shares
    columns += ["nodes", "link"] * with_nodes
    rows = []
    for dim in facts["dims"]:
        kind = dim["kind"] if dim["kind"] != "merged" else "merged " + " ".join(dim["dims"])
        extra = "".join(f" {name}={value}" for name, value in dim["extra"].items() if value is not True)
        extra += "".join(f" {name}" for name, value in dim["extra"].items() if value is True)
        row = {
            "dim": dim["name"],
            "kind": kind,
            "size": f"{dim['size']:,}",
            "stride": "-"
            if dim["size"] == 1
            else "uneven"
            if dim["stride"] is None
            else f"{dim['stride']:,}",
            "groups": f"{dim['groups']:,}",
            "backend": dim["backend"] + extra,
            "timeout": f"{dim['timeout_s']:g} s",
            "lane": dim["lane"] or "-",
            "shared with": dim["shares"] or "-",
        }
        if with_nodes:
            row["nodes"] = _span(dim["nodes"]["fewest"], dim["nodes"]["most"])
            row["link"] = _link_text(dim["link"], dim["crosses"])
        rows.append(tuple(row[column] for column in columns))
    return Cells(tuple(columns), tuple(rows), frozenset({*right, "timeout", "nodes"}))


def rank_table(facts: Facts) -> Cells:
    """One row for each name: the rank's coord, its group in coord order, and its ring neighbours."""
    groups = facts["rank"]["groups"]
    with_nodes = any("nodes" in group for group in groups)
    columns = ["dim", "coord", "prev", "next", "my group, in coord order"] + ["nodes"] * with_nodes
    rows = []
    for group in groups:
        alone = group["size"] == 1
        row = [
            group["name"],
            f"{group['coord']} of {group['size']}",
            "-" if alone else f"{group['prev']}{' (wraps)' if group['first'] else ''}",
            "-" if alone else f"{group['next']}{' (wraps)' if group['last'] else ''}",
            f"{fold(group['ranks'])}{'' if not alone else ' (alone: no group)'}",
        ]
        rows.append((*row, *([str(group["nodes"])] if with_nodes else [])))
    return Cells(tuple(columns), tuple(rows), frozenset({"coord", "prev", "next", "nodes"}))


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _span(fewest: int, most: int) -> str:
    return f"{most:,}" if fewest == most else f"{fewest:,} to {most:,}"


def _coords(coords: dict[str, int]) -> str:
    return " ".join(f"{name}={coord}" for name, coord in coords.items())


def _link_text(link: Facts | None, crosses: dict[str, int]) -> str:
    """The link that all groups cross, or the share of groups by their slowest link."""
    if link is None:
        return "-"
    total = sum(crosses.values())
    if crosses[link["name"]] < total:
        return ", ".join(f"{name} {_percent(n, total)}" for name, n in crosses.items() if n)
    if link["latency_us"] is None:
        return str(link["name"])
    return f"{link['name']}, {link['latency_us']:g} us, {link['bandwidth_gbytes_s']:g} GB/s"


def _percent(part: int, whole: int) -> str:
    """Never 0 or 100 where it is not all or nothing."""
    share = 100 * part / whole
    return "below 1%" if share < 1 else "above 99%" if share > 99 else f"{share:.0f}%"
