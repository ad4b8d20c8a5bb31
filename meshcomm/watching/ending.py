"""How a job ended: the failure of each rank, and the root cause among them."""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final, final

from meshcomm.errors import CommunicationError, MeshcommError, parts_of
from meshcomm.layout.sizes import ranks_text
from meshcomm.watching.exceptions import (
    about_others,
    first_cause,
    frames_of,
    held_by,
    one_line,
    place_of,
    text_of,
    trace_of,
)
from meshcomm.watching.verdict import Place, alike, majority
from meshcomm.watching.waits import ChainEnd, chain_ends
from meshcomm.watching.words import made_at

INTERRUPTED: Final = 130
# A thread of a backend, for example.
_ELSEWHERE = " in a thread that runs no Python"
_BUS = ": a file that it had mapped, such as a token file, was made shorter, or /dev/shm is full"
# See `rank_failure._end_quietly`.
_CPP = "if a C++ exception ended it, TORCH_SHOW_CPP_STACKTRACES=1 prints its message"
_FOLLOWED = "followed: lost a peer, or were ended by the launcher"


@dataclass(frozen=True, slots=True)
class Failure:
    """The error of a rank, or how the rank ended without an error.

    who: the rank with its coords.
    time: seconds since the epoch.
    what: the error's type and first line or, for a rank that left no error, how the rank ended.
    frame: the innermost line of the user's code.
    text: the text to print, "" if the rank left no error.
    code: the rank's exit code.
    follows: whether another rank's error, if any, is the cause.
    mismatched: whether the error itself names this rank as the one that differs.
    missing: the ranks that this rank waited for.
    call: the collective that failed; see `CommunicationError.call`.
    chain: the ranks that this rank waited for, directly or through others; see `CommunicationError.chain`.
    raised: whether `what` is an error of this rank.
    seen: whether the rank had raised the error but not ended, as in a long `finally` block.
    held: the error that the rank had raised before this one, with its line, if a `finally` or `except` block made the call that
        failed. It may be the cause, or one that the program has handled.
    error: the parts of the error's message, as in `parts_of`; {} if the rank left no error.
    """

    rank: int
    who: str
    time: float
    what: str
    frame: str = ""
    text: str = ""
    code: int = 1
    follows: bool = False
    mismatched: bool = False
    missing: Sequence[int] = ()
    call: Mapping[str, Any] | None = None
    chain: Sequence[Sequence[Any]] = ()
    raised: bool = True
    seen: bool = False
    held: str = ""
    error: Mapping[str, Any] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """One line with the rank, the error and the source line."""
        failed = "" if not self.raised else " raised" if self.seen else " failed:"
        ended = " and had not ended" if self.seen else ""
        at = f", at {self.frame}" if self.frame else ""
        return f"{self.who}{failed} {self.what}{at}{self.handling}{ended}"

    @property
    def handling(self) -> str:
        """The end of a line that names the error that the rank was handling, if any."""
        return f", while handling {self.held}" if self.held else ""


def failure_of(error: BaseException, rank: int, who: str) -> Failure:
    """Return the Failure for `rank`, which raised `error`. `who` is the rank with its coords."""
    first = first_cause(error)
    of_others = about_others(first)
    # The error itself, or the one of a group that no other rank explains.
    main = error if of_others or not isinstance(error, BaseExceptionGroup) else first
    misused = isinstance(main, MeshcommError) and not isinstance(main, CommunicationError)
    # In other libraries' errors, attributes with these names may have a different meaning, and a link counts other ranks.
    facts = vars(first) if isinstance(first, MeshcommError) and first.of_job else {}
    mismatched = facts.get("mismatched_ranks", ())
    frames = frames_of(main)
    text = (
        f" {type(error).__name__}: {text_of(error)}"
        if isinstance(error, MeshcommError)
        else f"\n{_traceback(error)}"
    )
    what = one_line(main)
    if of_others and first is not error:
        what = f"{what}, after {one_line(first)}"
        if text_of(first) not in text:
            # As after `raise ... from None`.
            text = f"{text}\nafter {type(first).__name__}: {text_of(first)}"
    elif main is not error:
        what = f"{what} (in {type(error).__name__})"
    if isinstance(error, CommunicationError) and frames:
        # If another rank is the cause, the call stack shows how the program reached its call.
        text = f"{text}\ncalled from:\n{''.join(traceback.format_list(frames))}".rstrip()
    held = held_by(first) if isinstance(first, MeshcommError) or of_others else None
    if held is not None and (isinstance(error, MeshcommError) or one_line(held) not in text):
        text = f"{text}\nwhile handling:\n{_traceback(held)}"
    return Failure(
        rank,
        who,
        time.time(),
        what,
        place_of(main),
        f"{who}:{text}",
        code=INTERRUPTED if isinstance(error, KeyboardInterrupt) else 2 if misused else 1,
        follows=of_others and rank not in mismatched,
        mismatched=rank in mismatched,
        missing=[*facts.get("missing", ())],
        call=facts.get("call"),
        chain=[[*each[:-1], [*each[-1]]] for each in facts.get("chain", ())],
        held="" if held is None else f"{one_line(held)}, at {place_of(held)}",
        error=parts_of(main if isinstance(main, MeshcommError) else Exception(text_of(main)))
        | {"type": type(main).__name__},
    )


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, trace_of(error))).rstrip()


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
    job = _Job(failures, label)
    missing = {rank for failure in job.failures for rank in failure.missing}
    causes = [
        failure
        for failure in job.failures
        if not failure.follows
        and not failure.seen
        and (not missing or failure.rank in missing or not _aborted(failure))
    ]
    causes = causes or [failure for failure in job.failures if failure.seen and failure.rank not in job.waits]
    mismatched, lines = ([], []) if causes else job.differing_calls()
    ends = [] if causes or mismatched else chain_ends(job.waits)
    first = ends[0] if ends else None
    if first is not None:
        root = job.failure_at(first)
    else:
        root = min(
            causes or [failure for failure in job.failures if failure.follows],
            key=lambda failure: (
                not (failure.mismatched or failure.rank in mismatched),
                (failure.mismatched or failure.follows) and not failure.held,
                failure.time,
            ),
        )
    at_end = () if first is None else first.ranks
    told = {*mismatched, *at_end, root.rank, *root.missing, *ended}
    others = [
        failure
        for failure in job.failures
        if failure.rank not in (root.rank, *at_end)
        and (not failure.follows or (not root.follows and failure.what == root.what))
    ]
    for what in dict.fromkeys(failure.what for failure in others):
        same = [failure for failure in others if failure.what == what]
        seen = [failure.summary for failure in same if failure.seen and what != root.what]
        told_so = "the same" if what == root.what else what
        lines += seen or [f"{_ranks(failure.rank for failure in same)}: {told_so}"]
    if _aborted(root):
        lines += job.calls_beside(root)
    gone = sorted({*root.missing} & {*ended}) or (sorted(ended) if root.follows and not mismatched else [])
    last = at_end[0] if at_end else gone[0] if gone else None
    # If the first rank ended by its own error, the errors that other ranks were handling explain nothing.
    handling = {failure.rank: failure.handling for failure in job.failures if root.follows or root.mismatched}
    if first is not None and first.is_circle:
        # The headline is about the circle.
        what = f"waited for each other: {'; '.join(map(job.in_circle, at_end[:4]))}"
        root = replace(root, who=_ranks(at_end), what=what, frame="", raised=False, held="")
    elif last is not None and last != root.rank and (last in ended or last in job.places):
        # The headline is about the rank at the end of the chain, and the text is that of a rank that waited for it.
        how = "ended with exit code 0 while" if last in ended else f"{job.places[last].doing}, and"
        own = raised.get(last) if last in ended else None
        if own is not None:
            how = f"raised {own.what}, at {own.frame}, then it {how}"
        waiters = (
            [failure.rank for failure in job.failures if last in failure.missing]
            if first is None
            else first.waiters
        )
        waiters = waiters or [root.rank]
        told |= {*waiters}
        lines = [job.waited(root.rank, root.summary), *lines]
        root = replace(
            root,
            rank=last,
            who=label(last) if own is None else own.who,
            what=f"{how} {ranks_text(waiters)} waited for it",
            frame="",
            text=root.text if own is None else own.text,
            missing=(),
            raised=False,
            held="",
        )
    elif root.missing:
        lines.append(f"it waited for {', '.join(label(rank) for rank in root.missing[:4])}")
    for end in ends[1:]:
        if not {*end.ranks} & told:
            where = ", ".join(job.whereabouts(rank) for rank in end.ranks)
            lines.append(f"{_ranks(end.waiters or end.ranks)} waited for {where}")
    for held in dict.fromkeys(handling.values()):
        if not any(held in line for line in (root.summary, *lines)):
            lines.append(f"{_ranks(rank for rank in handling if handling[rank] == held)} failed{held[1:]}")
    accounted = {*told, *(failure.rank for failure in others)}
    if after := [rank for rank in range(world_size) if rank not in accounted]:
        lines.append(f"{_ranks(after)} {_FOLLOWED}")
    return root, lines


@final
class _Job:
    """What is known of a job that has ended.

    failures: in rank order. by_rank: the same. waits: the ranks that each rank waited for. places: where each rank was that
    another one asked.
    """

    def __init__(self, failures: Iterable[Failure], label: Callable[[int], str]) -> None:
        self.failures = sorted(failures, key=attrgetter("rank"))
        self.by_rank = {failure.rank: failure for failure in self.failures}
        self.places: dict[int, Place] = {}
        self._label = label
        for failure in sorted(self.failures, key=attrgetter("time")):
            self.places |= {place.rank: place for place in (Place(*entry) for entry in failure.chain)}
        waits = {rank: place.waits_for for rank, place in self.places.items()}
        # What a rank says of itself counts more.
        waits |= {
            failure.rank: failure.missing for failure in self.failures if failure.follows and failure.missing
        }
        self.waits = {rank: others for rank, others in waits.items() if others}

    def failure_at(self, end: ChainEnd) -> Failure:
        """Return the failure of a rank of the circle, or of a rank that waited for the rank at the end of the chain.

        If none of these ranks has reported an error, make one up from what the others knew, with the text of a rank that asked.
        """
        last, near = end.ranks[0], end.ranks
        if not end.is_circle:
            if last in self.by_rank:
                return self.by_rank[last]
            near = tuple(rank for rank, others in self.waits.items() if last in others)
        # A rank that waits for the last rank alone says more than one that also waits for others.
        known = sorted(
            (failure for failure in self.failures if failure.rank in near),
            key=lambda each: ({*each.missing} != {last} and not end.is_circle, not each.held, each.time),
        )
        if known:
            return known[0]
        place = self.places[min(near)]
        told = (
            failure for failure in self.failures if any(place.rank == entry[0] for entry in failure.chain)
        )
        asked, waited_for = min(told, key=attrgetter("time")), self.waits[place.rank]
        who, what = place.name, place.doing
        return replace(asked, rank=place.rank, who=who, what=what, frame="", missing=waited_for, raised=False)

    def waited(self, rank: int, what: str) -> str:
        """Return a line about a rank: what it did or raised, and for which ranks it waited."""
        waited = f": it waited for {ranks_text(self.waits[rank])}" if rank in self.waits else ""
        return what if what.endswith(waited) else what + waited

    def in_circle(self, rank: int) -> str:
        """Return a line about a rank of a circle: where it was and, if it has failed, what it was handling."""
        own, place = self.by_rank.get(rank), self.places.get(rank)
        if place is not None:
            return self.waited(rank, f"{place.name} {place.doing}") + ("" if own is None else own.handling)
        return self.waited(rank, self.by_rank[rank].summary)

    def whereabouts(self, rank: int) -> str:
        """Return the name of a rank, with its last known activity."""
        return f"{self._label(rank)} {self.places[rank].doing}" if rank in self.places else self._label(rank)

    def differing_calls(self) -> tuple[list[int], list[str]]:
        """Return the ranks whose failed call on a group differs from the majority's call, and lines that describe those calls.

        All ranks of a group should make the same call at each sequence number. Different sequence numbers are conclusive only
        if no rank is missing, because a lost peer may have ended between two calls.
        """
        calls = {failure.rank: failure.call for failure in self.failures if failure.call is not None}
        someone_missing = any(failure.missing for failure in self.failures)
        mismatched: list[int] = []
        lines: list[str] = []
        for group in dict.fromkeys(call["label"] for call in calls.values()):
            rows = {rank: call for rank, call in calls.items() if call["label"] == group}
            signs = {rank: (row["number"], row["call"]) for rank, row in rows.items()}
            made = alike([*signs], signs)
            numbers = {row["number"] for row in rows.values()}
            if len(made) < 2 or (someone_missing and len(numbers) == len(made)):
                continue
            usual, others = majority(signs)
            mismatched += others if usual else ()
            for ranks in sorted(made, key=len):
                row = rows[ranks[0]]
                who = self._label(ranks[0]) if len(ranks) == 1 else _ranks(ranks)
                lines.append(f"call {row['number']} on {group} was {row['call']} on {who}, {made_at(row)}")
        return mismatched, lines

    def calls_beside(self, root: Failure) -> list[str]:
        """Return the calls that ranks were in when SIGABRT ended another rank, and a hint about the possible cause."""
        made: dict[str, list[int]] = {}
        for failure in self.failures:
            if (call := failure.call) is not None and failure.follows:
                text = f"{call['call']} of {call['bytes']} bytes, call {call['number']} on {call['label']}, {made_at(call)}"
                made.setdefault(text, []).append(failure.rank)
        lines = [f"{_ranks(ranks)}: in {text}" for text, ranks in made.items()]
        # If the program's own thread caused it, the backend did not.
        if lines and (not root.frame or root.what.endswith(_ELSEWHERE)):
            lines.append(
                "Gloo ends a process with SIGABRT if the process receives more data than its call expects: compare the sizes"
            )
        return [*lines, _CPP]


def without_error(
    rank: int, code: int, alive_at: float, label: Callable[[int], str], frame: str = "", own: bool = False
) -> Failure:
    """Return the failure of a rank that reported no error.

    code: the rank's exit code, negative for a signal. frame: the program's line at the signal, "" if unknown. own: whether the
    thread that ran this line caused the signal.
    """
    if code >= 0:
        return Failure(rank, label(rank), alive_at, f"ended with exit code {code}", code=code, raised=False)
    why = _BUS if -code == signal.SIGBUS else ""
    what = f"was ended by {signal_text(-code)}{why}{'' if own or not frame else _ELSEWHERE}"
    return Failure(rank, label(rank), alive_at, what, frame, code=128 - code, raised=False)


def signal_text(number: int) -> str:
    """Return a signal's name, such as `SIGKILL`, or `signal 99` if it has no name."""
    known = {member.value for member in signal.Signals}
    return signal.Signals(number).name if number in known else f"signal {number}"


def _aborted(failure: Failure) -> bool:
    return not failure.raised and failure.code == 128 + signal.SIGABRT


def _ranks(ranks: Iterable[int]) -> str:
    """Return the ranks in a compact form.

    >>> _ranks([3]), _ranks([0, 1]), _ranks([7, 0, 1, 2, 3, 4, 6])
    ('rank 3', 'ranks 0 1', 'ranks 0-4 6 7')
    """
    numbered = groupby(enumerate(sorted(ranks)), lambda each: each[1] - each[0])
    runs = [[rank for _, rank in run] for _, run in numbered]
    words = [f"{run[0]}-{run[-1]}" if len(run) > 2 else " ".join(map(str, run)) for run in runs]
    return f"rank{'' if [*map(len, runs)] == [1] else 's'} {' '.join(words)}"
