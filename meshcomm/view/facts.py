"""The page's data about a configuration, as JSON-serializable sizes and strides. The data never lists the groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshcomm.config import Config, TopologyConfig
from meshcomm.config.model import FACTS
from meshcomm.layout import Layout
from meshcomm.predict.estimate import Flow, expected
from meshcomm.predict.links import Machine, machine, span
from meshcomm.predict.times import bus_factor, fastest
from meshcomm.show.plan import dims_table, plan_facts

Facts = dict[str, Any]


def page_facts(settings: Config, world: int | None, topology: TopologyConfig) -> Facts:
    """Return the facts for the page. The browser computes every rank's groups from these facts.

    world: the number of processes, or None if every size is given. topology: the result of `discovered`.

    The result extends `plan_facts`. Each dim also has record (its row in the table of `meshcomm plan`), home (its view, or ""
    for the base) and digits (see Layout.digits).
    title: the name of the run, or of the configuration if it does not train. base and views: (dim, size) pairs in order. trains: facts about the training, or None without training.
    rank_order: the rank at each position, or None if each rank equals its position. The size of all other facts is independent
    of the number of ranks.
    Raises ConfigError or LayoutError if the world size or the training does not match the mesh.
    """
    filled = settings.resolved(world)
    plan = filled.plan(world)
    layout = plan.layout
    facts = plan_facts(plan, topology=topology)
    # The page's caption begins with the number of groups and their size.
    records = dims_table(facts["dims"]).records(without=("size", "groups"))
    for dim, record in zip(facts["dims"], records, strict=True):
        dim["record"] = record
        dim["home"] = layout.home(dim["name"])
        dim["digits"] = [list(digit) for digit in layout.digits(dim["name"])]
    order = layout.rank_order
    return {
        "title": Path(settings.source).stem if settings.train is None else Path(settings.train.out).name,
        "source": settings.source,
        **facts,
        "base": [list(pair) for pair in layout.dims.items()],
        "views": [[name, [list(pair) for pair in sizes.items()]] for name, sizes in layout.views.items()],
        "rank_order": None if order is None else list(order),
        "ranks_per_node": topology.ranks_per_node,
        "nodes_per_rack": topology.nodes_per_rack,
        "trains": _trains(filled, layout),
        "traffic": predicted_traffic(filled, world, layout, topology),
    }


def _trains(settings: Config, layout: Layout) -> Facts | None:
    parallel, model, data, train = settings.parallel, settings.model, settings.data, settings.train
    if parallel is None or model is None or data is None or train is None:
        return None
    return {
        "parts": {dim: part for part, dim in parallel.parts.items()},
        "layers": model.num_layers,
        "width": model.hidden_size,
        "steps": train.steps,
        "tokens_per_step": train.global_batch_size * data.seq_len,
        "microbatches": settings.microbatches(layout.dims),
    }


def predicted_traffic(
    settings: Config, world: int | None, layout: Layout, topology: TopologyConfig
) -> Facts | None:
    """Return the calls that the rank with the most layers makes in one step, as estimated by `tune`, with their dims.

    settings: settings with every size filled in. Returns None if the settings have no training or no model sizes. size_bytes:
    bytes per call, counted as in nccl-tests. sent_bytes: the bytes that the rank sends per step. received_bytes: the bytes
    that it receives, if some of the calls only receive; otherwise None.
    seconds: the time of all calls when they run one after another. link: the slowest link that a group crosses. seconds
    and link are None if they are unknown.
    """
    model = settings.model
    if settings.parallel is None or settings.train is None or settings.data is None or model is None:
        return None
    # A model that is built by code has no sizes here. The mesh can still be shown.
    if any(getattr(model, name) is None for name in FACTS):
        return None
    where = machine(topology)
    return {
        "links": None if where is None else [str(level) for level in where.levels],
        "rows": [_row(flow, layout, where) for flow in expected(settings, world)],
    }


def _row(flow: Flow, layout: Layout, where: Machine | None) -> Facts:
    name = flow.along[0] if len(flow.along) == 1 else flow.along
    size = layout.size(name)
    moved = flow.calls * flow.size_bytes * float(bus_factor(flow.operation, size))
    row: Facts = {
        "along": list(flow.along),
        "digits": [list(digit) for digit in layout.digits(name)],
        "size": size,
        "operation": flow.operation,
        "what": flow.what,
        "calls": flow.calls,
        "size_bytes": flow.size_bytes,
        "sent_bytes": moved * flow.sent,
        "received_bytes": None if flow.sent == 1 else moved * (1 - flow.sent),
        "seconds": None,
        "link": None,
    }
    if where is not None:
        crossed = span(layout.groups(name), where)
        line = fastest(flow.operation, crossed.route, flow.size_bytes)
        row["seconds"] = flow.calls * line.seconds(flow.size_bytes)
        row["link"] = crossed.slowest
    return row
