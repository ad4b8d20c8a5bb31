"""Did the ranks of a group call alike in every step, and where not: who is odd, since when? Plain data in and out."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from meshcomm.comm.steps import sum_after
from meshcomm.comm.verdict import name_of_rank
from meshcomm.errors import CallMismatchError
from meshcomm.layout.sizes import fold

Status: TypeAlias = Mapping[str, Any]

# Lines of a program that an error shows of one rank's step.
_SHOWN: Final = 6


class Made(NamedTuple):
    """What a rank called on a group in one step. listing: of (call, file:line, how often)."""

    calls: int
    digest: int
    nbytes: int
    listing: Sequence[Sequence[Any]]


class Difference(NamedTuple):
    """The first step in which ranks of a group differ.

    number: of the step, as the program counts. earlier: it was one before, which is no longer remembered.
    made: by rank, of those that have noted the step; empty where `earlier`.
    odd: the ranks that differ from most others; of equally many, those without the lowest rank.
    """

    label: str
    step: int
    number: int
    earlier: bool
    made: Mapping[int, Made]
    odd: tuple[int, ...]
    usual: tuple[int, ...]


class _Rank:
    """What one rank tells of its steps on a group; see Steps.told."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        self.last: int = told["step"]
        self.since: int = told["since"]
        self.runs: Sequence[Sequence[int]] = told["runs"]
        self.starts: list[int] = [run[0] for run in self.runs]
        self._listings = told["listings"]

    def has(self, step: int) -> bool:
        """Whether it is remembered what was called in the step."""
        return self.starts[0] <= step <= self.last

    def number(self, step: int) -> int:
        """What the program calls the step."""
        return step + self._run(step)[1]

    def at(self, step: int) -> Made:
        """What was called in the step."""
        _, _, calls, digest, nbytes, _, listing = self._run(step)
        return Made(calls, digest, nbytes, self._listings[listing])

    def sum_before(self, step: int) -> int:
        """A digest of all that was called before the step."""
        first, _, calls, digest, _, found, _ = self._run(step)
        for _ in range(step - first):
            found = sum_after(found, calls, digest)
        return found

    def _run(self, step: int) -> Sequence[int]:
        return self.runs[bisect_right(self.starts, step) - 1]


def difference(label: str, ranks: Sequence[int], statuses: Mapping[int, Status]) -> Difference | None:
    """The first step in which those of `ranks` differ whose status is known; None where none is known."""
    told = {}
    for rank in ranks:
        found = _steps(statuses.get(rank), label)
        if found is not None:
            told[rank] = _Rank(found)
    for step in sorted({start for each in told.values() for start in each.starts}):
        there = {rank: each for rank, each in told.items() if each.has(step)}
        made = {rank: each.at(step) for rank, each in there.items()}
        number = max(each.number(step) for each in there.values())
        before = {rank: each.sum_before(step) for rank, each in there.items()}
        if any(each.starts[0] == step > each.since for each in there.values()) and _several(before):
            # What came before is no longer remembered, and it differed.
            return _found(label, step, number, True, {}, before)
        signs = {rank: (each.calls, each.digest) for rank, each in made.items()}
        if _several(signs):
            return _found(label, step, number, False, made, signs)
    return None


def _several(signs: Mapping[int, Any]) -> bool:
    return len(set(signs.values())) > 1


def _found(
    label: str, step: int, number: int, earlier: bool, made: Mapping[int, Made], signs: Mapping[int, Any]
) -> Difference:
    common = Counter(signs.values()).most_common(1)[0][0]
    odd = tuple(rank for rank, sign in signs.items() if sign != common)
    usual = tuple(rank for rank, sign in signs.items() if sign == common)
    return Difference(label, step, number, earlier, made, odd, usual)


def finding(found: Difference, statuses: Mapping[int, Status]) -> dict[str, Any]:
    """The error in words, as plain data that can be told to other ranks; see `error_of`."""
    number = found.number
    who = ", ".join(name_of_rank(rank, statuses.get(rank)) for rank in found.odd[:4])
    who += f" and {len(found.odd) - 4} more" if len(found.odd) > 4 else ""
    are = "is" if len(found.odd) == 1 else "are"
    since = f"a step before {number}" if found.earlier else f"step {number}"
    if found.earlier:
        given = "what was called in that step is no longer remembered"
        expected = f"the same calls in every step, as {_those(found.usual)} made them"
        more = ""
    else:
        usual = found.made[found.usual[0]]
        given = "\n".join(
            f"{_those(ranks)} on {found.label}: {_told(made, usual)}"
            for ranks, made in _alike(found.made, found.odd)
        )
        expected = f"as {_those(found.usual)}: {_told(usual, found.made[found.odd[0]])}"
        more = _more(found.made[found.odd[0]].calls - usual.calls) if len(found.odd) == 1 else ""
    return {
        "what": f'ranks differ in {since} along "{found.label.partition("[")[0]}": {who} {are} odd{more}',
        "given": given,
        "expected": expected,
        "hint": "look for a branch that only some ranks take; "
        f"results from {'then' if found.earlier else f'step {number}'} on mix calls that do not belong "
        "together, so go on from a checkpoint of before",
        "odd_ranks": list(found.odd),
        "step": number,
    }


def error_of(told: Mapping[str, Any]) -> CallMismatchError:
    """The error that `finding` has put in words."""
    error = CallMismatchError(told["what"], given=told["given"], expected=told["expected"], hint=told["hint"])
    error.odd_ranks = tuple(told["odd_ranks"])
    error.step = told["step"]
    return error


def _steps(status: Status | None, label: str) -> Any:
    groups = () if status is None else status["groups"]
    return next((group.get("steps") for group in groups if group["label"] == label), None)


def _alike(made: Mapping[int, Made], ranks: Sequence[int]) -> list[tuple[list[int], Made]]:
    """Those of `ranks` that called the same, together."""
    found: dict[tuple[int, int], list[int]] = {}
    for rank in ranks:
        found.setdefault((made[rank].calls, made[rank].digest), []).append(rank)
    return [(each, made[each[0]]) for each in found.values()]


def _told(made: Made, other: Made) -> str:
    calls = f"{made.calls} collective{'' if made.calls == 1 else 's'}"
    if made.nbytes != other.nbytes and made.calls == other.calls:
        calls += f" of {made.nbytes:,} bytes"
    if not made.listing:
        return calls
    lines = [
        f"{call}{f' {times} times' if times > 1 else ''} at {site}" for call, site, times in made.listing
    ]
    if len(lines) > _SHOWN + 1:
        lines = [*lines[:_SHOWN], f"and {len(lines) - _SHOWN} more lines"]
    return f"{calls}: " + ", ".join(lines)


def _more(calls: int) -> str:
    if not calls:
        return ""
    count = abs(calls)
    return f", with {count} collective{'' if count == 1 else 's'} {'more' if calls > 0 else 'fewer'}"


def _those(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {fold(ranks)}"
