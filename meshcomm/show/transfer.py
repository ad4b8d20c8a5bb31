"""Tables of what a transfer between two meshes costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshcomm.layout.sizes import coords_text
from meshcomm.show.page import Cells, Line, PagePart, View, page_view
from meshcomm.show.units import bytes_text, count, seconds_text, size_text

Facts = Mapping[str, Any]


def transfer_view(facts: Facts) -> View:
    """Return the bytes and the seconds of a transfer for a rich console. facts: see `TransferCost.facts`."""
    return page_view(transfer_page(facts))


def transfer_page(facts: Facts) -> list[PagePart]:
    """Return the parts of `transfer_view`."""
    sides = [
        f"{coords_text(facts[side]['dims'])} ({count(facts[side]['ranks'], 'rank')})"
        for side in ("source", "target")
    ]
    both = f", {facts['ranks_on_both']:,} of them on both sides" if facts["ranks_on_both"] else ""
    kept = f"; {bytes_text(facts['kept_bytes'])} are on their ranks already" if facts["kept_bytes"] else ""
    what = f"{count(facts['tensors'], 'tensor')}, {bytes_text(facts['bytes'])}"
    loads = Cells.of(
        [load for load in facts["loads"] if load["max_bytes"] or load["bound_bytes"]],
        {
            "a rank": "{side} {direction}",
            ">at most": ("max_bytes", bytes_text),
            ">on average": ("mean_bytes", bytes_text),
            ">no plan less than": ("bound_bytes", bytes_text),
            ">ratio": ("ratio", "{:.2f}".format),
            "busiest": lambda load: f"rank {load['rank']:,} ({coords_text(load['coords'])})",
        },
    )
    buffers = facts["buffers_bytes"]
    stripes = (
        f"stripes along {' '.join(facts['stripes'])}, {facts['legs']} legs"
        if facts["stripes"]
        else "no stripes: each copy receives its own"
    )
    sent = (
        f"{count(facts['messages'], 'message')} of {count(facts['pieces'], 'piece')} in "
        f"{count(facts['rounds'], 'round')}; {stripes}\n"
        f"buffers of at most {bytes_text(buffers['source'])} on a rank of the source and "
        f"{bytes_text(buffers['target'])} of the target, with buckets of {size_text(facts['bucket_bytes'])}"
    )
    return [Line(f"{what}: {' -> '.join(sides)}{both}{kept}"), loads, Line(sent), *_seconds(facts)]


def _seconds(facts: Facts) -> list[PagePart]:
    seconds = facts["seconds"]
    if seconds is None:
        return [Line("no times: they need [topology] with ranks_per_node")]
    rows = [("bound", "no plan is faster"), ("direct", "each copy receives all of its part from the source")]
    if seconds["striped"] is not None:
        along = " ".join(seconds["striped_along"])
        rows.append(("striped", f"copies receive stripes and gather them along {along}"))
    rows.append(("gather_broadcast", "one rank gathers all, and each rank of the target receives all"))
    table = Cells.of(
        [{"way": way.replace("_", ", "), "seconds": seconds[way], "what": what} for way, what in rows],
        {"predicted": "way", ">time": ("seconds", seconds_text), "": "what"},
    )
    return [table, Line(f"links: {'; '.join(facts['links'])}")]
