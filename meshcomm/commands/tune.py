"""Shows a ranking of meshes as facts, and as tables that explain it."""

from __future__ import annotations

from collections.abc import Mapping

from meshcomm.config.parallel import ParallelRole
from meshcomm.layout.sizes import coords_text
from meshcomm.predict.estimate import EXPERT_SHARD, REPLICA
from meshcomm.predict.place import Placement, Ranking, Share
from meshcomm.show.page import Cells, Column, Facts, Line, View, page_view
from meshcomm.show.units import bytes_text, count, seconds_text


def place_facts(ranking: Ranking, names: Mapping[ParallelRole, str], device: str = "auto") -> Facts:
    """Return the output of `meshcomm tune` as JSON-serializable data. names: the name of each part's dim. device: the value
    of mesh.device.
    """
    return {
        "world_size": ranking.world,
        "meshes": ranking.meshes,
        "sizes": ranking.sizes,
        "too_large": ranking.too_large,
        "links": [str(level) for level in ranking.machine.levels],
        "tflops": ranking.tflops,
        "memory_gbytes": ranking.memory_gb,
        "assumed": list(ranking.assumed),
        "device": device,
        "placements": [_facts(placement, names) for placement in ranking.placements],
    }


def _facts(placement: Placement, names: Mapping[ParallelRole, str]) -> Facts:
    along = {str(part): name for part, name in names.items()} | {
        REPLICA: "experts' copies",
        EXPERT_SHARD: "experts' shards",
    }
    facts = {
        **placement._asdict(),
        "dims": {names[part]: size for part, size in placement.dims.items()},
        "expert": {names["expert"]: placement.expert} if "expert" in names else None,
        "memory_bytes": dict(placement.memory_bytes),
    }
    del facts["shares"]
    facts["calls"] = [_call(share, along) for share in placement.shares]
    return facts


def _call(share: Share, along: Mapping[str, str]) -> Facts:
    return {
        "part": share.flow.part,
        "dim": " ".join(along[part] for part in share.flow.along),
        "ranks": share.ranks,
        "link": share.link,
        "operation": share.flow.operation,
        "what": share.flow.what,
        "calls": share.calls,
        "bytes": share.flow.size_bytes,
        "seconds": share.seconds,
        "algorithm": share.algorithm,
    }


def place_view(facts: Facts) -> View:
    """Return `place_facts` for a rich console: the ranking, then a breakdown of the first mesh's step time."""
    left = f" ({facts['too_large']:,} of them too large for memory)" if facts["too_large"] else ""
    head = (
        f"{facts['meshes']:,} meshes of {facts['world_size']:,} ranks ranked: "
        f"{count(facts['sizes'], 'legal factorization')}{left} in all orders of their dims\n"
        f"links: {'; '.join(facts['links'])}\n"
        f"a rank: {facts['tflops']:g} TFLOP/s{assumed_text(facts, 'tflops')}, "
        f"{facts['memory_gbytes']:g} GB{assumed_text(facts, 'memory_gbytes')}\n"
        "times are predicted; nothing overlaps; by: the algorithm that the model finds fastest"
    )
    columns: dict[str, Column] = {
        ">": "number",
        "dims, outermost first": lambda row: (
            _dims(row) + (f" (+{count(row['also'], 'order')})" if row["also"] else "")
        ),
        ">step": ("step_s", seconds_text),
        ">compute": ("compute_s", seconds_text),
        ">bubble": ("bubble_s", seconds_text),
        ">calls": lambda row: seconds_text(sum(call["seconds"] for call in row["calls"])),
        ">GB": lambda row: f"{sum(row['memory_bytes'].values()) / 1e9:.3g}",
    }
    notes = []
    if any(row["also"] for row in facts["placements"]):
        notes.append("+N orders: N other orders of the same sizes take the same time")
    if "exact" in facts["placements"][0]:
        notes.append(
            "dry run, its GB: step time and peak memory by a dry run; !: more memory than a rank has"
        )
        columns[">dry run"] = ("exact.step_s", seconds_text)
        columns[">its GB"] = ("exact", _peak)
    columns["slow links, most time first"] = ("calls", _crossing)
    ranking = Cells.of([{"number": n, **each} for n, each in enumerate(facts["placements"], 1)], columns)
    return page_view([Line(head), ranking, *map(Line, notes), *_reasons(facts["placements"][0])])


def assumed_text(facts: Facts, key: str) -> str:
    """Return a note that an H100's value is assumed for `topology.<key>`, or "" if the value was set."""
    if key not in facts["assumed"]:
        return ""
    other = "not of mesh.device cpu, " if facts["device"] == "cpu" else ""
    return f" (of an H100, {other}as topology.{key} is not set)"


def _peak(exact: Facts) -> str:
    return f"{exact['peak_bytes'] / 1e9:.3g}" + "!" * (not exact["fits"])


def _crossing(calls: list[Facts]) -> str:
    """Return the dims whose calls leave the node, each with the seconds that those calls take, longest first."""
    by_dim: dict[str, float] = {}
    for call in calls:
        if call["link"] != "node":
            by_dim[call["dim"]] = by_dim.get(call["dim"], 0.0) + call["seconds"]
    ranked = sorted(by_dim.items(), key=lambda item: -item[1])
    return ", ".join(f"{dim} {seconds_text(time)}" for dim, time in ranked) or "none"


def _reasons(placement: Facts) -> list[Line | Cells]:
    number = placement["microbatches"]
    calls = Cells.of(
        placement["calls"],
        {
            "dim": "{dim} {ranks:,} {link}",
            "operation": "operation",
            "what": "what",
            ">calls": "calls",
            ">bytes": ("bytes", bytes_text),
            ">time": ("seconds", seconds_text),
            "by": "algorithm",
        },
        once=1,
    )
    sizes = placement["memory_bytes"]
    held = ", ".join(f"{name} {bytes_text(size)}" for name, size in sizes.items())
    return [
        Line(f"why: {_dims(placement)}"),
        Line(
            f"compute {seconds_text(placement['compute_s'])} in {number:,} micro-batch{'es' * (number > 1)}, "
            f"bubble {seconds_text(placement['bubble_s'])} waiting for other stages"
        ),
        *([calls] if calls.rows else []),
        Line(f"memory {bytes_text(sum(sizes.values()))} a rank: {held}"),
    ]


def _dims(placement: Facts) -> str:
    text = coords_text(placement["dims"])
    if placement["expert"] is None:
        return text
    ((name, size),) = placement["expert"].items()
    return f"{text} {name}={size}"
