"""What does one rank send in a step, along which dims, in which calls and of how many bytes?

As meshcomm's own training does it, whose `mesh.stats()` a test compares with this; sizes as
`meshcomm.predict.times` counts them. Not counted, as they are small beside the rest: the loss's calls along tensor,
which move a number or two for each token; losses, norms of gradients, and routers' counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, NamedTuple, TypeAlias

from meshcomm.config import Config
from meshcomm.config.parallel import Part
from meshcomm.predict.memory import held
from meshcomm.predict.times import Operation
from meshcomm.predict.workload import BASE, Sizes, Workload, workload

# The parts whose dims a call goes along together; "replica" are the copies of experts, edp, and with shard those of
# their shards, which lie along "expert shard".
Along: TypeAlias = tuple[str, ...]
REPLICA: Final = "replica"
EXPERT_SHARD: Final = "expert shard"


class Flow(NamedTuple):
    """One kind of call. along: parts whose dims form its group. calls: of one rank, in each micro-batch
    or in each step. size_bytes: of one call. what: in words. sent: the share of the calls that send; the
    others receive.
    """

    part: Part
    along: Along
    operation: Operation
    calls: int
    size_bytes: float
    each_microbatch: bool
    what: str
    sent: float = 1.0

    def in_a_step(self, microbatches: int) -> int:
        """Calls of a step."""
        return self.calls * (microbatches if self.each_microbatch else 1)


class Expected(NamedTuple):
    """One kind of call. dims: whose ranks make it together. calls, size_bytes: of the largest rank in a
    step, and of one call; microbatches is in them. what: in words. sent: as of a Flow.
    """

    dims: tuple[str, ...]
    operation: Operation
    calls: int
    size_bytes: float
    what: str
    sent: float = 1.0

    @property
    def step_bytes(self) -> float:
        """Of all calls of a step."""
        return self.calls * self.size_bytes


def expected(settings: Config, world: int) -> list[Expected]:
    """The calls of a step along dims of size 2 or more, for the sizes that `settings` has itself.

    Raises ConfigError where it does not train.
    """
    work = workload(settings)
    mesh, parallel = settings.resolved(world).mesh, settings.parallel
    assert parallel is not None
    view = parallel.expert_view(mesh.views)
    sizes = {**mesh.dims, **(mesh.views[view] if view is not None else {})}
    dims: dict[str, tuple[str, ...]] = {part: (dim,) for part, dim in parallel.parts.items()}
    copies = tuple(dim for dim in parallel.expert_gradient_dims(mesh.views) if sizes[dim] > 1)
    shards = copies[-1:] if "shard" in work.parts else ()
    dims |= {REPLICA: copies[: len(copies) - len(shards)], EXPERT_SHARD: shards}
    number = work.global_batch // (parallel.copies(mesh.dims) * work.microbatch)
    played = {part: sizes[dims[part][0]] for part in (*BASE, "expert") if part in dims}
    listed = []
    replicas = math.prod(sizes[dim] for dim in dims[REPLICA]) if shards else 1
    for flow in flows(work, Sizes(**played, microbatches=number, expert_copies=replicas)):
        along = tuple(dim for part in flow.along for dim in dims[part] if sizes[dim] > 1)
        if flow.along[0] == "shard":
            # As their merged dim has them.
            along = tuple(dim for dim in mesh.dims if dim in along)
        if along:
            calls = flow.in_a_step(number)
            listed.append(Expected(along, flow.operation, calls, flow.size_bytes, flow.what, flow.sent))
    return listed


def flows(work: Workload, sizes: Sizes) -> list[Flow]:
    """All calls of the largest rank."""
    makers = {
        "tensor": _tensor,
        "context": _context,
        "expert": _expert,
        "pipeline": _pipeline,
        "shard": _shard,
    }
    found = [flow for part, maker in makers.items() if part in work.parts for flow in maker(work, sizes)]
    return [flow for flow in (*found, *_gradients(work, sizes)) if flow.calls]


def _tensor(work: Workload, sizes: Sizes) -> Iterator[Flow]:
    """Two all_reduces forward and two backward in each layer (Shoeybi et al. 2019); with sequence
    parallelism a gather and a scatter in the place of each (Korthikanti et al. 2022).

    One more forward out of the embedding, and one backward out of the head. A forward pass that is
    computed again ends before its last all_reduce or scatter: nothing in backward asks for its result. With
    selective recomputation their results are kept, and nothing is sent again. With overlap what enters a layer's
    products goes around a ring, once for those of attention and once for those of a feed-forward.
    """
    layers = work.layers_of_rank(sizes)
    # With a pipeline no rank has both tables.
    ends = 1 if sizes.pipeline > 1 else 2
    again = work.layers_again(sizes)
    gathered = 4 * layers + 2 * again + ends
    # Tables that stay whole give what needs no sum.
    reduced = 4 * layers + again + (0 if work.vocabulary % sizes.tensor else ends)
    size = work.tokens(sizes) * work.width * work.activation_bytes
    if work.overlap:
        rings = 2 * (layers + again) - work.expert_layers_of_rank(sizes) * (layers + again) // layers
        gathered -= rings
        turns = rings * (sizes.tensor - 1)
        yield Flow(
            "tensor", ("tensor",), "sendrecv", turns, size / sizes.tensor, True, "activations around a ring"
        )
    if work.sequence_parallel:
        yield Flow("tensor", ("tensor",), "all_gather", gathered, size, True, "activations gathered")
        yield Flow("tensor", ("tensor",), "reduce_scatter", reduced, size, True, "activations scattered")
    else:
        yield Flow("tensor", ("tensor",), "all_reduce", reduced, size, True, "activations")


def _context(work: Workload, sizes: Sizes) -> Iterator[Flow]:
    layers, tokens, element = work.layers_of_rank(sizes), work.tokens(sizes), work.activation_bytes
    forward = layers + work.layers_again(sizes)
    along = ("context",)
    if work.ulysses:
        # Keys and values are repeated where the dim has more ranks than there are heads of them.
        kv, query = max(work.kv_heads / sizes.tensor, sizes.context), work.heads / sizes.tensor
        rows, calls = tokens * work.head_size * element, layers + forward
        size = rows * (query + 2 * kv)
        yield Flow("context", along, "all_to_all", calls, size, True, "q, k, v for heads")
        yield Flow("context", along, "all_to_all", calls, rows * query, True, "results for tokens")
        return
    block = tokens * 2 * work.kv_heads / sizes.tensor * work.head_size
    # Of all layers, for one that has a window needs fewer; a rank's share of them, rounded up.
    windows = work.windows or (None,) * work.layers
    turns = sum(len(ring_turns(sizes.context, True, int(tokens / work.microbatch), each)) for each in windows)
    turns = -(-layers * turns // work.layers)
    size, sends = block * element, -(-(turns - layers) * (layers + forward) // layers)
    yield Flow("context", along, "sendrecv", sends, size, True, "keys and values")
    back = turns if sizes.context > 1 else 0
    yield Flow("context", along, "sendrecv", back, block * max(element, 4), True, "their gradients")


def ring_turns(ranks: int, zigzag: bool, tokens: int, window: int | None) -> list[int]:
    """At which turns of ring attention some rank computes something; at turn t each has the keys of the t-th rank before it.

    tokens: of each rank. window: keys that a query meets, of its own sequence; None: all before it.

    >>> ring_turns(4, False, tokens=8, window=9), ring_turns(8, True, tokens=8, window=4)
    ([0, 1], [0, 1, 7])
    """
    if window is None:
        return list(range(ranks))
    size = tokens // 2 if zigzag else tokens
    # The farthest chunk of which a query of this one meets a key. The next one even if it meets none: keys go somewhere.
    far = max(1, (window + size - 2) // size)
    return [turn for turn in range(ranks) if turn <= far or (zigzag and ranks - turn <= far)]


def _expert(work: Workload, sizes: Sizes) -> Iterator[Flow]:
    """Each token's rows to its experts and back, twice forward and twice backward."""
    size = work.tokens(sizes) * work.experts_per_token * work.width * work.activation_bytes
    calls = 4 * work.expert_layers_of_rank(sizes) + 2 * work.expert_layers_again(sizes)
    yield Flow("expert", ("expert",), "all_to_all", calls, size, True, "tokens to experts and back")


def _pipeline(work: Workload, sizes: Sizes) -> Iterator[Flow]:
    """Sends and receives: each stage of a rank takes an activation and gives one on, and gradients back; the first
    stage of all takes none, and the last gives none on, which of two ranks each has one of.
    """
    each = 4 * work.stages_per_rank - (2 if sizes.pipeline == 2 else 0) if sizes.pipeline > 1 else 0
    split = sizes.tensor if work.sequence_parallel else 1
    size = work.tokens(sizes) * work.width * work.activation_bytes / split
    yield Flow(
        "pipeline", ("pipeline",), "sendrecv", each, size, True, "activations and their gradients", sent=0.5
    )


def _shard(work: Workload, sizes: Sizes) -> Iterator[Flow]:
    """Each layer is gathered forward and backward, what is outside of layers once; gradients are scattered once a step.

    Where layers stay gathered, it is at the first pass of a step alone, as are tables. In a pipeline that lets them go a
    layer stays gathered from one backward pass to the pass that follows: it is gathered again behind each forward pass.
    Routers keep the weights' type, so beside narrower weights they are gathered by themselves, as are experts that are
    spread.
    """
    here, layers, narrow = held(work, sizes), work.layers_of_rank(sizes), work.activation_bytes
    piped = sizes.pipeline > 1
    stages = work.stages_per_rank if piped else 1
    again = work.reshards(sizes)
    often = (2 if not piped else sizes.microbatches + 1) if again else 1
    apart = here.routers if narrow != work.weight_bytes else 0
    together = tuple(part for part in ("shard", "context") if part in work.parts)
    spread = here.experts if "expert" in work.parts else 0
    with_experts = work.expert_layers_of_rank(sizes)
    for count, along, number, gathers, element, what in (
        (here.all - here.ends - apart - spread, together, layers, often, narrow, "weights"),
        (spread, (EXPERT_SHARD,), with_experts, often, narrow, "experts"),
        (apart, together, with_experts, often, work.weight_bytes, "routers"),
        (here.ends, together, stages, 1, narrow, "tables"),
    ):
        if count:
            size = count / number
            yield Flow(
                "shard",
                along,
                "all_gather",
                gathers * number,
                size * element,
                again and not piped,
                f"{what} gathered",
            )
            scattered = size * work.reduced_bytes
            yield Flow(
                "shard",
                along,
                "reduce_scatter",
                number,
                scattered,
                False,
                f"gradients of {what} scattered",
            )


def _gradients(work: Workload, sizes: Sizes) -> Iterator[Flow]:
    here = held(work, sizes)
    plain, experts = here.plain * work.weight_bytes, here.experts * work.weight_bytes
    if "expert" not in work.parts:
        plain, experts = plain + experts, 0.0

    def summed(part: Part, along: Along, size_bytes: float, what: str, calls: int = 0) -> Flow:
        number = calls or max(1, math.ceil(size_bytes / work.bucket_bytes))
        return Flow(part, along, "all_reduce", number, size_bytes / number, False, what)

    if "shard" in work.parts:
        rest = plain / work.shards(sizes)
        scattered = [flow for flow in _shard(work, sizes) if flow.operation == "reduce_scatter"]
        if "data" in work.parts:
            calls = sum(flow.calls for flow in scattered if flow.along[0] == "shard")
            sent = rest / work.weight_bytes * work.reduced_bytes
            yield summed("data", ("data",), sent, "shards' gradients", calls)
        if "expert" in work.parts:
            calls = sum(flow.calls for flow in scattered if flow.along == (EXPERT_SHARD,))
            sent = here.experts / work.expert_shards(sizes) * work.reduced_bytes
            yield summed("expert", (REPLICA,), sent, "experts' shards' gradients", calls)
        return
    if "data" in work.parts or "context" in work.parts:
        along = tuple(part for part in ("data", "context") if part in work.parts)
        yield summed("data" if "data" in along else "context", along, plain, "gradients")
    if "expert" in work.parts:
        yield summed("expert", (REPLICA,), experts, "experts' gradients")
