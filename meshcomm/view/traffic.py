"""What a rank sends along each dim in one step of a training configuration, as the model of place has it."""

from __future__ import annotations

from math import prod
from typing import Any

from meshcomm.config import Config, TopologyConfig
from meshcomm.config.section import Table
from meshcomm.layout import Layout
from meshcomm.predict.links import span
from meshcomm.predict.machine import Machine, machine
from meshcomm.predict.times import bus_factor, fastest
from meshcomm.predict.traffic import Expected, expected

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
    if settings.parallel is None or settings.train is None:
        return None
    plain = _plain_mesh(settings)
    found = expected(plain, prod(plain.mesh.dims.values()))
    where = machine(topology)
    return {
        "links": None if where is None else [str(level) for level in where.levels],
        "rows": [_row(each, layout, where) for each in found],
    }


def _plain_mesh(settings: Config) -> Config:
    """Without what changes who sits where but not what anyone sends, and what place would therefore refuse."""
    parallel, mesh = settings.parallel, settings.mesh
    assert parallel is not None
    played = {dim: size for dim, size in mesh.dims.items() if dim in parallel.parts.values()}
    views = {name: sizes for name, sizes in mesh.views.items() if name == settings.expert_view}
    plain = {"dims": Table(played), "views": Table(views), "ranks": None, "rank_order": None}
    return settings.model_copy(update={"mesh": mesh.model_copy(update=plain)})


def _row(each: Expected, layout: Layout, where: Machine | None) -> Facts:
    name = each.dims[0] if len(each.dims) == 1 else each.dims
    size = layout.size(name)
    row: Facts = {
        "along": list(each.dims),
        "digits": [list(digit) for digit in layout.digits(name)],
        "size": size,
        "operation": each.operation,
        "what": each.what,
        "calls": each.calls,
        "size_bytes": each.size_bytes,
        "sent_bytes": each.step_bytes * float(bus_factor(each.operation, size)),
        "seconds": None,
        "link": None,
    }
    if where is not None:
        found = span(layout.groups(name), where)
        line = fastest(each.operation, found.route, each.size_bytes)
        row["seconds"] = each.calls * line.seconds(each.size_bytes)
        row["link"] = found.slowest
    return row
