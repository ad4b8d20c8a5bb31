"""How many bytes does a rank hold at the peak of a step? By the same parts as `meshcomm.dryrun` counts them.

The largest rank: the one with most layers and the larger of the embedding and the head. Tests compare the parts with
those of a step that is run through, kind of parallelism by kind.
"""

from __future__ import annotations

from typing import NamedTuple

from meshcomm.predict.passes import microbatches_held, microbatches_held_last
from meshcomm.predict.workload import Sizes, Workload


class Memory(NamedTuple):
    """Bytes of one rank. gathered: other ranks' parts of the weights. rest: what a backward pass, or a gather under way,
    needs for a time.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    gathered: float
    rest: float


class Kept(NamedTuple):
    """Bytes that the backward pass of one layer and micro-batch asks for. entry: its input. selective: with selective
    recompute, `entry` among them. whole: without any.
    """

    entry: float
    selective: float
    whole: float


class Held(NamedTuple):
    """Weights that one rank holds, before sharding: plain ones and experts'; those of one layer, and those outside of
    layers; and those of routers.
    """

    plain: float
    experts: float
    layer: float
    ends: float
    routers: float

    @property
    def all(self) -> float:
        """Both kinds."""
        return self.plain + self.experts


def held(work: Workload, sizes: Sizes) -> Held:
    """Weights of the largest rank. Experts are split along expert and tensor, the rest along tensor.

    Those of the built-in model, and of Llama and Mistral without biases. Left out of other families: biases, norms of
    queries and keys, GPT-2's positions.
    """
    layers, with_experts = work.layers_of_rank(sizes), work.expert_layers_of_rank(sizes)
    norms, attention = 2 * work.width, work.attention_weights / sizes.tensor
    dense, experts = work.expert_weights / sizes.tensor, work.experts * work.expert_weights
    experts_here = experts / sizes.expert / sizes.tensor
    # One rank of the pipeline has both tables only where there is one rank.
    tables = work.width * work.vocabulary * (1 if sizes.pipeline > 1 or work.tied else 2)
    # Ranks that do not divide the vocabulary have all of it.
    split = 1 if work.vocabulary % sizes.tensor else sizes.tensor
    ends, routers = tables / split + work.width, float(with_experts * work.width * work.experts)
    plain = layers * (attention + norms) + (layers - with_experts) * dense + ends + routers
    layer = attention + norms + (experts_here if work.expert_layers else dense)
    return Held(plain, with_experts * experts_here, layer, ends, routers)


def memory(work: Workload, sizes: Sizes) -> Memory:
    """Bytes of the largest rank.

    Weights, gradients and two moments are of the weights' dtype: 16 bytes for each float32 weight. Sharded (FSDP,
    ZeRO-3: Rajbhandari et al. 2020) each is divided by the shards. Besides there are, gathered and of the activations'
    dtype, one layer and what is outside of layers, and the next layer on its way; where they stay gathered all of
    the rank, from the first to the last pass of a step. Gradients of several micro-batches are added up whole, of
    the dtype in which they are reduced, and sharded with the last one.
    """
    here = held(work, sizes)
    shards, spread = work.shards(sizes), work.expert_shards(sizes)
    share = (here.plain / shards + here.experts / spread) * work.weight_bytes
    peaks = _activations(work, sizes)
    if shards == spread == 1:
        return max((Memory(share, share, 2 * share, each, 0.0, rest) for each, rest in peaks), key=sum)
    stay = not work.reshards(sizes)
    gathered = (here.all if stay else here.layer + here.ends) * work.activation_bytes
    coming = 0 if stay else here.layer * work.activation_bytes
    layer, whole = here.layer * work.reduced_bytes, here.all * work.reduced_bytes
    dense, inside = kept(work, sizes), _passing(work, sizes)
    done = {False: dense.whole, True: dense.entry, "selective": dense.selective}.get(
        work.recompute, dense.whole
    )
    moments = []
    for each, rest in peaks:
        # The last layer's backward pass, and the one after it, when its gradients are on their way.
        if sizes.microbatches == 1:
            moments.append((0.0, each, rest + coming))
        else:
            moments.append((whole, each, rest + coming))
            left = whole - layer + layer * share / (here.all * work.weight_bytes)
            moments.append((left, each - done, rest + coming + layer))
    # The first layer's, when the others have none any more.
    moments.append((share + layer, dense.whole, inside + layer))
    of_each = (
        Memory(share, gradients, 2 * share, *more)
        for gradients, *more in ((gradients, each, gathered, rest) for gradients, each, rest in moments)
    )
    return max(of_each, key=sum)


def kept(work: Workload, sizes: Sizes, experts: bool = False) -> Kept:
    """What a layer keeps of a micro-batch, in the manner of Korthikanti et al. 2022, counted for the built-in model.

    Without recompute: its input, the sum in its middle, both as its products read them, gathered where the
    sequence is split between layers; values, rotated queries and keys, what attention gives, as it comes and by tokens;
    of a feed-forward its products, the activation and what is multiplied at last. Scores are never kept. With
    selective recompute what `meshcomm.parallel.recompute.KEPT` names: the input, products, attention, and what ranks sent
    each other. experts: of a layer with experts, evenly loaded: of each choice its row there and back, and a feed-forward.
    """
    count, width, split = work.tokens(sizes), work.width, sizes.tensor
    slots = work.experts_per_token if experts else 1
    queries, keys = work.heads * work.head_size / split, work.kv_heads * work.head_size / split
    inner = slots * work.ff / split
    between = width / split if work.sequence_parallel else width
    whole = 2 * between + 2 * width + 3 * queries + 2 * keys + 2 * (work.ff_matrices - 1) * inner
    products = 3 * between + 2 * queries + 2 * keys + (work.ff_matrices - 1) * inner
    if work.sequence_parallel:
        products += 2 * width
    wide = max(4, work.activation_bytes)
    beside = wide * work.heads / split
    if experts:
        whole += 2 * slots * width
        products += slots * width * (3 if sizes.expert > 1 else 1)
        # Probabilities, in order and not, and which is where.
        beside += work.experts * (2 * wide + 8)
    element = work.activation_bytes
    return Kept(
        count * between * element, count * (products * element + beside), count * (whole * element + beside)
    )


def _passing(work: Workload, sizes: Sizes) -> float:
    """What the backward pass of a feed-forward needs: gradients of its three products, and of what it gave."""
    slots = work.experts_per_token if work.expert_layers else 1
    return work.tokens(sizes) * work.activation_bytes * (3 * slots * work.ff / sizes.tensor + work.width)


def _activations(work: Workload, sizes: Sizes) -> list[tuple[float, float]]:
    """Where a peak may be: what is kept, and what passes need for a time besides.

    In the backward pass of the last feed-forward, or of the loss, on the first stage's rank, which keeps as many
    micro-batches as its schedule has under way, and on the last one's, which has logits.
    """
    count, width, element = work.tokens(sizes), work.width, work.activation_bytes
    layers, with_experts = work.layers_of_rank(sizes), work.expert_layers_of_rank(sizes)
    here, sharded = held(work, sizes), work.shards(sizes) > 1
    dense, other = kept(work, sizes), kept(work, sizes, experts=True)
    largest = other if with_experts else dense
    # Autocast's copies of weights are kept with what was multiplied; FSDP gathers narrow ones.
    copied = 0 if sharded or element == work.weight_bytes else element
    row = count * width * element
    inner = count * element * work.ff / sizes.tensor * (work.experts_per_token if with_experts else 1)
    if work.recompute == "selective":
        each = (layers - with_experts) * dense.selective + with_experts * other.selective
        again = largest.whole - largest.selective + here.layer * copied
    else:
        done, of_experts = work.layers_again(sizes), work.expert_layers_again(sizes)
        each = (layers - with_experts - done + of_experts) * dense.whole
        each += (with_experts - of_experts) * other.whole + done * dense.entry
        each += (layers - done) * here.layer * copied
        again = largest.whole - largest.entry + here.layer * copied if done else 0.0
    # What multiplies last is let go. Of what is computed again norms count as the backward pass's own.
    again -= inner
    passing = _passing(work, sizes)
    if work.recompute:
        again, passing = again - 2 * row, passing + 2 * row
    split = 1 if work.vocabulary % sizes.tensor else sizes.tensor
    logits = count * max(4, element) * work.vocabulary / split
    ends = dense.entry + row
    # Logits that are split are there twice in forward, others' gradients twice in backward.
    loss = (logits, 0.0) if sizes.tensor > 1 else (0.0, 2 * logits)
    ranks, schedule, stages = sizes.pipeline, work.schedule, work.stages_per_rank
    if ranks == 1:
        return [(each + again, passing), (each + ends + logits + loss[0], loss[1])]
    number = sizes.microbatches
    first = microbatches_held(schedule, ranks, stages, number)
    last = microbatches_held_last(schedule, ranks, stages, number)
    if schedule == "zero_bubble":
        # Of passes whose second half is due later: gradients of all that products read.
        passing += min(number, ranks) / stages * layers * (2 * inner + 7 * row)
    # What a stage gives on is kept too; what it gets has memory for every micro-batch, but at the first stage.
    gets = stages * number * dense.entry
    of_first = first * (each + stages * dense.entry) + again, passing + gets - number * dense.entry
    # The last stage gives logits.
    piled, given = (
        last * each + (last - 1 / stages) * (ends + logits),
        last * logits * element / max(4, element),
    )
    of_last = piled + ends + again, passing + gets + given
    return [of_first, of_last, (piled + ends + logits + loss[0], loss[1] + gets + given)]
