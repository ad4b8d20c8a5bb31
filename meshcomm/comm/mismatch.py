"""Checks that all ranks of a group make the same calls: before the data of the first calls moves, and at each step."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from types import CodeType
from typing import Any, Final, NamedTuple, final
from zlib import crc32

import torch

from meshcomm.collectives import ALL_GATHER, ALL_REDUCE, Call
from meshcomm.comm.callsite import caller, line_of
from meshcomm.comm.counters import Entry
from meshcomm.comm.facts import balanced, facts_match
from meshcomm.errors import CallMismatchError
from meshcomm.layout.sizes import rank_text, ranks_text
from meshcomm.transport import Transport, Work

_BYTES: Final = 512
_SITE: Final = 200
# The number of runs of equal steps whose calls are kept.
RUNS: Final = 64
# What an error expects if no majority tells which ranks are wrong.
_SAME: Final = "the same calls on every rank of the group"
# Facts that an error shows only if nothing else differs.
_UNSEEN: Final = ("sent as",)
# The number of callsites of one rank's step that an error shows.
_SHOWN: Final = 6


@final
class CallCheck:
    """Compares the first calls in one group between its ranks, with an all_reduce of 16 bytes. If calls differ, the ranks
    exchange them in one small all_gather.

    transport: returns the group's transport. limit: how many calls to compare, equal on all ranks; None to compare all.
    """

    def __init__(self, transport: Callable[[], Transport], ranks: Sequence[int], limit: int | None) -> None:
        self._transport = transport
        self._ranks = list(ranks)
        self._left = limit
        self._number = 0

    @property
    def active(self) -> bool:
        """Whether the next call will be compared."""
        return (self._left is None or self._left > 0) and len(self._ranks) > 1

    @property
    def coord(self) -> int:
        """This rank's place in the group."""
        return self._transport().coord

    def announce_call(self, name: str, call: str, facts: dict[str, Any], past: bool = False) -> bool:
        """Wait until all ranks are about to make the same call on `name`. Return whether an exchange was needed.

        past: whether the call is made outside the mesh.

        Raises CallMismatchError on every rank of the group, before any data has moved.
        """
        transport = self._transport()
        if not self.active or transport.announce_call(name, call, facts):
            return False
        if self._left is not None:
            self._left -= 1
        self._number += 1
        sign = _sign(call, facts, past)
        signs = torch.tensor([sign, -sign], device=transport.device)
        _done(transport.start(Call(ALL_REDUCE, signs, op="max")))
        highest, lowest = signs.tolist()
        if highest != -lowest:
            self._compare(transport, name, _message(call, facts, past))
        return True

    def _compare(self, transport: Transport, name: str, message: bytes) -> None:
        """Exchange the calls themselves, because the digests differ."""
        mine = torch.frombuffer(bytearray(message.ljust(_BYTES, b"\0")), dtype=torch.uint8).to(
            transport.device
        )
        everyone = mine.new_empty(transport.size * _BYTES)
        _done(transport.start(Call(ALL_GATHER, mine, everyone)))
        rows = everyone.cpu().view(-1, _BYTES)
        calls = [json.loads(row.numpy().tobytes().rstrip(b"\0")) for row in rows]
        if not _are_same(calls):
            raise mismatch(name, self._number, self._ranks, [each[:3] for each in calls])


def _done(work: Work | None) -> None:
    if work is not None:
        work.wait()


def _sign(call: str, facts: dict[str, Any], past: bool) -> int:
    """Return a 63-bit number that is the same for equal calls in every process."""
    text = json.dumps([call, facts, past]).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def _is_same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return whether two ranks' calls, each given as (call, facts, ...), can belong to one call of their group."""
    return bool(one[0] == other[0]) and facts_match([one[1], other[1]])


def _are_same(calls: Sequence[Sequence[Any]]) -> bool:
    """Return whether the calls of all ranks of a group, in coord order, are one call."""
    facts = [each[1] for each in calls]
    return len({each[0] for each in calls}) == 1 and facts_match(facts) and balanced(facts)


def majority(signs: Mapping[int, Any]) -> tuple[list[int], list[int]]:
    """Return the ranks with the most common sign, and all other ranks. In a tie, no rank is in the majority, because any of
    two ranks that differ may be wrong.

    >>> majority({0: "a", 1: "b", 2: "b"}), majority({3: "a", 4: "b"}), majority({3: "a", 4: "a"})
    (([1, 2], [0]), ([], [3, 4]), ([3, 4], []))
    """
    (usual, times), *others = Counter(signs.values()).most_common(2)
    if others and others[0][1] == times:
        return [], list(signs)
    ranks = [rank for rank, sign in signs.items() if sign == usual]
    return ranks, [rank for rank in signs if signs[rank] != usual]


def blamed(mismatched: Sequence[int], tie: bool, of: int | None = None) -> str:
    """Return text that names the ranks of the second list of `majority`. tie: whether the first list is empty. of: the
    number of all ranks.

    >>> blamed([0], tie=False), blamed([0, 1], tie=False, of=5), blamed([3, 4], tie=True)
    ('rank 0 is mismatched', 'ranks 0 1 of 5 are mismatched', 'ranks 3 4 do not agree')
    """
    if tie:
        return f"{ranks_text(mismatched)} do not agree"
    who = f"{ranks_text(mismatched)} of {of}" if of else ranks_text(mismatched)
    return f"{who} {'is' if len(mismatched) == 1 else 'are'} mismatched"


def alike(ranks: Sequence[int], signs: Mapping[int, Any]) -> list[list[int]]:
    """Return the ranks as lists of equal sign.

    >>> alike([0, 1, 2], {0: "a", 1: "b", 2: "a"})
    [[0, 2], [1]]
    """
    lists: dict[Any, list[int]] = {}
    for rank in ranks:
        lists.setdefault(signs[rank], []).append(rank)
    return list(lists.values())


def mismatch(
    name: str, number: int, ranks: Sequence[int], calls: Sequence[Sequence[Any]]
) -> CallMismatchError:
    """Return the error for a group in which calls, each given as (call, facts, site), differ between ranks.

    ranks: global ranks, in the order of `calls`. Ranks that differ from the majority are mismatched.
    """
    by_rank = dict(zip(ranks, calls, strict=True))
    signs: dict[int, Any] = {}
    for rank, call in by_rank.items():
        same = (signs[each] for each in signs if _is_same(by_rank[each], call))
        signs[rank] = next(same, rank)
    usual, mismatched = majority(signs)
    expected = f"as {ranks_text(usual)}: " if usual else _SAME
    if not mismatched:
        # Every two calls can belong together, but not all: an all_to_all whose sizes do not fit.
        usual, mismatched, signs = [], list(ranks), {rank: rank for rank in ranks}
        expected = "each rank to expect from every other what that rank sends to it"
    seen = [{key: value for key, value in facts.items() if key not in _UNSEEN} for _, facts, _ in calls]
    shown = _UNSEEN if facts_match(seen) else ()
    lines = [
        f"{ranks_text(same)}: {_call_text(by_rank[same[0]], shown)}" for same in alike(mismatched, signs)
    ]
    expected += _call_text(by_rank[usual[0]], shown) if usual else ""
    return CallMismatchError(
        f'ranks differ in call {number} along "{name}": {blamed(mismatched, not usual)}; nothing was sent',
        given="\n".join(lines),
        expected=expected,
        hint="make the same calls in the same order on every rank of the group; "
        "look for a branch that depends on the rank",
        mismatched_ranks=tuple(mismatched),
    )


def _message(call: str, facts: dict[str, Any], past: bool) -> bytes:
    """Encode the call in at most 512 bytes. Equal facts give equal texts at any callsite."""
    site = caller()[-_SITE:]
    while len(text := json.dumps([call, facts, site, past]).encode()) > _BYTES:
        site = site[20:]
    return text


def _call_text(call: Sequence[Any], shown: Collection[str]) -> str:
    name, facts, site = call
    hidden = {"balance", *_UNSEEN} - {*shown} | ({"elements"} if "shape" in facts else set())
    listed = (
        f"{key} {_plain(value)}" for key, value in facts.items() if value is not None and key not in hidden
    )
    return f"{name}({', '.join(listed)}) at {site}"


def _plain(value: Any) -> str:
    return f"({', '.join(map(_plain, value))})" if isinstance(value, list) else str(value)


# -- step by step ------------------------------------------------------------------------------------


class _Run(NamedTuple):
    """Consecutive steps in which a rank made the same calls on the group, as plain data.

    first: the first step, by this rank's count. number: the program's number for that step. calls, nbytes: per step.
    digest: a digest of the operations and bytes. operations: each with its source line and count.
    ended_at: the line that called `mesh.step` after the first step.
    """

    first: int
    number: int
    calls: int
    digest: int
    nbytes: int
    operations: Sequence[str]
    ended_at: str


@final
class StepHistory:
    """One rank's calls in one group, step by step. Written by `mesh.step`; other threads read it too.

    step: the last recorded step. sums: for each step, a checksum of all calls up to its end. Two ranks with equal sums
    have made the same calls so far. The sum of a step divisible by 2**k is kept for 4 * 2**k steps, so that two ranks
    that are 2**k steps apart have a step in common.
    """

    def __init__(self) -> None:
        self.step = 0
        self.sums: dict[int, int] = {}
        self._sum = 0
        self._runs: deque[_Run] = deque(maxlen=RUNS)

    def note(
        self, step: int, number: int, calls: int, entries: Sequence[Entry], ended_at: tuple[CodeType, int]
    ) -> None:
        """Record that step `step`, which the program numbers `number`, has ended after `calls` calls.

        entries: the calls to compare.
        """
        facts = [fact for entry in entries for fact in (entry[0].sign, entry[1] * entry[0].alike)]
        digest, nbytes = crc32(array("q", facts).tobytes()) if facts else 0, sum(facts[1::2])
        last = self._runs[-1] if self._runs else None
        if last is None or last[2:4] != (calls, digest) or last.number - last.first != number - step:
            counts = Counter((entry[0].call, line_of(entry[2], entry[3])) for entry in entries)
            operations = [
                f"{call}{f' {times} times' if times > 1 else ''} at {line}"
                for (call, line), times in counts.items()
            ]
            self._runs.append(_Run(step, number, calls, digest, nbytes, operations, line_of(*ended_at)))
        self.sums[step] = self._sum = crc32(b"%d %d %d" % (number, calls, digest), self._sum)
        self.sums.pop(step - 4 * (step & -step), None)
        # Set last, because readers in other threads start from it.
        self.step = step

    def data(self) -> dict[str, Any] | None:
        """Return the history as plain data; None before the first step.

        sums: (step, sum). runs: as _Run. cut: whether older runs have been dropped.
        """
        if not self.step:
            return None
        runs = [list(run) for run in tuple(self._runs)]
        return {"sums": list(self.sums.items()), "cut": len(runs) == RUNS, "runs": runs}


def last_common(*sums: Mapping[int, int]) -> int:
    """Return the last step for which all ranks have a sum; 0 if there is none."""
    return max(set.intersection(*map(set, sums)), default=0) if sums else 0


def find_desync(
    label: str, histories: Mapping[int, Any], coords: Mapping[int, Mapping[str, int]]
) -> dict[str, Any] | None:
    """Return the first step in which ranks of a group differ, as plain data for `error_of`; None if none is known.

    histories: `StepHistory.data` by rank, in coord order; coords: those ranks' coords, by rank.
    """
    known = {rank: history for rank, history in histories.items() if history is not None}
    sums = {rank: dict(history["sums"]) for rank, history in known.items()}
    last = last_common(*sums.values())
    if len({of_rank.get(last) for of_rank in sums.values()}) < 2:
        return None
    # Start at the oldest step that all histories still contain. The first difference may be even earlier.
    oldest = max(history["runs"][0][0] for history in known.values())
    cut = any(history["cut"] for history in known.values())
    starts = {run[0] for history in known.values() for run in history["runs"]}
    for start in sorted(start for start in starts if oldest <= start <= last):
        steps = {rank: _run_at(history["runs"], start) for rank, history in known.items()}
        # If step numbers differ, a rank has skipped a step, although calls may be equal until the last step.
        numbers = {rank: step.number for rank, step in steps.items()}
        calls = {rank: (step.calls, step.digest) for rank, step in steps.items()}
        signs: Mapping[int, Any] = numbers if len(set(numbers.values())) > 1 else calls
        if len(set(signs.values())) > 1:
            if cut and start == oldest:
                break
            return _difference(label, signs, steps, coords, forgotten=False)
    steps = {rank: _run_at(history["runs"], oldest) for rank, history in known.items()}
    signs = {rank: of_rank[last] for rank, of_rank in sums.items()}
    return _difference(label, signs, steps, coords, forgotten=True)


def error_of(difference: Mapping[str, Any]) -> CallMismatchError:
    """Return the error for a result of `find_desync`."""
    facts = {key: difference[key] for key in ("given", "expected", "hint", "step")}
    return CallMismatchError(difference["what"], **facts, mismatched_ranks=tuple(difference["mismatched"]))


def _run_at(runs: Sequence[Sequence[Any]], step: int) -> _Run:
    """Return the run that contains step `step`, cut to start at that step."""
    run = next(_Run(*run) for run in reversed(runs) if run[0] <= step)
    return run._replace(first=step, number=run.number + step - run.first)


def _difference(
    label: str,
    signs: Mapping[int, Any],
    steps: Mapping[int, _Run],
    coords: Mapping[int, Mapping[str, int]],
    forgotten: bool,
) -> dict[str, Any]:
    """Return the difference as plain data.

    signs: equal for equal calls. forgotten: whether the first difference may be in an earlier step.
    """
    usual, mismatched = majority(signs)
    shown = [(ranks, steps[ranks[0]]) for ranks in alike(mismatched, signs)]
    # In a tie, the error compares the first two signs.
    first, model = shown[0][1], steps[usual[0]] if usual else shown[1][1]
    apart = not forgotten and model.number != first.number
    number = max(step.number for step in steps.values())
    if apart:
        number = model.number if usual else min(model.number, first.number)
    which = f"step {number}{' or an earlier one' if forgotten else ''}"
    who = ", ".join(rank_text(rank, coords[rank]) for rank in mismatched[:4])
    who += f" and {len(mismatched) - 4} more" if len(mismatched) > 4 else ""
    if forgotten:
        made = "other calls"
        given = "the calls of that step are no longer recorded"
        expected = f"the same calls in every step, as {ranks_text(usual)} made them"
    elif apart:
        made = f"step {first.number} instead"
        given = "\n".join(
            f"step {step.number} of {ranks_text(ranks)} ended at {step.ended_at}" for ranks, step in shown
        )
        expected = f"as {ranks_text(usual)}: step {number}, which ended at {model.ended_at}"
    else:
        more = first.calls - model.calls if len(mismatched) == 1 else 0
        made = f"{_collectives(abs(more))} {'more' if more > 0 else 'fewer'}" if more else "other calls"
        lines = [
            f"{ranks_text(ranks)} on {label}: {_calls(step, first if step is model else model)}"
            for ranks, step in shown
        ]
        given = "\n".join([*lines, f"step {number} ended at {first.ended_at}"])
        expected = f"as {ranks_text(usual)}: {_calls(model, first)}"
    did = f"made {made}" if usual else "do not agree"
    return {
        "what": f'ranks differ in {which} along "{label.partition("[")[0]}": {who} {did}',
        "given": given,
        "expected": expected if usual else _SAME,
        "hint": f"look for a {'step that only some ranks make' if apart else 'branch that only some ranks take'}; results of "
        f"{which} and later mix calls that do not belong together: resume from a checkpoint before it",
        "mismatched": mismatched,
        "step": number,
    }


def _calls(step: _Run, other: _Run) -> str:
    """Return text with the number of calls, and the lines whose calls `other` has not made as often."""
    text = _collectives(step.calls)
    if step.nbytes != other.nbytes and step.calls == other.calls:
        text += f" of {step.nbytes:,} bytes"
    lines = [line for line in step.operations if line not in other.operations] or list(step.operations)
    if len(lines) > _SHOWN + 1:
        lines = [*lines[:_SHOWN], f"and {len(lines) - _SHOWN} more callsites"]
    return f"{text}: {', '.join(lines)}" if lines else text


def _collectives(count: int) -> str:
    return f"{count} collective{'' if count == 1 else 's'}"
