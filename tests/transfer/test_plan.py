"""Plans of transfers between random placements, beside what torch.chunk puts on each rank."""

from __future__ import annotations

import random
from math import prod

import numpy as np
import pytest
import torch

from meshcomm.layout import Layout
from meshcomm.transfer.explain import counts
from meshcomm.transfer.placement import Located, Placement
from meshcomm.transfer.plan import Ends, Entry, Loads, Pieces, Plan, pieces, sliced
from tests.transfer.oracle import Case, random_axes, random_case, random_grid


def located(case: Case) -> Located:
    return Located(
        Placement.read(case.text, None, case.sizes, case.at),
        Layout(case.grid.dims, rank_order=case.grid.order),
    )


def random_ends(seed: int) -> tuple[Case, Case, Ends]:
    draw = random.Random(seed)
    axes = random_axes(draw, draw.randint(0, 3))
    first = draw.choice([0, 0, 3, 8])
    source = random_case(draw, random_grid(draw, "xyz", 0), axes, at=True)
    target = random_case(draw, random_grid(draw, "uvw", first), axes, at=True)
    ranks = sorted({*source.grid.order, *target.grid.order})
    numbers = [np.array([ranks.index(rank) for rank in case.grid.order]) for case in (source, target)]
    nodes = np.arange(len(ranks)) // draw.choice([1, 2, 4]) if draw.random() < 0.5 else None
    layouts = [Layout(case.grid.dims, rank_order=case.grid.order) for case in (source, target)]
    return source, target, Ends(*layouts, *numbers, nodes)


@pytest.mark.parametrize("block", range(8))
def test_every_element_arrives_once(block: int) -> None:
    """Each target gets each of its elements once, from a rank that holds it, and sends nothing that it holds."""
    for seed in range(block * 125, (block + 1) * 125):
        source, target, ends = random_ends(seed)
        shape = tuple(sum(size for _, size, _ in axis) for axis in source.axes)
        whole = torch.arange(1, 1 + prod(shape)).reshape(shape)
        parts = pieces(located(source), located(target), ends)
        held = {int(ends.source_ranks[at]): source.part(whole, at) for at in range(len(source.grid.order))}
        for at in range(len(target.grid.order)):
            number, wanted = int(ends.target_ranks[at]), target.part(whole, at)
            arrived = []
            for giver, begin, end in _rows(parts, number):
                piece = whole[tuple(slice(a, b) for a, b in zip(begin, end, strict=True))].flatten()
                of_giver = held[giver]
                assert of_giver is not None and torch.isin(piece, of_giver).all(), seed
                arrived.append(piece)
            got = torch.cat(arrived).sort().values if arrived else torch.zeros(0, dtype=torch.int64)
            want = torch.zeros(0, dtype=torch.int64) if wanted is None else wanted.flatten().sort().values
            assert torch.equal(got, want), seed
            own = held.get(number)
            remote = sum(int(n) for n in parts.of((parts.target == number) & ~parts.is_local).elements)
            mine = 0 if own is None else int(torch.isin(want, own).sum())
            assert remote == len(want) - mine, seed


@pytest.mark.parametrize("block", range(4))
def test_a_rank_computes_its_own_pieces(block: int) -> None:
    """The pieces of one sender and of one receiver are the rows of the whole plan, in the same order."""
    for seed in range(block * 50, (block + 1) * 50):
        source, target, ends = random_ends(seed)
        a, b = located(source), located(target)
        every = pieces(a, b, ends)
        for at, number in enumerate(ends.source_ranks):
            _same(pieces(a, b, ends, sender=at), every.of(every.source == number), seed)
        for at, number in enumerate(ends.target_ranks):
            _same(pieces(a, b, ends, receiver=at), every.of(every.target == number), seed)


@pytest.mark.parametrize("block", range(4))
def test_boxes_are_the_parts_of_chunk(block: int) -> None:
    """A rank's boxes, at their places in its memory, are what torch.chunk gives it."""
    for seed in range(block * 100, (block + 1) * 100):
        source, _, _ = random_ends(seed)
        where = located(source)
        whole = torch.arange(prod(where.placement.shape)).reshape(where.placement.shape)
        for at in range(len(source.grid.order)):
            wanted = source.part(whole, at)
            if wanted is None:
                assert where.boxes(at) == [], seed
                continue
            assert where.local_shape(at) == wanted.shape, seed
            memory = torch.full(wanted.shape, -1)
            for box in where.boxes(at):
                room = tuple(slice(a, a + n) for a, n in zip(box.local, box.shape, strict=True))
                memory[room] = whole[tuple(slice(a, b) for a, b in zip(box.begin, box.end, strict=True))]
            assert torch.equal(memory, wanted), seed
        assert where.placement == Placement.read(source.text, None, source.sizes, source.at)
        assert Placement.of_facts(where.placement.facts()) == where.placement


def test_holders_send_the_same() -> None:
    """Copies of the source share the sending, for any number of copies on both sides."""
    for holders in range(1, 7):
        for readers in range(1, 7):
            source, target = (
                Layout({"dp": holders}),
                Layout({"copy": readers}, rank_order=range(10, 10 + readers)),
            )
            ends = Ends(source, target, np.arange(holders), holders + np.arange(readers))
            every = pieces(
                Located(Placement.read("n", (840,)), source),
                Located(Placement.read("n", (840,)), target),
                ends,
            )
            sent = np.bincount(every.source, every.elements, holders)
            assert (sent == 840 * readers / holders).all(), (holders, readers)


def _rows(parts: Pieces, number: int) -> list[tuple[int, list[int], list[int]]]:
    mine = parts.of(parts.target == number)
    return list(zip(mine.source.tolist(), mine.begin.tolist(), mine.end.tolist(), strict=True))


def _same(mine: Pieces, rows: Pieces, seed: int) -> None:
    assert all(np.array_equal(x, y) for x, y in zip(mine, rows, strict=True)), seed


@pytest.mark.parametrize("block", range(4))
@pytest.mark.deep_cases(r"\[[123]\]")  # more random cases of the same kind
def test_loads_and_rounds_are_what_all_ranks_send(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each rank computes for itself adds up to the loads; a round keeps to the bucket, or sends one row of each piece."""
    monkeypatch.setattr("meshcomm.transfer.plan._LEAST_STRIPED_BYTES", 0)
    for seed in range(block * 60, (block + 1) * 60):
        draw = random.Random(-seed - 1)
        source, target, ends = random_ends(seed)
        axes = [[(section.name, section.size) for section in axis] for axis in source.axes]
        entries = []
        for number in range(draw.randint(1, 3)):
            cases = [random_case(draw, case.grid, axes, at=True) for case in (source, target)]
            placements = [Placement.read(case.text, None, case.sizes, case.at) for case in cases]
            entries += [Entry(str(number), draw.choice([1, 2, 4]), *placements)] * draw.choice([1, 1, 2])
        stripes = draw.sample(list(target.grid.dims), draw.randint(0, len(target.grid.dims)))
        bucket, packed = draw.choice([8, 40, 100, 1000]), draw.choice([4, 10, 1000])
        monkeypatch.setattr("meshcomm.transfer.explain.PACKED_BYTES", packed)
        plan = Plan(ends, entries, stripes=ends.levels(stripes), bucket_bytes=bucket)
        loads, every = Loads(ends.size), {}
        for number, entry in enumerate(entries):
            for turn, leg in enumerate(plan.legs[number]):
                parts = [
                    pieces(leg.source, leg.target, leg.ends, receiver=at)
                    for at in range(len(ends.target_ranks))
                ]
                of_leg = every[number, turn] = Pieces(*map(np.concatenate, zip(*parts, strict=True)))
                for giver, taker, nbytes in zip(
                    of_leg.source, of_leg.target, of_leg.elements * entry.itemsize, strict=True
                ):
                    if giver == taker:
                        loads.copied[giver] += nbytes
                    else:
                        loads.sent[giver] += nbytes
                        loads.received[taker] += nbytes
        planned = plan.loads()
        for name in ("sent", "received", "copied"):
            assert getattr(planned, name).tolist() == getattr(loads, name).tolist(), (seed, name)
        arrived, messages, sent = dict.fromkeys(every, 0), 0, 0
        for parts_of_round in plan.rounds():
            sums, rows = np.zeros((2, ends.size)), np.zeros((2, ends.size))
            peers = set()
            for part in parts_of_round:
                of_leg = every[part.entry, part.leg]
                begin, end = sliced(of_leg.begin, of_leg.end, part.chunk, part.chunks)
                slices = Pieces(of_leg.source, of_leg.target, begin, end)
                arrived[part.entry, part.leg] += int(slices.elements.sum())
                itemsize = entries[part.entry].itemsize
                row = of_leg.elements // np.maximum((of_leg.end - of_leg.begin).max(axis=1, initial=1), 1)
                for giver, taker, elements, in_row in zip(
                    slices.source, slices.target, slices.elements, row, strict=True
                ):
                    if giver != taker and elements:
                        large = elements * itemsize > packed
                        peers.add((giver, taker, sent if large else -1))
                        sent += 1
                        for direction, rank in enumerate((giver, taker)):
                            sums[direction, rank] += elements * itemsize
                            rows[direction, rank] += in_row * itemsize
            messages += len(peers)
            assert ((sums <= bucket) | (sums <= rows)).all(), seed
        assert counts(plan) == (messages, sent), seed
        assert arrived == {key: int(of_leg.elements.sum()) for key, of_leg in every.items()}, seed


def test_experts_of_different_ranks_are_sent_at_once() -> None:
    """64 experts by name, each on one of 8 ranks: a rank sends one after another, and 8 ranks send at the same time."""
    source, target = Layout({"ep": 8}), Layout({"copy": 2, "tp": 4}, range(8, 16))
    target_placement = Placement.read("n/tp k", (16, 8))
    entries = [
        Entry(
            f"{expert}",
            4,
            Placement.read("n k", (16, 8), at={"ep": [expert % 8]}),
            target_placement,
        )
        for expert in range(64)
    ]
    # Room for one expert on a sender, and for eight parts of a quarter on a receiver.
    plan = Plan(Ends.of(source, target), entries, bucket_bytes=2 * 16 * 8 * 4)
    rounds = [{part.entry % 8 for part in parts} for parts in plan.rounds()]
    assert rounds == [{*range(8)}] * 8
