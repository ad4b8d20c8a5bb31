"""The record of each step's calls, and its comparison between ranks."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from meshcomm.errors import MeshcommError
from meshcomm.watching.callsite import callsite
from meshcomm.watching.counters import counter_of
from meshcomm.watching.recorder import KEPT, FlightRecorder
from meshcomm.watching.steps import RUNS, StepHistory, find_desync, last_common
from meshcomm.watching.verdict import error_of

# The calls of one rank on one group in a step, each as a name and a number of bytes.
Calls = Sequence[tuple[str, int]]


def never(*_: object) -> Any:
    raise AssertionError("nobody asked")


def recorder_of(ranks: list[int], label: str = "dp[tp=0]") -> FlightRecorder:
    return FlightRecorder(label, ranks, never)


class _Nobody:
    def failed(self, call: str, error: BaseException) -> MeshcommError:
        raise AssertionError("nothing fails here")


NOBODY = _Nobody()


def make(recorder: FlightRecorder, calls: Calls) -> None:
    for call, nbytes in calls:
        with recorder.call(NOBODY, counter_of(recorder.counters, "dp", call), nbytes, None, sys._getframe()):
            pass


def noted(steps: Sequence[Calls], ranks: list[int], first: int = 1) -> FlightRecorder:
    """The recorder of a rank that made these calls in its steps; the program numbers its steps from `first`."""
    recorder = recorder_of(ranks)
    for step, calls in enumerate(steps, 1):
        make(recorder, calls)
        recorder.note(step, step + first - 1, False, callsite(0))
    return recorder


def found_in(recorders: dict[int, FlightRecorder], label: str = "dp[tp=0]") -> dict[str, Any] | None:
    """The verdict of other ranks, which receive the histories as JSON."""
    histories = {rank: json.loads(json.dumps(each.steps.data())) for rank, each in recorders.items()}
    return find_desync(label, histories, {rank: {"dp": place} for place, rank in enumerate(recorders)})


def judged(programs: dict[int, Sequence[Calls]], first: int = 1) -> dict[str, Any] | None:
    ranks = list(programs)
    return found_in({rank: noted(steps, ranks, first) for rank, steps in programs.items()})


def difference(programs: dict[int, Sequence[Calls]], first: int = 1) -> dict[str, Any]:
    found = judged(programs, first)
    assert found is not None
    return found


KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier")


ADD = [("all_reduce", 8)]


def drawn(chance: random.Random, steps: int) -> list[list[tuple[str, int]]]:
    """A program in which most steps make the same calls."""

    def one() -> list[tuple[str, int]]:
        return [(chance.choice(KINDS), 8 * chance.randint(0, 3)) for _ in range(chance.randint(0, 90))]

    body = one()
    return [list(body) if chance.random() < 0.7 else one() for _ in range(steps)]


@pytest.mark.parametrize("seed", range(16))
def test_equal_programs_never_differ_and_a_planted_call_always_does(seed: int) -> None:
    chance = random.Random(seed)
    ranks = [1, 4, 6, 9][: chance.randint(3, 4)]
    steps = drawn(chance, 10)
    assert judged(dict.fromkeys(ranks, steps)) is None
    # Ranks may be at different steps.
    assert judged({rank: steps[: chance.randint(1, 10)] for rank in ranks}) is None

    odd, at = chance.choice(ranks), chance.randrange(10)
    other = [list(calls) for calls in steps]
    how = chance.choice(("skip", "extra", "another"))
    if not other[at]:
        how = "extra"
    place = chance.randrange(max(1, len(other[at])))
    if how == "extra":
        other[at].insert(place, ("all_reduce", 8))
    else:
        call, nbytes = other[at].pop(place)
        if how == "another":
            other[at].insert(place, (KINDS[KINDS.index(call) - 1], nbytes))
    found = difference({rank: other if rank == odd else steps for rank in ranks}, first=101)
    assert (found["mismatched"], found["step"]) == ([odd], at + 101)
    assert {"skip": "fewer", "extra": "more"}.get(how, "other calls") in found["what"]


def test_the_words_of_a_difference() -> None:
    ranks = [0, 2, 4, 6]
    programs: dict[int, Sequence[Calls]] = {rank: [ADD * 3] * 9 for rank in ranks}
    programs[4] = [ADD * 3] * 4 + [ADD * 2] + [ADD * 3] * 4
    found = difference(programs, first=41)
    error = error_of(json.loads(json.dumps(found)))
    assert (error.step, error.mismatched_ranks) == (45, (4,))
    assert error.what == 'ranks differ in step 45 along "dp": rank 4 (dp=2) made 1 collective fewer'
    here = f"{__file__}:"
    given = str(error.given).splitlines()
    assert given[0].startswith(f"rank 4 on dp[tp=0]: 2 collectives: all_reduce 2 times at {here}")
    assert given[1].startswith(f"step 45 ended at {here}")
    assert str(error.expected).startswith(f"as ranks 0 2 6: 3 collectives: all_reduce 3 times at {here}")
    assert error.hint is not None
    assert "a branch that only some ranks take; results of step 45 and later mix calls" in error.hint


def test_a_whole_step_that_was_left_out_or_made_twice_is_found_by_its_number() -> None:
    """All calls look the same, and so do all steps."""
    ranks = [0, 2, 4, 6]
    for of_odd, at, made in (([1, 2, 4, 5, 6], 3, 4), ([1, 2, 3, 3, 4], 4, 3), ([2, 3, 4, 5, 6], 1, 2)):
        recorders = {rank: recorder_of(ranks) for rank in ranks}
        for rank, recorder in recorders.items():
            numbers = of_odd if rank == 4 else range(1, 6)
            for step, number in enumerate(numbers, 1):
                make(recorder, ADD * 3)
                recorder.note(step, number, False, callsite(0))
        found = found_in(recorders)
        assert found is not None
        error = error_of(found)
        assert (error.step, error.mismatched_ranks) == (at, (4,))
        assert error.what == f'ranks differ in step {at} along "dp": rank 4 (dp=2) made step {made} instead'
        assert str(error.given).startswith(f"step {made} of rank 4 ended at {__file__}:")
        assert str(error.expected).startswith(f"as ranks 0 2 6: step {at}, which ended at {__file__}:")
    # Ranks may lag, and steps may be numbered from anywhere.
    behind = {rank: noted([ADD] * (9 - rank), ranks, first=41) for rank in ranks}
    assert found_in(behind) is None


def test_only_the_operations_that_differ_are_told() -> None:
    same = [(kind, 8) for kind in KINDS[1:]]
    found = difference({0: [same + ADD * 2], 1: [same + ADD], 2: [same + ADD * 2]})
    assert "all_reduce at" in found["given"] and "all_reduce 2 times" in found["expected"]
    assert "broadcast" not in found["given"] + found["expected"]
    # If only the order differs, the error lists all calls.
    swapped = difference({0: [same], 1: [same[::-1]], 2: [same]})
    assert "broadcast" in swapped["given"] and "broadcast" in swapped["expected"]


def test_several_mismatched_ranks_and_other_bytes() -> None:
    usual: Sequence[Calls] = [ADD] * 3
    wide: Sequence[Calls] = [ADD, [("all_reduce", 800)], ADD]
    found = difference({0: wide, 1: usual, 2: wide, 3: usual, 4: usual})
    assert found["what"] == 'ranks differ in step 2 along "dp": rank 0 (dp=0), rank 2 (dp=2) made other calls'
    assert found["given"].startswith("ranks 0 2 on dp[tp=0]: 1 collective of 800 bytes: all_reduce at ")
    assert found["expected"].startswith("as ranks 1 3 4: 1 collective of 8 bytes: all_reduce at ")
    # Either of two ranks may be wrong. The error names both, with their calls.
    found = difference({3: wide, 7: usual})
    assert found["what"] == 'ranks differ in step 2 along "dp": rank 3 (dp=0), rank 7 (dp=1) do not agree'
    assert found["mismatched"] == [3, 7] and found["expected"] == "the same calls on every rank of the group"
    first, second, last = found["given"].splitlines()
    assert first.startswith("rank 3 on dp[tp=0]: 1 collective of 800 bytes: all_reduce at ")
    assert second.startswith("rank 7 on dp[tp=0]: 1 collective of 8 bytes: all_reduce at ")
    assert last.startswith("step 2 ended at ")


def test_more_calls_in_a_step_than_the_ring_holds() -> None:
    long = [ADD * (2 * KEPT)] * 2
    assert judged(dict.fromkeys(range(3), long)) is None
    found = difference({0: long, 1: long, 2: [long[0], ADD * (2 * KEPT - 1)]})
    assert found["step"] == 2
    assert f"rank 2 on dp[tp=0]: {2 * KEPT - 1} collectives" in found["given"]


def test_bytes_are_not_compared_where_they_may_differ() -> None:
    def program(nbytes: int) -> Sequence[Calls]:
        return [[("all_to_all", nbytes), ("objects.all_gather", nbytes), ("all_reduce", 8)]] * 3

    assert judged({rank: program(8 * rank) for rank in range(4)}) is None


def test_what_is_no_longer_remembered_is_said_so() -> None:
    chance = random.Random(5)
    steps = [[("all_reduce", chance.randint(1, 1 << 20))] for _ in range(RUNS + 50)]
    other = [list(calls) for calls in steps]
    other[20] = []
    found = difference({0: steps, 1: other, 2: steps}, first=11)
    assert (
        found["what"]
        == 'ranks differ in step 61 or an earlier one along "dp": rank 1 (dp=1) made other calls'
    )
    # The history is bounded, and equal steps take no additional room.
    alike = noted([ADD] * 3000, [0, 1])
    data = alike.steps.data()
    assert data is not None
    assert (len(data["runs"]), len(alike.steps.sums)) == (1, 22)


@pytest.mark.parametrize("lag", [0, 1, 7, 100, 12345])
def test_ranks_that_are_steps_apart_share_a_recent_sum(lag: int) -> None:
    behind, ahead = StepHistory(), StepHistory()
    place = callsite(0)
    for step in range(1, 30_000):
        behind.note(step, step, 0, [], place)
    for step in range(1, 30_000 + lag):
        ahead.note(step, step, 0, [], place)
    assert last_common(behind.sums, ahead.sums) > 29_999 - max(1, 2 * lag)
    assert len(ahead.sums) < 40


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 63, 100, 1023])
def test_a_rank_that_ends_each_step_twice_differs(steps: int) -> None:
    once, twice = ([[("all_reduce", 8)]] * steps, [[("all_reduce", 8)], []] * steps)
    found = judged({0: once, 1: twice, 2: once})
    assert (found is None) == (steps == 1)  # the first step is equal
    if found is not None:
        assert found["mismatched"] == [1]
        assert "in step 2 " in found["what"] or 2 * steps > RUNS


def test_calls_that_were_refused_and_those_of_other_threads() -> None:
    def one(call: str, excluded: int) -> FlightRecorder:
        recorder = recorder_of([0, 1])
        place = callsite(0)
        make(recorder, [(call, 8)])
        recorder.refuse()  # the ranks were about to make different calls, so none was made
        make(recorder, ADD)
        recorder.note(1, 1, False, place)
        make(recorder, ADD * excluded)
        recorder.note(2, 2, True, place)
        make(recorder, ADD)
        recorder.note(3, 3, False, place)
        return recorder

    assert found_in({0: one("all_reduce", 3), 1: one("broadcast", 5)}) is None


def test_ranks_that_do_not_answer_and_ranks_without_steps() -> None:
    recorders = {rank: noted([ADD, ADD if rank != 2 else []], [0, 1, 2, 3]) for rank in range(4)}
    for gone in ((0,), (1, 3), (0, 1)):
        found = found_in({rank: each for rank, each in recorders.items() if rank not in gone})
        assert found is not None
        assert found["step"] == 2
    assert found_in({2: recorders[2]}) is None
    assert found_in({}) is None
    assert found_in({0: recorder_of([0, 1]), 1: recorders[1]}) is None
