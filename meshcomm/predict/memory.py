"""How many bytes does a rank hold? Weights, gradients, AdamW's two moments, activations.

The largest rank: the one with most layers and the larger of the embedding and the head.
"""

from __future__ import annotations

from typing import NamedTuple

from meshcomm.predict.passes import microbatches_held
from meshcomm.predict.workload import Sizes, Workload


class Memory(NamedTuple):
    """Bytes of one rank."""

    weights: float
    gradients: float
    optimizer: float
    activations: float


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

    Weights, gradients and two moments are of the weights' dtype: 16 bytes for each float32 weight.
    Sharded (FSDP, ZeRO-3: Rajbhandari et al. 2020) each is divided by the shards, and one layer whole
    is there besides, of the activations' dtype; where they stay gathered all layers of the rank are, from the first
    to the last pass of a step.
    """
    here = held(work, sizes)
    experts = here.experts / work.expert_shards(sizes)
    shards = work.shards(sizes)
    share = (here.plain / shards + experts) * work.weight_bytes
    gathered = (here.layer if work.reshards(sizes) else here.all) * work.activation_bytes if shards > 1 else 0
    return Memory(share + gathered, share, 2 * share, _activations(work, sizes))


def _activations(work: Workload, sizes: Sizes) -> float:
    """Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models".

    A layer keeps s b h (10 + 24/t) bytes for a micro-batch at 2 bytes an element, all of it divided by t
    with sequence parallelism; scores are never kept, as their selective recomputation or flash
    attention has it; with full recompute s b h 2 for each layer, and one layer whole. With selective recompute what
    `meshcomm.parallel.recompute.KEPT` names: a layer's input, its products of matrices, attention, and what ranks sent
    each other. The first stage keeps as many micro-batches as its schedule has under way.
    """
    unit = work.tokens(sizes) * work.width * work.activation_bytes / 2
    if work.sequence_parallel:
        layer, kept = unit * 34 / sizes.tensor, unit * 2 / sizes.tensor
    else:
        layer, kept = unit * (10 + 24 / sizes.tensor), unit * 2
    number = microbatches_held(work.schedule, sizes.pipeline, work.stages_per_rank, sizes.microbatches)
    layers, again = work.layers_of_rank(sizes), work.layers_again(sizes)
    if work.recompute == "selective":
        return layers * _products(work, sizes) * number + layer
    return ((layers - again) * layer + again * kept) * number + (layer if again else 0)


def _products(work: Workload, sizes: Sizes) -> float:
    """Bytes of a layer with selective recompute: an expert layer's share of the layers counted in."""
    share = work.expert_layers / work.layers
    inner = 1 - share + share * work.experts_per_token
    split = 2 * (work.heads + work.kv_heads) * work.head_size + 2 * inner * work.ff
    # Its input, and what attention and the feed-forward add to it.
    whole = 3.0 * work.width
    if work.sequence_parallel:
        whole = whole / sizes.tensor + 2 * work.width
    if "expert" in work.parts:
        whole += 2 * share * work.experts_per_token * work.width
    return work.tokens(sizes) * work.activation_bytes * (whole + split / sizes.tensor)
