"""Whom does a rank exchange what with in training, by the part that each dim plays?"""

from __future__ import annotations

from typing import Any

from meshcomm.config import Config, ParallelConfig
from meshcomm.config.parallel import Part
from meshcomm.layout import Dims, Layout
from meshcomm.predict.lint import roles

Facts = dict[str, Any]


def exchange_facts(settings: Config, layout: Layout, rank: int) -> list[Facts]:
    """One entry for each kind of exchange, as data that JSON can hold.

    Keys: part, dims, what, operation; ranks: all that take part, in coord order, or None for messages,
    which have to and from: ranks, or None at the ends. said_by: "parallel" where the configuration says
    which part the dim plays, "name" where only its name does. Parts of one rank exchange nothing.
    """
    played = {part: dim for dim, part in roles(settings).items() if layout.size(dim) > 1}
    said_by = "name" if settings.parallel is None else "parallel"
    rules = settings.parallel or ParallelConfig()
    found: list[Facts] = []

    def group(part: Part, along: Dims, operation: str, what: str) -> None:
        ranks = layout.group_of(rank, along).tolist()
        if len(ranks) > 1:
            found.append(_facts(part, layout.expand(along), operation, what, said_by, ranks=ranks))

    def messages(part: Part, what: str, wraps: bool) -> None:
        dim = played[part]
        after, before = (layout.peer_rank(rank, dim, step, wrap=wraps) for step in (1, -1))
        found.append(_facts(part, (dim,), "send and receive", what, said_by, to=after, before=before))

    if "tensor" in played:
        operation = "all_gather and reduce_scatter" if rules.sequence_parallel else "all_reduce"
        group("tensor", played["tensor"], operation, "activations of each layer")
    if "context" in played:
        if rules.attention == "ring":
            messages("context", "keys and values, around a ring", True)
        else:
            group("context", played["context"], "all_to_all", "heads in place of tokens")
    if "expert" in played:
        group("expert", played["expert"], "all_to_all", "tokens, to their experts and back")
    if "pipeline" in played:
        wraps = rules.schedule in ("interleaved_1f1b", "zero_bubble")
        messages("pipeline", "activations onwards, their gradients back", wraps)
    if "shard" in played:
        group("shard", played["shard"], "all_gather and reduce_scatter", "weights, and their gradients")
    gradients = tuple(played[part] for part in ("data", "context") if part in played)
    if gradients:
        part: Part = "data" if "data" in played else "context"
        group(part, gradients, "all_reduce", "gradients")
    experts = tuple(name for name in settings.expert_gradient_dims if layout.size(name) > 1)
    if settings.expert_view is not None and experts:
        group("expert", experts, "all_reduce", "gradients of experts' weights")
    return found


def _facts(
    part: Part,
    dims: tuple[str, ...],
    operation: str,
    what: str,
    said_by: str,
    *,
    ranks: list[int] | None = None,
    to: int | None = None,
    before: int | None = None,
) -> Facts:
    return {
        "part": part,
        "dims": list(dims),
        "what": what,
        "operation": operation,
        "ranks": ranks,
        "to": to,
        "from": before,
        "said_by": said_by,
    }
