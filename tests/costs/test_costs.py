"""Alpha-beta times against schedules run step by step, crossover points, and nccl-tests' bandwidths."""

from __future__ import annotations

import json
import math
import random
import re
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshcomm.algorithms import (
    double_tree,
    halving_doubling,
    interpret,
    recursive_doubling,
    ring,
    tree,
    two_level,
)
from meshcomm.algorithms.page import fitted
from meshcomm.cli import app
from meshcomm.config import load
from meshcomm.costs import OPERATIONS, Hop, Line, Route, best, bus_factor, fastest_by_size, lines, route
from meshcomm.errors import ConfigError
from meshcomm.show.units import bytes_text, read_bytes, seconds_text
from meshcomm.topology import known_machine, span

ROOT = Path(__file__).parents[2]
INNER, OUTER = (Fraction(2, 10**6), Fraction(1, 300 * 10**9)), (Fraction(10, 10**6), Fraction(1, 50 * 10**9))


def flat(n: int) -> Route:
    return Route((Hop(n, *OUTER),))


def named(found: list[Line], name: str, chunks: int = 1) -> Line:
    (line,) = [each for each in found if (each.name, each.chunks) == (name, chunks)]
    return line


@pytest.mark.parametrize("n", [2, 3, 4, 5, 7, 8, 12, 16, 24])
def test_all_reduce_times_are_the_counts_of_schedules_that_were_run(n: int) -> None:
    alpha, beta = OUTER
    # A size that all of these cut evenly.
    size = math.lcm(n, 2 * 8, 1 << (n.bit_length() - 1)) * 1024
    found = lines("all_reduce", flat(n))
    made = {
        ("ring", 1): ring(n),
        ("recursive_doubling", 1): recursive_doubling(n),
        ("halving_doubling", 1): halving_doubling(n),
        **{("tree", k): tree(n, chunks=k) for k in (1, 2, 8)},
        **{("double_tree", k): double_tree(n, chunks=2 * k) for k in (1, 2, 4)},
    }
    for (name, chunks), schedule in made.items():
        if name == "double_tree":
            chunks = 2 * chunks
        counts = interpret(schedule, size_bytes=size)
        expected = counts.steps * alpha + max(counts.path_bytes, counts.busiest_bytes) * beta
        line = named(found, name, chunks)
        assert line.fixed_s + line.byte_s * size == expected, (name, chunks)


@pytest.mark.parametrize(("inner", "outer"), [(2, 2), (4, 3), (8, 16)])
def test_a_hierarchical_all_reduce_splits_its_levels(inner: int, outer: int) -> None:
    way = Route((Hop(inner, *INNER), Hop(outer, *OUTER)))
    line = named(lines("all_reduce", way), "hierarchical")
    size = 1024 * inner * outer
    # Steps and bytes of two_level, run: both levels' together are those of the schedule.
    counts = interpret(two_level(inner * outer, inner), size_bytes=size)
    inside, across = 2 * (inner - 1), 2 * (outer - 1)
    assert counts.steps == inside + across
    inner_bytes, outer_bytes = inside * size // inner, across * size // (inner * outer)
    assert counts.busiest_bytes == inner_bytes + outer_bytes
    expected = inside * INNER[0] + inner_bytes * INNER[1] + across * OUTER[0] + outer_bytes * OUTER[1]
    assert line.fixed_s + line.byte_s * size == expected
    # A gather and a scatter are its halves.
    for operation in ("all_gather", "reduce_scatter"):
        half = named(lines(operation, way), "hierarchical")  # type: ignore[arg-type]
        assert (2 * half.fixed_s, 2 * half.byte_s) == (line.fixed_s, line.byte_s)


@pytest.mark.parametrize("n", [2, 3, 5, 8, 13])
def test_the_other_operations_against_ranks_that_do_them(n: int) -> None:
    alpha, beta = OUTER
    # A ring gather: in each step each rank passes on the newest of n blocks, until all have all.
    blocks = [{rank} for rank in range(n)]
    newest = list(range(n))
    steps = 0
    while any(len(each) < n for each in blocks):
        newest = [newest[rank - 1] for rank in range(n)]
        for rank in range(n):
            blocks[rank].add(newest[rank])
        steps += 1
    gather = named(lines("all_gather", flat(n)), "ring")
    assert (gather.fixed_s, gather.byte_s) == (steps * alpha, Fraction(steps, n) * beta)
    # Bruck's exchange: in the round of each bit, blocks whose distance has it move by that much.
    where = {(rank, to): rank for rank in range(n) for to in range(n)}
    rounds, most = 0, 0
    while 1 << rounds < n:
        moved = [pair for pair, at in where.items() if ((pair[1] - pair[0]) % n) >> rounds & 1]
        for pair in moved:
            where[pair] = (where[pair] + (1 << rounds)) % n
        most += len(moved) // n
        rounds += 1
    assert all(at == to for (_, to), at in where.items())
    bruck = named(lines("all_to_all", flat(n)), "bruck")
    assert (bruck.fixed_s, bruck.byte_s) == (rounds * alpha, Fraction(most, n) * beta)
    pairwise = named(lines("all_to_all", flat(n)), "pairwise")
    assert (pairwise.fixed_s, pairwise.byte_s) == ((n - 1) * alpha, Fraction(n - 1, n) * beta)
    (message,) = lines("sendrecv", flat(n))
    assert (message.fixed_s, message.byte_s) == OUTER
    chain = named(lines("broadcast", flat(n)), "chain", 8)
    assert chain.fixed_s == (n - 1 + 7) * alpha
    assert chain.byte_s == Fraction(n - 1 + 7, 8) * beta


def test_an_exchange_pays_each_link_for_the_peers_behind_it() -> None:
    way = Route((Hop(4, *INNER), Hop(2, *OUTER)))
    line = named(lines("all_to_all", way), "pairwise")
    assert line.fixed_s == 3 * INNER[0] + 4 * OUTER[0]
    assert line.byte_s == Fraction(3, 8) * INNER[1] + Fraction(4, 8) * OUTER[1]


def test_groups_of_one_take_no_time_and_calls_cost_what_is_said() -> None:
    for operation in OPERATIONS:
        assert best(lines(operation, Route(())), 1 << 30).seconds(1 << 30) == 0
        plain, more = flat(4), flat(4)._replace(call_s=Fraction(7))
        pairs = zip(lines(operation, plain), lines(operation, more), strict=True)
        assert all(b.fixed_s == a.fixed_s + 7 and b.byte_s == a.byte_s for a, b in pairs)


# -- crossover points -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_the_fastest_by_size_is_the_least_of_all_everywhere(seed: int) -> None:
    chance = random.Random(seed)
    some = [
        Line(f"l{i}", 1, Fraction(chance.randrange(12)), Fraction(chance.randrange(12)))
        for i in range(chance.randrange(1, 9))
    ]
    found = fastest_by_size(some)
    sizes = [size for size, _ in found]
    assert sizes[0] == 0 and sizes == sorted(set(sizes))
    probes = {Fraction(n, 7) for n in range(120)} | set(sizes) | {s + Fraction(1, 10**9) for s in sizes}
    for probe in probes:
        least = min(line.fixed_s + line.byte_s * probe for line in some)
        here = [line for size, line in found if size <= probe][-1]
        assert here.fixed_s + here.byte_s * probe == least
    # At each point both neighbours are equal: it is exact.
    for (_, before), (size, after) in pairwise(found):
        assert before.fixed_s + before.byte_s * size == after.fixed_s + after.byte_s * size


def test_the_crossover_of_two_algorithms_by_hand() -> None:
    # 8 ranks: recursive doubling 3 alpha + 3 S beta, halving-doubling 6 alpha + 7/4 S beta.
    found = [(size, line.name) for size, line in fastest_by_size(lines("all_reduce", flat(8)))]
    assert found == [
        (0, "recursive_doubling"),
        (Fraction(3 * 10, 10**6) * 50 * 10**9 / Fraction(5, 4), "halving_doubling"),
    ]
    assert found[1][0] == 1_200_000


# -- conventions and published figures --------------------------------------------------------------


def test_bus_bandwidth_as_nccl_tests_counts_it() -> None:
    # The table of nccl-tests' PERFORMANCE.md.
    for n in (2, 3, 8, 24_576):
        assert bus_factor("all_reduce", n) == Fraction(2 * (n - 1), n)
        for operation in ("all_gather", "reduce_scatter", "all_to_all"):
            assert bus_factor(operation, n) == Fraction(n - 1, n)  # type: ignore[arg-type]
        for operation in ("broadcast", "reduce", "sendrecv"):
            assert bus_factor(operation, n) == 1  # type: ignore[arg-type]
    assert {bus_factor(operation, 1) for operation in OPERATIONS} == {1}


@pytest.mark.parametrize("n", [2, 8, 512])
def test_a_ring_s_bus_bandwidth_is_the_link_s_whatever_the_number_of_ranks(n: int) -> None:
    for operation in ("all_reduce", "all_gather", "reduce_scatter"):
        line = named(lines(operation, flat(n)), "ring")  # type: ignore[arg-type]
        assert bus_factor(operation, n) / line.byte_s == 50 * 10**9  # type: ignore[arg-type]


def test_24576_ranks_take_180_ms_by_ring_and_1_ms_by_double_tree_with_the_stated_constants() -> None:
    call, alpha = fitted()
    links = {"network": {"latency_us": alpha * 1e6, "bandwidth_gbytes_s": 25.0}}
    config = load(
        {
            "mesh": {"dims": {"dp": 24_576}},
            "topology": {"ranks_per_node": 1, "links": links, "call_us": call * 1e6},
        }
    )
    machine = known_machine(config.topology, "here")
    way = route(span(config.layout(None).groups("dp"), machine), machine)
    found = lines("all_reduce", way)
    assert named(found, "ring").seconds(0) == pytest.approx(180e-3, rel=1e-9)
    assert named(found, "double_tree").seconds(0) == pytest.approx(1e-3, rel=1e-9)
    # One alpha alone cannot give both: the ring's makes the double tree nine times too fast.
    alone = 180e-3 / (2 * 24_575)
    assert 2 * math.ceil(math.log2(24_576)) * alone == pytest.approx(0.11e-3, rel=0.01)
    text = (ROOT / "docs/guide/costs.md").read_text()
    assert f"alpha {alpha * 1e6:.2f} us and {call * 1e6:.0f} us for each call" in text


# -- routes of dims, and the command ----------------------------------------------------------------


def test_a_dim_s_route_has_its_levels() -> None:
    config = load(
        {
            "mesh": {"dims": {"pp": 4, "dp": 8, "tp": 2}, "merge": {"odd": ["pp", "tp"]}},
            "topology": {"ranks_per_node": 8, "nodes_per_rack": 2},
        }
    )
    machine = known_machine(config.topology, "here")
    layout = config.layout(None)
    ways = {name: route(span(layout.groups(name), machine), machine) for name in ("pp", "dp", "tp", "odd")}
    assert [hop.ranks for hop in ways["dp"].hops] == [4, 2]
    assert [hop.ranks for hop in ways["pp"].hops] == [4]
    assert ways["pp"].slowest.alpha_s == Fraction(10, 10**6)
    assert ways["tp"].slowest == Hop(2, *INNER)
    assert [hop.ranks for hop in ways["odd"].hops] == [2, 4]
    uneven = load({"mesh": {"dims": {"a": 4, "b": 6}}, "topology": {"ranks_per_node": 8}})
    machine = known_machine(uneven.topology, "here")
    way = route(span(uneven.layout(None).groups("b"), machine), machine)
    assert (way.even, way.hops) == (False, (Hop(6, *OUTER),))
    assert "hierarchical" not in {line.name for line in lines("all_reduce", way)}


def command(*words: str) -> Any:
    """`meshcomm` in this process: what a process prints is asked of `plan`, in its own tests."""
    return CliRunner().invoke(app, list(words))


def test_the_command_says_what_the_model_says() -> None:
    words = [
        "costs",
        str(ROOT / "configs/gpt_1024.toml"),
        "--world",
        "1024",
        "--op",
        "all_reduce",
        "--bytes",
        "64MB",
    ]
    facts: dict[str, Any] = json.loads(command(*words, "--json").stdout)
    tp = next(each for each in facts["dims"] if each["dim"] == "tp")
    (row,) = tp["rows"]
    assert (row["algorithm"], row["bytes"]) == ("halving_doubling", 64_000_000)
    seconds = 6 * 2e-6 + 1.75 * 64e6 / 300e9
    assert row["seconds"] == pytest.approx(seconds, rel=1e-12)
    assert row["algbw_gbytes_s"] == pytest.approx(64e6 / seconds / 1e9)
    assert row["busbw_gbytes_s"] == pytest.approx(1.75 * row["algbw_gbytes_s"])
    shown = command(*words)
    assert shown.exit_code == 0
    assert "all_reduce along tp: recursive_doubling, halving_doubling from 1.44 MB" in shown.stdout
    wrong = command("costs", str(ROOT / "configs/mesh.toml"))
    assert wrong.exit_code == 2
    assert "try:      --set topology.ranks_per_node=8" in wrong.stderr


def test_wrong_operations_and_sizes() -> None:
    from meshcomm.costs.operations import named_operations

    with pytest.raises(ConfigError, match=r'no operation allreduce\n(.*\n)*.*did you mean "all_reduce"\?'):
        named_operations(["allreduce"])
    assert named_operations(["sendrecv", "all_reduce"]) == ("all_reduce", "sendrecv")
    for text in ("", "12 pounds", "0", "-4", "0.5", "1.0001kB1"):
        with pytest.raises(ConfigError, match=re.escape(f"{text!r} is not a number of bytes")):
            read_bytes(text)
    assert [read_bytes(t) for t in ("1", "4KiB", "1.5kb", "2 GB")] == [1, 4096, 1500, 2_000_000_000]
    assert [bytes_text(n) for n in (0, 999, 1000, 2.5e9, 5e15)] == [
        "0 B",
        "999 B",
        "1 kB",
        "2.5 GB",
        "5,000 TB",
    ]
    assert [seconds_text(s) for s in (0, 1e-9, 2e-6, 0.9999, 5000)] == [
        "0",
        "0.001 us",
        "2 us",
        "1 s",
        "5,000 s",
    ]
