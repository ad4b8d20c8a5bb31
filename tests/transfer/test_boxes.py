"""Pieces between boxes that are listed rank by rank, beside sets of elements."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
import torch

from meshcomm.transfer import boxes
from meshcomm.transfer.boxes import BoxPlan, Span, box_pieces
from meshcomm.transfer.plan import sliced

RANKS = 6


def elements(span: Span) -> set[tuple[int, ...]]:
    """The indices of the elements of a box."""
    return {*product(*(range(a, b) for a, b in zip(*span, strict=True)))}


def partition(draw: random.Random, shape: tuple[int, ...]) -> list[Span]:
    """Boxes that divide a tensor along each axis as a mesh would. Some may be empty."""
    spans: list[list[tuple[int, int]]] = []
    for size in shape:
        cuts = sorted(draw.choices(range(size + 1), k=draw.choice([0, 0, 1, 3])))
        spans.append([*zip([0, *cuts], [*cuts, size], strict=True)])
    return [(tuple(a for a, _ in axes), tuple(b for _, b in axes)) for axes in product(*spans)]


def held(draw: random.Random, shape: tuple[int, ...], lost: float) -> list[tuple[int, Span]]:
    """The boxes of some ranks, in the layout of a mesh or of two meshes. lost: how many of them nobody has."""
    return [
        (rank, span)
        for _ in range(draw.choice([1, 1, 2]))
        for span in partition(draw, shape)
        for rank in draw.sample(range(RANKS), draw.choice([1, 2, 4]))
        if draw.random() >= lost
    ]


@pytest.mark.parametrize("block", range(4))
def test_every_element_comes_once_from_a_rank_that_has_it(block: int) -> None:
    lacking = 0
    for seed in range(block * 100, (block + 1) * 100):
        draw = random.Random(seed)
        shape = tuple(draw.choices([0, 1, 3, 4, 7], k=draw.randint(0, 3)))
        source = held(draw, shape, draw.choice([0.0, 0.0, 0.3, 0.6]))
        target = [(rank, span) for span in partition(draw, shape) for rank in draw.sample(range(RANKS), 2)]
        pieces = box_pieces(tuple(source), tuple(target))
        known: list[set[tuple[int, ...]]] = [set() for _ in range(RANKS)]
        wanted: list[set[tuple[int, ...]]] = [set() for _ in range(RANKS)]
        for side, sets in ((source, known), (target, wanted)):
            for rank, span in side:
                sets[rank] |= elements(span)
        if not set().union(*wanted) <= set().union(*known):
            assert pieces is None, seed
            lacking += 1
            continue
        assert pieces is not None, seed
        arrived: list[list[tuple[int, ...]]] = [[] for _ in range(RANKS)]
        for giver, reader, *corners in zip(*(values.tolist() for values in pieces), strict=True):
            piece = elements((corners[0], corners[1]))
            # A piece lies within one box of each side.
            for rank, side in ((giver, source), (reader, target)):
                assert any(piece <= elements(span) for other, span in side if other == rank), seed
            # What a rank has, it takes from itself.
            assert giver == reader or not piece & known[reader], seed
            arrived[reader] += piece
        assert [sorted(indices) for indices in arrived] == [sorted(indices) for indices in wanted], seed
    assert lacking > 2


def test_holders_share_the_sending() -> None:
    """The readers of a part take equal shares from all ranks that still have it."""
    span = ((0, 0), (60, 2))
    pieces = box_pieces(tuple((rank, span) for rank in (0, 1, 4)), tuple((rank, span) for rank in range(6)))
    assert pieces is not None
    sent = np.bincount(pieces.source, pieces.elements * ~pieces.is_local, RANKS)
    assert sent.tolist() == [120, 120, 0, 0, 120, 0]


def test_rounds_fit_into_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """However large the tensors are, a rank sends and receives no more than a bucket at once."""
    monkeypatch.setattr(boxes, "BUCKET_BYTES", 64)
    draw = random.Random(0)
    sides: list[list[boxes.Spans]] = [[{} for _ in range(RANKS)] for _ in range(2)]
    for number in range(40):
        shape = (draw.choice([1, 2, 5, 40]), draw.choice([1, 3]))
        key = f"{number}", draw.choice([torch.float64, torch.bfloat16]), shape
        for side, ranks in zip(sides, (range(3), range(3, 6)), strict=True):
            for rank, rows in zip(ranks, torch.arange(shape[0]).chunk(3), strict=False):
                side[rank][key] = [((int(rows[0]), 0), (int(rows[-1]) + 1, shape[1]))]  # type: ignore[index]
    plan = BoxPlan(*sides)
    assert not plan.lacking
    for parts in plan.rounds():
        for rank, sends in product(range(RANKS), (True, False)):
            nbytes = 0
            for part in parts:
                mine = plan.own(part, rank, sends)
                begin, end = sliced(mine.begin, mine.end, part.chunk, part.chunks)
                nbytes += int((end - begin).prod(axis=1).sum()) * plan.itemsizes[part.entry]
            assert nbytes <= 64
