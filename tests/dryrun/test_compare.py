"""Findings about calls that differ between ranks."""

from __future__ import annotations

from meshcomm.dryrun.compare import find_differences
from meshcomm.layout import Layout
from tests.dryrun.programs import Rank, steps, where


def test_findings_that_are_alike_are_one() -> None:
    layout = Layout({"dp": 4, "tp": 2})

    def program(rank: Rank) -> None:
        rank.collective("all_reduce", "tp", (1 + rank.coords["tp"],), line=3)

    found = find_differences(steps(layout, program), where(layout))
    assert [(each.groups, each.ranks) for each in found] == [(4, (0, 1))]


def test_parts_of_an_all_to_all_may_be_of_any_length() -> None:
    layout = Layout({"ep": 4})

    def program(rank: Rank) -> None:
        rank.collective("all_to_all", "ep", (3 + rank.rank, 8))

    assert find_differences(steps(layout, program), where(layout)) == []

    def wrong(rank: Rank) -> None:
        rank.collective("all_to_all", "ep", (3, 8 + (rank.rank == 2)))

    assert [each.ranks for each in find_differences(steps(layout, wrong), where(layout))] == [(2,)]
