"""Short formulas for a training step's memory and traffic on the rank with the most layers. `tune` ranks meshes by these.

`meshcomm dryrun` and `meshcomm tune --exact` count both exactly. The formulas leave out messages of a few bytes per token
(losses, norms, routers), biases, attention windows, the order in which memory is freed, and temporary buffers.
A call's bytes are counted as in `meshcomm.predict.times`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from meshcomm.config import Config, ModelConfig, TrainConfig
from meshcomm.config.parallel import ParallelConfig, ParallelRole
from meshcomm.errors import ConfigError
from meshcomm.predict.passes import microbatches_held
from meshcomm.predict.stages import PartCosts, attention_costs, part_costs
from meshcomm.predict.times import Operation

_BYTES: Final = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
# The parts that are dims of the base, outermost first by default.
BASE: Final[tuple[ParallelRole, ...]] = ("pipeline", "data", "shard", "context", "tensor")
# Parts, or dims, whose ranks make a call together. The dim of the experts' copies (edp) is "replica", or "expert shard"
# if the shard part is used, because each copy then holds a shard of the experts.
Along: TypeAlias = tuple[str, ...]
REPLICA: Final = "replica"
EXPERT_SHARD: Final = "expert shard"


# How many tensors of a parameter's shape torch's optimizers keep, if not two; and one more with these arguments.
_STATES: Final = {"sgd": 0, "rmsprop": 1, "adagrad": 1, "asgd": 1, "muon": 1}
_MORE_STATE: Final = ("momentum", "centered", "amsgrad")


class Sizes(NamedTuple):
    """The size of each part's dim; 1 for a part without a dim. microbatches: the number of micro-batches per rank and step.
    expert_copies: the number of copies of each expert shard.
    """

    pipeline: int = 1
    data: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    microbatches: int = 1
    expert_copies: int = 1


class Counts(NamedTuple):
    """Parameter counts of a model. layers: one count per block, without its experts. experts: one count per block. ends:
    parameters outside the blocks; a shared parameter counts once. values: the width of a head's values by that of its keys,
    which is below 1 in latent attention.
    """

    layers: tuple[int, ...]
    experts: tuple[int, ...]
    ends: int
    values: float = 1.0


@dataclass(frozen=True)
class Workload:
    """The training run that a configuration describes. settings: the configuration. parts: the parts in use. model: the
    model, with all sizes set. expert_layers: the number of layers with experts. counts: the model's parameter counts, if they
    are known.

    activation_bytes: bytes per activation element, and per weight element gathered by FSDP.
    weight_bytes: bytes per weight element. reduced_bytes: bytes per gradient element reduced by FSDP.
    """

    settings: Config
    parts: tuple[ParallelRole, ...]
    parallel: ParallelConfig
    model: ModelConfig
    train: TrainConfig
    seq_len: int
    costs: PartCosts
    expert_layers: int
    counts: Counts | None
    activation_bytes: int
    weight_bytes: int
    reduced_bytes: int

    @property
    def ulysses(self) -> bool:
        """Whether context parallelism splits heads instead of tokens."""
        return self.parallel.options.attention == "ulysses"

    def tokens(self, sizes: Sizes) -> float:
        """Return the number of tokens per micro-batch on one rank."""
        return self.train.micro_batch_size * self.seq_len / sizes.context

    def layers_of_rank(self, sizes: Sizes) -> int:
        """Return the largest number of layers on any rank, assuming that the stages are split evenly."""
        per_rank = self.parallel.options.stages_per_rank if sizes.pipeline > 1 else 1
        return -(-self.model.num_layers // (sizes.pipeline * per_rank)) * per_rank

    def with_experts(self, layers: int) -> int:
        """Return the number of layers with experts among `layers`.

        If only every n-th layer has experts, this is a rank's proportional share, rounded up.
        """
        return -(-layers * self.expert_layers // self.model.num_layers)

    def layers_again(self, sizes: Sizes) -> int:
        """Return how many layers of the rank with the most layers recompute their full forward pass; 0 for selective
        recompute.
        """
        every, layers = self.train.activation_checkpointing, self.layers_of_rank(sizes)
        if isinstance(every, bool) or every == "selective":
            return layers if every is True else 0
        # Which layers of a stage are recomputed depends on their position in the model.
        return layers // every if sizes.pipeline == 1 else -(-layers // every)

    def shards(self, sizes: Sizes) -> int:
        """Return the number of ranks that weights are sharded across: shard times context."""
        return sizes.shard * (sizes.context if "shard" in self.parts else 1)

    def expert_shards(self, sizes: Sizes) -> int:
        """Return the number of ranks that the experts' weights are sharded across. If the shard and
        expert parts are not both in use, this is the same as `shards`.
        """
        if "shard" not in self.parts or "expert" not in self.parts:
            return self.shards(sizes)
        return sizes.data * sizes.shard * sizes.context // sizes.expert // sizes.expert_copies

    def flops(self, sizes: Sizes) -> float:
        """Return the floating-point operations per micro-batch on a rank that has the most layers and the head. Each
        multiply-add in the forward pass counts as 6 operations: 2 forward and 4 backward. In recomputed layers, it counts as 8
        operations.
        """
        layer = sum(self.costs.layers) / self.model.num_layers
        once = self.layers_of_rank(sizes) * layer + self.costs.head
        return self.tokens(sizes) * (6 * once + 2 * self.layers_again(sizes) * layer) / sizes.tensor


def workload(settings: Config, counts: Counts | None = None) -> Workload:
    """Return the workload of `settings`. counts: the model's parameter counts, if its sizes do not determine them.

    Raises ConfigError if `settings` does not describe training, or if it fixes where ranks are placed.
    """
    work, mesh = _workload(settings, counts), settings.mesh
    # Settings that are valid only for the configured dim sizes, or that would override a new order of the dims.
    fixed = [f"mesh.{name}" for name in ("ranks", "rank_order") if getattr(mesh, name) is not None]
    fixed += [f"mesh.views.{name}" for name in mesh.views if name != settings.expert_view]
    fixed += [f"mesh.dims.{dim}" for dim in mesh.dims if dim not in work.parallel.parts.values()]
    if fixed:
        raise ConfigError(
            f"{fixed[0]} applies only to the configured mesh, but tune looks for a different one",
            given=f"{settings.source} with {fixed[0]}",
            expected="only the dims that [parallel] names, and the view that contains its expert dim",
            hint=f"--set {fixed[0]}=   (an empty value removes it)",
        )
    return work


def _workload(settings: Config, counts: Counts | None = None) -> Workload:
    parallel, model, data, train = settings.parallel, settings.model, settings.data, settings.train
    if parallel is None or model is None or data is None or train is None:
        raise ConfigError(
            f"{settings.source} does not describe training",
            given="a mesh without [parallel], [model], [data] and [train]",
            expected="all four sections, from which bytes and memory are computed",
            hint="meshcomm new writes a config that has them all",
        )
    model = model.sized("bytes and memory")
    named = {"model.lora": model.lora, "train.frozen": train.frozen}
    if some := [name for name, value in named.items() if value]:
        raise ConfigError(
            "the formulas of tune assume that every parameter is trained",
            given=", ".join(some),
            expected="training of all parameters",
            hint=f"meshcomm dryrun {settings.source}, which counts only trained parameters, on one mesh",
        )
    costs = part_costs(model, data.seq_len)
    with_experts = sum(map(model.has_experts, range(model.num_layers)))
    if counts is not None:
        with_experts = sum(map(bool, counts.experts))
        costs = costs._replace(layers=_costs(model, counts, data.seq_len))
    return Workload(
        settings=settings,
        parts=tuple(parallel.parts),
        parallel=parallel,
        model=model,
        train=train,
        seq_len=data.seq_len,
        costs=costs,
        expert_layers=with_experts,
        counts=counts,
        activation_bytes=_BYTES[train.compute_dtype or train.dtype],
        weight_bytes=_BYTES[train.dtype],
        reduced_bytes=_BYTES[parallel.options.reduce_dtype or train.dtype],
    )


def _costs(model: ModelConfig, counts: Counts, seq_len: int) -> tuple[int, ...]:
    """Return each layer's multiply-adds per token: one for each weight used, plus attention as in `part_costs`."""
    active = min(model.experts_per_token, model.experts) / max(1, model.experts)
    per_layer = zip(counts.layers, counts.experts, attention_costs(model, seq_len), strict=True)
    return tuple(
        plain + round(active * experts + (1 + counts.values) / 2 * attention)
        for plain, experts, attention in per_layer
    )


# -- memory -----------------------------------------------------------------------------------------


class Weights(NamedTuple):
    """The number of weights on one rank before sharding.

    plain: weights outside experts. experts: weights in experts. layer: weights in one layer. ends: weights outside layers.
    """

    plain: float
    experts: float
    layer: float
    ends: float


class Memory(NamedTuple):
    """One rank's memory at the peak of a step, in bytes. gathered: weights that FSDP has unsharded."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    gathered: float


def weights(work: Workload, sizes: Sizes) -> Weights:
    """Return the weights of the rank with the most layers. Experts are split along expert and tensor, other weights only
    along tensor. With a pipeline, the embedding and the head are on different ranks.
    """
    model, layers = work.model, work.layers_of_rank(sizes)
    with_experts, norms = work.with_experts(layers), 2 * model.hidden_size
    # Ranks that share key and value heads hold all of these heads' weights.
    shared = model.num_kv_heads < sizes.tensor
    heads = 2 * model.num_heads / sizes.tensor + 2 * model.num_kv_heads / (1 if shared else sizes.tensor)
    attention = model.hidden_size * model.head_size * heads
    dense = model.ff_matrices * model.hidden_size * model.intermediate_size / sizes.tensor
    experts = model.experts * dense / sizes.expert
    tables: float = (
        model.hidden_size * model.vocab_size * (1 if sizes.pipeline > 1 or model.tied_embeddings else 2)
    )
    if work.counts is not None:
        tables = work.counts.ends / (2 if sizes.pipeline > 1 and not model.tied_embeddings else 1)
    ends = tables / sizes.tensor
    if work.counts is not None:
        of_rank = layers / model.num_layers
        blocks = of_rank * sum(work.counts.layers) / sizes.tensor
        spread = of_rank * sum(work.counts.experts) / (sizes.tensor * sizes.expert)
        return Weights(blocks + ends, spread, (blocks + spread) / layers, ends)
    ends += model.hidden_size
    routers = with_experts * model.hidden_size * model.experts
    plain = layers * (attention + norms) + (layers - with_experts) * dense + ends + routers
    layer = attention + norms + (experts if work.expert_layers else dense)
    return Weights(plain, with_experts * experts, layer, ends)


def kv_heads(model: ModelConfig, sizes: Sizes) -> float:
    """Return the number of key and value heads on one rank. Ranks along tensor share heads if these are fewer."""
    return max(1.0, model.num_kv_heads / sizes.tensor)


def memory(work: Workload, sizes: Sizes) -> Memory:
    """Return the memory of the rank that needs the most. Weights and gradients have the same dtype.

    With sharding (FSDP, ZeRO-3: Rajbhandari et al. 2020), each is divided by the number of shards. At the peak, two layers
    and the weights outside the layers are gathered; without `reshard`, all weights are. If a step has several
    micro-batches, gradients accumulate unsharded.
    """
    counts = weights(work, sizes)
    shards, spread = work.shards(sizes), work.expert_shards(sizes)
    share = (counts.plain / shards + counts.experts / spread) * work.weight_bytes
    moments = share * state_bytes(work.train) / work.weight_bytes
    activations = _activations(work, sizes)
    if shards == spread == 1:
        # Autocast keeps its casted copies of the weights for the backward pass.
        if work.activation_bytes != work.weight_bytes and not work.train.activation_checkpointing:
            activations += work.layers_of_rank(sizes) * counts.layer * work.activation_bytes
        return Memory(share, share, moments, activations, 0.0)
    every = counts.plain + counts.experts
    gathered = min(every, 2 * counts.layer + counts.ends) if work.parallel.reshards(sizes.pipeline) else every
    gradients = share + counts.layer * work.reduced_bytes
    if sizes.microbatches > 1:
        gradients = every * work.reduced_bytes
    return Memory(share, gradients, moments, activations, gathered * work.activation_bytes)


def state_bytes(train: TrainConfig) -> int:
    """Return how many bytes the optimizer keeps for each weight, and the moving average of train.ema. If groups name
    other optimizers, the largest number among all optimizers.
    """
    kinds: list[tuple[str, Mapping[str, Any]]] = [(train.optimizer, train.optimizer_args)]
    kinds += [(group.optimizer, group.optimizer_args) for group in train.groups.values() if group.optimizer]
    states = max(
        _STATES.get(name, 2) + (0 if name == "muon" else sum(bool(args.get(more)) for more in _MORE_STATE))
        for name, args in kinds
    )
    average = 0 if train.ema is None else _BYTES[train.dtype]
    return states * _BYTES[train.state_dtype or train.dtype] + average


def layer_activations(work: Workload, sizes: Sizes) -> tuple[float, float, float]:
    """Return how many bytes a layer keeps per micro-batch for the backward pass: (with full recompute, with selective
    recompute, without recompute).

    The formulas follow Korthikanti et al. 2022. They assume that attention keeps no scores and that experts are evenly loaded.
    """
    model, split, with_experts = work.model, sizes.tensor, work.expert_layers / work.model.num_layers
    rows = with_experts * min(model.experts_per_token, model.experts)
    inner = (model.ff_matrices - 1) * (1 - with_experts + rows) * model.intermediate_size / split
    queries, keys = model.num_heads * model.head_size / split, kv_heads(model, sizes) * model.head_size
    whole = model.hidden_size
    entry = whole / split if work.parallel.options.sequence_parallel else whole
    selective = 3 * entry + 2 * queries + 2 * keys + inner + (3 if sizes.expert > 1 else 1) * rows * whole
    if work.parallel.options.sequence_parallel:
        selective += 2 * whole
    everything = 2 * entry + 2 * whole + 2 * queries + 2 * keys + 2 * inner + 2 * rows * whole
    element = work.tokens(sizes) * work.activation_bytes
    return entry * element, selective * element, everything * element


def _activations(work: Workload, sizes: Sizes) -> float:
    """Return the activation bytes of the first or the last pipeline rank, whichever needs more. The first rank has the most
    micro-batches in flight, and the last rank has the logits.
    """
    entry, selective, everything = layer_activations(work, sizes)
    layers, again, options = work.layers_of_rank(sizes), work.layers_again(sizes), work.parallel.options
    usual = selective if work.train.activation_checkpointing == "selective" else everything
    kept = (layers - again) * usual + again * entry
    recomputed = everything - (entry if again else usual)
    elements = work.tokens(sizes) * work.model.vocab_size / sizes.tensor
    logits, computed = elements * work.activation_bytes, min(elements, max(2**24, elements / 8)) * 4
    schedule, stages = options.schedule, options.stages_per_rank
    first = microbatches_held(schedule, sizes.pipeline, stages, sizes.microbatches)
    last = first if schedule in ("gpipe", "zero_bubble") else 1
    # The logits and their gradient, which is computed a few rows at a time: see `cross_entropy`.
    return max(first * kept, last * (kept + logits) + logits + computed) + recomputed


# -- calls ------------------------------------------------------------------------------------------


class Flow(NamedTuple):
    """One kind of call. along: the parts whose ranks make the call. calls: the number of calls that one rank makes in each
    micro-batch, or in each step if `each_microbatch` is False.

    size_bytes: bytes per call. what: a description. sent: the fraction of the calls that send; the rest receive. behind: the
    passes of one micro-batch during which the calls run, all but the first; "" if the program waits for each of them.
    """

    part: ParallelRole
    along: Along
    operation: Operation
    calls: int
    size_bytes: float
    each_microbatch: bool
    what: str
    sent: float = 1.0
    behind: Literal["", "forward", "backward", "both"] = ""

    def exposed_s(self, call_s: float, compute_s: float) -> float:
        """Return how long the calls of a micro-batch or a step delay it, where one call takes `call_s`.

        compute_s: the compute time of a micro-batch. A third of it is the forward pass.
        """
        seconds, forward, backward = self.calls * call_s, compute_s / 3, compute_s * 2 / 3
        match self.behind:
            case "":
                return seconds
            case "both":
                return max(call_s, seconds / 2 - forward) + max(0.0, seconds / 2 - backward)
            case _:
                return max(call_s, seconds - (forward if self.behind == "forward" else backward))

    def in_a_step(self, microbatches: int) -> int:
        """Return the number of calls in a step."""
        return self.calls * (microbatches if self.each_microbatch else 1)


def flows(work: Workload, sizes: Sizes) -> list[Flow]:
    """Return all calls that the rank with the most layers makes."""
    makers = {
        "tensor": _tensor,
        "context": _context,
        "expert": _expert,
        "pipeline": _pipeline,
        "shard": _shard,
    }
    chosen = [flow for part, maker in makers.items() if part in work.parts for flow in maker(work, sizes)]
    return [flow for flow in (*chosen, *_gradients(work, sizes)) if flow.calls]


def expected(settings: Config, world: int | None) -> list[Flow]:
    """Return the calls in a step along dims of size 2 or more. In the result, `along` names dims instead of parts, and `calls`
    covers the full step. world: the number of processes; it may be None if every size is given.

    Raises ConfigError if `settings` does not describe training.
    """
    work = _workload(settings)
    mesh, parallel = settings.resolved(world).mesh, work.parallel
    view = parallel.expert_view(mesh.views)
    sizes = {**mesh.dims, **(mesh.views[view] if view is not None else {})}
    dims: dict[str, Along] = {part: (dim,) for part, dim in parallel.parts.items()}
    copies = tuple(dim for dim in parallel.expert_gradient_dims(mesh.views) if sizes[dim] > 1)
    shards = copies[-1:] if "shard" in work.parts else ()
    dims |= {REPLICA: copies[: len(copies) - len(shards)], EXPERT_SHARD: shards}
    number = settings.microbatches(mesh.dims)
    played = {part: sizes[dims[part][0]] for part in (*BASE, "expert") if part in dims}
    replicas = math.prod(sizes[dim] for dim in dims[REPLICA]) if shards else 1
    along_dims = []
    for flow in flows(work, Sizes(**played, microbatches=number, expert_copies=replicas)):
        along = tuple(dim for part in flow.along for dim in dims[part] if sizes[dim] > 1)
        if flow.along[0] == "shard":
            # The dims in the order of the mesh, as in the merged dim.
            along = tuple(dim for dim in mesh.dims if dim in along)
        if along:
            along_dims.append(flow._replace(along=along, calls=flow.in_a_step(number), each_microbatch=False))
    return along_dims


def _tensor(work: Workload, sizes: Sizes) -> Iterator[Flow]:
    """Each layer makes two all-reduces forward and two backward (Shoeybi et al. 2019). With sequence parallelism, it makes
    as many all-gathers and reduce-scatters instead (Korthikanti et al. 2022). The embedding and the head each add one.
    A recomputed forward pass ends before its last all-reduce.
    """
    layers, again = work.layers_of_rank(sizes), work.layers_again(sizes)
    tables = 1 if sizes.pipeline > 1 else 2
    sums = 4 * layers + again + tables
    size = work.tokens(sizes) * work.model.hidden_size * work.activation_bytes
    if not work.parallel.options.sequence_parallel:
        yield Flow("tensor", ("tensor",), "all_reduce", sums, size, True, "activations")
        return
    gathers = 4 * layers + 2 * again + tables
    yield Flow("tensor", ("tensor",), "all_gather", gathers, size, True, "activations gathered")
    yield Flow("tensor", ("tensor",), "reduce_scatter", sums, size, True, "activations scattered")


def _context(work: Workload, sizes: Sizes) -> Iterator[Flow]:
    layers, along, model = work.layers_of_rank(sizes), ("context",), work.model
    passes = 2 * layers + work.layers_again(sizes)
    rows = work.tokens(sizes) * model.head_size
    if work.ulysses:
        # Keys and values are repeated if the dim has more ranks than there are kv heads.
        queries, keys = model.num_heads / sizes.tensor, max(kv_heads(model, sizes), sizes.context)
        size, there = rows * work.activation_bytes, "q, k, v for heads"
        yield Flow("context", along, "all_to_all", passes, size * (queries + 2 * keys), True, there)
        yield Flow("context", along, "all_to_all", passes, size * queries, True, "results for tokens")
        return
    block, turns = rows * 2 * kv_heads(model, sizes), sizes.context - 1
    size = block * work.activation_bytes
    yield Flow("context", along, "sendrecv", turns * passes, size, True, "keys and values")
    back, size = layers * sizes.context if turns else 0, block * max(work.activation_bytes, 4)
    yield Flow("context", along, "sendrecv", back, size, True, "their gradients")


def _expert(work: Workload, sizes: Sizes) -> Iterator[Flow]:
    """Each token's rows are sent to its experts and back: two calls forward and two backward."""
    rows = work.tokens(sizes) * min(work.model.experts_per_token, work.model.experts)
    layers, again = work.layers_of_rank(sizes), work.layers_again(sizes)
    calls = 4 * work.with_experts(layers) + 2 * work.with_experts(again)
    size = rows * work.model.hidden_size * work.activation_bytes
    yield Flow("expert", ("expert",), "all_to_all", calls, size, True, "tokens to experts and back")


def _pipeline(work: Workload, sizes: Sizes) -> Iterator[Flow]:
    """Each stage receives and sends an activation and a gradient. The first and last rank each have only one neighbor."""
    stages = work.parallel.options.stages_per_rank
    calls = 4 * stages - (2 if sizes.pipeline == 2 else 0) if sizes.pipeline > 1 else 0
    split = sizes.tensor if work.parallel.options.sequence_parallel else 1
    size = work.tokens(sizes) * work.model.hidden_size * work.activation_bytes / split
    what = "activations and their gradients"
    yield Flow("pipeline", ("pipeline",), "sendrecv", calls, size, True, what, sent=0.5)


def _shard(work: Workload, sizes: Sizes) -> Iterator[Flow]:
    """Each layer's weights are gathered in each forward and backward pass, or once per step. Gradients are reduce-scattered
    once per step. The embedding and the head together count as one more layer.
    """
    counts, again, piped = weights(work, sizes), work.parallel.reshards(sizes.pipeline), sizes.pipeline > 1
    # In a pipeline, a layer stays gathered from a backward pass until the next pass.
    often = (sizes.microbatches + 1 if piped else 2) if again else 1
    spread = counts.experts if "expert" in work.parts else 0.0
    layers = work.layers_of_rank(sizes)
    together = tuple(part for part in ("shard", "context") if part in work.parts)
    for count, along, units, what in (
        (counts.plain + counts.experts - spread, together, layers + 1, "weights"),
        (spread, (EXPERT_SHARD,), work.with_experts(layers), "experts"),
    ):
        if count:
            size, gathers, each_microbatch = count / units, units * often, again and not piped
            gather = Flow(
                "shard", along, "all_gather", gathers, size * work.activation_bytes, each_microbatch, ""
            )
            yield gather._replace(what=f"{what} gathered", behind="both" if each_microbatch else "forward")
            # A pipeline scatters after its last pass.
            scatter = Flow("shard", along, "reduce_scatter", units, size * work.reduced_bytes, False, "")
            yield scatter._replace(what=f"gradients of {what} scattered", behind="" if piped else "backward")


def _gradients(work: Workload, sizes: Sizes) -> Iterator[Flow]:
    """All-reduce gradients across replicas, either in buckets or after FSDP's reduce-scatter."""
    counts, sharded = weights(work, sizes), "shard" in work.parts
    plain, experts = counts.plain, counts.experts
    if "expert" not in work.parts:
        plain, experts = plain + experts, 0.0
    copies = tuple(part for part in ("data", "context") if part in work.parts)
    if sharded:
        plain, experts = plain / work.shards(sizes), experts / work.expert_shards(sizes)
        copies = tuple(part for part in copies if part == "data")
    first: ParallelRole = "data" if "data" in work.parts else "context"
    layers = work.layers_of_rank(sizes)
    rows: tuple[tuple[ParallelRole, Along, float, int, str], ...] = (
        (first, copies, plain, layers + 1, "gradients"),
        ("expert", (REPLICA,), experts, work.with_experts(layers), "experts' gradients"),
    )
    for part, along, count, units, what in rows:
        if count and along:
            size = count * (work.reduced_bytes if sharded else work.weight_bytes)
            calls = units if sharded else max(1, math.ceil(size / (work.parallel.options.bucket_mb * 1e6)))
            behind: Literal["", "backward"] = "" if sizes.pipeline > 1 else "backward"
            yield Flow(part, along, "all_reduce", calls, size / calls, False, what, behind=behind)
