"""What collectives along every dim will take, by the model of meshcomm.predict.times."""

from __future__ import annotations

from collections.abc import Sequence

from meshcomm.layout import Plan
from meshcomm.predict.links import span
from meshcomm.predict.machine import Machine
from meshcomm.predict.times import Operation, best, bus_factor, lines
from meshcomm.show.page import Cells, Facts, Line, View, page_view
from meshcomm.show.units import seconds_text, size_text


def bandwidths(operation: Operation, ranks: int, size_bytes: int, seconds: float) -> Facts:
    """GB/s (10^9): algbw = bytes / time, busbw as nccl-tests counts it."""
    algbw = size_bytes / seconds / 1e9
    return {"algbw_gbytes_s": algbw, "busbw_gbytes_s": algbw * float(bus_factor(operation, ranks))}


def cost_facts(plan: Plan, machine: Machine, operations: Sequence[Operation], sizes: Sequence[int]) -> Facts:
    """What `meshcomm costs` shows, as data that JSON can hold.

    dims: an entry for each name with groups and each operation.
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
    """`cost_facts` for a rich console."""
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
        "GB/s; busbw as nccl-tests counts it; what a model says, not what was measured; "
        "by: the algorithm that the model finds fastest. A backend chooses its own: NCCL may take another"
    )
    head = Line(f"links: {'; '.join(facts['links'])}{call}")
    return page_view([head, table, Line(notes)])
