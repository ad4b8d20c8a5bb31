"""Did a row come out as it has to? Plain data in, a list of complaints out."""

from __future__ import annotations

import re

from tests.faults.row import Row
from tests.faults.runner import Result, Said


def complaints(row: Row, result: Result, busy_s: float = 0.0) -> list[str]:
    """Everything about `result` that is not as `row` expects; empty where all is well.

    busy_s: what other work on the machine may add to the promised seconds.
    """
    found = [f"rank {rank} hangs:\n{stacks}" for rank, stacks in result.hung.items()]
    survivors = set(row.expected)
    for rank in row.started:
        if rank not in survivors and rank not in result.gone and rank not in result.hung:
            found.append(f"rank {rank} was to be killed or stopped, and said {result.said.get(rank)}")
    for rank in sorted(survivors - set(result.hung)):
        said = result.said.get(rank)
        if said is None:
            found.append(f"rank {rank} said nothing: {result.gone.get(rank)}")
        elif said.kind not in row.expected[rank].split("|"):
            found.append(
                f"rank {rank}: {row.expected[rank] or 'no error'} expected, got {said.kind}\n{said.text}"
            )
        elif said.kind:
            unnamed = [other for other in row.to_name(rank) if other not in names(said)]
            blamed = [other for other in row.blameless if other in (said.named or ())]
            if unnamed or blamed:
                found.append(f"rank {rank} does not name {unnamed}, and blames {blamed}\n{said.text}")
    if result.seconds is None:
        found.append("nobody told when the fault was")
    elif result.seconds > row.promise_s + busy_s:
        busy = f", and {busy_s:g} s for other work" if busy_s else ""
        found.append(f"{result.seconds:.2f} s after the fault, promised within {row.promise_s:g} s{busy}")
    if result.left:
        found.append(f"{result.left} processes of the row were left")
    return found


def names(said: Said) -> set[int]:
    """The ranks that an error names: its own list where it has one, else those in its text."""
    if said.named is not None:
        return set(said.named)
    found = set()
    # "rank 2", "ranks 1 3", "ranks 0-2 5", "coord 2"
    for listed in re.findall(r"\b(?:ranks?|coords?) ((?:\d+(?:-\d+)?(?:[ ,]+|\b))+)", said.text):
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", listed):
            found |= set(range(int(first), int(last or first) + 1))
    return found
