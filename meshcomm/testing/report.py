"""What does a test say whose body has ended on every rank? Each failure once, with its ranks and their coords."""

from __future__ import annotations

import pickle
import sys
import unittest
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, final

import pytest
from _pytest._code.code import ReprFileLocation, TerminalRepr

from meshcomm.layout import Layout
from meshcomm.mesh.logs import prefix
from meshcomm.testing.marker import MeshRequest
from meshcomm.testing.outcome import Ends, Outcome
from meshcomm.testing.pool import RankFailure

FAILURE: pytest.StashKey[MeshFailure] = pytest.StashKey()
SKIPPED: pytest.StashKey[tuple[str, int, str]] = pytest.StashKey()


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


def settle(item: pytest.Function, request: MeshRequest, ends: Ends) -> None:
    """Print what the ranks printed, and return, skip, xfail or raise as they did."""
    __tracebackhide__ = True
    _print(request.layout, ends)
    outcomes = [end.value for end in ends.ranks if end.state == "returned"]
    by_kind: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_kind.setdefault(outcome.kind, []).append(outcome)
    if "exited" in by_kind:
        pytest.exit(by_kind["exited"][0].reason)
    own_failure = _died(ends) or any(not each.after for each in by_kind.get("failed", ()))
    if "xfailed" in by_kind and not own_failure:
        # Those that still waited did so for the ranks that had given up.
        pytest.xfail(by_kind["xfailed"][0].reason)
    failure = failure_of(ends, request)
    if failure is not None:
        item.stash[FAILURE] = failure
        _raise(ends, request)
    if outcomes and [*by_kind] == ["skipped"]:
        item.stash[SKIPPED] = (outcomes[0].path, outcomes[0].line, f"Skipped: {outcomes[0].reason}")
        pytest.skip(outcomes[0].reason)


def _died(ends: Ends) -> list[int]:
    return [rank for rank, end in enumerate(ends.ranks) if end.state in ("died", "raised")]


def _failed(ends: Ends) -> dict[int, Outcome]:
    """Those that most likely failed because another did come last."""
    returned = {rank: end.value for rank, end in enumerate(ends.ranks) if end.state == "returned"}
    failed = {rank: outcome for rank, outcome in returned.items() if outcome.kind == "failed"}
    return dict(sorted(failed.items(), key=lambda each: each[1].after))


def _print(layout: Layout, ends: Ends) -> None:
    noted: dict[tuple[Any, ...], None] = {}
    for rank, end in enumerate(ends.ranks):
        mark, out = prefix(layout, rank), end.out.splitlines()
        if end.state == "returned":
            noted.update(dict.fromkeys(end.value.warnings))
            if end.value.kind == "skipped":
                out += f"skipped: {end.value.reason}".splitlines()
        for stream, lines in ((sys.stdout, out), (sys.stderr, end.err.splitlines())):
            stream.write("".join(f"{mark} {line}\n" for line in lines))
    for text, category, file, line in noted:
        warnings.warn_explicit(text, category, file, line)


def _raise(ends: Ends, request: MeshRequest) -> NoReturn:
    """The first failing rank's own exception where it can be had, so that xfail(raises=...) and the like work."""
    __tracebackhide__ = True
    if ends.verdict is not None:
        raise ends.verdict
    failed = _failed(ends)
    first = next(iter(failed.values()), None)
    if first is not None and first.error is not None and not _died(ends):
        error = pickle.loads(first.error)
        # Those that would end the whole run, or mean something else here, are only told of.
        if not isinstance(error, (KeyboardInterrupt, GeneratorExit, unittest.SkipTest)):
            raise error
    texts = {rank: end.text for rank, end in enumerate(ends.ranks) if end.state != "returned"}
    raise RankFailure(texts | {rank: each.reason for rank, each in failed.items()}, request.world_size)


def failure_of(ends: Ends, request: MeshRequest) -> MeshFailure | None:
    """What to show, or None where no rank failed."""
    verdict, ranks = ends.verdict, ends.ranks
    failed, died = _failed(ends), _died(ends)
    late = [rank for rank, end in enumerate(ranks) if end.state == "late"]
    if not (failed or died or late or verdict):
        return None

    def header(of: Sequence[int]) -> str:
        return _header(of, request)

    def failures(after: bool) -> Iterable[tuple[str, Any]]:
        chosen = [rank for rank, outcome in failed.items() if outcome.after == after]
        for same in _alike(chosen, lambda rank: failed[rank].key):
            # They may differ in what tells one rank from another.
            one = len({failed[rank].shown for rank in same}) == 1
            words = "" if one else f", in the words of rank {same[0]}"
            yield f"{header(same)}{words}", pickle.loads(failed[same[0]].shown)

    def stacks(of: Iterable[int], says: str) -> Iterable[tuple[str, Any]]:
        for same in _alike(of, lambda rank: ranks[rank].stack):
            yield f"{header(same)}: {says}", ranks[same[0]].stack

    shared = "" if verdict is None else f"{type(verdict).__name__}: {verdict}"
    report = MeshFailure([(f"all {len(ranks)} ranks together", shared)] if shared else [])
    report.parts += failures(after=False)
    for rank in died:
        text = f"{request.layout.label(rank)} {ranks[rank].text}\n{ranks[rank].stack}"
        report.parts.append((header([rank]), text.rstrip()))
    report.parts += failures(after=True)
    report.parts += stacks(late, "still running" if failed or died else ranks[late[0]].text if late else "")
    report.parts += stacks([rank for rank in sorted(failed) if ranks[rank].stack], "when the time was up")
    good = [rank for rank in range(len(ranks)) if rank not in {*failed, *died, *late}]
    if good:
        report.parts.append((f"{header(good)}: no failure", ""))
    # The line of the summary.
    first = next(iter(failed), None)
    if shared:
        report.reprcrash = ReprFileLocation("", 0, shared.splitlines()[0])
    elif died and (first is None or failed[first].after):
        report.reprcrash = ReprFileLocation("", 0, f"{request.layout.label(died[0])} {ranks[died[0]].text}")
    elif first is not None:
        text = f"{prefix(request.layout, first)} {failed[first].reason}"
        report.reprcrash = ReprFileLocation(failed[first].path, failed[first].line, text)
    else:
        report.reprcrash = ReprFileLocation("", 0, f"{header(late)}: {ranks[late[0]].text}")
    return report


def _alike(ranks: Iterable[int], key: Callable[[int], str]) -> list[list[int]]:
    """The ranks in groups of equal keys."""
    groups: dict[str, list[int]] = {}
    for rank in ranks:
        groups.setdefault(key(rank), []).append(rank)
    return list(groups.values())


def _header(ranks: Sequence[int], request: MeshRequest) -> str:
    """Who they are: `rank 1 (dp=0 tp=1) of 4`, `ranks 1 3 (tp=1) of 4` with what their coords have in common."""
    world, layout = request.world_size, request.layout
    if len(ranks) == 1:
        return f"{request.layout.label(ranks[0])} of {world}"
    if len(ranks) == world:
        return f"all {world} ranks"
    numbers = f"ranks {' '.join(map(str, ranks))}"
    coords = {rank: set(layout.coords(rank).items()) for rank in range(world) if rank in layout}
    if all(rank in coords for rank in ranks):
        common = set.intersection(*(coords[rank] for rank in ranks))
        if len(ranks) == sum(common <= each for each in coords.values()):
            words = " ".join(
                f"{dim}={at}" for dim, at in layout.coords(ranks[0]).items() if (dim, at) in common
            )
            return f"{numbers} (all with {words}) of {world}"
        if len(ranks) <= 4:
            return f"{', '.join(request.layout.label(rank) for rank in ranks)} of {world}"
    return f"{numbers} of {world}"
