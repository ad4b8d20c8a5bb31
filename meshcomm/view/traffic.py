"""What a rank sends along each dim in one step of a training configuration, as the model of place has it."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshcomm.config import Config, TopologyConfig
from meshcomm.config.parallel import PARTS
from meshcomm.config.table import Table
from meshcomm.costs import best, bus_factor, lines, route
from meshcomm.layout import Layout
from meshcomm.place import workload
from meshcomm.place.links import ALGORITHMS
from meshcomm.place.sizes import Sizes
from meshcomm.place.traffic import REPLICA, Flow, flows
from meshcomm.topology import Machine, machine, span

Facts = dict[str, Any]


def predicted_traffic(settings: Config, layout: Layout, topology: TopologyConfig) -> Facts | None:
    """The calls of one step on the rank with most layers, by the dims that they go along.

    settings: with every size filled in. Returns None where they say nothing about training, else
    links: the text of each level, or None where nobody says which ranks share a node; and rows, each
    with along (names of dims), digits (see Layout.digits), size (ranks of a group), operation, what (in
    words), calls, size_bytes (of one call, as nccl-tests counts), sent_bytes (what the rank sends in a
    step: calls * size_bytes * the operation's share that crosses a link), and, where links are known,
    seconds (of all the calls, one after the other) and link (the slowest one that a group crosses).
    """
    parallel = settings.parallel
    if parallel is None or settings.train is None:
        return None
    sizes = {**layout.dims, **layout.views.get(settings.expert_view or "", {})}
    number = settings.microbatches(sizes)
    work = workload(_plain_mesh(settings))
    one = {part: np.array([parallel.size(part, sizes)]) for part in PARTS}
    found = flows(work, Sizes(**one, microbatches=np.array([number])))
    where = machine(topology)
    rows = [_row(flow, settings, layout, where, number) for flow in found]
    return {
        "links": None if where is None else [str(level) for level in where.levels],
        "rows": [row for row in rows if row is not None],
    }


def _plain_mesh(settings: Config) -> Config:
    """Without what changes who sits where but not what anyone sends, and what place would therefore refuse."""
    parallel, mesh = settings.parallel, settings.mesh
    assert parallel is not None
    played = {dim: size for dim, size in mesh.dims.items() if dim in parallel.parts.values()}
    views = {name: sizes for name, sizes in mesh.views.items() if name == settings.expert_view}
    plain = {"dims": Table(played), "views": Table(views), "ranks": None, "rank_order": None}
    return settings.model_copy(update={"mesh": mesh.model_copy(update=plain)})


def _row(
    flow: Flow, settings: Config, layout: Layout, where: Machine | None, microbatches: int
) -> Facts | None:
    parallel = settings.parallel
    assert parallel is not None
    along: list[str] = []
    for part in flow.along:
        # The copies of experts may lie along several dims of their view.
        along += settings.expert_gradient_dims if part == REPLICA else [getattr(parallel, part)]
    if not along:
        return None
    name = along[0] if len(along) == 1 else tuple(along)
    size = layout.size(name)
    calls = round(float(flow.calls[0])) * (microbatches if flow.each_microbatch else 1)
    if size == 1 or not calls:
        return None
    size_bytes = float(flow.size_bytes[0])
    row: Facts = {
        "along": along,
        "digits": [list(digit) for digit in layout.digits(name)],
        "size": size,
        "operation": flow.operation,
        "what": flow.what,
        "calls": calls,
        "size_bytes": size_bytes,
        "sent_bytes": calls * size_bytes * float(bus_factor(flow.operation, size)),
        "seconds": None,
        "link": None,
    }
    if where is not None:
        found = span(layout.groups(name), where)
        every = [line for line in lines(flow.operation, route(found, where)) if line.name in ALGORITHMS]
        row["seconds"] = calls * best(every, size_bytes).seconds(size_bytes)
        row["link"] = found.slowest
    return row
