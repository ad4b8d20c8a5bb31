"""Shows the times of collectives along every dim, as predicted by meshcomm.predict.times and as measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Final

from meshcomm.layout import Plan
from meshcomm.layout.sizes import coords_text
from meshcomm.predict.fit import Fit, Fitted
from meshcomm.predict.links import Machine, span
from meshcomm.predict.times import Operation, best, bus_factor, lines
from meshcomm.show.page import Cells, Facts, Line, PagePart, View, page_view
from meshcomm.show.units import seconds_text, size_text

_NOTE: Final = """\
time and torch (the time of torch.distributed) are medians over the rounds; algbw
and busbw, in GB/s, are computed from the median time, busbw as in nccl-tests;
ratio is the median over the rounds of meshcomm's time divided by torch's, not the
ratio of the two medians; below 1, meshcomm is faster"""


# -- predicted --------------------------------------------------------------------------------------


def bandwidths(operation: Operation, ranks: int, size_bytes: int, seconds: float) -> Facts:
    """Return algbw and busbw in GB/s (10^9 bytes/s). algbw is bytes / time, and busbw is counted as in nccl-tests."""
    algbw = size_bytes / seconds / 1e9
    return {"algbw_gbytes_s": algbw, "busbw_gbytes_s": algbw * float(bus_factor(operation, ranks))}


def cost_facts(plan: Plan, machine: Machine, operations: Sequence[Operation], sizes: Sequence[int]) -> Facts:
    """Return the output of `meshcomm costs` as JSON-serializable data.

    dims: one entry for each operation along each dim that has groups.
    """
    families = [family for family in plan.families if family.size > 1]
    listed: list[Facts] = []
    for family in families:
        found = span(plan.layout.groups(family.name), machine)
        for operation in operations:
            every = lines(operation, found.route)
            rows = []
            for size in sizes:
                line = best(every, size)
                seconds = line.seconds(size)
                row = {"bytes": size, "algorithm": line.name, "chunks": line.chunks, "seconds": seconds}
                rows.append(row | bandwidths(operation, family.size, size, seconds))
            facts = {"dim": family.name, "size": family.size, "link": found.slowest, "operation": operation}
            levels = [hop.ranks for hop in found.route.hops]
            listed.append(facts | {"levels": levels, "rows": rows})
    call_us = float(machine.call_s * 10**6)
    return {"links": list(map(str, machine.levels)), "call_us": call_us, "dims": listed}


def cost_view(facts: Facts) -> View:
    """Return `cost_facts` for a rich console."""
    table = Cells.of(
        [each | row for each in facts["dims"] for row in each["rows"]],
        {
            "dim": "{dim} {size:,} {link}",
            "operation": "operation",
            ">bytes": ("bytes", size_text),
            ">time": ("seconds", seconds_text),
            ">algbw": "{algbw_gbytes_s:.3g}",
            ">busbw": "{busbw_gbytes_s:.3g}",
            "by": lambda row: row["algorithm"] + (f" in {row['chunks']}" if row["chunks"] > 1 else ""),
        },
        once=2,
    )
    call = f"; {facts['call_us']:g} us for each call" if facts["call_us"] else ""
    notes = (
        "GB/s; busbw as nccl-tests counts it; predicted by a model, not measured; "
        "by: the algorithm that the model finds fastest. NCCL and other backends may choose a different one"
    )
    head = Line(f"links: {'; '.join(facts['links'])}{call}")
    return page_view([head, table, Line(notes)])


# -- measured ---------------------------------------------------------------------------------------


def row_facts(
    dim: str,
    ranks: int,
    operation: Operation,
    size_bytes: int,
    calls: int,
    seconds: tuple[Sequence[float], Sequence[float]],
) -> Facts:
    """Return one row. seconds: the slowest rank's seconds per call in each round, for meshcomm and for torch.

    Times are medians over the rounds, ratio is the median of the rounds' ratios, and bandwidths are computed from the medians.
    """
    ratio = median(a / b for a, b in zip(*seconds, strict=True))
    facts: Facts = {"dim": dim, "operation": operation, "bytes": size_bytes, "calls": calls, "ratio": ratio}
    for who, times in zip(("meshcomm", "torch"), seconds, strict=True):
        usual = median(times)
        spread = {"seconds": usual, "least_s": min(times), "most_s": max(times)}
        facts[who] = spread | bandwidths(operation, ranks, size_bytes, usual)
    return facts


def fit_facts(fitted: Fitted, notes: Sequence[str] = ()) -> Facts:
    """Return the fitted latency, the bandwidth and the model's error by dim and by link class, with notes to display."""
    left = [dict(zip(("dim", "operation", "why"), each, strict=True)) for each in fitted.left_out]
    return {
        "dims": {name: _fit_facts(found) for name, found in fitted.dims.items()},
        "links": {name: _fit_facts(found) for name, found in fitted.links.items()},
        "left_out": left,
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


def bench_view(facts: Mapping[str, Any]) -> View:
    """Return the result of `measured_facts` for a rich console. `facts["fit"]` is the result of `fit_facts`, or None."""
    machine, mesh = facts["machine"], facts["mesh"]
    head = (
        f"mesh {coords_text(mesh['dims'])}: {mesh['world_size']} ranks on {machine['hosts']} host{'s' * (machine['hosts'] > 1)}, "
        f"{machine['device']}, torch {machine['torch']}\n"
        f"{machine['cpus']} cores on rank 0's host, load {machine['load']:.1f} before it began\n"
        f"medians of {facts['rounds']} rounds, each round's slowest rank; all groups along a dim in parallel"
    )
    dims = {each["dim"]: {**each, "over": each["link"] or each["backend"]} for each in facts["dims"]}
    table = Cells.of(
        [dims[row["dim"]] | row for row in facts["rows"]],
        {
            "dim": "{dim} {size:,} {over}",
            "operation": "operation",
            ">bytes": ("bytes", size_text),
            ">time": ("meshcomm.seconds", seconds_text),
            ">algbw": "{meshcomm[algbw_gbytes_s]:.3g}",
            ">busbw": "{meshcomm[busbw_gbytes_s]:.3g}",
            ">torch": ("torch.seconds", seconds_text),
            ">ratio": "{ratio:.2f}",
        },
        once=2,
    )
    skipped = (f"skipped: {e['operation'] or 'all'} along {e['dim']}: {e['why']}" for e in facts["skipped"])
    parts: list[PagePart] = [Line(head), table, Line("\n".join([_NOTE, *skipped]))]
    return page_view(parts if facts["fit"] is None else [*parts, *_fits(facts["fit"])])


def _fits(fit: Mapping[str, Any]) -> list[PagePart]:
    found = [{"link": "-", "name": name, **row} for name, row in fit["dims"].items()]
    found += [{"link": f"links.{name}", "name": name, **row} for name, row in fit["links"].items()]
    left: dict[str, list[str]] = {}
    for each in fit["left_out"]:
        left.setdefault(f"not in the fit: {each['operation']}, {each['why']}", []).append(each["dim"])
    notes = [f"{row['name']}: {note}" for row in found for note in row["notes"]]
    notes += ["off by: the median of |model / measured - 1|", *fit["notes"]]
    notes += [f"{text}: {', '.join(dims)}" for text, dims in left.items()]
    table = Cells.of(
        found,
        {
            "link": "link",
            "from the dims": ("dims", " ".join),
            ">latency": lambda row: seconds_text(row["latency_us"] / 1e6),
            ">GB/s": "{bandwidth_gbytes_s:.3g}",
            ">times": "{times}",
            ">off by": "{median_error:.0%}",
            ">at most": "{worst_error:.0%}",
        },
    )
    return [table, Line("\n".join(notes))]
