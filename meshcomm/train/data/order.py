"""Which sample comes when? By the seed and the position alone, so that nothing of an order is stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

_ROUNDS = 6


def permuted(positions: Indices, size: int, key: Sequence[int]) -> Indices:
    """Where a permutation of range(size) takes `positions`, another one for each key.

    A balanced Feistel network over the next power of four, walked until the value is below size (Black and
    Rogaway, Ciphers with Arbitrary Finite Domains, 2002); its rounds mix as splitmix64 does.

    >>> sorted(permuted(np.arange(7), 7, [0, 1]).tolist())
    [0, 1, 2, 3, 4, 5, 6]
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = np.random.SeedSequence(list(key)).generate_state(_ROUNDS, np.uint64)
    values = positions.astype(np.uint64)
    left = np.ones(len(values), dtype=bool)
    while left.any():
        value = values[left]
        high, low = value >> half, value & mask
        for each in keys:
            high, low = low, high ^ (_mixed(low ^ each) & mask)
        values[left] = value = (high << half) | low
        left[left] = value >= size
    return values.astype(np.int64)


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@final
class Order:
    """Epochs over the samples of several parts, each epoch in an order of its own.

    sizes: samples of each part. weights: the share of an epoch that comes from each, in relation to one another; none:
    each sample once. A part that gives less than all of its samples to an epoch goes on in the next one, and one
    that gives more begins again, in another order.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int) -> None:
        self.sizes, self.seed = list(sizes), seed
        total = sum(self.sizes)
        if weights:
            shares = [weight / sum(weights) * total for weight in weights]
            self.counts = [max(1, round(share)) for share in shares]
        else:
            self.counts = self.sizes
        self.epoch = sum(self.counts)
        self._ends = np.cumsum(self.counts)

    def at(self, positions: Indices) -> tuple[Indices, Indices]:
        """Part and sample at these positions, counted from the beginning of the training."""
        parts, samples = np.empty_like(positions), np.empty_like(positions)
        for epoch in np.unique(positions // self.epoch):
            here = positions // self.epoch == epoch
            slots = permuted(positions[here] % self.epoch, self.epoch, [self.seed, 0, int(epoch)])
            part = np.searchsorted(self._ends, slots, side="right")
            parts[here] = part
            found = np.empty_like(slots)
            for index in np.unique(part):
                count, size, of = self.counts[index], self.sizes[index], part == index
                within = slots[of] - (self._ends[index] - count)
                found[of] = within if count == size else self._again(within + epoch * count, size, int(index))
            samples[here] = found
        return parts, samples

    def _again(self, running: Indices, size: int, part: int) -> Indices:
        """The sample of a part that has epochs of its own."""
        samples = np.empty_like(running)
        for round_ in np.unique(running // size):
            here = running // size == round_
            samples[here] = permuted(running[here] % size, size, [self.seed, part + 1, int(round_)])
        return samples
