"""Random programs of 50 calls: every rank's tensor after every call, against NumPy on all ranks at once."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import meshcomm
from meshcomm.layout import Layout
from meshcomm.testing import Pool

DIMS = {"pp": 2, "dp": 2, "tp": 2}
MERGE = {"model": ("pp", "tp"), "all": ("tp", "dp", "pp")}
NAMES = ("pp", "dp", "tp", "model", "all")
CALLS = 50

Call = tuple[str, str, int, int]


def step(call: Call, state: list[np.ndarray], layout: Layout) -> list[np.ndarray]:
    """What every rank holds after a call. Values stay whole numbers below 97: exact everywhere."""
    op, dims, a, b = call
    after = list(state)
    for row in layout.groups(dims):
        xs = [state[rank] for rank in row]
        n = len(xs)
        for c, rank in enumerate(row):
            x = xs[c]
            if op == "all_reduce":
                x = sum(xs) if a == 0 else np.max(xs, 0) if a == 1 else np.min(xs, 0)
            elif op == "broadcast":
                x = xs[a % n]
            elif op == "reduce":
                x = sum(xs) if c == a % n else x
            elif op == "gather_slice":  # all_gather along an axis, then one of the parts
                x = np.split(np.concatenate(xs, b), n, b)[a % n]
            elif op == "scatter":
                x = np.concatenate([np.split(xs[a % n], n, b)[c]] * n, b)
            elif op == "reduce_scatter":
                x = np.concatenate([np.split(sum(xs), n, b)[c]] * n, b)
            elif op == "all_to_all":
                parts = [np.split(each, n, b)[c] for each in xs]
                x = np.concatenate(parts, b)
            elif op == "shift":
                x = xs[(c - a) % n]
            elif op == "open_shift":
                x = xs[c - 1] if c > 0 else x
            elif op == "exchange":
                x = sum(xs) - x
            elif op == "list":
                x = sum(xs) * 2
            else:
                raise AssertionError(op)
            after[rank] = np.asarray(x) % 97
    return after


def execute(call: Call, x: torch.Tensor, mesh: Any) -> torch.Tensor:
    """The same on one rank, by communication."""
    op, dims, a, b = call
    n, c = mesh.size(dims), mesh.coord(dims)
    if op == "all_reduce":
        x = mesh.all_reduce(dims, x.clone(), ("sum", "max", "min")[a])
    elif op == "broadcast":
        x = mesh.broadcast(dims, x.clone(), src=a % n)
    elif op == "reduce":
        got = mesh.reduce(dims, x, a % n)
        x = x if got is None else got
    elif op == "gather_slice":
        x = mesh.all_gather(dims, x, b, async_op=True).wait().chunk(n, b)[a % n]
    elif op == "scatter":
        x = torch.cat([mesh.scatter(dims, x if c == a % n else None, a % n, b)] * n, b)
    elif op == "reduce_scatter":
        x = torch.cat([mesh.reduce_scatter(dims, x, b)] * n, b)
    elif op == "all_to_all":
        x = mesh.all_to_all(dims, x, b, b)
    elif op == "shift":
        x = mesh.shift(dims, x, a)
    elif op == "open_shift":
        got = mesh.shift(dims, x, 1, wrap=False)
        x = x if got is None else got
    elif op == "exchange":
        peers = [p for p in range(n) if p != c]
        outs = [(torch.zeros_like(x, memory_format=torch.contiguous_format), p) for p in reversed(peers)]
        x = sum(mesh.exchange(dims, [(x, p) for p in peers], outs))  # type: ignore[assignment]
    elif op == "list":
        one, two = mesh.all_reduce(dims, [x.clone(), x.to(torch.int32)])
        x = one + two
    return x % 97


def run_program(calls: list[Call], order: list[int]) -> list[list[Any]]:
    seen = []
    with meshcomm.init(dims=DIMS, merge=MERGE, rank_order=order, device="cpu", timeout_s=30) as mesh:
        x = start(mesh.rank)
        for number, call in enumerate(calls):
            x = execute(call, x, mesh)
            if number % 3 == 1:  # go on with memory that is not in order
                x = x.transpose(0, 1).contiguous().transpose(0, 1)
            seen.append(x.tolist())
    return seen


def start(rank: int) -> torch.Tensor:
    return (torch.arange(8 * 8 * 2).view(8, 8, 2) * (rank + 3)) % 97


OPS = (
    *("all_reduce", "broadcast", "reduce", "gather_slice", "scatter", "reduce_scatter", "all_to_all"),
    *("shift", "open_shift", "exchange", "list"),
)
calls = st.tuples(st.sampled_from(OPS), st.sampled_from(NAMES), st.integers(0, 2), st.integers(0, 1))


def check_program(program: list[Call], order: list[int], seen: list[list[Any]]) -> None:
    layout = Layout(DIMS, order, merge=MERGE)
    state = [start(rank).numpy() for rank in range(8)]
    for number, call in enumerate(program):
        state = step(call, state, layout)
        for rank in range(8):
            assert (np.array(seen[rank][number]) == state[rank]).all(), (number, call, rank)


@settings(max_examples=8, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    program=st.lists(calls, min_size=CALLS, max_size=CALLS),
    order=st.permutations(list(range(8))),
)
def test_random_programs(program: list[Call], order: list[int]) -> None:
    seen = meshcomm.simulate(lambda world: run_program(program, order), dims={"world": 8})
    check_program(program, order, seen)


def test_a_random_program_on_processes(pool: Pool) -> None:
    chance = random.Random(0)
    program = [
        (chance.choice(OPS), chance.choice(NAMES), chance.randrange(3), chance.randrange(2))
        for _ in range(30)
    ]
    order = chance.sample(range(8), 8)
    check_program(program, order, pool.run(run_program, program, order))
