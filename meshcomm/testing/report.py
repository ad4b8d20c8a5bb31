"""What does a test say whose body failed on some ranks? Each failure once, with its ranks and their coords."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

from _pytest._code.code import ReprFileLocation, TerminalRepr

from meshcomm.layout import Layout
from meshcomm.testing.marker import MeshRequest
from meshcomm.testing.outcome import Outcome


@final
@dataclass(frozen=True)
class RankEnd:
    """How one rank ended. outcome: None where it died or had to be ended; then `text` says how.

    stack: what its main thread was doing when the time was up or the others had failed.
    """

    rank: int
    outcome: Outcome | None
    text: str = ""
    died: bool = False
    stack: str = ""
    out: str = ""
    err: str = ""


@final
@dataclass(eq=False)
class MeshFailure(TerminalRepr):
    """The failure's text: a part for each group of ranks that tell the same. pytest reads `reprcrash`."""

    parts: list[tuple[str, Any]] = field(default_factory=list)
    reprcrash: ReprFileLocation | None = None

    def toterminal(self, tw: Any) -> None:
        """Write it as pytest writes a traceback."""
        for number, (header, shown) in enumerate(self.parts):
            if number:
                tw.line("")
            tw.sep("-", header)
            if isinstance(shown, str):
                for line in shown.splitlines():
                    tw.line(line)
            else:
                shown.toterminal(tw)


def failure_of(ends: Sequence[RankEnd], request: MeshRequest, shared: str = "") -> MeshFailure | None:
    """What to show, or None where no rank failed.

    shared: what is true of all ranks together, a deadlock's verdict say.
    """
    failed = [end for end in ends if end.outcome is not None and end.outcome.kind == "failed"]
    died = [end for end in ends if end.died]
    late = [end for end in ends if end.outcome is None and not end.died]
    if not (failed or died or late or shared):
        return None
    report = MeshFailure()
    if shared:
        report.parts.append((f"all {len(ends)} ranks together", shared))
    first = [end for end in failed if end.outcome is not None and not end.outcome.after]
    report.parts += _failures(first, request)
    for end in died:
        text = f"{request.label(end.rank)} {end.text}"
        report.parts.append((_header([end.rank], request), f"{text}\n{end.stack}".rstrip()))
    # Those that most likely failed because another did are read last.
    followed = [end for end in failed if end not in first]
    report.parts += _failures(followed, request)
    says = "still running" if failed or died else late[0].text if late else ""
    for ranks, stack in _folded_stacks(late):
        report.parts.append((f"{_header(ranks, request)}: {says}", stack))
    answered = [end for end in failed if end.stack]
    for ranks, stack in _folded_stacks(answered):
        report.parts.append((f"{_header(ranks, request)}: when the time was up", stack))
    passed = [end.rank for end in ends if end.outcome is not None and end.outcome.kind != "failed"]
    if passed:
        report.parts.append((f"{_header(passed, request)}: no failure", ""))
    report.reprcrash = _crash(first, died, followed, late, request, shared)
    return report


def _failures(failed: Sequence[RankEnd], request: MeshRequest) -> list[tuple[str, Any]]:
    parts = []
    for ranks, outcome in _folded(failed):
        # They may differ in what tells one rank from another.
        same = (
            len({end.outcome.shown for end in failed if end.rank in ranks and end.outcome is not None}) == 1
        )
        words = "" if same else f", in the words of rank {ranks[0]}"
        parts.append((f"{_header(ranks, request)}{words}", pickle.loads(outcome.shown)))
    return parts


def _folded(ends: Sequence[RankEnd]) -> list[tuple[list[int], Outcome]]:
    groups: dict[str, tuple[list[int], Outcome]] = {}
    for end in ends:
        assert end.outcome is not None
        groups.setdefault(end.outcome.key, ([], end.outcome))[0].append(end.rank)
    return list(groups.values())


def _folded_stacks(ends: Sequence[RankEnd]) -> list[tuple[list[int], str]]:
    groups: dict[str, list[int]] = {}
    for end in ends:
        groups.setdefault(end.stack, []).append(end.rank)
    return [(ranks, stack) for stack, ranks in groups.items()]


def _header(ranks: Sequence[int], request: MeshRequest) -> str:
    """Who they are: `rank 1 (dp=0 tp=1) of 4`, `ranks 1 3 (tp=1) of 4` with what their coords have in common."""
    if len(ranks) == 1:
        return f"{request.label(ranks[0])} of {request.world_size}"
    if len(ranks) == request.world_size:
        return f"all {request.world_size} ranks"
    numbers = " ".join(map(str, ranks))
    coords = [request.layout.coords(rank).items() for rank in ranks if rank in request.layout]
    if len(coords) < len(ranks):
        return f"ranks {numbers} of {request.world_size}"
    common = [f"{dim}={at}" for dim, at in coords[0] if all((dim, at) in each for each in coords)]
    if len(ranks) == sum(
        all(
            (dim, at) in request.layout.coords(rank).items()
            for dim, at in coords[0]
            if f"{dim}={at}" in common
        )
        for rank in range(request.world_size)
        if rank in request.layout
    ):
        return f"ranks {numbers} (all with {' '.join(common)}) of {request.world_size}"
    if len(ranks) <= 4:
        return f"{', '.join(request.label(rank) for rank in ranks)} of {request.world_size}"
    return f"ranks {numbers} of {request.world_size}"


def _crash(
    first: Sequence[RankEnd],
    died: Sequence[RankEnd],
    followed: Sequence[RankEnd],
    late: Sequence[RankEnd],
    request: MeshRequest,
    shared: str,
) -> ReprFileLocation:
    """The line of the summary."""
    if shared:
        return ReprFileLocation("", 0, shared.splitlines()[0])
    if died and not first:
        return ReprFileLocation("", 0, f"{request.label(died[0].rank)} {died[0].text}")
    for end in (*first, *followed):
        assert end.outcome is not None
        mark = prefix(request.layout, end.rank)
        return ReprFileLocation(end.outcome.path, end.outcome.line, f"{mark} {end.outcome.reason}")
    return ReprFileLocation("", 0, f"{_header([end.rank for end in late], request)}: {late[0].text}")


def prefix(layout: Layout, rank: int) -> str:
    """`[r5 pp1 dp0 tp1]`, as log lines begin."""
    from meshcomm.mesh.logs import prefix as of_logs

    return of_logs(layout, rank)


def prefixed(text: str, layout: Layout, rank: int) -> str:
    """`text` with the rank's prefix before each line."""
    mark = prefix(layout, rank)
    return "".join(f"{mark} {line}\n" for line in text.splitlines())
