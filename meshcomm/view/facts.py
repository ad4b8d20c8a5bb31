"""What the page shows of a configuration, as data that JSON can hold: sizes and strides, never groups."""

from __future__ import annotations

from typing import Any

from meshcomm.config import Config, TopologyConfig
from meshcomm.layout import Layout
from meshcomm.show.plan import plan_facts
from meshcomm.view.traffic import predicted_traffic

Facts = dict[str, Any]


def page_facts(settings: Config, world: int | None, topology: TopologyConfig) -> Facts:
    """The facts of the page. The browser computes every rank's groups from them.

    world: number of processes, or None where every size is given. topology: as `discovered` gives it.

    Keys: title, and of `plan_facts` world_size, fingerprint, groups, groups_per_rank; dims, as there, each
    with home (the view that it belongs to, "" for the base) and digits (see Layout.digits); base and
    views: (dim, size) pairs in order; rank_order: the rank at each position, or None where they are the
    same; ranks_per_node, nodes_per_rack: None where not known; traffic: see `predicted_traffic`;
    trains: None without training, else the dim of every part and what the model is.
    Their length does not grow with the number of ranks, except for rank_order.
    Raises ConfigError or LayoutError where the world or the training does not fit.
    """
    filled = settings.resolved(world)
    plan = filled.plan(world)
    layout = plan.layout
    facts = plan_facts(plan, topology=topology)
    for dim in facts["dims"]:
        dim["home"] = layout.home(dim["name"])
        dim["digits"] = [list(digit) for digit in layout.digits(dim["name"])]
    order = layout.rank_order
    return {
        "title": settings.source,
        **facts,
        "base": [list(pair) for pair in layout.dims.items()],
        "views": [[name, [list(pair) for pair in sizes.items()]] for name, sizes in layout.views.items()],
        "rank_order": None if order is None else list(order),
        "ranks_per_node": topology.ranks_per_node,
        "nodes_per_rack": topology.nodes_per_rack,
        "trains": _trains(filled, layout),
        "traffic": predicted_traffic(filled, layout, topology),
    }


def _trains(settings: Config, layout: Layout) -> Facts | None:
    parallel, model, data, train = settings.parallel, settings.model, settings.data, settings.train
    if parallel is None or model is None or data is None or train is None:
        return None
    return {
        "parts": {dim: part for part, dim in parallel.parts.items()},
        "layers": model.layers,
        "width": model.width,
        "steps": train.steps,
        "tokens_per_step": train.global_batch * data.sequence,
        "microbatches": settings.microbatches(layout.dims),
    }
