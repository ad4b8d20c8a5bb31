"""Which meshes of a world can train this? Sizes that the checks of a configuration let pass, and orders, each mesh once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from math import prod
from typing import Final, NamedTuple

from meshcomm.config.parallel import Part, runs
from meshcomm.layout.sizes import divisors
from meshcomm.predict.estimate import EXPERT_SHARD, REPLICA
from meshcomm.predict.workload import BASE, Sizes, Workload

# The parts whose ranks experts are spread over.
_BLOCK: Final[tuple[Part, ...]] = ("data", "shard", "context")


class Order(NamedTuple):
    """parts: of the base, outermost first. experts_inside: in the view, whether expert is inside replica."""

    parts: tuple[Part, ...]
    experts_inside: bool


def trainable(work: Workload, world: int) -> Iterator[Sizes]:
    """All sizes of the parts that are played whose product is `world`, and that the checks of a configuration
    would let pass, with their microbatches; those of expert divide the ranks beside pipeline and tensor.
    """
    for factors in _factors(world, sum(part in work.parts for part in BASE)):
        sizes = Sizes(**dict(zip([part for part in BASE if part in work.parts], factors, strict=True)))
        copies = sizes.data * sizes.shard
        if work.global_batch_size % (copies * work.micro_batch_size) or not _splits(work, sizes):
            continue
        sizes = sizes._replace(microbatches=work.global_batch_size // (copies * work.micro_batch_size))
        if "pipeline" in work.parts and not runs(work.schedule, sizes.microbatches, sizes.pipeline):
            continue
        experts = divisors(copies * sizes.context) if "expert" in work.parts else [1]
        yield from (sizes._replace(expert=n) for n in experts if n == 1 or work.experts % n == 0)


def orders(work: Workload, sizes: Sizes) -> Iterator[Order]:
    """Every order of the base's dims that is a mesh of its own, and one that a configuration may have; with
    experts both orders of their view.

    A dim of size 1 changes no group wherever it stands: it stands outermost, in BASE's order. Experts
    share the block of ranks that data, shard and context form, so nothing stands between those.
    """
    played = [part for part in BASE if part in work.parts]
    ones = [part for part in played if getattr(sizes, part) == 1]
    views = [True]
    if "expert" in work.parts and 1 < sizes.expert < sizes.data * sizes.shard * sizes.context:
        views.append(False)
    for parts in permutations(part for part in played if part not in ones):
        at = {part: place for place, part in enumerate(parts)}
        block = [at[part] for part in _BLOCK if part in at]
        if "expert" in work.parts and block and max(block) - min(block) >= len(block):
            continue
        yield from (Order((*ones, *parts), inside) for inside in views)


def strides(work: Workload, sizes: Sizes, order: Order) -> dict[str, tuple[int, int]]:
    """(size, stride) of every part's dim, and where experts are spread of expert, REPLICA, and with shard EXPERT_SHARD."""
    found: dict[str, tuple[int, int]] = {}
    step = 1
    for part in reversed(order.parts):
        found[part] = getattr(sizes, part), step
        step *= found[part][0]
    if "expert" in work.parts:
        # Their block begins where the innermost of those that have groups does.
        shared = [found[part] for part in _BLOCK if part in found]
        block = min((stride for size, stride in shared if size > 1), default=1)
        copies = prod(size for size, _ in shared) // sizes.expert
        inner, outer = (sizes.expert, copies) if order.experts_inside else (copies, sizes.expert)
        # All copies of experts are shards of them.
        beside = EXPERT_SHARD if "shard" in work.parts else REPLICA
        names = ("expert", beside) if order.experts_inside else (beside, "expert")
        found |= {REPLICA: (1, 1)} | dict(zip(names, ((inner, block), (outer, block * inner)), strict=True))
    return found


def _factors(world: int, count: int) -> Iterator[Sequence[int]]:
    """All ways to write `world` as a product of `count` factors, in their order, the first ascending."""
    if count <= 1:
        yield from [[world]] if count else [[]] * (world == 1)
        return
    for first in divisors(world):
        for rest in _factors(world // first, count - 1):
            yield [first, *rest]


def _splits(work: Workload, sizes: Sizes) -> bool:
    """Whether heads, layers and tokens can be split so: the rules of meshcomm.config.rules."""
    tensor, context, pipeline = sizes.tensor, sizes.context, sizes.pipeline
    divided = [
        work.num_heads,
        work.num_kv_heads,
        work.intermediate_size,
        *([] if work.whole_tables else [work.vocab_size]),
    ]
    if any(number % tensor for number in divided):
        return False
    if pipeline > 1 and work.num_layers < pipeline * work.stages_per_rank:
        return False
    if work.seq_len % (context * (2 if context > 1 and not work.ulysses else 1)):
        return False
    if work.sequence_parallel and work.seq_len // context % tensor:
        return False
    if work.ulysses and context > 1:
        # Heads are split evenly, and kv heads too or each equally often.
        mine = work.num_kv_heads // tensor
        return work.num_heads // tensor % context == 0 and (mine % context == 0 or context % mine == 0)
    return True
