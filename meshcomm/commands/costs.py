"""`meshcomm costs`: predict the times of collectives along every dim."""

from __future__ import annotations

from typing import Annotated

import typer

from meshcomm.commands.app import (
    AsJson,
    ConfigFile,
    Operations,
    Overrides,
    World,
    command,
    discovered_topology,
    show_facts,
)
from meshcomm.show.page import Cells, Facts, Line, View, page_view
from meshcomm.show.units import read_bytes, seconds_text, size_text


@command()
def costs(
    config: ConfigFile,
    world: World = None,
    operation: Operations = None,
    size: Annotated[
        list[str] | None,
        typer.Option(
            "--bytes", help="Size such as 64MB or 4KiB. Repeatable. Default: 4KiB, 1MiB, 64MiB, 1GiB."
        ),
    ] = None,
    json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Predict the algorithm and the time of collectives along each dim from the speed of its links."""
    from meshcomm.config import load_config
    from meshcomm.predict.links import known_machine, span
    from meshcomm.predict.times import bandwidths, best, lines, named_operations

    settings = load_config(config, overrides or ()).resolved(world)
    machine = known_machine(discovered_topology(settings), settings.source)
    sizes = [read_bytes(text) for text in size or ("4KiB", "1MiB", "64MiB", "1GiB")]
    plan, operations = settings.plan(world), named_operations(operation or ())
    dims: list[Facts] = []
    for family in plan.families:
        if family.size == 1:
            continue
        crossed = span(plan.layout.groups(family.name), machine)
        for each in operations:
            every = lines(each, crossed.route)
            rows = []
            for nbytes in sizes:
                line = best(every, nbytes)
                seconds = line.seconds(nbytes)
                row = {"bytes": nbytes, "algorithm": line.name, "chunks": line.chunks, "seconds": seconds}
                rows.append(row | bandwidths(each, family.size, nbytes, seconds))
            facts = {"dim": family.name, "size": family.size, "link": crossed.slowest, "operation": each}
            levels = [hop.ranks for hop in crossed.route.hops]
            dims.append(facts | {"levels": levels, "rows": rows})
    call_us = float(machine.call_s * 10**6)
    show_facts({"links": list(map(str, machine.levels)), "call_us": call_us, "dims": dims}, json, view)


def view(facts: Facts) -> View:
    """Return the times for a rich console: a row for each operation and size along each dim."""
    table = Cells.of(
        [facts_of_dim | row for facts_of_dim in facts["dims"] for row in facts_of_dim["rows"]],
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
