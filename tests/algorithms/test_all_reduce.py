"""Schedules are all-reduces with the costs of the formulas."""

from __future__ import annotations

import pytest

from meshcomm.algorithms import (
    Cost,
    Receive,
    Schedule,
    ScheduleStep,
    Send,
    double_tree,
    formulas,
    halving_doubling,
    recursive_doubling,
    ring,
    tree,
    two_level,
)
from meshcomm.algorithms.all_reduce import heap_place, in_order_place, twin_place
from meshcomm.algorithms.schedule import bounds
from meshcomm.errors import LayoutError
from tests.algorithms.interpret import interpret

# All small numbers of ranks, and larger ones around powers of two.
SIZES = (*range(1, 20), 31, 32, 33, 48, 63, 64)


def counted(schedule: Schedule, size_bytes: int) -> Cost:
    found = interpret(schedule, size_bytes)
    assert found.steps == schedule.steps
    return Cost(found.steps, found.path_bytes, found.busiest_bytes, found.total_bytes)


def test_counts_are_the_formulas() -> None:
    for n in SIZES:
        for chunks in (1, 2, 5):
            size = 12 * chunks
            assert counted(tree(n, chunks), size) == formulas.tree(n, size, chunks), n
            assert counted(double_tree(n, chunks), size) == formulas.double_tree(n, size, chunks), n
        assert counted(ring(n), 6 * n) == formulas.ring(n, 6 * n), n
        assert counted(recursive_doubling(n), 64) == formulas.recursive_doubling(n, 64), n
        assert counted(halving_doubling(n), 128) == formulas.halving_doubling(n, 128), n
        inners = [inner for inner in range(1, n + 1) if n % inner == 0]
        # The first and the last are rings. Large n run only every third of the others.
        for inner in inners if n < 20 else inners[1:-1:3]:
            assert counted(two_level(n, inner), 6 * n) == formulas.two_level(n, 6 * n, inner), (n, inner)


def test_what_crosses_between_the_levels_is_a_ring_of_a_part() -> None:
    n, inner, size = 12, 4, 120
    schedule, cuts = two_level(n, inner), bounds(size, n)
    across = [0] * n
    for coord in range(n):
        for step in schedule.of(coord):
            for send in step.sends:
                if send.peer // inner != coord // inner:
                    across[coord] += cuts[send.last] - cuts[send.first]
    assert set(across) == {formulas.ring(n // inner, size / inner).busiest_bytes} == {40}
    assert formulas.two_level(n, size, inner).busiest_bytes == formulas.ring(n, size).busiest_bytes == 220


def test_a_length_that_does_not_divide_is_reduced_too() -> None:
    for n in (2, 3, 5, 8, 13):
        for length in (1, 2, 7, 31):
            for schedule in (
                ring(n),
                tree(n, 4),
                double_tree(n, 3),
                recursive_doubling(n),
                halving_doubling(n),
            ):
                found = interpret(schedule, 4 * length, 4)
                assert found.steps <= schedule.steps
                assert found.total_bytes % 4 == 0
            assert interpret(ring(n), length).total_bytes == 2 * (n - 1) * length
    cuts = bounds(7, 3)
    assert cuts == [0, 3, 5, 7]
    assert bounds(2, 4) == [0, 1, 2, 2, 2]


def test_the_trees_are_trees_and_the_two_share_the_work() -> None:
    for n in (*SIZES, 127, 128, 129, 199):
        for place in (heap_place, in_order_place, twin_place):
            places = [place(n, rank) for rank in range(n)]
            roots = [rank for rank in range(n) if places[rank].depth == 0]
            assert len(roots) == 1
            assert sorted(child for each in places for child in each.children) == [
                rank for rank in range(n) if rank not in roots
            ]
            for rank, each in enumerate(places):
                assert len(each.children) <= 2
                for child in each.children:
                    assert (places[child].parent, places[child].depth) == (rank, each.depth + 1)
            height = max(each.depth for each in places)
            # The root has two children, or it is above a tree of all other ranks.
            assert height == (n.bit_length() - 1 if place is heap_place else (n - 1).bit_length())
        both = [r for r in range(n) if in_order_place(n, r).children and twin_place(n, r).children]
        assert both == ([0] if n % 2 and n > 1 else []), n


def changed(steps: list[ScheduleStep], coord: int, fault: str) -> list[ScheduleStep]:
    """The steps of one rank in a ring of four, with a fault."""
    if (fault == "unreduced" and coord == 2) or fault == "twice":
        at = 1 if coord == 2 and fault == "unreduced" else 3
        receives = tuple(r._replace(reduce=fault == "twice") for r in steps[at].receives)
        steps[at] = steps[at]._replace(receives=receives)
    elif fault == "unsent" and coord == 1:
        steps[4] = steps[4]._replace(sends=())
    elif fault == "unreceived" and coord == 1:
        steps[0] = steps[0]._replace(receives=())
    elif fault == "overwritten":
        sends, receives = (Send((coord + 1) % 4, 0, 4),), (Receive((coord - 1) % 4, 0, 4, False),)
        steps[5] = ScheduleStep(sends, receives)
    return steps[:5] if fault == "short" else steps


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("unreduced", r"coord 0 ends with chunk \d made of 1 x coord"),
        ("twice", r"made of .*2 x coord"),
        ("unsent", r"in step 4 coord 1 sends None and 2 expects Receive\(peer=1, first=0"),
        ("unreceived", r"in step 0 coord 1 does not receive Send\(peer=1, first=3, last=4\) of 0"),
        ("overwritten", "in step 5 coord 0 overwrites what it sends"),
        ("short", "coord 0 has 5 steps, not 6"),
    ],
)
def test_a_wrong_schedule_is_found(fault: str, text: str) -> None:
    broken = Schedule("changed", 4, 4, 6, lambda c: tuple(changed(list(ring(4).of(c)), c, fault)))
    with pytest.raises(LayoutError, match=text):
        interpret(broken, 64)


def test_wrong_counts_are_refused() -> None:
    for call in (lambda: ring(0), lambda: tree(4, 0), lambda: formulas.ring(-1, 8)):
        with pytest.raises(LayoutError, match=r"expected: *an integer, 1 or more"):
            call()
    for call in (lambda: two_level(6, 4), lambda: formulas.two_level(6, 8, 4)):
        with pytest.raises(LayoutError, match="6 ranks in groups of 4"):
            call()
    with pytest.raises(LayoutError, match="no coord 3"):
        ring(3).of(3)
