"""The ranking of meshes as facts, and as tables with the reasons."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from meshcomm.config.parallel import Part
from meshcomm.predict.place import Placement, Ranking
from meshcomm.show.page import Cells, Line, page_view
from meshcomm.show.units import bytes_text, seconds_text

if TYPE_CHECKING:
    from rich.console import Group

Facts = dict[str, Any]


def place_facts(ranking: Ranking, names: Mapping[Part, str]) -> Facts:
    """What `meshcomm place` shows, as data that JSON can hold. names: the dim of each part."""
    return {
        "world_size": ranking.world,
        "meshes": ranking.meshes,
        "sizes": ranking.sizes,
        "too_large": ranking.too_large,
        "links": [str(level) for level in ranking.machine.levels],
        "tflops": ranking.tflops,
        "memory_gbytes": ranking.memory_gb,
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
    left = f", {facts['too_large']:,} of them too large for memory" if facts["too_large"] else ""
    head = (
        f"{facts['meshes']:,} meshes of {facts['world_size']:,} ranks ranked: {facts['sizes']:,} legal sizes{left}\n"
        f"links: {'; '.join(facts['links'])}\n"
        f"{facts['tflops']:g} TFLOP/s and {facts['memory_gbytes']:g} GB a rank; nothing overlaps; times are predicted"
    )
    first = facts["placements"][0]
    return page_view([Line(head), _ranking(facts["placements"]), *_reasons(first)])


def _ranking(placements: list[Facts]) -> Cells:
    rows = []
    for number, each in enumerate(placements, 1):
        also = f" (+{each['also']} order{'s' * (each['also'] > 1)})" if each["also"] else ""
        rows.append(
            (
                str(number),
                _dims(each) + also,
                seconds_text(each["step_s"]),
                seconds_text(each["compute_s"]),
                seconds_text(each["bubble_s"]),
                seconds_text(sum(call["seconds"] for call in each["calls"])),
                f"{sum(each['memory_bytes'].values()) / 1e9:.3g}",
                _crossing(each["calls"]),
            )
        )
    right = ("step", "compute", "bubble", "calls", "GB")
    columns = ("", "dims, outermost first", *right, "slow links, most time first")
    return Cells(columns, tuple(rows), frozenset((*right, "")))


def _crossing(calls: list[Facts]) -> str:
    """What crosses links beyond the node: dim and seconds."""
    by_dim: dict[str, float] = {}
    for call in calls:
        if call["link"] != "node":
            by_dim[call["dim"]] = by_dim.get(call["dim"], 0.0) + call["seconds"]
    ranked = sorted(by_dim.items(), key=lambda item: -item[1])
    return ", ".join(f"{dim} {seconds_text(time)}" for dim, time in ranked) or "none"


def _reasons(placement: Facts) -> list[Line | Cells]:
    number = placement["microbatches"]
    parts: list[Line | Cells] = [
        Line(f"why: {_dims(placement)}", heading=True),
        Line(
            f"compute {seconds_text(placement['compute_s'])} in {number:,} micro-batch{'es' * (number > 1)}, "
            f"bubble {seconds_text(placement['bubble_s'])} waiting for other stages"
        ),
    ]
    rows = [
        (
            f"{call['dim']} {call['ranks']:,} {call['link']}",
            call["operation"],
            call["what"],
            f"{call['calls']:,}",
            bytes_text(call["bytes"]),
            seconds_text(call["seconds"]),
            call["algorithm"],
        )
        for call in placement["calls"]
    ]
    right = ("calls", "bytes", "time")
    if rows:
        parts.append(Cells(("dim", "operation", "what", *right, "by"), tuple(rows), frozenset(right), once=1))
    sizes = placement["memory_bytes"]
    held = ", ".join(f"{name} {bytes_text(size)}" for name, size in sizes.items())
    return [*parts, Line(f"memory {bytes_text(sum(sizes.values()))} a rank: {held}")]


def _dims(placement: Facts) -> str:
    text = " ".join(f"{name}={size}" for name, size in placement["dims"].items())
    if placement["expert"] is None:
        return text
    (name, size), (_, inside) = placement["expert"].items()
    return f"{text} {name}={size}{'' if inside or size == 1 else ' outside its copies'}"
