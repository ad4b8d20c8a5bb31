"""Chains of waiting ranks, followed to their ends: in tables of ranks, and in the records that errors are made from."""

from __future__ import annotations

import random
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pytest
import torch

from meshcomm.errors import CommunicationError
from meshcomm.watching import messages, recorder
from meshcomm.watching.callsite import origin
from meshcomm.watching.counters import counter_of
from meshcomm.watching.failed_call import FailedCall
from meshcomm.watching.messages import PendingMessage
from meshcomm.watching.recorder import FlightRecorder
from meshcomm.watching.verdict import BlockedCall, diagnose, find_hung, root_cause, unasked, whereabouts
from meshcomm.watching.waits import chain_ends, ends_of, find_circle
from meshcomm.watching.words import UNKNOWN

Waits = dict[int, Sequence[int]]
# Each end: its ranks, and the ranks that wait for it.
Ends = list[tuple[tuple[int, ...], tuple[int, ...]]]

# The last rank of each chain is asleep, dead or unknown, which makes no difference to the walk.
TABLE: dict[str, tuple[Waits, Ends]] = {
    "nobody waits": ({}, []),
    "nobody waits, though all are known": ({0: [], 1: []}, []),
    "one for one": ({0: [1]}, [((1,), (0,))]),
    **{
        f"a chain of {n}": ({rank: [rank + 1] for rank in range(n)}, [((n,), tuple(range(n)))])
        for n in (2, 3, 4, 5)
    },
    "all for one": ({0: [3], 1: [3], 2: [3], 3: []}, [((3,), (0, 1, 2))]),
    "one for several": ({0: [1, 2]}, [((1,), (0,)), ((2,), (0,))]),
    "most waiters first": ({0: [4], 1: [5], 2: [5]}, [((5,), (1, 2)), ((4,), (0,))]),
    "two for each other": ({0: [1], 1: [0]}, [((0, 1), ())]),
    "a circle of four": ({0: [2], 2: [3], 3: [1], 1: [0]}, [((0, 2, 3, 1), ())]),
    "a circle that others wait for": ({0: [2], 2: [0, 1, 3], 1: [0], 3: [0]}, [((0, 2), (1, 3))]),
    "a chain into a circle": ({5: [4], 4: [3], 3: [2], 2: [3]}, [((2, 3), (4, 5))]),
    "two circles": ({0: [1], 1: [0], 2: [3], 3: [2], 7: [2]}, [((0, 1), ()), ((2, 3), (7,))]),
    "a circle and a chain": ({0: [1], 1: [0], 5: [6], 6: [7]}, [((0, 1), ()), ((7,), (5, 6))]),
    "two chains": ({0: [1], 1: [2], 5: [6], 6: [7], 4: [6]}, [((7,), (4, 5, 6)), ((2,), (0, 1))]),
    "two ways to one end": ({0: [1, 2], 1: [3], 2: [3]}, [((3,), (0, 1, 2))]),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_ends_of_chains(name: str) -> None:
    waits, expected = TABLE[name]
    assert [tuple(end) for end in chain_ends(waits)] == expected


def loops_of(waits: Mapping[int, Collection[int]]) -> list[set[int]]:
    """For each rank that is in a circle, all ranks that it can reach; found by iterating the plain rule."""
    reach = {rank: set(others) for rank, others in waits.items()}
    for _ in reach:
        for rank, others in reach.items():
            reach[rank] = others.union(*(reach.get(other, set()) for other in others))
    return [others for rank, others in reach.items() if rank in others]


def test_every_chain_has_an_end_and_every_end_is_one() -> None:
    choose = random.Random(0)
    for _ in range(2_000):
        size = choose.randint(1, 7)
        waits = {
            rank: choose.sample([r for r in range(size) if r != rank], choose.randint(0, min(2, size - 1)))
            for rank in range(size)
            if choose.random() < 0.8
        }
        ends = chain_ends(waits)
        for end in ends:
            following = [*end.ranks[1:], end.ranks[0]]
            if end.is_circle:
                assert all(b in waits[a] for a, b in zip(end.ranks, following, strict=True)), waits
            else:
                assert not waits.get(end.ranks[0]) and end.waiters, waits
        led = {rank for end in ends for rank in (*end.ranks, *end.waiters)}
        assert {rank for rank, others in waits.items() if others} <= led, waits
        assert bool(loops_of(waits)) == any(end.is_circle for end in ends), waits
        for rank in waits:
            assert {e.ranks for e in ends_of(rank, waits) if not e.is_circle} <= {e.ranks for e in ends}, (
                waits
            )


# -- from records ---------------------------------------------------------------------------------------

GROUPS = {"dp0": [0, 2], "dp1": [1, 3], "tp0": [0, 1], "tp1": [2, 3], "world": [0, 1, 2, 3]}


def record(rank: int, inside: str = "", **started: int) -> dict[str, Any]:
    """A rank of a 2 x 2 mesh that is blocked in the last call on the group `inside`, or at its own line."""
    groups = []
    for label, ranks in GROUPS.items():
        if rank in ranks:
            number = started.get(label, 0)
            last = {
                **UNKNOWN,
                "number": number,
                "dim": label[:-1] if label != "world" else label,
                "call": "barrier" if label == "world" else "all_gather",
                "callsite": f"train.py:{rank}{number}",
                "inside": label == inside,
            }
            messages: dict[str, Any] = {"begun": [], "waiting": None}
            group = {"label": label, "ranks": ranks, "started": number, "recent": [], "messages": messages}
            groups.append({**group, "last": last if number else None})
    return {
        "rank": rank,
        "coords": {"r": rank},
        "main": f"train.py:{rank} in step",
        "failed": None,
        "groups": groups,
    }


def diagnosed(
    rank: int, label: str, number: int, statuses: dict[int, Any], silent: dict[int, str] | None = None
) -> tuple[list[int], list[str], dict[int, list[int]]]:
    found = diagnose(BlockedCall(rank, label, GROUPS[label], number), statuses, silent or {})
    return [*found.missing], [*found.lines], {each[0]: [*each[-1]] for each in found.chain}


def test_a_step_that_one_rank_leaves_out_ends_in_a_circle() -> None:
    # Rank 2 has made one step fewer along dp, and all others are in a barrier of all ranks.
    statuses = {
        0: record(0, "dp0", dp0=475),
        1: record(1, "world", dp1=475, world=1),
        2: record(2, "world", dp0=471, world=1),
        3: record(3, "world", dp1=475, world=1),
    }
    for rank in (1, 2, 3):
        missing, lines, chain = diagnosed(rank, "world", 1, statuses)
        assert missing == [0]
        assert lines == [
            "ranks 0 2 wait for each other",
            'rank 2 (r=2) is in barrier along "world", call 1, at train.py:21, which rank 0 has not reached',
            'rank 0 (r=0) has not arrived: it is in all_gather along "dp", call 475, at train.py:0475, which rank 2 has not '
            "reached after 471 calls",
        ]
        assert chain[0] == [2] and chain[2] == [0] and chain[rank] == [0]
    missing, lines, _ = diagnosed(0, "dp0", 475, statuses)
    assert missing == [2] and lines[0] == "ranks 0 2 wait for each other"
    assert root_cause(statuses) == [
        "circular wait:",
        '  rank 0 (r=0) is in all_gather along "dp", call 475, at train.py:0475, which rank 2 has not reached after 471 calls '
        "and waits for rank 2",
        '  rank 2 (r=2) is in barrier along "world", call 1, at train.py:21, which rank 0 has not reached and waits for rank 0',
    ]


def test_a_chain_to_a_rank_that_sleeps_is_dead_or_is_unknown() -> None:
    # 1 waits along tp for 0, which waits along dp for 2, which waits along tp for 3.
    statuses = {
        0: record(0, "dp0", dp0=9, tp0=4),
        1: record(1, "tp0", tp0=5),
        2: record(2, "tp1", dp0=8, tp1=7),
        3: record(3, tp1=6),
    }
    missing, lines, chain = diagnosed(1, "tp0", 5, statuses)
    assert missing == [0] and chain == {0: [2], 1: [0], 2: [3], 3: []}
    assert lines[0] == "rank 3 (r=3) is at train.py:3 in step"
    assert lines[1].startswith('rank 2 (r=2) is in all_gather along "tp", call 7') and lines[2].startswith(
        "rank 0 "
    )
    # Only ranks that a rank of the chain waits for are asked, one after the other.
    asked = {rank: statuses[rank] for rank in (0, 1)}
    blocked = BlockedCall(1, "tp0", GROUPS["tp0"], 5)
    assert unasked(blocked, {1: statuses[1]}, {}) == [0]
    assert unasked(blocked, asked, {}) == [2]
    assert unasked(blocked, {**asked, 2: statuses[2]}, {}) == [3]
    del statuses[3]
    for state, said in (
        ("ended", "its process has ended"),
        ("stopped", "is stopped"),
        ("", "it has ended, is"),
    ):
        _, lines, chain = diagnosed(1, "tp0", 5, statuses, {3: state})
        assert "rank 3 does not answer: " in lines[0] and said in lines[0] and chain[3] == []
        assert unasked(blocked, statuses, {3: state}) == []
    # A report does not claim that a rank has ended if no rank asked it.
    assert root_cause(statuses)[0].startswith(
        "rank 3 left no report: no rank asked it, or it could not write one; rank 2 "
    )
    assert root_cause(statuses)[0].endswith(
        '; rank 2 waits for it in all_gather along "tp", call 7, at train.py:27, and ranks 0 1 for that rank'
    )


def test_of_several_missing_ranks_the_end_of_the_chain_comes_first() -> None:
    statuses = {
        0: record(0, "dp0", dp0=9),
        1: record(1, "world", world=1),
        2: record(2, dp0=8),
        3: record(3, "tp1", tp1=3),
    }
    missing, lines, _ = diagnosed(1, "world", 1, statuses)
    assert missing == [0, 2, 3]
    assert [line.split(" (")[0] for line in lines] == ["rank 2", "rank 0", "rank 3"]
    # A rank that answers is named before a rank that was not asked.
    del statuses[3]
    assert whereabouts(statuses, {}) == [
        'rank 2 (r=2) is at train.py:2 in step; ranks 0 1 wait for it in all_gather along "dp", call 9, '
        "at train.py:09",
        'rank 0 (r=0) is in all_gather along "dp", call 9, at train.py:09, which rank 2 has not reached after 8 calls',
        'rank 1 (r=1) is in barrier along "world", call 1, at train.py:11, which ranks 0 2 have not reached',
        "rank 2 (r=2) is at train.py:2 in step",
    ]


def test_a_rank_that_has_raised_and_goes_on_is_said_to() -> None:
    statuses = {
        0: record(0, "tp0", tp0=3),
        1: {**record(1, tp0=2), "raised": "it raised KeyError: 'x', at train.py:7 in load"},
    }
    _, lines, _ = diagnosed(0, "tp0", 3, statuses)
    assert lines == [
        "rank 1 (r=1) has not arrived: it is at train.py:1 in step, after all_gather, call 2; it "
        "raised KeyError: 'x', at train.py:7 in load, and goes on"
    ]


def test_a_rank_whose_call_has_just_failed_does_not_hang() -> None:
    # Rank 3 is stopped. Rank 2 waited for it and handles the timeout, while 0 still waits for 2, and 1 for 3.
    statuses = {0: record(0, "dp0", dp0=9), 1: record(1, "dp1", dp1=9), 2: record(2, tp1=9, dp0=8)}
    hung = {2: "is at train.py:2 in step", 3: "does not answer: its process is stopped"}
    unchanged = statuses.__getitem__
    assert (
        find_hung(statuses, {3: "stopped"}, lambda ranks: {rank: unchanged(rank) for rank in ranks}) == hung
    )
    # When first asked, it was raising the error; or it has made another call since.
    for later in (
        {"call_failed": True},
        {"failed": {**UNKNOWN, "call": "all_gather", "callsite": "train.py:8"}},
        record(2, "dp0", tp1=9, dp0=9),
    ):
        assert find_hung(statuses, {3: "stopped"}, lambda ranks: {2: {**statuses[2], **later}}) == {
            3: hung[3]
        }
    statuses[2]["call_failed"] = True
    assert find_hung(statuses, {3: "stopped"}, lambda ranks: {}) == {3: hung[3]}


def test_circles_against_walking_every_path() -> None:
    for seed in range(300):
        chance = random.Random(seed)
        n = chance.randint(1, 7)
        waits = {
            rank: sorted(set(chance.choices([r for r in range(n + 2) if r != rank], k=chance.randint(0, 2))))
            for rank in range(n)
        }
        circle = find_circle(waits)
        for rank, following in zip(circle, [*circle[1:], *circle[:1]], strict=True):
            assert following in waits[rank]
        assert len(set(circle)) == len(circle)
        assert bool(circle) == any(_returns(waits, rank, rank, set()) for rank in waits), waits


def test_a_fact_that_somebody_adds_to_the_origin_of_a_call_is_in_every_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`made_at` has all facts, whichever record it words: test_where_a_call_was_made_is_said_in_one_place."""

    def told(*place: Any) -> dict[str, Any]:
        return {**origin(*place), "added": 7}

    log, frame = FlightRecorder("dp", [0, 1]), sys._getframe()
    log.begin(None, counter_of(log.counters, "dp", "all_reduce"), 4, torch.ones(1), frame)
    assert (log.call_data(1) or {}).keys() - {"bytes", "began", "over"} <= UNKNOWN.keys()
    for module in (recorder, messages):
        monkeypatch.setattr(module, "origin", told)
    collective = FailedCall(0, log.status(), "", TimeoutError("timed out"))
    error = collective.error_alone()
    assert isinstance(error, CommunicationError)
    log.messages.waiting = PendingMessage(log.messages, "dp", "recv", 4, [("recv", 1, 0, 1)], frame)
    group = log.status()
    message = FailedCall(0, group, "", TimeoutError("timed out"))
    records = [
        group["last"],
        *group["recent"],
        group["messages"]["waiting"],
        collective.facts,
        error.call,
        message.facts,
    ]
    assert [record and record["added"] for record in records] == [7] * 6


def _returns(waits: dict[int, list[int]], rank: int, home: int, seen: set[int]) -> bool:
    for other in waits.get(rank, ()):
        if other == home:
            return True
        if other not in seen:
            seen.add(other)
            if _returns(waits, other, home, seen):
                return True
    return False
