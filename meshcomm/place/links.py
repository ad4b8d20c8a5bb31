"""Where the groups of many meshes lie, by arithmetic on sizes and strides, and what a call on them takes.

The same as meshcomm.topology.span and meshcomm.costs, for whole columns of meshes at once and without
their ranks; tests compare the two.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from meshcomm.costs import Operation
from meshcomm.place.memory import Floats
from meshcomm.place.sizes import Flags, Ints
from meshcomm.topology import Machine

# What place lets a backend choose from: NCCL's rings, its double tree, and rings level by level.
ALGORITHMS: Final = ("ring", "double_tree", "hierarchical", "pairwise", "message")
# Pieces that the double tree may cut the data into.
CHUNKS: Final = tuple(2**power for power in range(13))


class Groups(NamedTuple):
    """Groups of many meshes. size: ranks of one. hops: per level, how many units of the level below meet
    there. even: whether that is so of all groups; slowest: index of the slowest level that one crosses.
    """

    size: Ints
    hops: tuple[Ints, ...]
    even: Flags
    slowest: Ints


def groups(dims: list[tuple[Ints, Ints]], world: int, machine: Machine) -> Groups:
    """Groups along dims, given as (size, stride) columns; one mesh in each row.

    Ranks lie in the row-major order of the mesh, so the groups of a dim fill blocks of size * stride.
    """
    size = np.ones_like(dims[0][0])
    even = np.ones(len(size), dtype=np.bool_)
    slowest = np.zeros(len(size), dtype=np.int64)
    for number, _ in dims:
        size = size * number
    inside: list[Ints] = []
    for index, level in enumerate(machine.levels):
        if level.ranks == 0 or world <= level.ranks:
            inside.append(size)
            continue
        here = np.ones_like(size)
        for number, stride in dims:
            count, regular = _within(number, stride, level.ranks)
            here = here * count
            even &= regular
            crosses = (number > 1) & (level.ranks % (number * stride) != 0)
            slowest = np.where(crosses, index + 1, slowest)
        inside.append(here)
    hops = [inside[0]]
    for below, above in pairwise(inside):
        hops.append(np.maximum(above // np.maximum(below, 1), 1))
        even &= above % np.maximum(below, 1) == 0
    return Groups(size, tuple(hops), even, slowest)


def _within(number: Ints, stride: Ints, ranks: int) -> tuple[Ints, Flags]:
    """How many ranks of a group lie in one unit of `ranks`, and whether equally many do everywhere."""
    each = ranks // stride
    alone = (stride >= ranks) | (number == 1)
    fits = (ranks % stride == 0) & np.where(
        number <= each, each % np.maximum(number, 1) == 0, number % np.maximum(each, 1) == 0
    )
    count = np.where(alone, 1, np.minimum(number, np.maximum(each, 1)))
    return count, alone | fits


def seconds(operation: Operation, where: Groups, size_bytes: Floats, machine: Machine) -> Floats:
    """The time of one call, by the fastest of ALGORITHMS; 0 for groups of one."""
    alphas = np.array([float(level.alpha_s) for level in machine.levels])
    betas = np.array([float(level.beta_s) for level in machine.levels])
    alpha, beta = alphas[where.slowest], betas[where.slowest]
    n = where.size.astype(np.float64)
    if operation == "sendrecv":
        found = alpha + beta * size_bytes
    elif operation == "all_to_all":
        flat = (n - 1) * alpha + (n - 1) / n * size_bytes * beta
        found = np.where(where.even, _pairwise(where, size_bytes, alphas, betas), flat)
    elif operation in ("all_gather", "reduce_scatter", "all_reduce"):
        rounds = 2 if operation == "all_reduce" else 1
        found = rounds * ((n - 1) * alpha + (n - 1) / n * size_bytes * beta)
        by_level = _by_level(where, size_bytes, alphas, betas, rounds)
        found = np.where(where.even, np.minimum(found, by_level), found)
        if operation == "all_reduce":
            found = np.minimum(found, _double_tree(n, size_bytes, alpha, beta))
    else:
        raise AssertionError(operation)
    return np.where(where.size > 1, found + float(machine.call_s), 0.0)


def _by_level(where: Groups, size_bytes: Floats, alphas: Floats, betas: Floats, rounds: int) -> Floats:
    total = np.zeros(len(where.size))
    share = np.ones(len(where.size))
    for hop, alpha, beta in zip(where.hops, alphas, betas, strict=True):
        total += rounds * ((hop - 1) * alpha + share * (hop - 1) / hop * size_bytes * beta)
        share = share / hop
    return total


def _pairwise(where: Groups, size_bytes: Floats, alphas: Floats, betas: Floats) -> Floats:
    total = np.zeros(len(where.size))
    inner = np.ones_like(where.size)
    for hop, alpha, beta in zip(where.hops, alphas, betas, strict=True):
        peers = inner * (hop - 1)
        total += peers * alpha + peers / where.size * size_bytes * beta
        inner = inner * hop
    return total


def _double_tree(n: Floats, size_bytes: Floats, alpha: Floats, beta: Floats) -> Floats:
    """formulas.double_tree, in the best of CHUNKS."""
    depth = 2 * np.ceil(np.log2(np.maximum(n, 1)))
    busiest = np.minimum(n, 4) / 2
    best = np.full(len(n), np.inf)
    for chunks in CHUNKS:
        steps = depth + chunks - 1
        moved = np.maximum(steps / (2 * chunks), busiest)
        best = np.minimum(best, steps * alpha + moved * size_bytes * beta)
    return best
