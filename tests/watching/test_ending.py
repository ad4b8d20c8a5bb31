"""Which of several failures the launcher reports as the cause, and how it folds the others."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch.distributed as dist

from meshcomm.errors import MeshcommError, PeerLost, RankLost, TransferFailed
from meshcomm.watching.ending import Failure, failure_of, root_cause, without_error
from meshcomm.watching.words import UNKNOWN

LAYOUT = {rank: f"rank {rank} (pp={rank // 4} tp={rank % 4})" for rank in range(8)}


def failure(rank: int, at: float, kind: str = "ValueError", **more: Any) -> Failure:
    facts = {"frame": "train.py:88 in step", "text": f"all of rank {rank}"} | more
    return Failure(rank, LAYOUT[rank], at, f"{kind}: planted", **facts)


def told(
    left: list[Failure], ended: dict[int, int] | None = None, alive_at: float = 10.0
) -> tuple[list[str], int, str]:
    silent = [without_error(rank, code, alive_at, LAYOUT.__getitem__) for rank, code in (ended or {}).items()]
    root, others = root_cause([*left, *silent], 8, LAYOUT.__getitem__)
    return [root.summary, *others], root.code, root.text


FOLLOWED = "followed: lost a peer, or were ended by the launcher"


def test_the_earliest_error_is_the_cause() -> None:
    lines, code, text = told([failure(6, 12.0), failure(5, 11.0, "KeyError", code=2)])
    assert lines == [
        "rank 5 (pp=1 tp=1) failed: KeyError: planted, at train.py:88 in step",
        "rank 6: ValueError: planted",
        f"ranks 0-4 7 {FOLLOWED}",
    ]
    assert (code, text) == (2, "all of rank 5")


def test_an_error_about_communication_is_the_cause_only_where_there_is_no_other() -> None:
    lost = failure(0, 9.0, "PeerLost", follows=True, missing=(5,))
    assert told([lost, failure(5, 11.0)])[0][0].startswith("rank 5 (pp=1 tp=1) failed: ValueError")
    lines, code, text = told([lost, failure(1, 9.5, "PeerLost", follows=True)])
    assert lines == [
        "rank 0 (pp=0 tp=0) failed: PeerLost: planted, at train.py:88 in step",
        "it waited for rank 5 (pp=1 tp=1)",
        f"ranks 1-4 6 7 {FOLLOWED}",
    ]
    assert (code, text) == (1, "all of rank 0")


def test_of_a_chain_of_waiting_ranks_the_one_at_its_end_is_the_cause() -> None:
    # Rank 2 waits for rank 0, which waits for rank 1, which does not answer.
    waits = failure(2, 9.0, "CollectiveTimeout", follows=True, missing=(0,))
    ends = failure(0, 9.5, "PeerLost", follows=True, missing=(1,))
    lines = told([waits, ends, failure(3, 9.6, "PeerLost", follows=True, missing=(1,))])[0]
    assert lines[0].startswith("rank 0 (pp=0 tp=0) failed: PeerLost: planted")
    assert lines[1:] == ["it waited for rank 1 (pp=0 tp=1)", f"ranks 2-7 {FOLLOWED}"]
    # A rank that waits for rank 1 alone is better evidence than one that also waits for a waiting rank.
    both = failure(2, 9.0, "CollectiveTimeout", follows=True, missing=(0, 1))
    assert told([both, ends])[0][0].startswith("rank 0 ")
    # They wait for each other: the headline names both, and the text is from the earlier one.
    round_ = failure(0, 9.5, "CollectiveTimeout", follows=True, missing=(2,))
    lines = told([round_, waits, failure(3, 8.0, "PeerLost", follows=True, missing=(2,))])[0]
    assert lines == [
        "ranks 0 2 waited for each other: rank 0 (pp=0 tp=0) failed: CollectiveTimeout: planted, at train.py:88 in step: it "
        "waited for rank 2; rank 2 (pp=0 tp=2) failed: CollectiveTimeout: planted, at train.py:88 in step: it waited for rank 0",
        f"ranks 1 3-7 {FOLLOWED}",
    ]
    assert told([round_, waits])[2] == "all of rank 2"


def place(rank: int, *waits_for: int) -> list[Any]:
    doing = 'is in all_gather along "dp", call 475' if waits_for else "is at train.py:9 in load"
    return [rank, LAYOUT[rank], doing, [*waits_for]]


IS_IN = 'is in all_gather along "dp", call 475'


def late(rank: int, *chain: list[Any], at: float = 9.0, **more: Any) -> Failure:
    return failure(
        rank, at, "CollectiveTimeout", **{"follows": True, "missing": chain[0][-1], "chain": [*chain], **more}
    )


def test_what_the_ranks_knew_of_the_others_leads_to_the_end_of_the_chain() -> None:
    # 3 waits for 0, which waits for 2, which is outside of any call: neither 0 nor 2 has reported an error.
    lines, code, text = told([late(3, place(3, 0), place(0, 2), place(2)), late(1, place(1, 0), at=8.0)])
    assert lines == [
        "rank 2 (pp=0 tp=2) is at train.py:9 in load, and ranks 0 1 3 waited for it",
        f"rank 0 (pp=0 tp=0) {IS_IN}: it waited for rank 2",
        f"ranks 4-7 {FOLLOWED}",
    ]
    assert (code, text) == (1, "all of rank 3")
    # If the rank that waits for it has reported, its text is shown.
    lines, _, text = told([late(3, place(3, 0), place(0, 2), place(2)), late(0, place(0, 2), at=10.0)])
    assert (
        lines[1].startswith("rank 0 (pp=0 tp=0) failed: CollectiveTimeout: planted")
        and text == "all of rank 0"
    )
    # A circle that only another rank has seen.
    lines, _, text = told([late(3, place(3, 0), place(0, 2), place(2, 0))])
    assert lines == [
        f"ranks 0 2 waited for each other: rank 0 (pp=0 tp=0) {IS_IN}: it waited for rank 2; "
        f"rank 2 (pp=0 tp=2) {IS_IN}: it waited for rank 0",
        f"ranks 1 3-7 {FOLLOWED}",
    ]
    assert text == "all of rank 3"
    # Two chains: first the one with more ranks, then the other.
    lines = told([late(3, place(3, 0), place(0)), late(1, place(1, 0)), late(5, place(5, 6), place(6))])[0]
    assert lines[0] == "rank 0 (pp=0 tp=0) is at train.py:9 in load, and ranks 1 3 waited for it"
    assert "rank 5 waited for rank 6 (pp=1 tp=2) is at train.py:9 in load" in lines
    # Ranks that ended well or were killed are ends of a chain like others.
    lines, code, _ = told([late(3, place(3, 0), place(0, 2), place(2)), late(0, place(0, 2))], {2: -9})
    assert lines[0] == "rank 2 (pp=0 tp=2) was ended by SIGKILL" and code == 137
    assert "was ended by SIGBUS: a file that it had mapped" in told({}, {2: -7})[0][0]


def test_an_error_that_was_seen_counts_where_its_rank_waits_for_nobody() -> None:
    seen = failure(2, 5.0, "KeyError", seen=True)
    waits = late(3, place(3, 0), place(0, 2), place(2))
    assert (
        told([seen, waits])[0][0]
        == "rank 2 (pp=0 tp=2) raised KeyError: planted, at train.py:88 in step and had not ended"
    )
    # It has handled that error, and is in a call.
    assert told([seen, late(3, place(3, 2), place(2, 4), place(4))])[0][0].startswith(
        "rank 4 (pp=1 tp=0) is at train.py:9"
    )
    # An error that has ended a rank has priority.
    assert told([seen, failure(4, 9.0)])[0][0].startswith("rank 4 (pp=1 tp=0) failed: ValueError")


def test_a_signal_is_a_cause_and_counts_from_when_the_rank_was_last_seen() -> None:
    # Ranks that raised after that may have raised because of it.
    lines, code, text = told([failure(4, 10.05, "RuntimeError")], {5: -9}, alive_at=10.0)
    assert lines == [
        "rank 5 (pp=1 tp=1) was ended by SIGKILL",
        "rank 4: RuntimeError: planted",
        f"ranks 0-3 6 7 {FOLLOWED}",
    ]
    assert (code, text) == (137, "")
    assert told([failure(4, 9.9)], {5: -11}, alive_at=10.0)[0][0].startswith("rank 4 ")
    assert told([], {2: -11})[0] == [
        "rank 2 (pp=0 tp=2) was ended by SIGSEGV",
        f"ranks 0 1 3-7 {FOLLOWED}",
    ]
    assert told([], {2: 3})[:2] == (
        ["rank 2 (pp=0 tp=2) ended with exit code 3", f"ranks 0 1 3-7 {FOLLOWED}"],
        3,
    )


def test_the_rank_that_the_error_calls_mismatched_is_the_cause() -> None:
    lines, _, text = told(
        [failure(r, 9.0 + r, "CallMismatchError", follows=r != 3, mismatched=r == 3) for r in range(4)]
    )
    assert lines[0].startswith("rank 3 (pp=0 tp=3) failed: CallMismatchError")
    assert lines[1:] == ["ranks 0-2: the same", f"ranks 4-7 {FOLLOWED}"]
    assert text == "all of rank 3"


def test_an_abort_comes_after_an_error_that_names_who_is_missing() -> None:
    # NCCL's watchdog aborts a rank that waits too long; the rank that it waits for is the cause.
    waits = failure(2, 9.5, "CollectiveTimeout", follows=True, missing=(3,))
    lines, code, text = told([waits], {0: -6, 1: -6}, alive_at=9.0)
    assert lines == [
        "rank 2 (pp=0 tp=2) failed: CollectiveTimeout: planted, at train.py:88 in step",
        "ranks 0 1: was ended by SIGABRT",
        "it waited for rank 3 (pp=0 tp=3)",
        f"ranks 4-7 {FOLLOWED}",
    ]
    assert (code, text) == (1, "all of rank 2")
    # If no other rank is missing, or the aborted rank is the missing one, it has another reason to abort.
    lost = failure(2, 9.5, "PeerLost", follows=True)
    for left in ([], [lost], [waits]):
        assert told(left, {3: -6})[0][0] == "rank 3 (pp=0 tp=3) was ended by SIGABRT"


def test_an_abort_is_told_with_the_calls_that_the_others_were_in() -> None:
    # Gloo aborts a rank that receives more data than its call expects, so that rank cannot report anything.
    left = [called(rank, 9.0, "all_reduce", 71, follows=True, bytes=24, missing=(3,)) for rank in (0, 1)]
    left.append(called(2, 9.0, "all_reduce", 71, follows=True, bytes=16, missing=(3,)))
    lines = told(left, {3: -6})[0]
    assert lines[:5] == [
        "rank 3 (pp=0 tp=3) was ended by SIGABRT",
        "ranks 0 1: in all_reduce of 24 bytes, call 71 on tp, at train.py:6",
        "rank 2: in all_reduce of 16 bytes, call 71 on tp, at train.py:6",
        "Gloo ends a process with SIGABRT if the process receives more data than its call expects: compare the sizes",
        "if a C++ exception ended it, TORCH_SHOW_CPP_STACKTRACES=1 prints its message",
    ]


def called(rank: int, at: float, call: str, number: int = 140, label: str = "tp", **more: Any) -> Failure:
    site = f"train.py:{7 if call == 'barrier' else 6}"
    row = {"label": label, "number": number, "call": call, "callsite": site, "bytes": more.pop("bytes", 4)}
    return failure(rank, at, "CollectiveTimeout", call={**UNKNOWN, **row}, **{"follows": True, **more})


def test_a_rank_whose_operation_differs_at_one_sequence_number_is_the_cause() -> None:
    # Rank 1 left out a call long ago. The first rank to time out does not mention it.
    left = [called(rank, 9.0 + rank, "barrier" if rank == 1 else "all_reduce") for rank in range(4)]
    lines, _, text = told(left)
    assert lines[0].startswith("rank 1 (pp=0 tp=1) failed: CollectiveTimeout")
    assert lines[1:3] == [
        "call 140 on tp was barrier on rank 1 (pp=0 tp=1), at train.py:7",
        "call 140 on tp was all_reduce on ranks 0 2 3, at train.py:6",
    ]
    assert text == "all of rank 1"
    # This holds if another rank waits for some rank, too, and if only the call numbers differ.
    assert told([*left, called(5, 8.0, "barrier", 7, "tp'", missing=(6,))])[0][0].startswith("rank 1 ")
    behind = [called(rank, 9.0 + rank, "barrier", 139 if rank == 1 else 140) for rank in range(4)]
    assert told(behind)[0][0].startswith("rank 1 ")


def test_calls_that_are_no_mismatch_blame_nobody() -> None:
    calls = [called(rank, 9.0 + rank, "all_reduce") for rank in range(4)]
    elsewhere = called(4, 9.9, "barrier", label="tp[pp=1]")
    assert told([*calls, elsewhere])[0][1:] == [f"ranks 1-7 {FOLLOWED}"]
    # A peer was lost between two calls, and one rank had reached the next call.
    lost = [called(r, 9.0 + r, "barrier", 141 if r == 1 else 140, missing=(3,)) for r in range(3)]
    assert told(lost)[0][0].startswith("rank 0 ") and not any("call 14" in line for line in told(lost)[0])
    # With two ranks it is unknown which one is wrong, so both are named.
    two = [called(0, 9.0, "all_reduce"), called(1, 8.0, "barrier")]
    lines = told(two)[0]
    assert lines[0].startswith("rank 1 ") and "barrier on rank 1" in lines[1] + lines[2]
    assert "all_reduce on rank 0 (pp=0 tp=0)" in lines[1] + lines[2]
    # An error of another kind explains why the calls differ.
    assert told([*two, failure(5, 9.5)])[0][0].startswith("rank 5 ")


def test_the_ranks_of_a_link_between_jobs_are_no_ranks_of_the_job() -> None:
    facts: dict[str, Any] = {"missing": (1,), "chain": [place(1)], "call": {"label": "link"}}
    own, link = (
        failure_of(PeerLost("lost", of_job=of_job, **facts), 0, "rank 0") for of_job in (True, False)
    )
    assert (own.missing, own.chain[0][0], own.call) == ([1], 1, {"label": "link"})
    assert (link.missing, link.chain, link.call) == ([], [], None) and link.follows
    assert failure_of(TransferFailed("lost", missing=(("target", 1),)), 0, "rank 0").missing == []


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


LOST, OWN = PeerLost("lost a peer"), KeyError("mine")


def chained(
    outer: BaseException, cause: BaseException | None = None, context: BaseException | None = None
) -> BaseException:
    error = raised(outer)
    error.__cause__, error.__context__ = cause, context
    return error


# An error, whether it follows from another rank's error, and words of its headline.
CHAINS = {
    "raised from": (chained(ValueError("w"), LOST, LOST), True, "ValueError: w, after PeerLost: lost a peer"),
    "from None": (chained(ValueError("w"), None, LOST), True, "ValueError: w, after PeerLost: lost a peer"),
    "twice": (
        chained(ValueError("w"), None, chained(KeyError(1), LOST)),
        True,
        "ValueError: w, after PeerLost",
    ),
    "an exit code": (chained(SystemExit(3), None, LOST), True, "SystemExit: 3, after PeerLost"),
    "its own": (chained(ValueError("w"), OWN, OWN), False, "ValueError: w"),
    "after a new mesh": (chained(ValueError("w"), None, RankLost("lost 3")), False, "ValueError: w"),
    "a group of lost peers": (
        chained(ExceptionGroup("g", [LOST, chained(KeyError(1), LOST)])),
        True,
        "ExceptionGroup: g",
    ),
    "a group with one of its own": (
        chained(ExceptionGroup("g", [LOST, OWN])),
        False,
        "KeyError: 'mine' (in ExceptionGroup)",
    ),
    "a group in a group": (
        chained(ExceptionGroup("g", [ExceptionGroup("h", [OWN]), LOST])),
        False,
        "KeyError: 'mine' (in",
    ),
    "raised from a group": (
        chained(ValueError("w"), ExceptionGroup("g", [LOST])),
        True,
        "ValueError: w, after PeerLost",
    ),
    "torch's own": (
        chained(ValueError("w"), dist.DistNetworkError("gone")),
        True,
        "ValueError: w, after DistNetworkError",
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_an_error_is_judged_with_its_chain_of_causes(name: str) -> None:
    error, follows, words = CHAINS[name]
    found = failure_of(error, 0, LAYOUT[0])
    assert found.follows is follows and found.what.startswith(words)
    if follows and "torch" not in name:
        assert "PeerLost: lost a peer" in found.text, found.text


def test_a_chain_without_end_is_read_once() -> None:
    first, second = raised(ValueError("a")), raised(KeyError("b"))
    first.__cause__, second.__context__ = second, first
    assert not failure_of(first, 0, LAYOUT[0]).follows


def test_only_the_users_frames_count() -> None:
    with pytest.raises(MeshcommError) as caught:
        layout_of_nothing()
    assert failure_of(caught.value, 0, "rank 0").frame.endswith(" in layout_of_nothing")


def test_the_frame_is_the_programs_and_not_of_a_library() -> None:
    def in_library() -> None:
        json.loads("{")

    with pytest.raises(json.JSONDecodeError) as caught:
        in_library()
    found = failure_of(caught.value, 0, "rank 0")
    assert found.frame.startswith(f"{__file__}:") and found.frame.endswith(" in in_library")


@pytest.mark.parametrize("kind", [Exception, RuntimeError, MeshcommError])
def test_an_error_without_a_text_is_told_as_python_tells_it(kind: type[Exception]) -> None:
    def fails(self: Exception) -> str:
        raise ValueError

    error = raised(type("Bad", (kind,), {"__str__": fails})("b"))
    found = failure_of(error, 0, "rank 0")
    assert found.what == "Bad: <exception str() failed>" and "Bad: <exception str() failed>" in found.text
    while_handled = raised(PeerLost("lost"))
    while_handled.__context__ = error
    assert "Bad: <exception str() failed>" in failure_of(while_handled, 0, "rank 0").summary


def test_what_a_rank_held_is_named_only_if_no_error_explains_the_failure() -> None:
    lost = failure(0, 9.0, "PeerLost", follows=True)
    held = failure(1, 9.5, "PeerLost", follows=True, held="ValueError: true, at train.py:3 in f")
    assert told([lost, held])[0][0].endswith(
        "PeerLost: planted, at train.py:88 in step, while handling ValueError: true, at train.py:3 in f"
    )
    lines, _, _ = told([failure(0, 9.9, follows=False), held])
    assert lines[0].startswith("rank 0 ") and "true" not in "".join(lines)
    # An earlier error comes first.
    lines, _, _ = told([failure(0, 9.0), failure(1, 9.5, "ShapeError", held="KeyError: later")])
    assert lines[0].startswith("rank 0 ")
    mismatched = failure(2, 9.0, "CallMismatchError", mismatched=True)
    lines, _, _ = told([mismatched, held])
    assert lines[0].startswith("rank 2 ") and any(
        line == "rank 1 failed while handling ValueError: true, at train.py:3 in f" for line in lines
    ), lines


def layout_of_nothing() -> None:
    from meshcomm.layout import Layout

    Layout({"dp": 0})


def test_an_error_that_begins_with_an_empty_line_is_told_in_one_line() -> None:
    assert (
        failure_of(RuntimeError("\n  shapes do not fit\nmore"), 0, "rank 0").what
        == "RuntimeError: shapes do not fit"
    )
