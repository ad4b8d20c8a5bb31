"""Find the root cause among a job's failures, and describe the other failures."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from types import MappingProxyType

from meshcomm.comm.mismatch import alike, majority
from meshcomm.comm.waits import ChainEnd, chain_ends
from meshcomm.layout.sizes import ranks_text
from meshcomm.mesh.rank_failure import Failure
from meshcomm.rendezvous.processes import signal_text

# A thread of a backend, for example.
_ELSEWHERE = " in a thread that runs no Python"
_FOLLOWED = "followed: lost a peer, or were ended by the launcher"


def root_cause(
    failures: Iterable[Failure],
    world_size: int,
    label: Callable[[int], str],
    ended: Collection[int] = (),
    raised: Mapping[int, Failure] = MappingProxyType({}),
) -> tuple[Failure, list[str]]:
    """Return the root cause among `failures`, and lines about the other failures. `failures` has at least one entry, and
    contains no rank that was asked to end.

    label: returns the name of a rank, with its coords. ended: ranks that had ended with exit code 0. raised: the errors that were
        seen on these ranks, as in a thread.

    The first candidates are errors that no other rank's error caused, and ranks ended by a signal or an unknown error. The
    root cause is a candidate whose call is reported as mismatched, or else the earliest candidate. A rank ended by SIGABRT,
    for example by its backend's watchdog, is not a candidate if an error names missing ranks. If there is no such candidate,
    the root cause is the first of the following that exists. First, an error that was seen on a rank that waits for no other
    and had not ended. Second, the rank whose operation differs at a group's sequence number. Third, the end of the chains of
    waiting, see `chain_ends`: a circle of ranks, or a rank that waits for no other, with the error of a rank that waited for
    it. Fourth, the earliest failure. If a rank waited for another rank that had already ended, the ended rank is the cause,
    with the error that was seen on it, or else that of the waiting rank. Unless there is a candidate, an error that a failed
    rank was handling is named: it may be the cause.
    """
    failures = sorted(failures, key=attrgetter("rank"))
    missing = {rank for failure in failures for rank in failure.missing}
    waits, places = _waits(failures)
    causes = [
        failure
        for failure in failures
        if not failure.follows
        and not failure.seen
        and (not missing or failure.rank in missing or not _aborted(failure))
    ]
    causes = causes or [each for each in failures if each.seen and each.rank not in waits]
    mismatched, lines = ([], []) if causes else _differing_calls(failures, label)
    ends = [] if causes or mismatched else chain_ends(waits)
    told = {*mismatched}
    if ends:
        root = _at_end(ends[0], failures, waits, places)
        told |= {*ends[0].ranks}
    else:
        root = min(
            causes or [failure for failure in failures if failure.follows],
            key=lambda failure: (
                not (failure.mismatched or failure.rank in mismatched),
                (failure.mismatched or failure.follows) and not failure.held,
                failure.time,
            ),
        )
    told |= {root.rank, *root.missing, *ended}
    others = [
        failure
        for failure in failures
        if failure.rank not in (root.rank, *(ends[0].ranks if ends else ()))
        and (not failure.follows or (not root.follows and failure.what == root.what))
    ]
    for what in dict.fromkeys(failure.what for failure in others):
        same = [failure for failure in others if failure.what == what]
        seen = [failure.summary for failure in same if failure.seen and what != root.what]
        told_so = "the same" if what == root.what else what
        lines += seen or [f"{_ranks(failure.rank for failure in same)}: {told_so}"]
    if _aborted(root):
        lines += _calls_beside(root, failures)
    gone = sorted({*root.missing} & {*ended}) or (sorted(ended) if root.follows and not mismatched else [])
    last = ends[0].ranks[0] if ends else gone[0] if gone else None
    # Once a rank has ended by an error of its own, what the others were handling explains nothing.
    handling = {each.rank: each.handling for each in failures if root.follows or root.mismatched}
    if ends and ends[0].is_circle:
        # The headline is about the circle.
        what = "; ".join(
            _waited(rank, [], waits, places) + handling.get(rank, "")
            if rank in places
            else _waited(rank, failures, waits, places)
            for rank in ends[0].ranks[:4]
        )
        what = f"waited for each other: {what}"
        root = replace(root, who=_ranks(ends[0].ranks), what=what, frame="", raised=False, held="")
    elif last is not None and last != root.rank and (last in ended or last in places):
        # The headline is about the rank at the end of the chain, and the text is that of a rank that waited for it.
        how = "ended with exit code 0 while" if last in ended else f"{places[last][1]}, and"
        own = raised.get(last) if last in ended else None
        if own is not None:
            how = f"raised {own.what}, at {own.frame}, then it {how}"
        waiters = ends[0].waiters if ends else [each.rank for each in failures if last in each.missing]
        waiters = waiters or [root.rank]
        told |= {*waiters}
        lines = [_waited(root.rank, [*failures, root], waits, places), *lines]
        what = f"{how} {ranks_text(waiters)} waited for it"
        who, text = (label(last), root.text) if own is None else (own.who, own.text)
        root = replace(
            root, rank=last, who=who, what=what, frame="", text=text, missing=(), raised=False, held=""
        )
    elif root.missing:
        lines.append(f"it waited for {', '.join(label(rank) for rank in root.missing[:4])}")
    for end in ends[1:]:
        if not {*end.ranks} & told:
            where = [
                f"{label(rank)} {places[rank][1] if rank in places else ''}".rstrip() for rank in end.ranks
            ]
            lines.append(f"{_ranks(end.waiters or end.ranks)} waited for {', '.join(where)}")
    for held in dict.fromkeys(handling.values()):
        if not any(held in line for line in (root.summary, *lines)):
            lines.append(f"{_ranks(rank for rank in handling if handling[rank] == held)} failed{held[1:]}")
    accounted = {*told, *(failure.rank for failure in others)}
    if after := [rank for rank in range(world_size) if rank not in accounted]:
        lines.append(f"{_ranks(after)} {_FOLLOWED}")
    return root, lines


def _waits(
    failures: Iterable[Failure],
) -> tuple[dict[int, Sequence[int]], dict[int, tuple[str, str]]]:
    """Return the ranks that each rank waited for, and the name and activity of each rank that another one asked."""
    waits: dict[int, Sequence[int]] = {}
    places: dict[int, tuple[str, str]] = {}
    for failure in sorted(failures, key=attrgetter("time")):
        for rank, name, doing, others in failure.chain:
            waits[rank], places[rank] = others, (name, doing)
    # What a rank says of itself counts more.
    waits |= {each.rank: each.missing for each in failures if each.follows and each.missing}
    return {rank: others for rank, others in waits.items() if others}, places


def _at_end(
    end: ChainEnd,
    failures: Sequence[Failure],
    waits: Mapping[int, Sequence[int]],
    places: Mapping[int, tuple[str, str]],
) -> Failure:
    """Return the failure of a rank of the circle, or of a rank that waited for the rank at the end of the chain.

    If none of these ranks has reported an error, make one up from what the others knew, with the text of a rank that asked.
    """
    last = end.ranks[0]
    near = end.ranks if end.is_circle else [rank for rank, others in waits.items() if last in others]
    own = [failure for failure in failures if failure.rank == last and not end.is_circle]
    # A rank that waits for the last rank alone says more than one that also waits for others.
    known = own or [failure for failure in failures if failure.rank in near]
    if known:
        return min(
            known,
            key=lambda each: ({*each.missing} != {last} and not end.is_circle, not each.held, each.time),
        )
    rank = min(near)
    asked = min(
        (each for each in failures if any(rank == entry[0] for entry in each.chain)), key=attrgetter("time")
    )
    who, doing = places[rank]
    return replace(asked, rank=rank, who=who, what=doing, frame="", missing=waits[rank], raised=False)


def _waited(
    rank: int,
    failures: Sequence[Failure],
    waits: Mapping[int, Sequence[int]],
    places: Mapping[int, tuple[str, str]],
) -> str:
    """Return a line about a rank that waited for others."""
    own = [failure.summary for failure in failures if failure.rank == rank]
    what = own[0] if own else " ".join(places[rank])
    return f"{what}: it waited for {ranks_text(waits[rank])}" if rank in waits else what


def without_error(
    rank: int, code: int, alive_at: float, label: Callable[[int], str], frame: str = "", own: bool = False
) -> Failure:
    """Return the failure of a rank that reported no error.

    code: the rank's exit code, negative for a signal. frame: the program's line at the signal, "" if unknown. own: whether the
    thread that ran this line caused the signal.
    """
    if code >= 0:
        return Failure(rank, label(rank), alive_at, f"ended with exit code {code}", code=code, raised=False)
    what = f"was ended by {signal_text(-code)}{'' if own or not frame else _ELSEWHERE}"
    return Failure(rank, label(rank), alive_at, what, frame, code=128 - code, raised=False)


def _aborted(failure: Failure) -> bool:
    return not failure.raised and failure.code == 128 + signal.SIGABRT


def _calls_beside(root: Failure, failures: Sequence[Failure]) -> list[str]:
    """Return the calls that ranks were in when SIGABRT ended another rank, and a hint about the possible cause."""
    made: dict[str, list[int]] = {}
    for failure in failures:
        if (call := failure.call) is not None and failure.follows:
            text = f"{call['call']} of {call['bytes']} bytes, call {call['number']} on {call['label']}, at {call['callsite']}"
            made.setdefault(text, []).append(failure.rank)
    lines = [f"{_ranks(ranks)}: in {text}" for text, ranks in made.items()]
    # If the program's own thread caused it, the backend did not.
    if lines and (not root.frame or root.what.endswith(_ELSEWHERE)):
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
        signs = {
            rank: (call["number"], call["call"]) for rank, call in calls.items() if call["label"] == group
        }
        made = alike([*signs], signs)
        if len(made) < 2 or (someone_missing and len({signs[ranks[0]][0] for ranks in made}) == len(made)):
            continue
        usual, others = majority(signs)
        mismatched += others if usual else ()
        for ranks in sorted(made, key=len):
            number, operation = signs[ranks[0]]
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
