"""Ranks whose calls differ are found, and said in one line with their coords and lines."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from meshcomm.dryrun.compare import compare
from meshcomm.dryrun.replay import replay
from meshcomm.dryrun.world import chosen
from meshcomm.layout import Layout
from tests.dryrun.programs import Rank, steps, where

LAYOUT = Layout({"pp": 16, "dp": 64, "cp": 2, "tp": 8})
LAST = 15


def right(rank: Rank) -> None:
    """A pipeline's step in short: three calls along tp, messages to the next stage, gradients along dp."""
    for line in (3, 4, 5):
        rank.collective("all_reduce", "tp", line=line, op="sum")
    stage = rank.coords["pp"]
    if stage:
        rank.message("recv", "pp", stage - 1, line=7)
    if stage < LAST:
        rank.message("send", "pp", stage + 1, line=8)
    rank.collective("all_reduce", "dp", (128,), line=9, op="sum")
    rank.collective("broadcast", "cp", line=10, root=0)


def another_reduction(rank: Rank) -> None:
    right(rank)
    rank.collective("all_reduce", "cp", line=25, op="max" if rank.coords["cp"] else "sum")


def left_out(rank: Rank) -> None:
    rank.collective("all_reduce", "tp", line=2)
    if rank.rank != 0:
        rank.collective("broadcast", "tp", line=26, root=0)
    right(rank)


def an_uneven_microbatch(rank: Rank) -> None:
    right(rank)
    stage = rank.coords["pp"]
    if stage == LAST:
        rank.message("recv", "pp", stage - 1, (3,), line=29)
    elif stage == LAST - 1:
        rank.message("send", "pp", LAST, (4,), line=30)


# tests/dryrun/test_dryrun.py plants more, in scripts.
SAID = {
    another_reduction: r"along cp: all_reduce max .* at train.py:25, where others make all_reduce sum",
    left_out: r"rank 0 \(pp=0 dp=0 cp=0 tp=0\) along tp: broadcast root 0 \(4\) float32 left out, which others make at train.py:26",
    an_uneven_microbatch: r"rank 14336 .* sends send \(4\) float32 to rank 15360 .* along pp, which receives recv \(3\) float32",
}


def test_what_is_right_is_found_right() -> None:
    made = steps(LAYOUT, right, chosen(LAYOUT, "pp"))
    assert compare(made, where(LAYOUT)) == []
    met = replay(made, where(LAYOUT))
    assert met.stuck == [] and set(met.ends) == {step.rank for step in made}


@pytest.mark.parametrize("program", SAID, ids=lambda each: each.__name__)
def test_a_planted_bug_is_named_in_one_line_at_16384_ranks(program: Callable[[Rank], None]) -> None:
    found = compare(steps(LAYOUT, program, chosen(LAYOUT, "pp")), where(LAYOUT))
    assert found
    assert any(__import__("re").search(SAID[program], each.what) for each in found), [
        each.what for each in found
    ]
    assert all("\n" not in each.what and each.lines for each in found)


def test_findings_that_are_alike_are_one() -> None:
    found = compare(
        steps(
            Layout({"dp": 4, "tp": 2}),
            lambda rank: rank.collective("all_reduce", "tp", (1 + rank.coords["tp"],), line=3) and None,
        ),
        where(Layout({"dp": 4, "tp": 2})),
    )
    assert [(each.groups, each.ranks) for each in found] == [(4, (1,))]


def test_parts_of_an_all_to_all_may_be_of_any_length() -> None:
    layout = Layout({"ep": 4})

    def program(rank: Rank) -> None:
        rank.collective("all_to_all", "ep", (3 + rank.rank, 8))

    assert compare(steps(layout, program), where(layout)) == []

    def wrong(rank: Rank) -> None:
        rank.collective("all_to_all", "ep", (3, 8 + (rank.rank == 2)))

    assert [each.ranks for each in compare(steps(layout, wrong), where(layout))] == [(2,)]
