"""The ranking of meshes as facts, and as tables with the reasons."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from meshcomm.config.parallel import Part
from meshcomm.place import Placement, Ranking
from meshcomm.show.units import bytes_text, seconds_text
from meshcomm.topology import Machine

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

Facts = dict[str, Any]


def place_facts(
    ranking: Ranking, world: int, machine: Machine, names: Mapping[Part, str], tflops: float, memory_gb: float
) -> Facts:
    """What `meshcomm place` shows, as data that JSON can hold. names: the dim of each part."""
    return {
        "world_size": world,
        "meshes": ranking.meshes,
        "sizes": ranking.sizes,
        "too_large": ranking.too_large,
        "links": [str(level) for level in machine.levels],
        "tflops": tflops,
        "memory_gbytes": memory_gb,
        "placements": [_facts(placement, names) for placement in ranking.placements],
    }


def _facts(placement: Placement, names: Mapping[Part, str]) -> Facts:
    along = {str(part): name for part, name in names.items()} | {"replica": "experts' copies"}
    return {
        "dims": {names[part]: size for part, size in placement.dims.items()},
        "expert": {names["expert"]: placement.expert, "inside": placement.experts_inside}
        if "expert" in names
        else None,
        "microbatches": placement.microbatches,
        "step_s": placement.step_s,
        "compute_s": placement.compute_s,
        "bubble_s": placement.bubble_s,
        "memory_bytes": dict(placement.memory_bytes),
        "also": placement.also,
        "calls": [
            {
                "part": share.part,
                "dim": " ".join(along[part] for part in share.along),
                "ranks": share.ranks,
                "link": share.link,
                "operation": share.operation,
                "what": share.what,
                "calls": share.calls,
                "bytes": share.size_bytes,
                "seconds": share.seconds,
                "algorithm": share.algorithm,
            }
            for share in placement.shares
        ],
    }


def place_view(facts: Facts) -> Group:
    """`place_facts` for a rich console: the ranking, then why the first one takes what it takes."""
    from rich.console import Group
    from rich.text import Text

    left = f", {facts['too_large']:,} of them too large for memory" if facts["too_large"] else ""
    head = (
        f"{facts['meshes']:,} meshes of {facts['world_size']:,} ranks ranked: {facts['sizes']:,} legal sizes{left}\n"
        f"links: {'; '.join(facts['links'])}\n"
        f"{facts['tflops']:g} TFLOP/s and {facts['memory_gbytes']:g} GB a rank; nothing overlaps; times are predicted"
    )
    first = facts["placements"][0]
    return Group(Text(head), _ranking(facts["placements"]), Text(f"why: {_dims(first)}"), _reasons(first))


def _ranking(placements: list[Facts]) -> Table:
    table = _table(
        [
            "",
            "dims, outermost first",
            "step",
            "compute",
            "bubble",
            "calls",
            "GB",
            "slow links, most time first",
        ]
    )
    for number, each in enumerate(placements, 1):
        calls = sum(call["seconds"] for call in each["calls"])
        also = f" (+{each['also']} orders)" if each["also"] else ""
        table.add_row(
            str(number),
            _dims(each) + also,
            seconds_text(each["step_s"]),
            seconds_text(each["compute_s"]),
            seconds_text(each["bubble_s"]),
            seconds_text(calls),
            f"{sum(each['memory_bytes'].values()) / 1e9:.3g}",
            _crossing(each["calls"]),
        )
    return table


def _crossing(calls: list[Facts]) -> str:
    """What crosses links beyond the node: dim and seconds."""
    by_dim: dict[str, float] = {}
    for call in calls:
        if call["link"] != "node":
            by_dim[call["dim"]] = by_dim.get(call["dim"], 0.0) + call["seconds"]
    ranked = sorted(by_dim.items(), key=lambda item: -item[1])
    return ", ".join(f"{dim} {seconds_text(time)}" for dim, time in ranked) or "none"


def _reasons(placement: Facts) -> Table:
    table = _table(["dim", "ranks", "link", "operation", "what", "calls", "bytes", "time", "by"])
    table.add_row(
        "",
        "",
        "",
        "compute",
        f"micro-batches: {placement['microbatches']:,}",
        "",
        "",
        seconds_text(placement["compute_s"]),
        "",
    )
    table.add_row(
        "", "", "", "bubble", "waiting for other stages", "", "", seconds_text(placement["bubble_s"]), ""
    )
    for call in placement["calls"]:
        table.add_row(
            call["dim"],
            f"{call['ranks']:,}",
            call["link"],
            call["operation"],
            call["what"],
            f"{call['calls']:,}",
            bytes_text(call["bytes"]),
            seconds_text(call["seconds"]),
            call["algorithm"],
        )
    for name, size in placement["memory_bytes"].items():
        table.add_row("", "", "", "memory", name, "", bytes_text(size), "", "")
    return table


def _dims(placement: Facts) -> str:
    text = " ".join(f"{name}={size}" for name, size in placement["dims"].items())
    if placement["expert"] is None:
        return text
    (name, size), (_, inside) = placement["expert"].items()
    return f"{text} {name}={size}{'' if inside or size == 1 else ' outside its copies'}"


def _table(columns: list[str]) -> Table:
    from rich import box
    from rich.table import Table

    right = {"", "step", "compute", "bubble", "calls", "GB", "ranks", "bytes", "time"}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left")
    return table
