"""Measured operations as facts, and as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from meshcomm.predict.fit import Fit, Fitted
from meshcomm.predict.times import Operation, bus_factor
from meshcomm.show.page import Cells, Line, Part, page_view
from meshcomm.show.units import seconds_text, size_text

if TYPE_CHECKING:
    from rich.console import Group

Facts = dict[str, Any]


def row_facts(
    dim: str,
    ranks: int,
    operation: Operation,
    size_bytes: int,
    calls: int,
    ours_s: Sequence[float],
    torch_s: Sequence[float],
) -> Facts:
    """One row. ours_s, torch_s: seconds per call of each round, of the slowest rank.

    Times are medians over the rounds, ratio the median of the round-by-round ratios, bandwidths GB/s
    (10^9) of the median times: algbw = bytes / time, busbw as nccl-tests counts it.
    """
    factor = float(bus_factor(operation, ranks))
    facts: Facts = {
        "dim": dim,
        "operation": operation,
        "bytes": size_bytes,
        "calls": calls,
        "ratio": median(a / b for a, b in zip(ours_s, torch_s, strict=True)),
    }
    for who, times in (("meshcomm", ours_s), ("torch", torch_s)):
        seconds = median(times)
        algbw = size_bytes / seconds / 1e9
        facts[who] = {
            "seconds": seconds,
            "least_s": min(times),
            "most_s": max(times),
            "algbw_gbytes_s": algbw,
            "busbw_gbytes_s": algbw * factor,
        }
    return facts


def fit_facts(fitted: Fitted, notes: Sequence[str] = ()) -> Facts:
    """Latency, bandwidth and how far the model is off: by dim, and by link class; notes to show with it."""
    return {
        "dims": {dim: _fit_facts(found) for dim, found in fitted.dims.items()},
        "links": {name: _fit_facts(found) for name, found in fitted.links.items()},
        "left_out": [
            {"dim": dim, "operation": operation, "why": why} for dim, operation, why in fitted.left_out
        ],
        "notes": list(notes),
    }


def _fit_facts(found: Fit) -> Facts:
    return {
        "dims": list(found.dims),
        "latency_us": found.latency_s * 1e6,
        "bandwidth_gbytes_s": found.bytes_s / 1e9,
        "times": found.times,
        "median_error": found.error,
        "worst_error": found.worst,
        "notes": list(found.notes),
    }


def bench_view(facts: Mapping[str, Any]) -> Group:
    """What `meshcomm bench` measured, for a rich console.

    facts: machine, mesh, rounds, alone, dims, rows (`row_facts`), skipped, and fit (`fit_facts`, or None).
    """
    machine, mesh = facts["machine"], facts["mesh"]
    sizes = " ".join(f"{name}={size}" for name, size in mesh["dims"].items())
    head = [
        f"mesh {sizes}: {mesh['world_size']} ranks on {machine['hosts']} host{'s' * (machine['hosts'] > 1)}, "
        f"{machine['device']}, torch {machine['torch']}",
        f"{machine['cpus']} cores on rank 0's host, load {machine['load']:.1f} before it began",
        f"medians of {facts['rounds']} rounds, each round's slowest rank; "
        + ("one group along a dim at a time" if facts["alone"] else "all groups along a dim at once"),
    ]
    notes = [
        "time, torch (torch.distributed's): medians of the rounds; algbw, busbw: GB/s of\n"
        "the median time, busbw as nccl-tests counts it; ratio: the median of the rounds'\n"
        "ratios of meshcomm's time to torch's, not the ratio of the medians beside it;\n"
        "below 1 meshcomm is faster"
    ]
    notes += [
        f"skipped: {each['operation'] or 'all'} along {each['dim']}: {each['why']}"
        for each in facts["skipped"]
    ]
    parts: list[Part] = [Line("\n".join(head)), _rows(facts), Line("\n".join(notes))]
    if facts["fit"] is not None:
        parts += _fits(facts["fit"])
    return page_view(parts)


def _rows(facts: Mapping[str, Any]) -> Cells:
    known = {each["dim"]: each for each in facts["dims"]}
    rows = []
    for row in facts["rows"]:
        dim, ours, theirs = known[row["dim"]], row["meshcomm"], row["torch"]
        rows.append(
            (
                f"{dim['dim']} {dim['size']:,} {dim['link'] or dim['backend']}",
                row["operation"],
                size_text(row["bytes"]),
                seconds_text(ours["seconds"]),
                f"{ours['algbw_gbytes_s']:.3g}",
                f"{ours['busbw_gbytes_s']:.3g}",
                seconds_text(theirs["seconds"]),
                f"{row['ratio']:.2f}",
            )
        )
    right = ("bytes", "time", "algbw", "busbw", "torch", "ratio")
    return Cells(("dim", "operation", *right), tuple(rows), frozenset(right), once=2)


def _fits(fit: Mapping[str, Any]) -> list[Part]:
    rows = []
    notes = []
    for name, each in [*fit["dims"].items(), *fit["links"].items()]:
        is_link = name in fit["links"] and each is fit["links"][name]
        rows.append(
            (
                f"links.{name}" if is_link else "-",
                " ".join(each["dims"]),
                seconds_text(each["latency_us"] / 1e6),
                f"{each['bandwidth_gbytes_s']:.3g}",
                str(each["times"]),
                f"{each['median_error']:.0%}",
                f"{each['worst_error']:.0%}",
            )
        )
        notes += [f"{name}: {note}" for note in each["notes"]]
    notes.append("off by: the median of |model / measured - 1|")
    notes += fit["notes"]
    left: dict[str, list[str]] = {}
    for each in fit["left_out"]:
        left.setdefault(f"not in the fit: {each['operation']}, {each['why']}", []).append(each["dim"])
    notes += [f"{text}: {', '.join(dims)}" for text, dims in left.items()]
    right = ("latency", "GB/s", "times", "off by", "at most")
    return [Cells(("link", "from the dims", *right), tuple(rows), frozenset(right)), Line("\n".join(notes))]
