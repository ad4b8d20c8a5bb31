"""In which orders can the parts' dims stand, each mesh once?"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, permutations
from typing import NamedTuple

import numpy as np

from meshcomm.config.parallel import Part
from meshcomm.place.sizes import BASE, Flags, Ints, Sizes
from meshcomm.place.traffic import REPLICA
from meshcomm.place.workload import Workload


class Order(NamedTuple):
    """parts: of the base, outermost first. experts_inside: in the view, whether expert is inside replica."""

    parts: tuple[Part, ...]
    experts_inside: bool


def orders(work: Workload) -> Iterator[Order]:
    """Every order of the base's dims, and with experts both orders of their view."""
    played = [part for part in BASE if part in work.parts]
    for parts in permutations(played):
        yield Order(parts, True)
        if "expert" in work.parts:
            yield Order(parts, False)


def distinct(work: Workload, sizes: Sizes, order: Order) -> Flags:
    """The rows for which this order is a mesh of its own, and one that a configuration may have.

    A dim of size 1 changes no group wherever it stands: it stands outermost, in BASE's order. Beside
    tensor, copies stand outside their shards (a rule of meshcomm.config.combination_checks); experts
    share the block of ranks that data and context form, so nothing stands between those.
    """
    good = np.ones(len(sizes.tensor), dtype=np.bool_)
    for before, after in pairwise(order.parts):
        trivial = sizes.of(after) == 1
        # A size of 1 behind a larger one, or two of them out of order.
        good &= ~(trivial & ((sizes.of(before) > 1) | (BASE.index(before) > BASE.index(after))))
    if {"data", "shard", "tensor"} <= set(order.parts) and (
        order.parts.index("data") > order.parts.index("shard")
    ):
        good &= (sizes.data == 1) | (sizes.shard == 1)
    if "expert" in work.parts:
        split = sizes.data * sizes.context
        inside = np.zeros_like(good)
        done = np.zeros_like(good)
        for part in order.parts:
            number = sizes.of(part)
            if part in ("data", "context"):
                good &= ~(done & (number > 1))
                inside |= number > 1
            else:
                done |= inside & (number > 1)
        if not order.experts_inside:
            good &= (sizes.expert > 1) & (sizes.expert < split)
    return good


def strides(work: Workload, sizes: Sizes, order: Order) -> dict[str, tuple[Ints, Ints]]:
    """(size, stride) of every part's dim, and of expert and REPLICA where experts are spread."""
    found: dict[str, tuple[Ints, Ints]] = {}
    step = np.ones_like(sizes.tensor)
    block = np.zeros_like(step)
    for part in reversed(order.parts):
        number = sizes.of(part)
        found[part] = number, step
        if part in ("data", "context"):
            # The innermost of the two that has groups is where the experts' block begins.
            block = np.where((block == 0) & (number > 1), step, block)
        step = step * number
    if "expert" in work.parts:
        block = np.maximum(block, 1)
        copies = sizes.data * sizes.context // sizes.expert
        inner = order.experts_inside
        found["expert"] = sizes.expert, block if inner else block * copies
        found[REPLICA] = copies, block * sizes.expert if inner else block
    return found
