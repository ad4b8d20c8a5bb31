"""The order of samples: permutations, epochs, weights, and each rank's share of a global batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from meshcomm.train.data import Batches, Corpus, Stream
from meshcomm.train.data.batches import Order, permuted

TEXT = np.arange(1000, dtype=np.int64).astype(np.uint8)
ABC = Corpus((Stream(TEXT, 7),), b"")


def batches(coord: int = 0, size: int = 1, seed: int = 0, corpus: Corpus = ABC) -> Batches:
    return Batches(corpus, global_batch_size=12, seed=seed, coord=coord, size=size)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 65, 1000, 4097])
def test_a_permutation_takes_each_place_once_and_every_key_another(size: int) -> None:
    places = np.arange(size)
    orders = [permuted(places, size, [seed, 0, 0]) for seed in range(3)]
    assert all(sorted(order.tolist()) == places.tolist() for order in orders)
    if size >= 64:
        assert not np.array_equal(orders[0], orders[1]) and not np.array_equal(orders[0], places)
        # Neighbours are separated: about one pair in `size` remains.
        assert (np.diff(orders[0]) == 1).sum() < 8


def test_a_place_in_a_billion_samples_needs_no_list_of_them() -> None:
    places = permuted(np.arange(5_000_000_000, 5_000_001_000), 10**10, [1])
    assert len(set(places.tolist())) == 1000 and places.min() >= 0 and places.max() < 10**10
    # The places are spread over the whole range, and their distance is not constant.
    assert places.min() < 10**8 and places.max() > 99 * 10**8 and len(set(np.diff(places).tolist())) == 999


@pytest.mark.parametrize("size", [1, 2, 3, 12])
def test_data_ranks_share_out_the_same_global_batch(size: int) -> None:
    for step in (1, 2, 50):
        whole_batch = batches()(step)
        parts = [batches(coord, size)(step) for coord in range(size)]
        for index in (0, 1):
            assert torch.equal(torch.cat([part[index] for part in parts]), whole_batch[index])
            assert whole_batch[index].shape == (12, 7)


def test_an_epoch_reads_every_sample_once_and_the_next_in_another_order() -> None:
    # 142 samples: some epochs end within a step of 12.
    read = np.concatenate([batches().places(step)[1] for step in range(1, 143)])
    epochs = [read[start : start + 142].tolist() for start in range(0, 12 * 142, 142)]
    assert all(sorted(epoch) == list(range(142)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 12
    assert batches(seed=1).places(1)[1].tolist() != read[:12].tolist()


def test_samples_lie_side_by_side_and_targets_follow() -> None:
    _, numbers = batches().places(4)
    tokens, targets = batches()(4)
    for number, token, target in zip(numbers, tokens, targets, strict=True):
        assert token.tolist() == [value % 256 for value in range(7 * number, 7 * number + 7)]
        assert target.tolist() == [value % 256 for value in range(7 * number + 1, 7 * number + 8)]


def test_weights_are_shares_of_the_samples_and_no_part_repeats_before_its_end() -> None:
    order = Order([100, 300], [3.0, 1.0], seed=5)
    assert order.epoch == 400
    parts, samples = order.at(np.arange(1200))
    assert [(parts == part).sum() for part in (0, 1)] == [900, 300]
    assert np.bincount(samples[parts == 0], minlength=100).tolist() == [9] * 100
    assert np.bincount(samples[parts == 1], minlength=300).tolist() == [1] * 300
    # Every epoch of the whole has its share of each part, well mixed.
    assert all(250 < (parts[first : first + 400] == 0).sum() < 350 for first in (0, 400, 800))


def test_parts_with_epochs_of_their_own_are_in_another_order_by_seed_part_and_epoch() -> None:
    running = np.arange(200)
    orders = {
        (seed, part): Order([100, 100, 400], [1.0, 1.0, 1.0], seed)._again(running, 100, part).tolist()
        for seed in (1, 2)
        for part in (0, 1)
    }
    assert len({tuple(order) for order in orders.values()}) == 4
    assert all(order[:100] != order[100:] for order in orders.values())
    assert all(sorted(order[:100]) == list(range(100)) for order in orders.values())


def test_another_batch_goes_on_where_the_samples_are() -> None:
    before = [batches().places(step)[1] for step in (1, 2, 3, 4)]
    larger = Batches(ABC, global_batch_size=24, seed=0, after=(2, 24))
    assert larger.places(3)[1].tolist() == np.concatenate(before[2:]).tolist()
    assert larger.read(3) == 48
