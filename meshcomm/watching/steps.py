"""The calls of each step on each rank, and the first step in which the ranks of a group differ."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from types import CodeType
from typing import Any, Final, NamedTuple, final
from zlib import crc32

from meshcomm.layout.sizes import rank_text, ranks_text
from meshcomm.watching.callsite import line_of
from meshcomm.watching.counters import Entry
from meshcomm.watching.verdict import SAME, alike, majority

# The number of runs of equal steps whose calls are kept.
RUNS: Final = 64
# The number of callsites of one rank's step that an error shows.
_SHOWN: Final = 6


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
        if (
            last is None
            or (last.calls, last.digest) != (calls, digest)
            or last.number - last.first != number - step
        ):
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
        runs = [run._asdict() for run in tuple(self._runs)]
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
    histories_known = {rank: history for rank, history in histories.items() if history is not None}
    sums = {rank: dict(history["sums"]) for rank, history in histories_known.items()}
    last = last_common(*sums.values())
    if len({of_rank.get(last) for of_rank in sums.values()}) < 2:
        return None
    # Start at the oldest step that all histories still contain. The first difference may be even earlier.
    oldest = max(history["runs"][0]["first"] for history in histories_known.values())
    cut = any(history["cut"] for history in histories_known.values())
    starts = {run["first"] for history in histories_known.values() for run in history["runs"]}
    for start in sorted(start for start in starts if oldest <= start <= last):
        steps = {rank: _run_at(history["runs"], start) for rank, history in histories_known.items()}
        # If step numbers differ, a rank has skipped a step, although calls may be equal until the last step.
        numbers = {rank: step.number for rank, step in steps.items()}
        calls = {rank: (step.calls, step.digest) for rank, step in steps.items()}
        signs: Mapping[int, Any] = numbers if len(set(numbers.values())) > 1 else calls
        if len(set(signs.values())) > 1:
            if cut and start == oldest:
                break
            return _difference(label, signs, steps, coords, forgotten=False)
    steps = {rank: _run_at(history["runs"], oldest) for rank, history in histories_known.items()}
    signs = {rank: of_rank[last] for rank, of_rank in sums.items()}
    return _difference(label, signs, steps, coords, forgotten=True)


def _run_at(runs: Sequence[Mapping[str, Any]], step: int) -> _Run:
    """Return the run that contains step `step`, cut to start at that step."""
    run = next(_Run(**run) for run in reversed(runs) if run["first"] <= step)
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
        instead = "other calls"
        given = "the calls of that step are no longer recorded"
        expected = f"the same calls in every step, as {ranks_text(usual)} made them"
    elif apart:
        instead = f"step {first.number} instead"
        given = "\n".join(
            f"step {step.number} of {ranks_text(ranks)} ended at {step.ended_at}" for ranks, step in shown
        )
        expected = f"as {ranks_text(usual)}: step {number}, which ended at {model.ended_at}"
    else:
        more = first.calls - model.calls if len(mismatched) == 1 else 0
        instead = f"{_collectives(abs(more))} {'more' if more > 0 else 'fewer'}" if more else "other calls"
        lines = [
            f"{ranks_text(ranks)} on {label}: {_calls(step, first if step is model else model)}"
            for ranks, step in shown
        ]
        given = "\n".join([*lines, f"step {number} ended at {first.ended_at}"])
        expected = f"as {ranks_text(usual)}: {_calls(model, first)}"
    did = f"made {instead}" if usual else "do not agree"
    return {
        "what": f'ranks differ in {which} along "{label.partition("[")[0]}": {who} {did}',
        "given": given,
        "expected": expected if usual else SAME,
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


def _collectives(number: int) -> str:
    return f"{number:,} collective{'' if number == 1 else 's'}"
