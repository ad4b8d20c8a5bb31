"""mesh.step names the rank that omits one of several equal calls, or makes one call too many."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import meshcomm
from meshcomm.errors import (
    CallMismatchError,
    DeadlockError,
    LayoutError,
    MeshClosed,
    MeshcommError,
    NotMember,
)
from meshcomm.mesh import Mesh, desync
from meshcomm.mesh.desync import DesyncMonitor
from meshcomm.mesh.rank_record import RankRecord
from meshcomm.watching.callsite import callsite
from meshcomm.watching.counters import counter_of
from meshcomm.watching.recorder import KEPT, FlightRecorder
from meshcomm.watching.steps import RUNS, StepHistory, find_desync, last_common
from meshcomm.watching.verdict import error_of
from tests.ranks import on_ranks
from tests.simulator import random_programs

# -- the record of steps and its comparison; no ranks ------------------------------------------------

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


def test_what_step_refuses() -> None:
    def program(mesh: Mesh) -> None:
        if not mesh.is_member:
            with pytest.raises(NotMember):
                mesh.step()
            return
        with pytest.raises(LayoutError):
            mesh.step(apart=("cp",))
        mesh.close()
        with pytest.raises(MeshClosed, match="is closed"):
            mesh.step()

    meshcomm.simulate(program, dims={"dp": 2}, ranks=(0, 1), world_size=3)


@on_ranks(1)
def test_the_number_of_a_step_is_an_int_also_of_numpy() -> None:
    with meshcomm.init(dims={"dp": 1}, device="cpu") as mesh:
        found = mesh.step(np.int64(3))  # type: ignore[arg-type]
        assert (found, type(found), mesh.step()) == (3, int, 4)
        for wrong in (3.0, True, "3"):
            with pytest.raises(LayoutError, match="is not an int"):
                mesh.step(wrong)  # type: ignore[arg-type]


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


# -- ranks at a store; no processes, no time ----------------------------------------------------------


class Counted:
    """A store of one process that records the names of its calls."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._store = dist.HashStore()

    def __getattr__(self, name: str) -> Any:
        def ask(*arguments: Any) -> Any:
            self.asked.append(name)
            return getattr(self._store, name)(*arguments)

        return ask


class Rank:
    """One rank's monitor and recorder, without a process."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.recorder = recorder_of(list(range(size)))
        self.monitor = DesyncMonitor(store, RankRecord(rank, {"dp": rank}, [self.recorder]), size)

    def step(self, calls: Calls) -> None:
        make(self.recorder, calls)
        step = self.recorder.steps.step + 1
        self.recorder.note(step, step, False, callsite(0))
        self.monitor.noted(step)


def test_what_a_period_costs_the_store() -> None:
    store = Counted()
    ranks = [Rank(store, rank, 4) for rank in range(4)]

    def asked(now: float) -> list[str]:
        store.asked.clear()
        for rank in reversed(ranks):
            rank.monitor.look(now)
        return sorted(store.asked)

    assert asked(0.0) == []  # nothing before the first step
    for rank in ranks:
        rank.step(ADD)
    asked(1.0)
    assert asked(1.5) == []  # not due
    for _ in range(200):
        for rank in ranks:
            rank.step(ADD)
    # Any number of steps costs one set and one check per rank, and one multi_get for the group.
    assert asked(3.0) == ["check"] * 4 + ["multi_get"] + ["set"] * 4
    assert asked(5.0) == ["check"] * 4
    for rank in ranks:
        rank.step(ADD * 2)
    assert asked(9.0) == ["check"] * 4 + ["multi_get"] + ["set"] * 8  # other calls: published as well
    assert store.num_keys() == 8  # two per rank, whatever the number of steps


def test_ranks_that_are_ahead_or_behind_are_compared() -> None:
    store = dist.HashStore()
    low, high = Rank(store, 0, 2), Rank(store, 1, 2)
    for _ in range(300):
        high.step(ADD)
    high.monitor.look(0.0)
    low.step([])
    low.monitor.look(0.0)
    assert low.monitor.found is None  # the other rank no longer has the sum of step 1
    for _ in range(2, 257):
        low.step(ADD)
    low.monitor.look(2.0)
    assert low.monitor.found is not None
    assert low.monitor.found["step"] == 1
    high.monitor.look(2.0)
    for rank in (low, high):
        with pytest.raises(
            CallMismatchError, match=r"step 1 along .dp.: rank 0 .dp=0., rank 1 .dp=1. do not agree"
        ):
            rank.step(ADD)


def test_a_difference_is_published_to_all_ranks() -> None:
    store = dist.HashStore()
    ranks = [Rank(store, rank, 3) for rank in range(3)]
    outside = DesyncMonitor(store, RankRecord(3, {"dp": 0}, []), 4)  # in no group with the others
    outside.noted(1)
    for number, rank in enumerate(ranks):
        rank.step(ADD * (2 if number == 1 else 1))
    for rank in reversed(ranks):
        rank.monitor.look(0.0)
    for rank in ranks[1:]:
        rank.monitor.look(2.0)
    outside.look(2.0)
    for monitor in (*(rank.monitor for rank in ranks), outside):
        with pytest.raises(CallMismatchError, match=r"rank 1 .dp=1. made 1 collective more"):
            monitor.noted(2)
        assert monitor.linger_s > 0
        assert monitor.before_leaving() is None  # it was raised
    assert store.num_keys() == 2 * 4 + 1


def test_of_equally_many_ranks_the_last_are_blamed_on_every_rank() -> None:
    """Each rank gets the other rank's answer first, and its own last."""
    ranks = [Rank(dist.HashStore(), rank, 2) for rank in range(2)]
    for number, rank in enumerate(ranks):
        rank.step(ADD * (1 + number))
    for own, other in ((0, 1), (1, 0)):
        statuses = {
            rank: {
                "coords": {"dp": rank},
                "groups": [{"label": "dp[tp=0]", "steps": ranks[rank].recorder.steps.data()}],
            }
            for rank in (other, own)
        }
        error = ranks[own].monitor.cause(statuses)
        assert error is not None and error.mismatched_ranks == (0, 1)


def test_the_last_rank_to_leave_deletes_the_keys() -> None:
    store = dist.HashStore()
    ranks = [Rank(store, rank, 3) for rank in range(3)]
    for rank in ranks:
        rank.step(ADD)
        rank.monitor.look(0.0)
    assert store.num_keys() == 6
    with ThreadPoolExecutor(len(ranks)) as threads:
        list(threads.map(lambda rank: rank.monitor.before_leaving(), ranks, timeout=20))
    assert store.num_keys() == 0


# -- the simulator: at once ----------------------------------------------------------------------------

DIMS = {"dp": 4, "tp": 2}


def loop(mesh: Mesh, dim: str, odd: int, at: int, how: str, start: int = 1) -> None:
    for step in range(1, 7):
        for name in ("dp", "tp", "dp"):
            times = 1
            if (mesh.rank, step, name) == (odd, at, dim):
                times, odd = {"skip": 0, "extra": 2}[how], -1
            for _ in range(times):
                mesh.all_reduce(name, torch.ones(3))
        assert mesh.step(step + start - 1) == step + start - 1


@pytest.mark.parametrize(
    ("dim", "odd", "at", "how"),
    [("dp", 5, 3, "skip"), ("tp", 0, 1, "skip"), ("dp", 0, 4, "extra"), ("dp", 7, 1, "extra")],
)
def test_a_simulated_rank_is_found_in_its_step(dim: str, odd: int, at: int, how: str) -> None:
    with pytest.raises(CallMismatchError) as caught:
        meshcomm.simulate(loop, dims=DIMS, args=(dim, odd, at, how, 1001))
    error = caught.value
    assert error.step == at + 1000
    others = 1 if dim == "tp" else 3
    # Either of two ranks may be wrong.
    assert error.mismatched_ranks == ((odd,) if others > 1 else (odd, odd + 1))
    assert error.what.startswith(f'ranks differ in step {at + 1000} along "{dim}": rank {odd} (')
    assert ("do not agree" in error.what) == (others == 1)


def test_correct_programs_are_never_blamed() -> None:
    def program(mesh: Mesh, seed: int) -> int:
        chance = random.Random(seed)
        for each in range(4):
            random_programs.run(mesh, seed * 10 + each, steps=chance.randint(0, 4))
            mesh.step()
        return mesh.debug.metrics.steps

    for seed in range(6):
        found = meshcomm.simulate(
            program, dims=random_programs.DIMS, merge=random_programs.MERGE, args=(seed,)
        )
        assert found == [4] * 6


def test_uneven_calls_objects_and_what_only_some_groups_do() -> None:
    def program(mesh: Mesh) -> None:
        for step in range(4):
            mesh.all_gather("dp", torch.ones(mesh.rank + step), uneven=True)
            mesh.gather("dp", torch.ones(mesh.rank), 1, uneven=True)
            splits = [mesh.rank % 2, 1, 2, 0]
            mesh.all_to_all("dp", torch.ones(sum(splits)), input_split_sizes=splits)
            mesh.objects.all_gather("dp", "x" * mesh.rank)
            mesh.objects.scatter("dp", ["x" * i for i in range(4)] if mesh.coord("dp") == 0 else None, src=0)
            mesh.scatter("tp", torch.ones(4) if mesh.coord("tp") == 1 else None, src=1)
            if mesh.coord("dp") == 2:
                # Only this group along tp makes the call; the other groups along tp do not.
                mesh.all_reduce("tp", torch.ones(step))
            if mesh.coord("dp") == 3:
                mesh.shift("tp", torch.ones(1))
            mesh.step()

    meshcomm.simulate(program, dims=DIMS)


def test_every_mesh_counts_for_itself_and_groups_may_come_later() -> None:
    def program(mesh: Mesh, skip: bool) -> None:
        with meshcomm.init(dims={"dp": 4, "tp": 2}) as other:
            mesh.all_reduce("dp", torch.ones(1))
            mesh.step()
            other.all_reduce("dp", torch.ones(1), "max")
            mesh.create_group("both", ("dp", "tp"))
            for step in range(2, 5):
                if not (skip and mesh.rank == 6 and step == 3):
                    mesh.all_reduce("both", torch.ones(1))
                mesh.step()
            other.step()

    meshcomm.simulate(program, dims=DIMS, args=(False,))
    with pytest.raises(
        CallMismatchError, match=r'in step 3 along "both": rank 6 .dp=3 tp=0. made 1 collective fewer'
    ) as caught:
        meshcomm.simulate(program, dims=DIMS, args=(True,))
    assert caught.value.step == 3


def test_groups_that_other_threads_call_on_can_be_left_out() -> None:
    def program(mesh: Mesh, apart: tuple[str, ...]) -> None:
        # Rank 1 makes its calls in other steps, but as many in total.
        for step in range(3):
            for _ in range({0: 1, 1: 2, 2: 0}[step] if mesh.rank == 1 else 1):
                mesh.all_reduce("dp", torch.ones(1))
            mesh.step(apart=apart)

    meshcomm.simulate(program, dims={"dp": 3}, args=(("dp",),))
    with pytest.raises(CallMismatchError, match=r"rank 1 .dp=1. made 1 collective more"):
        meshcomm.simulate(program, dims={"dp": 3}, args=((),))


def test_the_last_step_is_told_by_its_deadlock() -> None:
    with pytest.raises(DeadlockError, match="rank 5 returned while ranks 1 3 7 wait"):
        meshcomm.simulate(loop, dims=DIMS, args=("dp", 5, 6, "skip"))


# -- processes -----------------------------------------------------------------------------------------


@on_ranks(2)
def test_closing_is_bounded_where_ranks_made_unlike_numbers_of_steps() -> None:
    """Rank 0 is one step ahead. It waits a bounded time for rank 1's report, and not at all if its program has failed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(desync, "_LEAVES_S", 0.5)
        for fails in (False, True):
            mesh = meshcomm.init(dims={"dp": 2}, device="cpu", timeout_s=20)
            for _ in range(2 - mesh.rank):
                mesh.step()
            watch: Any = mesh._state.watch
            began = time.monotonic()
            try:
                if fails:
                    raise ValueError("a program's own")
                mesh.close()
                assert mesh.rank == 1 or 0.5 <= time.monotonic() - began < 10
            except ValueError:
                watch.before_leaving = lambda: pytest.fail("it waits for others")
                mesh.close()
            assert mesh.closed


@pytest.mark.faults
@pytest.mark.mesh(
    dp=2, tp=2, validate_calls=2, via="gloo", not_via={"emulated_nccl": "closing waits for what is queued"}
)
def test_ranks_that_lose_a_peer_by_it_get_the_same_error(mesh: Mesh) -> None:
    """Rank 3 skips a call along dp, and raises while rank 2, from another dp group, is in a call with it along tp."""
    with pytest.raises(CallMismatchError) as caught:
        for step in range(1, 100_000):
            if not (mesh.rank == 3 and step == 4):
                mesh.all_reduce("dp", torch.ones(4))
            mesh.all_reduce("tp", torch.ones(4))
            mesh.step()
            time.sleep(0.002)
    said = 'ranks differ in step 4 along "dp": rank 1 (dp=0 tp=1), rank 3 (dp=1 tp=1) do not agree'
    assert caught.value.what.startswith(said) and caught.value.mismatched_ranks == (1, 3)
    assert "rank 3 on dp[tp=1]: 0 collectives" in str(caught.value.given)


@pytest.mark.mesh(dp=2, via="gloo")
def test_a_trace_shows_the_steps(mesh: Mesh, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with mesh.debug.trace(path):
        for _ in range(2):
            mesh.all_reduce("dp", torch.ones(1))
            mesh.step(number=mesh.debug.metrics.number + 7)
    events = json.loads(path.read_text())["traceEvents"]
    found = [(each["pid"], each["name"]) for each in events if each["name"].startswith("step ")]
    assert sorted(found) == [(0, "step 14"), (0, "step 7"), (1, "step 14"), (1, "step 7")]
    first, second = (
        next(e for e in events if e["pid"] == 0 and e["name"] == name) for name in ("step 7", "step 14")
    )
    assert second["ts"] == pytest.approx(first["ts"] + first["dur"])
    call = next(e for e in events if e["pid"] == 0 and e.get("cat") == "collective")
    assert first["ts"] <= call["ts"] <= first["ts"] + first["dur"]
