"""Calls that differ between ranks; which rank waits for which, and how long; and ranks that wait for ever."""

from __future__ import annotations

from typing import Any

import pytest

from meshcomm.dryrun.compare import find_differences
from meshcomm.dryrun.replay import Replay, replay
from meshcomm.layout import Layout
from tests.dryrun.programs import Rank, steps, where


def test_a_late_rank_keeps_the_others_waiting() -> None:
    layout = Layout({"dp": 4})

    def program(rank: Rank) -> None:
        rank.compute(10 * (1 + rank.rank))
        rank.collective("all_reduce", "dp")
        rank.compute(5)

    met = replay(steps(layout, program), where(layout), seconds=lambda span, ranks: 3.0, flop_s=1.0)
    assert met.ends == dict.fromkeys(range(4), 40 + 3 + 5) and met.seconds == 48
    assert [met.dims[rank]["dp"] for rank in range(4)] == [
        (33 - 10 * rank, 30 - 10 * rank) for rank in range(4)
    ]
    assert met.computed == {rank: 10 * (1 + rank) + 5 for rank in range(4)}


def test_what_is_waited_for_later_hides_behind_what_is_computed() -> None:
    layout = Layout({"dp": 2})

    def program(rank: Rank) -> None:
        first = rank.collective("all_reduce", "dp", wait=False)
        second = rank.collective("all_reduce", "dp", wait=False)
        rank.compute(5)
        rank.wait(first)
        rank.wait(second)

    met = replay(steps(layout, program), where(layout), seconds=lambda span, ranks: 3.0, flop_s=1.0)
    # The calls run one after the other on their group: 6 s, of which 5 are hidden.
    assert met.seconds == 6 and met.dims[0]["dp"].waits == 1


def test_bytes_take_time_beside_operations() -> None:
    layout = Layout({"dp": 2})

    def program(rank: Rank) -> None:
        rank.compute(5)
        rank.moved = 40
        rank.collective("all_reduce", "dp")

    met = replay(
        steps(layout, program), where(layout), seconds=lambda span, ranks: 3.0, flop_s=1.0, byte_s=0.1
    )
    assert met.seconds == 5 + 4 + 3 and met.computed == {0: 9, 1: 9}


def test_a_pipeline_fills_and_drains() -> None:
    """GPipe's bubble is p - 1 of m + p - 1 slots (Huang et al. 2019)."""
    stages, microbatches = 4, 6
    layout = Layout({"pp": stages})

    def program(rank: Rank) -> None:
        stage = rank.coords["pp"]
        for _ in range(microbatches):
            if stage:
                rank.message("recv", "pp", stage - 1)
            rank.compute(7)
            if stage < stages - 1:
                rank.message("send", "pp", stage + 1, wait=False)

    met = replay(steps(layout, program), where(layout), flop_s=1.0)
    assert met.seconds == 7 * (microbatches + stages - 1)
    assert met.dims[stages - 1]["pp"].late == 7 * (stages - 1)


def test_ranks_that_were_not_run_come_in_time() -> None:
    layout = Layout({"dp": 8})

    def program(rank: Rank) -> None:
        rank.collective("all_reduce", "dp")
        rank.message("send", "dp", (rank.rank + 1) % 8)
        rank.message("recv", "dp", (rank.rank - 1) % 8)

    met = replay(
        steps(layout, program, [0, 3, 6]), where(layout), seconds=lambda span, ranks: float(len(ranks))
    )
    assert not met.stuck and met.seconds == 8 + 2 + 2


def test_a_rank_whose_neighbours_were_not_run_waits_for_nobody() -> None:
    layout = Layout({"pp": 4, "tp": 2})

    def program(rank: Rank) -> None:
        stage = rank.coords["pp"]
        if stage:
            rank.message("recv", "pp", stage - 1)
        rank.compute(7)
        if stage < 3:
            rank.message("send", "pp", stage + 1)
        rank.collective("all_reduce", "tp")

    def timed(ranks: list[int]) -> Replay:
        return replay(steps(layout, program, ranks), where(layout), flop_s=1.0)

    # Rank 7 ends a pipeline whose other ranks were not run, so it arrives 21 s before rank 6.
    met = timed([0, 2, 4, 6, 7])
    assert met.early == {7} and met.seconds == 28
    assert met.sound == [0, 2, 4, 6] and all(met.dims[rank]["tp"].late == 0 for rank in met.sound)
    whole = timed(list(range(8)))
    assert not whole.early and whole.dims[7]["tp"].late == 0 and whole.seconds == 28


def test_a_call_that_waits_for_the_one_before_it_waits_for_nobody_else() -> None:
    layout = Layout({"dp": 4})

    def program(rank: Rank) -> None:
        one = rank.collective("all_reduce", "dp", wait=False)
        two = rank.collective("all_reduce", "dp", wait=False)
        rank.wait(two)
        rank.wait(one)

    met = replay(steps(layout, program), where(layout), seconds=lambda span, ranks: 3.0)
    assert met.seconds == 6 and met.dims[0]["dp"] == (6.0, 0.0)


def circle(rank: Rank) -> None:
    """Every rank sends before it receives. A message completes only when its other end arrives."""
    rank.message("send", "dp", (rank.rank + 1) % 3, line=4)
    rank.message("recv", "dp", (rank.rank - 1) % 3, line=5)


def crossed(rank: Rank) -> None:
    """On a square of four ranks, two call along dp first and two along tp first."""
    dims = ("dp", "tp") if rank.rank in (0, 3) else ("tp", "dp")
    for line, dim in enumerate(dims, 4):
        rank.collective("all_reduce", dim, line=line)


@pytest.mark.parametrize(
    ("layout", "program", "said"),
    [
        (
            Layout({"dp": 3}),
            circle,
            "ranks 0, 1, 2 wait for each other in a cycle: rank 0 (dp=0) in send (4) float32 at train.py:4",
        ),
        (Layout({"dp": 2, "tp": 2}), crossed, "wait for each other in a cycle"),
    ],
    ids=["messages", "dims"],
)
def test_a_circle_is_proved_and_said(layout: Layout, program: Any, said: str) -> None:
    made = steps(layout, program)
    assert find_differences(made, where(layout)) == []
    met = replay(made, where(layout))
    (finding,) = met.stuck
    assert said in finding.what and len(finding.lines) == len(finding.ranks) == layout.world_size
    assert met.ends == {}
