"""The verdict on a call that cannot end: who could have sent, who is behind, and whose call differs."""

from __future__ import annotations

from typing import Any

from meshcomm.watching.verdict import BlockedCall, absent, diagnose
from meshcomm.watching.words import UNKNOWN


def message(direction: str, peer: int | None, tag: int, number: int) -> dict[str, Any]:
    """A message as it appears in a rank's status."""
    return {"direction": direction, "peer": peer, "tag": tag, "number": number}


def test_who_could_have_sent_to_a_receive_from_any_rank() -> None:
    def status(rank: int, *begun: tuple[str, int, int, int]) -> dict[str, Any]:
        messages = {"begun": [message(*each) for each in begun]}
        group = {"label": "pp[0]", "ranks": [0, 1, 2, 3], "last": None, "messages": messages}
        return {"rank": rank, "main": f"train.py:{rank} in step", "groups": [group]}

    def said(tag: int) -> list[tuple[int, str | None]]:
        waiting = {"call": "recv_any", "parts": [message("recv", None, tag, 0)]}
        return absent(BlockedCall(0, "pp[0]", [0, 1, 2, 3], 0, waiting), statuses)

    statuses = {
        0: status(0, ("recv", 1, 7, 2), ("recv", 2, 7, 1)),
        1: status(1, ("send", 0, 7, 2)),
        2: status(2, ("send", 0, 7, 1), ("send", 0, 9, 1), ("send", 3, 5, 1)),
    }
    assert said(7) == [
        (1, "has sent 2 with tag 7, all received; it is at train.py:1 in step"),
        (2, "has sent 1 with tag 7, all received, and 1 with tag 9; it is at train.py:2 in step"),
        (3, None),
    ]
    assert said(5) == [
        (1, "has sent none with tag 5, and 2 with tag 7; it is at train.py:1 in step"),
        (2, "has sent none with tag 5, and 1 with tag 7, 1 with tag 9; it is at train.py:2 in step"),
        (3, None),
    ]
    # Some rank has sent, so no rank that answers is missing.
    assert said(9) == [(3, None)]
    # For several messages, only the missing one is listed.
    waiting = {"call": "exchange", "parts": [message("recv", 1, 7, 2), message("recv", 2, 9, 2)]}
    assert absent(BlockedCall(0, "pp[0]", [0, 1, 2, 3], 0, waiting), statuses) == [
        (2, "has sent 1 of 2 with tag 9, and 1 with tag 7; it is at train.py:2 in step")
    ]


def status_of(rank: int, started: int, *recent: tuple[int, str], inside: bool = True) -> dict[str, Any]:
    """The status of a rank of dp with `recent` as its last collectives."""
    calls = [
        {**UNKNOWN, "number": number, "call": call, "callsite": f"train.py:{number}{rank}", "bytes": None}
        for number, call in recent
    ]
    last = {**calls[-1], "number": started, "dim": "dp", "inside": inside}
    group = {"label": "dp", "ranks": [0, 1, 2, 3], "started": started, "last": last, "recent": calls}
    return {"rank": rank, "coords": {"dp": rank}, "main": "train.py:1 in step", "groups": [group]}


CALL_9 = BlockedCall(0, "dp", [0, 1, 2, 3], 9)


def test_equal_operations_with_other_counts_say_who_is_behind_and_who_is_ahead() -> None:
    call = "all_reduce"
    statuses = {rank: status_of(rank, 9, (8, call), (9, call)) for rank in range(3)}
    statuses[3] = status_of(3, 8, (7, call), (8, call))
    found = diagnose(CALL_9, statuses)
    assert (found.missing, found.mismatched, found.silent) == ([3], (), False)
    assert found.lines == [
        'rank 3 (dp=3) has not arrived: it is in all_reduce along "dp", call 8, at train.py:83'
    ]
    statuses[3] = status_of(3, 10, (9, call), (10, call))
    found = diagnose(CALL_9, statuses)
    assert (found.missing, found.mismatched) == ([], ())
    assert found.lines == [
        'rank 3 (dp=3) has continued: it is in all_reduce along "dp", call 10, at train.py:103'
    ]


def test_the_first_number_with_different_operations_counts() -> None:
    a, b = "all_reduce", "all_gather"
    statuses = {rank: status_of(rank, 9, (7, a), (8, a), (9, b)) for rank in (0, 2)}
    statuses[1] = status_of(1, 9, (7, a), (8, b), (9, a))
    found = diagnose(CALL_9, statuses)  # rank 3 does not answer
    assert found.mismatched == [1]
    assert found.lines == [
        "rank 1 (dp=1) made all_gather, at train.py:81, as call 8",
        "ranks 0 2 made all_reduce, at train.py:80, as call 8",
    ]
    # Either of two ranks may be wrong.
    found = diagnose(CALL_9, {rank: statuses[rank] for rank in (0, 1)})
    assert found.mismatched == [0, 1] and found.tie
    assert found.lines == [
        "rank 0 (dp=0) made all_reduce, at train.py:80, as call 8",
        "rank 1 (dp=1) made all_gather, at train.py:81, as call 8",
    ]
    # A call is compared only if both ranks remember it.
    statuses[1] = status_of(1, 6, (5, b), (6, b))
    assert diagnose(CALL_9, statuses).mismatched == ()
