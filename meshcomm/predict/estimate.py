"""What does the rank with most layers hold and send in a step of training? Short formulas, by which `place` ranks meshes.

`meshcomm dryrun`, and `meshcomm tune --exact`, count both exactly. Left out here: messages of a few bytes for each token
(losses, norms, routers), biases, windows of attention, the order in which memory is freed, and buffers of a pass.
Bytes of a call are counted as `meshcomm.predict.times` does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, NamedTuple, TypeAlias

from meshcomm.config import Config
from meshcomm.config.parallel import Part
from meshcomm.predict.passes import microbatches_held
from meshcomm.predict.times import Operation
from meshcomm.predict.workload import BASE, Sizes, Workload, workload

# Parts, or dims, whose ranks make a call together. The copies of experts, edp, are "replica", and with shard "expert shard",
# as they hold shards of them.
Along: TypeAlias = tuple[str, ...]
REPLICA: Final = "replica"
EXPERT_SHARD: Final = "expert shard"


class Weights(NamedTuple):
    """Weights of one rank before sharding: all but experts', experts', those of one layer, those outside of layers."""

    plain: float
    experts: float
    layer: float
    ends: float


class Memory(NamedTuple):
    """Bytes of one rank at the peak of a step. gathered: weights that other ranks hold shards of."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    gathered: float


class Flow(NamedTuple):
    """One kind of call. along: whose ranks make it. calls: of one rank, in each micro-batch or in each step.

    size_bytes: of one call. what: in words. sent: the share of the calls that send; the others receive.
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


def weights(work: Workload, sizes: Sizes) -> Weights:
    """Experts are split along expert and tensor, the others along tensor; a pipeline puts the two tables on two ranks."""
    layers, with_experts = work.layers_of_rank(sizes), work.expert_layers_of_rank(sizes)
    norms, attention = 2 * work.hidden_size, work.attention_weights / sizes.tensor
    dense = work.expert_weights / sizes.tensor
    experts = work.experts * dense / sizes.expert
    tables = work.hidden_size * work.vocab_size * (1 if sizes.pipeline > 1 or work.tied else 2)
    # Ranks that do not divide the vocabulary have all of it.
    ends = tables / (1 if work.vocab_size % sizes.tensor else sizes.tensor) + work.hidden_size
    routers = with_experts * work.hidden_size * work.experts
    plain = layers * (attention + norms) + (layers - with_experts) * dense + ends + routers
    layer = attention + norms + (experts if work.expert_layers else dense)
    return Weights(plain, with_experts * experts, layer, ends)


def memory(work: Workload, sizes: Sizes) -> Memory:
    """Bytes of the largest rank. Weights, gradients and Adam's two moments are of one dtype.

    Sharded (FSDP, ZeRO-3: Rajbhandari et al. 2020), each is divided by the shards. Gathered are two layers, the tables and
    the last norm, or all weights without `reshard`. Gradients of several micro-batches accumulate unsharded.
    """
    here = weights(work, sizes)
    shards, spread = work.shards(sizes), work.expert_shards(sizes)
    share = (here.plain / shards + here.experts / spread) * work.weight_bytes
    activations = _activations(work, sizes)
    if shards == spread == 1:
        # Autocast keeps its copies of weights for the backward pass.
        if work.activation_bytes != work.weight_bytes and not work.activation_checkpointing:
            activations += work.layers_of_rank(sizes) * here.layer * work.activation_bytes
        return Memory(share, share, 2 * share, activations, 0.0)
    every = here.plain + here.experts
    gathered = min(every, 2 * here.layer + here.ends) if work.reshards(sizes) else every
    gradients = share + here.layer * work.reduced_bytes
    if sizes.microbatches > 1:
        gradients = every * work.reduced_bytes
    return Memory(share, gradients, 2 * share, activations, gathered * work.activation_bytes)


def layer_activations(work: Workload, sizes: Sizes) -> tuple[float, float, float]:
    """Bytes that a layer keeps of a micro-batch for backward: with recompute, with selective recompute, without.

    In the manner of Korthikanti et al. 2022; attention keeps no scores, experts are evenly loaded.
    """
    split, with_experts = sizes.tensor, work.expert_layers / work.num_layers
    rows = with_experts * work.experts_per_token
    inner = (work.ff_matrices - 1) * (1 - with_experts + rows) * work.intermediate_size / split
    queries, keys = work.num_heads * work.head_size / split, work.num_kv_heads * work.head_size / split
    entry = work.hidden_size / split if work.sequence_parallel else work.hidden_size
    selective = (
        3 * entry + 2 * queries + 2 * keys + inner + (3 if sizes.expert > 1 else 1) * rows * work.hidden_size
    )
    if work.sequence_parallel:
        selective += 2 * work.hidden_size
    everything = (
        2 * entry + 2 * work.hidden_size + 3 * queries + 2 * keys + 2 * inner + 2 * rows * work.hidden_size
    )
    element = work.tokens(sizes) * work.activation_bytes
    return entry * element, selective * element, everything * element


def _activations(work: Workload, sizes: Sizes) -> float:
    """The larger of two ranks of a pipeline: the first has the most micro-batches in flight, the last has the logits."""
    entry, selective, everything = layer_activations(work, sizes)
    layers, again = work.layers_of_rank(sizes), work.layers_again(sizes)
    usual = selective if work.activation_checkpointing == "selective" else everything
    kept = (layers - again) * usual + again * entry
    recomputed = everything - (entry if again else usual)
    split = 1 if work.vocab_size % sizes.tensor else sizes.tensor
    logits = work.tokens(sizes) * work.vocab_size / split * max(4, work.activation_bytes)
    first = microbatches_held(work.schedule, sizes.pipeline, work.stages_per_rank, sizes.microbatches)
    last = first if work.schedule in ("gpipe", "zero_bubble") else 1
    # Logits, their logarithms and gradients.
    return max(first * kept, last * (kept + 2 * logits) + logits) + recomputed


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


def expected(settings: Config, world: int) -> list[Flow]:
    """The calls of a step along dims of size 2 or more: along names dims, and calls are those of the whole step.

    Raises ConfigError where `settings` does not train.
    """
    work = workload(settings)
    mesh, parallel = settings.resolved(world).mesh, settings.parallel
    assert parallel is not None
    view = parallel.expert_view(mesh.views)
    sizes = {**mesh.dims, **(mesh.views[view] if view is not None else {})}
    dims: dict[str, Along] = {part: (dim,) for part, dim in parallel.parts.items()}
    copies = tuple(dim for dim in parallel.expert_gradient_dims(mesh.views) if sizes[dim] > 1)
    shards = copies[-1:] if "shard" in work.parts else ()
    dims |= {REPLICA: copies[: len(copies) - len(shards)], EXPERT_SHARD: shards}
    number = work.global_batch_size // (parallel.copies(mesh.dims) * work.micro_batch_size)
    played = {part: sizes[dims[part][0]] for part in (*BASE, "expert") if part in dims}
    replicas = math.prod(sizes[dim] for dim in dims[REPLICA]) if shards else 1
    found = []
    for flow in flows(work, Sizes(**played, microbatches=number, expert_copies=replicas)):
        along = tuple(dim for part in flow.along for dim in dims[part] if sizes[dim] > 1)
        if flow.along[0] == "shard":
            # In the order of their merged dim.
            along = tuple(dim for dim in mesh.dims if dim in along)
        if along:
            found.append(flow._replace(along=along, calls=flow.in_a_step(number), each_microbatch=False))
    return found


def _tensor(work: Workload, sizes: Sizes) -> Iterator[Flow]:
    """Two sums forward and two backward in each layer (Shoeybi et al. 2019), or as many gathers and scatters (Korthikanti et
    al. 2022); one for each table. A pass that is computed again ends before its last sum.
    """
    layers, again = work.layers_of_rank(sizes), work.layers_again(sizes)
    tables = 1 if sizes.pipeline > 1 else 2
    sums = 4 * layers + again + (0 if work.vocab_size % sizes.tensor else tables)
    size = work.tokens(sizes) * work.hidden_size * work.activation_bytes
    if not work.sequence_parallel:
        yield Flow("tensor", ("tensor",), "all_reduce", sums, size, True, "activations")
        return
    gathers = 4 * layers + 2 * again + tables
    yield Flow("tensor", ("tensor",), "all_gather", gathers, size, True, "activations gathered")
    yield Flow("tensor", ("tensor",), "reduce_scatter", sums, size, True, "activations scattered")


def _context(work: Workload, sizes: Sizes) -> Iterator[Flow]:
    layers, along = work.layers_of_rank(sizes), ("context",)
    passes = 2 * layers + work.layers_again(sizes)
    rows = work.tokens(sizes) * work.head_size
    if work.ulysses:
        # Keys and values are repeated where the dim has more ranks than there are heads of them.
        queries, keys = work.num_heads / sizes.tensor, max(work.num_kv_heads / sizes.tensor, sizes.context)
        size = rows * work.activation_bytes
        yield Flow(
            "context", along, "all_to_all", passes, size * (queries + 2 * keys), True, "q, k, v for heads"
        )
        yield Flow("context", along, "all_to_all", passes, size * queries, True, "results for tokens")
        return
    block, turns = rows * 2 * work.num_kv_heads / sizes.tensor, sizes.context - 1
    size = block * work.activation_bytes
    yield Flow("context", along, "sendrecv", turns * passes, size, True, "keys and values")
    back, size = layers * sizes.context if turns else 0, block * max(work.activation_bytes, 4)
    yield Flow("context", along, "sendrecv", back, size, True, "their gradients")


def _expert(work: Workload, sizes: Sizes) -> Iterator[Flow]:
    """The rows of each token to its experts and back, twice forward and twice backward."""
    size = work.tokens(sizes) * work.experts_per_token * work.hidden_size * work.activation_bytes
    calls = 4 * work.expert_layers_of_rank(sizes) + 2 * work.expert_layers_again(sizes)
    yield Flow("expert", ("expert",), "all_to_all", calls, size, True, "tokens to experts and back")


def _pipeline(work: Workload, sizes: Sizes) -> Iterator[Flow]:
    """Each stage receives and sends an activation and a gradient; of two ranks each lacks one neighbour."""
    calls = 4 * work.stages_per_rank - (2 if sizes.pipeline == 2 else 0) if sizes.pipeline > 1 else 0
    split = sizes.tensor if work.sequence_parallel else 1
    size = work.tokens(sizes) * work.hidden_size * work.activation_bytes / split
    what = "activations and their gradients"
    yield Flow("pipeline", ("pipeline",), "sendrecv", calls, size, True, what, sent=0.5)


def _shard(work: Workload, sizes: Sizes) -> Iterator[Flow]:
    """Each layer is gathered forward and backward, or once a step; gradients are scattered once a step."""
    here, again, piped = weights(work, sizes), work.reshards(sizes), sizes.pipeline > 1
    # In a pipeline a layer stays gathered from a backward pass to the pass that follows.
    often = (sizes.microbatches + 1 if piped else 2) if again else 1
    spread = here.experts if "expert" in work.parts else 0.0
    layers, with_experts = work.layers_of_rank(sizes), work.expert_layers_of_rank(sizes)
    together = tuple(part for part in ("shard", "context") if part in work.parts)
    for count, along, number, what in (
        (here.plain + here.experts - spread - here.ends, together, layers, "weights"),
        (spread, (EXPERT_SHARD,), with_experts, "experts"),
        (here.ends, together, 1, "tables"),
    ):
        if count:
            size, each = count / number, again and not piped and what != "tables"
            times, narrow = 1 if what == "tables" else often, size * work.activation_bytes
            yield Flow("shard", along, "all_gather", times * number, narrow, each, f"{what} gathered")
            wide = size * work.reduced_bytes
            yield Flow(
                "shard", along, "reduce_scatter", number, wide, False, f"gradients of {what} scattered"
            )


def _gradients(work: Workload, sizes: Sizes) -> Iterator[Flow]:
    """Sums over copies: of buckets, or of what FSDP has scattered."""
    here, sharded = weights(work, sizes), "shard" in work.parts
    plain, experts = here.plain, here.experts
    if "expert" not in work.parts:
        plain, experts = plain + experts, 0.0
    copies = tuple(part for part in ("data", "context") if part in work.parts)
    if sharded:
        plain, experts = plain / work.shards(sizes), experts / work.expert_shards(sizes)
        copies = tuple(part for part in copies if part == "data")
    first: Part = "data" if "data" in work.parts else "context"
    layers, with_experts = work.layers_of_rank(sizes), work.expert_layers_of_rank(sizes)
    rows: tuple[tuple[Part, Along, float, int, str], ...] = (
        (first, copies, plain, layers + 1, "gradients"),
        ("expert", (REPLICA,), experts, with_experts, "experts' gradients"),
    )
    for part, along, count, units, what in rows:
        if count and along:
            size = count * (work.reduced_bytes if sharded else work.weight_bytes)
            calls = units if sharded else max(1, math.ceil(size / work.bucket_bytes))
            yield Flow(part, along, "all_reduce", calls, size / calls, False, what)
