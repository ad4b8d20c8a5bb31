"""Which of a job's failures was the first cause, and what does the launcher say of the others?"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshcomm.mesh.failures import Failure

_FOLLOWED = "followed: lost a peer, or were ended by the launcher"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the launcher prints of a failed attempt, and the exit code that follows from it.

    text: the first cause in full; "" where a rank could not speak. cause: it in one line.
    rest: lines on the other ranks.
    """

    text: str
    cause: str
    rest: tuple[str, ...]
    code: int


def judge(
    left: Sequence[Failure],
    ended: Mapping[int, int],
    alive_at: float,
    world_size: int,
    label: Callable[[int], str],
) -> Verdict:
    """Find the first cause.

    Args:
        left: the errors that ranks left.
        ended: exit codes (negative: signals) of the ranks that had ended by themselves, before the
            launcher ended the others. alive_at: when all of them were last seen.
        label: the name of a rank, with its coords.

    Errors that are not about communication come first, and ranks that a signal or an unknown error
    ended; the earliest of them, but the one that the error itself calls odd before all. Only where
    there is none, the earliest error about communication is shown, and whom it waited for; but one
    that waited for a rank that left no error before those that waited for each other.
    """
    spoken = {failure.rank for failure in left}
    causes = [failure for failure in left if not failure.follows]
    silent = [
        _silent(rank, code, alive_at, label) for rank, code in sorted(ended.items()) if rank not in spoken
    ]
    candidates = [*causes, *silent] or [failure for failure in left if failure.follows]
    if not candidates:
        return Verdict("", "the job was ended", (), 1)
    root = min(candidates, key=lambda each: (not each.odd, bool(spoken.issuperset(each.missing)), each.time))
    rest = []
    others = [each for each in (*causes, *silent) if each.rank != root.rank]
    for what in dict.fromkeys((each.kind, each.first) for each in others):
        ranks = [each.rank for each in others if (each.kind, each.first) == what]
        same = what == (root.kind, root.first)
        rest.append(f"{_ranks(ranks)}: {'the same' if same else ': '.join(filter(None, what))}")
    if root.missing:
        rest.append(f"it waited for {', '.join(label(rank) for rank in root.missing[:4])}")
    accounted = {root.rank, *root.missing, *(each.rank for each in others)}
    if after := [rank for rank in range(world_size) if rank not in accounted]:
        rest.append(f"{_ranks(after)} {_FOLLOWED}")
    return Verdict(root.text, root.summary if root.text else root.first, tuple(rest), root.code)


def _silent(rank: int, code: int, alive_at: float, label: Callable[[int], str]) -> Failure:
    if code < 0:
        what = f"was ended by {_signal(-code)}"
    else:
        what = f"ended with exit code {code}"
    first = f"{label(rank)} {what}"
    return Failure(rank, label(rank), alive_at, what, first, "", "", 128 - code if code < 0 else code, False)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _ranks(ranks: Iterable[int]) -> str:
    """The ranks in few words.

    >>> _ranks([3]), _ranks([0, 1]), _ranks([7, 0, 1, 2, 3, 4, 6])
    ('rank 3', 'ranks 0 1', 'ranks 0-4 6 7')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [f"{run[0]}-{run[-1]}" if len(run) > 2 else " ".join(map(str, run)) for run in runs]
    single = len(runs) == 1 and len(runs[0]) == 1
    return f"{'rank' if single else 'ranks'} {' '.join(words)}"
