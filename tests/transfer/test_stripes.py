"""Stripes on two levels: copies on several nodes gather them between equal places of the nodes, then copies of a node from each other."""

from __future__ import annotations

import random
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

import meshcomm
from meshcomm.layout import Layout
from meshcomm.testing import Pool
from meshcomm.transfer import bounds, link, plan
from meshcomm.transfer.placement import Ints, Placement
from meshcomm.transfer.plan import Ends, Entry, Plan, pieces
from tests.transfer.pairs import random_whole, same_bits

FEW, MANY = {"fsdp": 2}, {"fsdp": 64}


@pytest.mark.parametrize(
    ("source", "target", "node", "dims", "expected"),
    [
        # Without dims: what share a node, and all if the target has more ranks.
        (FEW, {"copy": 16}, 8, None, ["/copy%8", "/copy:2"]),
        (MANY, {"copy": 16}, 8, None, ["/copy%8"]),
        (MANY, {"copy": 16, "tp": 4}, 8, None, ["/copy%2/tp"]),
        (FEW, {"copy": 4, "tp": 8}, 8, None, ["/tp", "/copy"]),
        (MANY, {"copy": 4, "tp": 8}, 8, None, ["/tp"]),
        (MANY, {"copy": 2, "tp": 4}, 8, None, ["/copy/tp"]),
        # A node of three ranks: no run of neighbors along a dim of eight is always on one node.
        (MANY, {"copy": 8}, 3, None, []),
        (FEW, {"copy": 8}, 3, None, ["/copy"]),
        (FEW, {"copy": 6}, 4, None, ["/copy%2", "/copy:3"]),
        # Dims that were asked for.
        (MANY, {"copy": 16, "tp": 4}, 8, ["copy"], ["/copy%2", "/copy:8"]),
        (MANY, {"copy": 16, "tp": 4}, 8, [], []),
        (MANY, {"a": 4, "b": 4}, 8, ["ab"], ["/a%2/b", "/a:2"]),
        (MANY, {"copy": 4}, 0, ["copy"], ["/copy"]),
        (MANY, {"copy": 4}, 0, None, []),
    ],
)
def test_levels(
    source: dict[str, int], target: dict[str, int], node: int, dims: list[str] | None, expected: list[str]
) -> None:
    merge = {"ab": ["a", "b"]} if "a" in target else None
    sides = (
        Layout(source),
        Layout(target, rank_order=range(64, 64 + np.prod([*target.values()])), merge=merge),
    )
    first = -(-64 // node) * node if node else 0
    ends = Ends.of(
        *sides, (lambda ranks: np.where(ranks < 64, -1, ranks - 64 + first) // node) if node else None
    )
    assert ["".join(map(str, splits)) for splits in ends.levels(dims)] == expected


def node_of(size: int, ranks: Ints) -> Ints:
    return ranks // size


@pytest.mark.parametrize("block", range(4))
def test_every_element_enters_a_node_once(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank receives each element once, each node as few bytes as possible, and sources send equal shares."""
    monkeypatch.setattr(plan, "_LEAST_STRIPED_BYTES", 0)
    legs_seen = set()
    for seed in range(block * 40, (block + 1) * 40):
        draw = random.Random(seed)
        node, tp, copies = draw.choice([2, 4, 8]), draw.choice([1, 2, 4]), draw.choice([2, 4, 6, 8])
        source = Layout({"fsdp": draw.choice([2, 4]), "dp": draw.choice([1, 2])})
        target = Layout({"copy": copies, "tp": tp}, rank_order=range(8, 8 + copies * tp))
        n, k = draw.choice([64, 96, 41]), draw.choice([1, 8, 7])
        texts = draw.choice(["n/fsdp k", "n k/fsdp"]), draw.choice(["n/tp k", "n k/tp"])
        entry = Entry("w", 2, *(Placement.read(text, (n, k)) for text in texts))
        ends = Ends.of(source, target, partial(node_of, node))
        transfer = Plan(ends, [entry], stripes=ends.levels(draw.choice([None, ["copy"]])))
        assert ends.nodes is not None
        need, nodes = bounds.received([entry], ends), ends.nodes
        received, entering = np.zeros(ends.size), np.zeros(int(nodes.max()) + 1)
        held = {number: np.zeros((n, k), dtype=int) for number in range(ends.size)}
        for at, number in enumerate(ends.source_ranks.tolist()):
            for box in transfer.legs[0][0].source.boxes(at):
                held[number][tuple(map(slice, box.begin, box.end))] = 1
        for leg in transfer.legs[0]:
            before = {number: memory.copy() for number, memory in held.items()}
            every = pieces(leg.source, leg.target, leg.ends)
            for giver, taker, begin, end in zip(*(values.tolist() for values in every), strict=True):
                index = tuple(map(slice, begin, end))
                assert before[giver][index].all(), seed
                if giver != taker:
                    held[taker][index] += 1
                    nbytes = 2 * held[taker][index].size
                    received[taker] += nbytes
                    entering[nodes[taker]] += nbytes * (nodes[giver] != nodes[taker])
        for at, number in enumerate(ends.target_ranks.tolist()):
            wanted = np.zeros((n, k), dtype=int)
            for box in transfer.legs[0][-1].target.boxes(at):
                wanted[tuple(map(slice, box.begin, box.end))] = 1
            assert np.array_equal(held[number], wanted), seed
        assert np.array_equal(received, need), seed
        legs_seen.add(len(transfer.legs[0]))
        aligned = node % tp == 0 and copies % (node // tp) == 0
        if aligned and len(transfer.legs[0]) > 1:
            assert np.array_equal(entering, bounds.received([entry], ends, nodes)), seed
    assert legs_seen >= {2, 3}


def striped(world: int, nodes_of: int) -> None:
    """Send tensors and versions with stripes to copies on two nodes. Called by: every rank of the job."""
    least = patch.object(plan, "_LEAST_STRIPED_BYTES", 0)
    with least, patch.object(link, "nodes_of", lambda _, ranks: ranks // nodes_of), ExitStack() as stack:
        source = stack.enter_context(meshcomm.init(dims={"fsdp": 2}, ranks=[0, 1], device="cpu"))
        # Ranks 2 and 3 are on the source's node, and 4 to 7 on the other one.
        few = stack.enter_context(
            meshcomm.init(dims={"copy": world - 2}, ranks=range(2, world), device="cpu")
        )
        both = stack.enter_context(meshcomm.init(dims={"copy": world // 2, "tp": 2}, device="cpu"))
        for target, text, stripes, levels in (
            (few, "n/fsdp k -> n k", None, ["/copy%2", "/copy:3"]),
            (few, "n k/fsdp -> n k", ["copy"], ["/copy%2", "/copy:3"]),
            (both, "n/fsdp k -> n/tp k", ["copy"], ["/copy%2", "/copy:2"]),
            (both, "n/fsdp k -> n k/tp", ["copy", "tp"], ["/copy%2/tp", "/copy:2"]),
        ):
            for bucket_bytes in (1000, 1 << 20):
                with meshcomm.link(source, target, stripes=stripes, bucket_bytes=bucket_bytes) as chosen:
                    assert chosen._settings["stripes"] == levels
                    for shape in ([24, 10], [50, 7], [1, 3], [96, 64]):
                        transfer_once(chosen, source, target, text, shape)
        with meshcomm.link(source, few, bucket_bytes=2000) as chosen:
            if chosen.is_member:
                check_weights(chosen, source)


def transfer_once(chosen: Any, source: Any, target: Any, text: str, shape: list[int]) -> None:
    whole = random_whole(shape, torch.bfloat16, sum(shape))
    given, wanted = (
        part(whole, side, of_side) if side.is_member else None
        for side, of_side in zip((source, target), text.split(" -> "), strict=True)
    )
    if not chosen.is_member:
        return
    out = (
        None if wanted is None else torch.full_like(wanted, torch.nan, memory_format=torch.contiguous_format)
    )
    chosen.transfer(None if given is None else given.clone(), out, text)
    assert wanted is None or (out is not None and same_bits(out, wanted)), (text, shape)


def part(whole: torch.Tensor, side: Any, text: str) -> torch.Tensor:
    """Return this rank's part by torch.chunk."""
    for axis, splits in enumerate(text.split()):
        for dim in splits.split("/")[1:]:
            chunks = whole.chunk(side.size(dim), axis)
            at = side.coord(dim)
            whole = chunks[at] if at < len(chunks) else whole.narrow(axis, 0, 0)
    return whole


def check_weights(chosen: Any, source: Any) -> None:
    wholes = [random_whole([40, 30], torch.bfloat16, seed) for seed in range(5)]
    model = {str(n): torch.full_like(whole, torch.nan) for n, whole in enumerate(wholes)}
    if source.is_member:
        model = {str(n): whole.clone() for n, whole in enumerate(wholes)}
    weights = chosen.weights(model)
    if source.is_member:
        weights.push(version=3).wait()
    else:
        assert weights.pull() == 3
        assert all(same_bits(model[str(n)], whole) for n, whole in enumerate(wholes))


def test_two_nodes_in_the_simulator() -> None:
    meshcomm.simulate(lambda mesh: striped(8, 4), dims={"all": 8})


def test_copies_that_gather_have_a_version_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of a node, if only they gather stripes from each other."""
    monkeypatch.setattr(link, "nodes_of", lambda _, ranks: ranks // 2)

    def program(_: meshcomm.Mesh) -> list[int]:
        with (
            meshcomm.init(dims={"fsdp": 4}, ranks=range(4)) as source,
            meshcomm.init(dims={"copy": 4}, ranks=range(4, 8)) as target,
            meshcomm.link(source, target) as chosen,
        ):
            copies: list[int] = chosen.weights({"w": torch.zeros(4)})._copies("copy").tolist()
            return copies

    assert meshcomm.simulate(program, dims={"all": 8}) == [[0, 0, 1, 1]] * 8


def striped_on_process() -> None:
    dist.init_process_group("gloo")
    try:
        striped(8, 4)
    finally:
        dist.destroy_process_group()


@pytest.mark.parity
def test_two_nodes_on_processes(pool: Pool) -> None:
    """Eight processes, as two nodes of four."""
    pool.run(striped_on_process, ranks=8)
