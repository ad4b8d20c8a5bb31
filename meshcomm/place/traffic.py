"""What does one rank send in a step, along which part's dim, in which calls and of how many bytes?

As meshcomm's own training does it, whose `mesh.stats()` a test compares with this; sizes as
meshcomm.costs counts them. Not counted, as they are small beside the rest: the loss's calls along tensor,
which move a number or two for each token; losses, norms of gradients, and routers' counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from meshcomm.config.parallel import Part
from meshcomm.costs import Operation
from meshcomm.place.memory import Floats, held, layers_of_rank
from meshcomm.place.sizes import Sizes
from meshcomm.place.workload import Workload

# The parts whose dims a call goes along together; "replica" are the copies of experts, edp.
Along: TypeAlias = tuple[str, ...]
REPLICA: Final = "replica"


class Flow(NamedTuple):
    """One kind of call. along: parts whose dims form its group. calls: of one rank, in each micro-batch
    or in each step. size_bytes: of one call. what: in words.
    """

    part: Part
    along: Along
    operation: Operation
    calls: Floats
    size_bytes: Floats
    each_microbatch: bool
    what: str


def flows(work: Workload, sizes: Sizes) -> list[Flow]:
    """All calls of the largest rank, for every row of the sizes."""
    makers = {
        "tensor": _tensor,
        "context": _context,
        "expert": _expert,
        "pipeline": _pipeline,
        "shard": _shard,
    }
    found = [flow for part, maker in makers.items() if part in work.parts for flow in maker(work, sizes)]
    return [*found, *_gradients(work, sizes)]


def _tokens(work: Workload, sizes: Sizes) -> Floats:
    """Tokens of a micro-batch on one rank."""
    return work.microbatch * work.sequence / sizes.context


def _tensor(work: Workload, sizes: Sizes) -> Iterator[Flow]:
    """Two all_reduces forward and two backward in each layer (Shoeybi et al. 2019); with sequence
    parallelism a gather and a scatter in the place of each (Korthikanti et al. 2022).

    One more forward out of the embedding, and one backward out of the head. A forward pass that is
    computed again ends before its last all_reduce or scatter: nothing in backward asks for its result.
    """
    layers = layers_of_rank(work, sizes)
    # With a pipeline no rank has both tables.
    ends = np.where(sizes.pipeline > 1, 1.0, 2.0)
    gathered = layers * (6 if work.recompute else 4) + ends
    reduced = layers * (5 if work.recompute else 4) + ends
    size = _tokens(work, sizes) * work.width * work.activation_bytes
    if work.sequence_parallel:
        yield Flow("tensor", ("tensor",), "all_gather", gathered, size, True, "activations gathered")
        yield Flow("tensor", ("tensor",), "reduce_scatter", reduced, size, True, "activations scattered")
    else:
        yield Flow("tensor", ("tensor",), "all_reduce", reduced, size, True, "activations")


def _context(work: Workload, sizes: Sizes) -> Iterator[Flow]:
    layers, tokens, element = layers_of_rank(work, sizes), _tokens(work, sizes), work.activation_bytes
    forward = 2 if work.recompute else 1
    if work.ulysses:
        # Keys and values are repeated where the dim has more ranks than there are heads of them.
        mine = work.kv_heads / sizes.tensor
        kv = np.maximum(mine, sizes.context)
        query = work.heads / sizes.tensor
        rows = tokens * work.head_size * element
        calls = layers * (forward + 1)
        together = ("context",)
        yield Flow(
            "context", together, "all_to_all", calls, rows * (query + 2 * kv), True, "q, k, v for heads"
        )
        yield Flow("context", together, "all_to_all", calls, rows * query, True, "results for tokens")
        return
    block = tokens * 2 * work.kv_heads / sizes.tensor * work.head_size
    turns = layers * (sizes.context - 1) * (forward + 1)
    yield Flow("context", ("context",), "sendrecv", turns, block * element, True, "keys and values")
    wide = block * max(element, 4)
    back = layers * np.where(sizes.context > 1, sizes.context, 0)
    yield Flow("context", ("context",), "sendrecv", back, wide, True, "their gradients")


def _expert(work: Workload, sizes: Sizes) -> Iterator[Flow]:
    """Each token's rows to its experts and back, twice forward and twice backward."""
    layers = np.ceil(layers_of_rank(work, sizes) * work.expert_layers / work.layers)
    size = _tokens(work, sizes) * work.experts_per_token * work.width * work.activation_bytes
    calls = layers * (6 if work.recompute else 4)
    yield Flow("expert", ("expert",), "all_to_all", calls, size, True, "tokens to experts and back")


def _pipeline(work: Workload, sizes: Sizes) -> Iterator[Flow]:
    """One activation forward and its gradient backward for each stage of a rank."""
    each = np.where(sizes.pipeline > 1, 2.0 * work.stages_per_rank, 0.0)
    split = sizes.tensor if work.sequence_parallel else np.ones_like(sizes.tensor)
    size = _tokens(work, sizes) * work.width * work.activation_bytes / split
    yield Flow("pipeline", ("pipeline",), "sendrecv", each, size, True, "activations and their gradients")


def _shard(work: Workload, sizes: Sizes) -> Iterator[Flow]:
    """Each layer is gathered forward and backward, and its gradients scattered once a step."""
    layers = layers_of_rank(work, sizes)
    size = held(work, sizes).all / layers * work.weight_bytes
    yield Flow("shard", ("shard",), "all_gather", 2 * layers, size, True, "weights gathered")
    yield Flow("shard", ("shard",), "reduce_scatter", layers, size, False, "gradients scattered")


def _gradients(work: Workload, sizes: Sizes) -> Iterator[Flow]:
    here = held(work, sizes)
    plain, experts = here.plain * work.weight_bytes, here.experts * work.weight_bytes
    if "expert" not in work.parts:
        plain, experts = plain + experts, np.zeros_like(plain)
    if "shard" in work.parts:
        layers, rest = layers_of_rank(work, sizes), plain / sizes.shard
        if "data" in work.parts:
            yield Flow("data", ("data",), "all_reduce", layers, rest / layers, False, "shards' gradients")
        if "context" in work.parts:
            calls = _buckets(work, rest)
            yield Flow("context", ("context",), "all_reduce", calls, rest / calls, False, "gradients")
        return
    along = tuple(part for part in ("data", "context") if part in work.parts)
    if along:
        calls = _buckets(work, plain)
        part: Part = "data" if "data" in along else "context"
        yield Flow(part, along, "all_reduce", calls, plain / calls, False, "gradients")
    if "expert" in work.parts:
        calls = _buckets(work, experts)
        yield Flow("expert", (REPLICA,), "all_reduce", calls, experts / calls, False, "experts' gradients")


def _buckets(work: Workload, size_bytes: Floats) -> Floats:
    return np.maximum(1.0, np.ceil(size_bytes / work.bucket_bytes))
