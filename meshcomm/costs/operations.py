"""The alpha-beta time of each operation along a group, for every algorithm that could carry it out.

Sizes as nccl-tests count them: of all_gather and reduce_scatter the whole data, of all_to_all what one
rank sends in all, itself included, of the others the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, Final, Literal, TypeAlias, assert_never, get_args

from meshcomm.algorithms import formulas
from meshcomm.algorithms.formulas import Cost
from meshcomm.costs.lines import Line
from meshcomm.costs.route import Hop, Route
from meshcomm.errors import ConfigError
from meshcomm.layout.names import did_you_mean

Operation: TypeAlias = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "sendrecv"
]
OPERATIONS: Final[tuple[Operation, ...]] = get_args(Operation)
# Into how many chunks trees may cut the data.
CHUNKS: Final = tuple(2**power for power in range(13))
# One byte, exact: the formulas are even in the size.
_BYTE: Final[Any] = Fraction(1)


def named_operations(names: Sequence[str]) -> tuple[Operation, ...]:
    """The operations of these names; all where there is none. Raises ConfigError."""
    for name in names:
        if name not in OPERATIONS:
            raise ConfigError(
                f"no operation {name}",
                given=f"--op {name}",
                expected="one of " + ", ".join(OPERATIONS),
                hint=did_you_mean(name, OPERATIONS) or "--op all_reduce",
            )
    return tuple(each for each in OPERATIONS if each in names or not names)


def lines(operation: Operation, route: Route) -> list[Line]:
    """The time of every algorithm for `operation` along `route`.

    Algorithms that know no levels run all steps at the slowest link's alpha and beta; hierarchical ones,
    where the route is even and has two levels or more, run each level at its own. Groups of one take no
    time.
    """
    if route.ranks == 1:
        return [Line("none", 1, Fraction(0), Fraction(0))]
    found = _lines(operation, route)
    return [line._replace(fixed_s=line.fixed_s + route.call_s) for line in found]


def _lines(operation: Operation, route: Route) -> Iterator[Line]:
    levels = len(route.hops) > 1 and route.even
    flat = route.slowest
    n = flat.ranks
    match operation:
        case "all_reduce":
            yield _line("ring", formulas.ring(n, _BYTE), flat)
            yield _line("recursive_doubling", formulas.recursive_doubling(n, _BYTE), flat)
            yield _line("halving_doubling", formulas.halving_doubling(n, _BYTE), flat)
            for chunks in CHUNKS:
                yield _line("tree", formulas.tree(n, _BYTE, chunks), flat, chunks)
                yield _line("double_tree", formulas.double_tree(n, _BYTE, chunks), flat, chunks)
            if levels:
                yield _by_level("hierarchical", route, rounds=2)
        case "all_gather" | "reduce_scatter":
            yield _line("ring", _half_ring(n), flat)
            if n & (n - 1) == 0:
                yield _line("recursive", _half_ring(n)._replace(steps=n.bit_length() - 1), flat)
            if levels:
                yield _by_level("hierarchical", route, rounds=1)
        case "all_to_all":
            yield _pairwise(route)
            # log2 n rounds, rounded up, each with half of the data or less: Bruck et al. 1997.
            rounds = [sum(1 for i in range(n) if i >> bit & 1) for bit in range((n - 1).bit_length())]
            moved = Fraction(sum(rounds), n)
            yield Line("bruck", 1, len(rounds) * flat.alpha_s, moved * flat.beta_s)
        case "broadcast" | "reduce":
            for chunks in CHUNKS:
                # One way of a tree's two, see formulas.tree; an inner rank has two children, and its port
                # carries the data to or from both.
                steps = n.bit_length() - 1 + chunks - 1
                moved = max(Fraction(steps, chunks), Fraction(1 if n == 2 else 2))
                yield Line("tree", chunks, steps * flat.alpha_s, moved * flat.beta_s)
                chain = n - 1 + chunks - 1
                yield Line("chain", chunks, chain * flat.alpha_s, Fraction(chain, chunks) * flat.beta_s)
        case "sendrecv":
            yield Line("message", 1, flat.alpha_s, flat.beta_s)
        case _:
            assert_never(operation)


def _line(name: str, cost: Cost, hop: Hop, chunks: int = 1) -> Line:
    moved: Any = max(cost.path_bytes, cost.busiest_bytes)
    return Line(name, chunks, cost.steps * hop.alpha_s, Fraction(moved) * hop.beta_s)


def _half_ring(n: int) -> Cost:
    """One of a ring all-reduce's two halves, exact."""
    moved: Any = Fraction(n - 1, n)
    return Cost(n - 1, moved, moved, n * moved)


def _by_level(name: str, route: Route, rounds: int) -> Line:
    """Rings inside each level, and across it with what one unit of it has left: formulas.two_level_parts,
    for any number of levels. rounds: 2 for an all-reduce, 1 for each of its halves.
    """
    fixed = byte = Fraction(0)
    share = Fraction(1)
    for hop in route.hops:
        fixed += rounds * (hop.ranks - 1) * hop.alpha_s
        byte += rounds * share * Fraction(hop.ranks - 1, hop.ranks) * hop.beta_s
        share /= hop.ranks
    return Line(name, 1, fixed, byte)


def _pairwise(route: Route) -> Line:
    """Each rank sends to all others, one after the other, over the link that joins the two."""
    n = route.ranks
    fixed = byte = Fraction(0)
    inner = 1
    for hop in route.hops:
        peers = inner * hop.ranks - inner
        fixed += peers * hop.alpha_s
        byte += Fraction(peers, n) * hop.beta_s
        inner *= hop.ranks
    assert inner == math.prod(hop.ranks for hop in route.hops)
    return Line("pairwise", 1, fixed, byte)
