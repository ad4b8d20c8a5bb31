"""Alpha-beta times against schedules that run step by step, crossover points, and nccl-tests' bandwidths."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from pathlib import Path

import pytest

from meshcomm.algorithms import double_tree, halving_doubling, recursive_doubling, ring, tree, two_level
from meshcomm.config import load_config
from meshcomm.errors import ConfigError
from meshcomm.predict.links import Hop, Route, known_machine, span
from meshcomm.predict.times import (
    BACKENDS_OWN,
    COUNTED,
    OPERATIONS,
    Line,
    best,
    bus_factor,
    counted_bytes,
    fastest,
    lines,
    named_operations,
)
from meshcomm.show.units import bytes_text, read_bytes, seconds_text
from tests.algorithms.interpret import interpret
from tests.documents import tool

ROOT = Path(__file__).parents[2]
INNER, OUTER = (Fraction(2, 10**6), Fraction(1, 300 * 10**9)), (Fraction(10, 10**6), Fraction(1, 50 * 10**9))


def flat(n: int) -> Route:
    return Route((Hop(n, *OUTER),))


def named(found: list[Line], name: str, chunks: int = 1) -> tuple[Fraction, Fraction]:
    ((fixed_s, byte_s),) = [each[2:] for each in found if each[:2] == (name, chunks)]
    return fixed_s, byte_s


@pytest.mark.parametrize("n", [2, 3, 4, 5, 7, 8, 12, 16, 24])
def test_all_reduce_times_are_the_counts_of_schedules_that_were_run(n: int) -> None:
    alpha, beta = OUTER
    # All schedules cut this size evenly.
    size = math.lcm(n, 2 * 8, 1 << (n.bit_length() - 1)) * 1024
    found = lines("all_reduce", flat(n))
    made = {
        ("ring", 1): ring(n),
        ("recursive_doubling", 1): recursive_doubling(n),
        ("halving_doubling", 1): halving_doubling(n),
        **{("tree", k): tree(n, chunks=k) for k in (1, 2, 8)},
        **{("double_tree", k): double_tree(n, chunks=k) for k in (2, 4, 8)},
    }
    for key, schedule in made.items():
        counts = interpret(schedule, size_bytes=size)
        fixed_s, byte_s = named(found, *key)
        moved = max(counts.path_bytes, counts.busiest_bytes)
        assert fixed_s + byte_s * size == counts.steps * alpha + moved * beta, key


@pytest.mark.parametrize(("inner", "outer"), [(2, 2), (4, 3), (8, 16)])
def test_a_hierarchical_all_reduce_splits_its_levels(inner: int, outer: int) -> None:
    way = Route((Hop(inner, *INNER), Hop(outer, *OUTER)))
    fixed_s, byte_s = named(lines("all_reduce", way), "hierarchical")
    size = 1024 * inner * outer
    # Together, the steps and bytes of both levels equal the counts of a two_level run.
    counts = interpret(two_level(inner * outer, inner), size_bytes=size)
    inside, across = 2 * (inner - 1), 2 * (outer - 1)
    assert counts.steps == inside + across
    inner_bytes, outer_bytes = inside * size // inner, across * size // (inner * outer)
    assert counts.busiest_bytes == inner_bytes + outer_bytes
    expected = inside * INNER[0] + inner_bytes * INNER[1] + across * OUTER[0] + outer_bytes * OUTER[1]
    assert fixed_s + byte_s * size == expected
    # A gather and a scatter are its halves. An uneven route has no hierarchical algorithm.
    assert named(lines("all_gather", way), "hierarchical") == (fixed_s / 2, byte_s / 2)
    assert named(lines("reduce_scatter", way), "hierarchical") == (fixed_s / 2, byte_s / 2)
    assert "hierarchical" not in {line.name for line in lines("all_reduce", way._replace(even=False))}


@pytest.mark.parametrize("n", [2, 3, 5, 8, 13])
def test_the_other_operations_against_ranks_that_do_them(n: int) -> None:
    alpha, beta = OUTER
    # A ring gather: in each step, every rank passes on its newest block, until all ranks have all n blocks.
    blocks = [{rank} for rank in range(n)]
    newest = list(range(n))
    steps = 0
    while any(len(each) < n for each in blocks):
        newest = [newest[rank - 1] for rank in range(n)]
        for rank in range(n):
            blocks[rank].add(newest[rank])
        steps += 1
    assert named(lines("all_gather", flat(n)), "ring") == (steps * alpha, Fraction(steps, n) * beta)
    # Bruck's exchange has a round for each bit. Blocks whose distance has the bit move by its value.
    where = {(rank, to): rank for rank in range(n) for to in range(n)}
    rounds, most = 0, 0
    while 1 << rounds < n:
        moved = [pair for pair, at in where.items() if ((pair[1] - pair[0]) % n) >> rounds & 1]
        for pair in moved:
            where[pair] = (where[pair] + (1 << rounds)) % n
        most += len(moved) // n
        rounds += 1
    assert all(at == to for (_, to), at in where.items())
    exchanges = lines("all_to_all", flat(n))
    assert named(exchanges, "bruck") == (rounds * alpha, Fraction(most, n) * beta)
    assert named(exchanges, "pairwise") == ((n - 1) * alpha, Fraction(n - 1, n) * beta)
    assert named(lines("sendrecv", flat(n)), "message") == OUTER
    # A chain passes on eight pieces in sequence, one step at a time.
    has, clock = [8] + [0] * (n - 1), 0
    while has[-1] < 8:
        has = [8] + [has[i] + (has[i - 1] > has[i]) for i in range(1, n)]
        clock += 1
    assert named(lines("broadcast", flat(n)), "chain", 8) == (clock * alpha, Fraction(clock, 8) * beta)


def test_an_exchange_pays_each_link_for_the_peers_behind_it() -> None:
    fixed_s, byte_s = named(lines("all_to_all", Route((Hop(4, *INNER), Hop(2, *OUTER)))), "pairwise")
    assert fixed_s == 3 * INNER[0] + 4 * OUTER[0]
    assert byte_s == Fraction(3, 8) * INNER[1] + Fraction(4, 8) * OUTER[1]


def test_groups_of_one_take_no_time_calls_cost_what_is_said_and_backends_choose_among_their_own() -> None:
    for operation in OPERATIONS:
        assert fastest(operation, Route(()), 1 << 30).seconds(1 << 30) == 0
        plain, more = flat(4), flat(4)._replace(call_s=Fraction(7))
        pairs = zip(lines(operation, plain), lines(operation, more), strict=True)
        assert all(b.fixed_s == a.fixed_s + 7 and b.byte_s == a.byte_s for a, b in pairs)
        every = lines(operation, plain)
        own = [line for line in every if line.name in BACKENDS_OWN] or every
        least = min(line.seconds(4096) for line in own)
        assert fastest(operation, plain, 4096).seconds(4096) == least
    # The model knows faster algorithms than the backends.
    assert best(lines("all_reduce", flat(8)), 8).name == "recursive_doubling"
    assert fastest("all_reduce", flat(8), 8).name == "double_tree"


def test_which_of_two_algorithms_is_best_changes_at_the_size_by_hand() -> None:
    # With 8 ranks, recursive doubling takes 3 alpha + 3 S beta and halving-doubling 6 alpha + 7/4 S beta.
    every = lines("all_reduce", flat(8))
    found = {size: best(every, size).name for size in (1_199_999, 1_200_001)}
    assert list(found.values()) == ["recursive_doubling", "halving_doubling"]


def test_bus_bandwidth_as_nccl_tests_counts_it() -> None:
    # The table of nccl-tests' PERFORMANCE.md. By it, a ring's bus bandwidth equals the link's for any number of ranks.
    for n in (2, 3, 8, 24_576):
        for operation in OPERATIONS:
            table = {"all_reduce": Fraction(2 * (n - 1), n), "broadcast": 1, "reduce": 1, "sendrecv": 1}
            assert bus_factor(operation, n) == table.get(operation, Fraction(n - 1, n))
            assert bus_factor(operation, 1) == 1
        if n < 1000:
            _, byte_s = named(lines("all_reduce", flat(n)), "ring")
            assert bus_factor("all_reduce", n) / byte_s == 50 * 10**9


def test_24576_ranks_take_180_ms_by_ring_and_1_ms_by_double_tree_with_the_stated_constants() -> None:
    call, alpha = tool("algorithms").fitted()
    links = {"network": {"latency_us": alpha * 1e6, "bandwidth_gbytes_s": 25.0}}
    topology = {"ranks_per_node": 1, "links": links, "call_us": call * 1e6}
    config = load_config({"mesh": {"dims": {"dp": 24_576}}, "topology": topology})
    machine = known_machine(config.topology, "here")
    found = lines("all_reduce", span(config.layout(None).groups("dp"), machine).route)
    assert float(named(found, "ring")[0]) == pytest.approx(180e-3, rel=1e-9)
    assert float(named(found, "double_tree")[0]) == pytest.approx(1e-3, rel=1e-9)
    # A single alpha cannot give both times: with the ring's, the double tree is nine times too fast.
    alone = 180e-3 / (2 * 24_575)
    assert 2 * math.ceil(math.log2(24_576)) * alone == pytest.approx(0.11e-3, rel=0.01)
    text = (ROOT / "docs/guide/costs.md").read_text()
    assert f"alpha {alpha * 1e6:.2f} us and {call * 1e6:.0f} us for each call" in text


def test_wrong_operations_and_sizes() -> None:
    with pytest.raises(ConfigError, match=r'no operation allreduce\n(.*\n)*.*did you mean "all_reduce"\?'):
        named_operations(["allreduce"])
    assert named_operations(["sendrecv", "all_reduce"]) == ("all_reduce", "sendrecv")
    for text in ("", "12 pounds", "0", "-4", "0.5", "1.0001kB1"):
        with pytest.raises(ConfigError, match=re.escape(f"{text!r} is not a number of bytes")):
            read_bytes(text)
    assert [read_bytes(t) for t in ("1", "4KiB", "1.5kb", "2 GB")] == [1, 4096, 1500, 2_000_000_000]
    sizes = {0: "0 B", 999: "999 B", 1000: "1 kB", 2.5e9: "2.5 GB", 5e15: "5,000 TB"}
    assert [bytes_text(n) for n in sizes] == [*sizes.values()]
    times = {0: "0", 1e-9: "0.001 us", 2e-6: "2 us", 0.9999: "1 s", 5000: "5,000 s"}
    assert [seconds_text(s) for s in times] == [*times.values()]


ROOT = Path(__file__).parents[2]


def test_a_size_is_what_nccl_tests_counts() -> None:
    for operation in OPERATIONS:
        parts = operation in ("all_gather", "reduce_scatter", "all_to_all")
        assert counted_bytes(operation, 4096, "dp", 4) == 4096
        assert counted_bytes(operation, 4099, "dp", 3) == (4092 if parts else 4096)
        least = 12 if parts else 4
        assert counted_bytes(operation, least, "dp", 3) == least
        with pytest.raises(
            ConfigError, match=rf"bytes are too few for {operation} along dp\n(.*\n)*.*--bytes {least}"
        ):
            counted_bytes(operation, least - 1, "dp", 3)


def test_the_guide_has_the_sizes_and_factors() -> None:
    guide = (ROOT / "docs/guide/performance.md").read_text()
    for operation in OPERATIONS:
        (row,) = [line for line in guide.splitlines() if line.startswith(f"| {operation} | `mesh.")]
        *_, counted, factor = row.strip("| ").split(" | ")
        assert counted == COUNTED[operation]
        for n in (2, 7):
            assert eval(factor.replace("2 (", "2 * ("), {"n": n}) == pytest.approx(
                float(bus_factor(operation, n))
            )
