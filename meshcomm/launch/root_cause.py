"""Find the root cause among a job's failures, and describe the other failures."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter

from meshcomm.comm.diagnosis import find_circle
from meshcomm.launch.reaper import signal_text
from meshcomm.layout.sizes import ranks_text
from meshcomm.mesh.rank_failure import Failure

_FOLLOWED = "followed: lost a peer, or were ended by the launcher"


def root_cause(
    failures: Iterable[Failure],
    world_size: int,
    label: Callable[[int], str],
    ended: Collection[int] = (),
) -> tuple[Failure, list[str]]:
    """Return the root cause among `failures`, and lines about the other failures. `failures` has at least one entry, and
    contains no rank that was asked to end.

    label: returns the name of a rank, with its coords. ended: ranks that had ended with exit code 0.

    The first candidates are errors that no other rank's error caused, and ranks ended by a signal or an unknown error. The
    root cause is a candidate whose call is reported as mismatched, or else the earliest candidate. A rank ended by SIGABRT,
    for example by its backend's watchdog, is not a candidate if an error names missing ranks. If there is no such candidate,
    the root cause is the first of the following that exists. First, the rank whose operation differs at a group's sequence
    number. Second, a rank that waited for ranks that have not all failed. Third, a cycle of ranks that waited
    for each other, with a line for each. Fourth, the earliest failure. If a rank waited for another rank that had already
    ended, the ended rank is the cause, with the error of the waiting rank.
    """
    failures = sorted(failures, key=attrgetter("rank"))
    failed = {failure.rank for failure in failures}
    missing = {rank for failure in failures for rank in failure.missing}
    causes = [
        failure
        for failure in failures
        if not failure.follows and (not missing or failure.rank in missing or not _aborted(failure))
    ]
    mismatched, lines = ([], []) if causes else _differing_calls(failures, label)
    root = min(
        causes or [failure for failure in failures if failure.follows],
        key=lambda failure: (
            not (failure.mismatched or failure.rank in mismatched),
            failed.issuperset(failure.missing),
            not failed.isdisjoint(failure.missing),
            failure.time,
        ),
    )
    circle = _circle(failures) if root.follows and failed.issuperset(root.missing) and not mismatched else []
    root = circle[0] if circle else root
    others = [
        failure
        for failure in failures
        if failure.rank != root.rank
        and failure not in circle
        and (not failure.follows or (not root.follows and failure.what == root.what))
    ]
    for what in dict.fromkeys(failure.what for failure in others):
        ranks = [failure.rank for failure in others if failure.what == what]
        lines.append(f"{_ranks(ranks)}: {'the same' if what == root.what else what}")
    if _aborted(root):
        lines += _calls_beside(failures)
    if root.missing:
        lines.append(f"it waited for {', '.join(label(rank) for rank in root.missing[:4])}")
    if circle:
        lines.append(f"{_ranks([each.rank for each in circle])} waited for each other")
    lines += [f"{each.summary}: it waited for {ranks_text(each.missing)}" for each in circle[1:]]
    left = [rank for rank in root.missing if rank in ended] or ([] if root.missing else sorted(ended))
    if root.follows and left and not mismatched:
        lines = [f"{root.summary}", *lines[: -1 if root.missing else None]]
        what = f"ended with exit code 0 while {ranks_text([root.rank])} waited for it"
        others = [*others, root]
        root = replace(
            root, rank=left[0], who=label(left[0]), what=what, frame="", missing=left[1:], raised=False
        )
    accounted = {
        *ended,
        root.rank,
        *root.missing,
        *mismatched,
        *(each.rank for each in circle),
        *(failure.rank for failure in others),
    }
    if after := [rank for rank in range(world_size) if rank not in accounted]:
        lines.append(f"{_ranks(after)} {_FOLLOWED}")
    return root, lines


def _circle(failures: Iterable[Failure]) -> list[Failure]:
    """Return the failures in a cycle of ranks that waited for each other, earliest first; [] if there is no cycle."""
    of_rank = {failure.rank: failure for failure in failures if failure.missing and failure.follows}
    ranks = find_circle({rank: each.missing for rank, each in of_rank.items()})
    return sorted((of_rank[rank] for rank in ranks), key=attrgetter("time"))


def without_error(rank: int, code: int, alive_at: float, label: Callable[[int], str]) -> Failure:
    """Return the failure of a rank that reported no error. code: the rank's exit code, negative for a signal."""
    if code >= 0:
        return Failure(rank, label(rank), alive_at, f"ended with exit code {code}", code=code, raised=False)
    what = f"was ended by {signal_text(-code)}"
    return Failure(rank, label(rank), alive_at, what, code=128 - code, raised=False)


def _aborted(failure: Failure) -> bool:
    return not failure.raised and failure.code == 128 + signal.SIGABRT


def _calls_beside(failures: Sequence[Failure]) -> list[str]:
    """Return the calls that ranks were in when SIGABRT ended another rank, and a hint about the possible cause."""
    made: dict[str, list[int]] = {}
    for failure in failures:
        if (call := failure.call) is not None and failure.follows:
            text = f"{call['call']} of {call['bytes']} bytes, call {call['number']} on {call['label']}, at {call['callsite']}"
            made.setdefault(text, []).append(failure.rank)
    lines = [f"{_ranks(ranks)}: in {text}" for text, ranks in made.items()]
    if lines:
        lines.append(
            "Gloo ends a process with SIGABRT if the process receives more data than its call expects: compare the sizes"
        )
    return lines


def _differing_calls(failures: Sequence[Failure], label: Callable[[int], str]) -> tuple[list[int], list[str]]:
    """Return the ranks whose failed call on a group differs from the majority's call, and lines that describe those calls.

    All ranks of a group should make the same call at each sequence number. Different sequence numbers are conclusive only
    if no rank is missing, because a lost peer may have ended between two calls.
    """
    calls = {failure.rank: failure.call for failure in failures if failure.call is not None}
    someone_missing = any(failure.missing for failure in failures)
    mismatched: list[int] = []
    lines: list[str] = []
    for group in dict.fromkeys(call["label"] for call in calls.values()):
        made: dict[tuple[int, str], list[int]] = {}
        for rank, call in calls.items():
            if call["label"] == group:
                made.setdefault((call["number"], call["call"]), []).append(rank)
        if len(made) < 2 or (someone_missing and len({number for number, _ in made}) == len(made)):
            continue
        fewest_first = sorted(made.items(), key=lambda each: len(each[1]))
        most = fewest_first[-1][1]
        if 2 * len(most) > sum(map(len, made.values())):
            mismatched += [rank for _, ranks in fewest_first[:-1] for rank in ranks]
        for (number, operation), ranks in fewest_first:
            who = label(ranks[0]) if len(ranks) == 1 else _ranks(ranks)
            lines.append(
                f"call {number} on {group} was {operation} on {who}, at {calls[ranks[0]]['callsite']}"
            )
    return mismatched, lines


def _ranks(ranks: Iterable[int]) -> str:
    """Return the ranks in a compact form.

    >>> _ranks([3]), _ranks([0, 1]), _ranks([7, 0, 1, 2, 3, 4, 6])
    ('rank 3', 'ranks 0 1', 'ranks 0-4 6 7')
    """
    numbered = groupby(enumerate(sorted(ranks)), lambda each: each[1] - each[0])
    runs = [[rank for _, rank in run] for _, run in numbered]
    words = [f"{run[0]}-{run[-1]}" if len(run) > 2 else " ".join(map(str, run)) for run in runs]
    return f"rank{'' if [*map(len, runs)] == [1] else 's'} {' '.join(words)}"
