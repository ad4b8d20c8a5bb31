"""Each fact of each operation, changed on one rank while calls are compared, and the table of docs/reference/promises.md."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from meshcomm.collectives import ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER, Collective
from meshcomm.testing import Pool
from meshcomm.transport.torch_private import HOOK_NAMES, arguments_of
from meshcomm.watching.compare import shortened
from meshcomm.watching.facts import facts_of_hook, is_refused
from meshcomm.watching.verdict import balanced, facts_match
from tests.comm import compared
from tests.comm.compared import ALONE, DONE, EVERY, OPERATIONS, OWN, PAGE, TOLD
from tests.group_hooks import needs_group_hooks
from tests.mesh.right_programs import WORLD, refused_calls

# Only here do the other ranks learn nothing: they have the right results.
ALONE_IN = {
    ("`mesh.gather` to the changed rank", "shape of out"),
}
# Processes compare numbers of elements.
STRICTER = {"`mesh.send` to the changed rank": {"shape of equally many elements"}}


@pytest.fixture(scope="module")
def tried(pool: Pool) -> dict[str, dict[str, str]]:
    return compared.all_tried(pool)


# A difference that is found while data moves costs the group, and a new mesh.
@pytest.mark.deep
@needs_group_hooks
def test_a_changed_fact_is_refused_or_may_differ(tried: dict[str, dict[str, str]]) -> None:
    wrong = []
    for name, operation in EVERY.items():
        for fact, ended in tried[name].items():
            expected = (DONE,) if fact not in operation.odd else (TOLD, OWN)
            if (name, fact) in ALONE_IN:
                expected = (ALONE,)
            if ended not in expected:
                wrong.append(f"{name}, {fact or 'unchanged'}: {ended}")
    assert wrong == []


@pytest.mark.deep
@needs_group_hooks
def test_the_table_of_the_page_is_what_was_found(tried: dict[str, dict[str, str]]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == compared.page(compared.table(tried)), "run: python -m tests.comm.compared"


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_simulator_refuses_the_same(name: str) -> None:
    operation = OPERATIONS[name]
    ended = {fact: compared.simulated(operation, changed) for fact, changed in operation.facts().items()}
    refused = {fact for fact, verdict in ended.items() if verdict in (TOLD, OWN)}
    assert refused == operation.odd.keys() | STRICTER.get(name, set()), ended
    assert compared.simulated(operation, {}) == DONE


def told(
    row: Collective, sent: list[int], got: list[int], coord: int, size: int, **arguments: Any
) -> dict[str, Any]:
    """The facts of a torch call with tensors of these numbers of elements, as another rank receives them."""
    inputs, outputs = ([torch.empty(n) for n in sizes] for sizes in (sent, got))
    given = SimpleNamespace(input_tensors=inputs, output_tensors=outputs, root=-1)
    facts: dict[str, Any] = json.loads(json.dumps(facts_of_hook(row, given, coord, size, arguments)))
    return facts


def test_lists_of_unequal_sizes_that_nccl_takes() -> None:
    sizes = [4, 3, 5]
    gathered = [told(ALL_GATHER, [n], sizes, coord, 3) for coord, n in enumerate(sizes)]
    scattered = [told(REDUCE_SCATTER, sizes, [n], coord, 3) for coord, n in enumerate(sizes)]
    assert facts_match(gathered) and facts_match(scattered)
    for wrong in ([4], [4, 4, 4]), ([3], [4, 3, 4]), ([2], sizes):
        assert not facts_match([gathered[0], told(ALL_GATHER, *wrong, 1, 3), gathered[2]])
    assert not facts_match([scattered[0], told(REDUCE_SCATTER, [4, 4, 4], [4], 1, 3)])


def odd_calls_of_which_torch_sends_something(rank: int) -> list[Callable[[], Any]]:
    one, n = torch.ones, WORLD
    return [
        lambda: dist.all_gather([one(4)[::2] for _ in range(n)], one(4)[::2]),
        lambda: dist.all_gather_into_tensor(one(4 * n)[::2], one(2)),
        lambda: dist.all_gather_into_tensor(one(2 * n, 3), one(2, 3)),
        lambda: dist.gather(one(2), [one(2)] * n if rank == 1 else None, 1),
        lambda: dist.scatter(one(2), [one(2)] * n if rank == 1 else None, 1),
        lambda: dist.reduce_scatter(one(2), [one(2)] * n),
        lambda: dist.reduce_scatter_tensor(one(1, 2), one(n, 2)),
        lambda: dist.all_to_all([one(1)] * n, [one(1)] * n),
        lambda: dist.all_to_all_single(one(n), one(n)),
        lambda: dist.all_to_all_single(one(n), one(n), [1] * n, [1] * n),
        lambda: dist.all_reduce(one(3).to_sparse()),
        lambda: dist.all_reduce_coalesced([one(3), one(2)]),
        lambda: dist.send(one(1), 1) if rank == 0 else dist.recv(one(1)) if rank == 1 else None,
        dist.barrier,
    ]


def predicted_and_sent() -> tuple[list[Any], list[Any]]:
    """For each call: whether `is_refused` predicts that torch refuses it, and whether torch did; empty if no group is called."""
    dist.init_process_group("gloo")
    rank, said, sent = dist.get_rank(), [], []
    group: Any = dist.group.WORLD

    def before(given: Any) -> None:
        arguments = arguments_of(sys._getframe(1))
        said[-1].append(is_refused(HOOK_NAMES[int(given.name)], given, WORLD, True, arguments))

    group.register_pre_hook(1, before)
    group.register_post_hook(1, lambda given: sent[-1].append(False))
    for call in (*refused_calls(rank), *odd_calls_of_which_torch_sends_something(rank)):
        said.append([])
        sent.append([])
        try:
            call()
        except (RuntimeError, ValueError):
            sent[-1] += [True] * len(said[-1])
    group.unregister_pre_hook(1)
    group.unregister_post_hook(1)
    dist.barrier()
    dist.destroy_process_group()
    return said, sent


@needs_group_hooks
def test_what_torch_refuses_is_known_before(pool: Pool) -> None:
    for said, sent in pool.run(predicted_and_sent, ranks=WORLD):
        assert said == sent


@pytest.mark.parametrize("size", [2, 3, 300])
def test_split_sizes_fit_or_do_not(size: int) -> None:
    """Holds for a group of any size, although the text of each call stays under 400 bytes."""
    random = np.random.default_rng(size)
    sends = random.integers(1, 9, (size, size))
    expects = sends.T.copy()

    def calls() -> list[dict[str, Any]]:
        return [
            told(
                ALL_TO_ALL,
                [sum(sends[coord])],
                [sum(expects[coord])],
                coord,
                size,
                input_split_sizes=sends[coord].tolist(),
                output_split_sizes=expects[coord].tolist(),
            )
            for coord in range(size)
        ]

    right = calls()
    assert balanced(right) and facts_match(right)
    assert all(len(json.dumps(shortened(each))) < 400 for each in right)
    # Sizes that do not divide among the ranks would be refused on this rank only.
    even = told(
        ALL_TO_ALL, [4 * size + 1], [4 * size + 1], 0, size, input_split_sizes=[], output_split_sizes=[]
    )
    assert even["balance"] is None and not balanced([even, *right[1:]])
    # Two errors on one rank that keep its total, and two errors on two ranks that keep the overall sum.
    for places in ([(0, 0), (0, 1)], [(0, 1), (1, 0)]):
        expects = sends.T.copy()
        expects[places[0]] += 1
        expects[places[1]] -= 1
        assert not balanced(calls())
