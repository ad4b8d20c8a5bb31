"""Which sizes of the parts multiply to the world and can train this? All of them, as columns."""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshcomm.config.parallel import Part
from meshcomm.config.pipeline_checks import runs
from meshcomm.layout.sizes import divisors
from meshcomm.place.workload import Workload

Ints: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]

# The parts that lie along dims of the base, outermost first where nothing else decides.
BASE: Final[tuple[Part, ...]] = ("pipeline", "data", "shard", "context", "tensor")


class Sizes(NamedTuple):
    """One row for each factorisation; parts that are not played are 1. microbatches: of a rank and step."""

    pipeline: Ints
    data: Ints
    shard: Ints
    context: Ints
    tensor: Ints
    expert: Ints
    microbatches: Ints

    def of(self, part: Part) -> Ints:
        """A part's column."""
        column: Ints = getattr(self, part)
        return column

    def where(self, rows: Flags | Ints) -> Sizes:
        """Some of the rows."""
        return Sizes(*(column[rows] for column in self))


def factorisations(work: Workload, world: int) -> Sizes:
    """All sizes of the parts that are played whose product is `world`; those of expert divide the ranks
    beside pipeline and tensor. Not yet asked whether they can train.
    """
    small = np.array(divisors(world), dtype=np.int64)
    left = np.array([world], dtype=np.int64)
    columns: dict[str, Ints] = {}
    played = [part for part in BASE if part in work.parts]
    for index, part in enumerate(played):
        rows, picks = np.nonzero(left[:, None] % small[None, :] == 0)
        if index == len(played) - 1:
            # The last one takes what is left.
            columns[part] = left
            left = np.ones_like(left)
            break
        columns = {name: column[rows] for name, column in columns.items()}
        columns[part] = small[picks]
        left = left[rows] // small[picks]
    count = len(left)
    one = np.ones(count, dtype=np.int64)
    full = {part: columns.get(part, one) for part in BASE}
    keep = left == 1
    if not played:
        keep &= world == 1
    sizes = Sizes(**full, expert=one, microbatches=one).where(keep)
    if "expert" in work.parts:
        within = sizes.data * sizes.shard * sizes.context
        rows, picks = np.nonzero(within[:, None] % small[None, :] == 0)
        sizes = sizes.where(rows)._replace(expert=small[picks])
    return sizes


def trainable(work: Workload, sizes: Sizes) -> Sizes:
    """The rows that the checks of a configuration would let pass, their microbatches filled in.

    The same rules as meshcomm.config.training_checks, for all rows at once.
    """
    tensor, context, pipeline = sizes.tensor, sizes.context, sizes.pipeline
    fits = np.ones(len(tensor), dtype=np.bool_)
    if "tensor" in work.parts:
        for number in (work.heads, work.kv_heads, work.ff, work.vocabulary):
            fits &= number % tensor == 0
    if "pipeline" in work.parts:
        fits &= (pipeline == 1) | (work.layers >= pipeline * work.stages_per_rank)
    if "context" in work.parts:
        fits &= work.sequence % (context * np.where((context > 1) & (not work.ulysses), 2, 1)) == 0
        if work.ulysses:
            fits &= _heads(work, tensor, context)
    if work.sequence_parallel and "tensor" in work.parts:
        fits &= work.sequence // context % tensor == 0
    if "expert" in work.parts:
        fits &= work.experts % sizes.expert == 0
    copies = sizes.data * sizes.shard
    fits &= work.global_batch % (copies * work.microbatch) == 0
    sizes = sizes._replace(microbatches=work.global_batch // (copies * work.microbatch)).where(fits)
    if "pipeline" in work.parts:
        pairs, back = np.unique(np.stack([sizes.microbatches, sizes.pipeline]), axis=1, return_inverse=True)
        run = [runs(work.schedule, int(number), int(ranks)) for number, ranks in pairs.T]
        sizes = sizes.where(np.array(run, dtype=np.bool_)[back.reshape(-1)])
    return sizes


def _heads(work: Workload, tensor: Ints, context: Ints) -> Flags:
    """Ulysses: heads split evenly, and kv heads too or each equally often."""
    whole = (work.heads % tensor == 0) & (work.kv_heads % tensor == 0)
    mine = np.maximum(work.kv_heads // tensor, 1)
    even = (mine % context == 0) | (context % mine == 0)
    fits: Flags = (context == 1) | (whole & (work.heads // tensor % context == 0) & even)
    return fits
