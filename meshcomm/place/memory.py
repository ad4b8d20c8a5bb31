"""How many bytes does a rank hold? Weights, gradients, AdamW's two moments, activations.

The largest rank: the one with most layers and the larger of the embedding and the head.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshcomm.place.sizes import Sizes
from meshcomm.place.workload import Workload

Floats: TypeAlias = NDArray[np.float64]


class Memory(NamedTuple):
    """Bytes of one rank, one entry for each row of the sizes."""

    weights: Floats
    gradients: Floats
    optimizer: Floats
    activations: Floats

    @property
    def total(self) -> Floats:
        """All of them."""
        return self.weights + self.gradients + self.optimizer + self.activations


class Held(NamedTuple):
    """Weights that one rank holds, before sharding: plain ones and experts'; and those of one layer."""

    plain: Floats
    experts: Floats
    layer: Floats

    @property
    def all(self) -> Floats:
        """Both kinds."""
        return self.plain + self.experts


def layers_of_rank(work: Workload, sizes: Sizes) -> Floats:
    """Layers of the rank that has most, as if stages were cut evenly."""
    each = np.where(sizes.pipeline > 1, work.stages_per_rank, 1)
    return np.ceil(work.layers / (sizes.pipeline * each)) * each


def held(work: Workload, sizes: Sizes) -> Held:
    """Weights of the largest rank. Experts are split along expert and tensor, the rest along tensor."""
    layers = layers_of_rank(work, sizes)
    tensor = sizes.tensor.astype(np.float64)
    # Where only every n-th layer has experts, a rank has its share of them, rounded up.
    with_experts = np.ceil(layers * work.expert_layers / work.layers)
    dense = layers - with_experts
    norms = 2 * work.width
    router = work.width * work.experts
    one_expert = work.experts * work.expert_weights / sizes.expert / tensor
    # One rank of the pipeline has both tables only where there is one rank.
    tables = work.width * work.vocabulary * np.where((sizes.pipeline > 1) | work.tied, 1, 2) / tensor
    plain = layers * (work.attention_weights / tensor + norms) + dense * work.expert_weights / tensor
    plain = plain + with_experts * router + tables + work.width
    feed = one_expert if work.expert_layers else work.expert_weights / tensor
    return Held(plain, with_experts * one_expert, work.attention_weights / tensor + norms + feed)


def memory(work: Workload, sizes: Sizes) -> Memory:
    """Bytes of the largest rank.

    Weights, gradients and two moments are of the weights' dtype: 16 bytes for each float32 weight.
    Sharded (FSDP, ZeRO-3: Rajbhandari et al. 2020) each is divided by the shards, and one layer whole
    is there besides; with zero_bubble all layers of the rank are, from the first to the last pass.
    """
    here = held(work, sizes)
    share = here.all / sizes.shard * work.weight_bytes
    kept = (sizes.pipeline > 1) & (work.schedule == "zero_bubble")
    gathered = np.where(sizes.shard > 1, np.where(kept, here.all, here.layer) * work.weight_bytes, 0.0)
    return Memory(share + gathered, share, 2 * share, activations(work, sizes))


def activations(work: Workload, sizes: Sizes) -> Floats:
    """Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models".

    A layer keeps s b h (10 + 24/t) bytes for a micro-batch at 2 bytes an element, all of it divided by t
    with sequence parallelism; scores are never kept, as their selective recomputation or flash
    attention has it; with full recompute s b h 2 for each layer, and one layer whole. The first stage
    keeps as many micro-batches as its schedule has under way.
    """
    tensor = sizes.tensor.astype(np.float64)
    tokens = work.microbatch * work.sequence / sizes.context
    unit = tokens * work.width * work.activation_bytes / 2
    if work.sequence_parallel:
        layer, kept = unit * 34 / tensor, unit * 2 / tensor
    else:
        layer, kept = unit * (10 + 24 / tensor), unit * 2
    layers = layers_of_rank(work, sizes)
    stored = layers * (kept if work.recompute else layer) * microbatches_held(work, sizes)
    return stored + (layer if work.recompute else 0.0)


def microbatches_held(work: Workload, sizes: Sizes) -> Floats:
    """Micro-batches, each counted with all of a rank's layers, that the first rank keeps at most.

    gpipe all; 1f1b one for each rank (Narayanan et al. 2019); interleaved 1 + (p - 1) / (p v) as many
    (Narayanan et al. 2021, Korthikanti et al. 2022); zero bubble in its first form, with weights' passes
    put off by as many as forward ones run ahead, as interleaved.
    """
    ranks = sizes.pipeline.astype(np.float64)
    number = sizes.microbatches.astype(np.float64)
    if work.schedule == "gpipe":
        return np.where(ranks > 1, number, 1.0)
    if work.schedule == "1f1b":
        return np.minimum(number, ranks)
    each = work.stages_per_rank
    return np.where(ranks > 1, np.minimum(number, ranks * (1 + (ranks - 1) / (ranks * each))), 1.0)
