"""What is shown of a test whose body has ended on every rank? Each failure once, with its ranks and their coords."""

from __future__ import annotations

import pickle
import re
import sys
import unittest
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import pytest

from meshcomm.layout import Layout
from meshcomm.layout.sizes import coords_text, ranks_text
from meshcomm.mesh.logs import prefix
from meshcomm.testing.marker import MeshRequest
from meshcomm.testing.outcome import Ends
from meshcomm.testing.pool import RankFailure

FAILURE: pytest.StashKey[str] = pytest.StashKey()
SKIPPED: pytest.StashKey[str] = pytest.StashKey()


def settle(item: pytest.Function, request: MeshRequest, ends: Ends) -> None:
    """Print what the ranks printed, and return, skip, xfail or raise as they did."""
    __tracebackhide__ = True
    _print(request.layout, ends)
    by_kind = {outcome.kind: outcome for outcome in reversed(ends.returned.values())}
    if "exited" in by_kind:
        pytest.exit(by_kind["exited"].reason)
    own_failure = ends.died or not all(outcome.after for outcome in ends.failed.values())
    if "xfailed" in by_kind and not own_failure:
        # Ranks that still waited did so for those that had given up.
        pytest.xfail(by_kind["xfailed"].reason)
    failure = failure_of(ends, request)
    if failure is not None:
        item.stash[FAILURE] = failure
        _raise(ends, request)
    if [*by_kind] == ["skipped"]:
        item.stash[SKIPPED] = by_kind["skipped"].reason
        pytest.skip(by_kind["skipped"].reason)


def replace_longrepr(item: pytest.Item, report: pytest.TestReport) -> None:
    """Put the ranks' failures, or the line of a skipped test, into pytest's report."""
    if FAILURE in item.stash and report.longrepr is not None:
        try:
            pytest.fail(item.stash[FAILURE], pytrace=False)
        except pytest.fail.Exception as failed:
            report.longrepr = item.repr_failure(pytest.ExceptionInfo.from_exception(failed))
    if SKIPPED in item.stash and report.skipped:
        line = 1 + (item.location[1] or 0)
        report.longrepr = (str(item.path), line, f"Skipped: {item.stash[SKIPPED]}")


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
    """The first failing rank's exception if it can be pickled, so that xfail(raises=...) and the like work."""
    __tracebackhide__ = True
    if ends.verdict is not None:
        raise ends.verdict
    failed = ends.failed
    first = next(iter(failed.values()), None)
    if first is not None and first.error is not None and not ends.died:
        error = pickle.loads(first.error)
        # These would end the run, or mean something else here.
        if not isinstance(error, (KeyboardInterrupt, GeneratorExit, unittest.SkipTest)):
            raise error
    texts = {rank: end.text for rank, end in enumerate(ends.ranks) if end.state != "returned"}
    raise RankFailure(texts | {rank: outcome.reason for rank, outcome in failed.items()}, request.world_size)


class _Text(NamedTuple):
    """The text of one rank. order: among the parts. text: without the rank's name, equal ones are shown once."""

    order: int
    rank: int
    state: str
    text: str


def failure_of(ends: Ends, request: MeshRequest) -> str | None:
    """One line for the summary, then a part for each group of ranks with equal texts; None if no rank failed."""
    if all(end.state == "returned" for end in ends.ranks) and not (ends.failed or ends.verdict):
        return None
    layout = request.layout
    groups: dict[tuple[int, str, str], list[_Text]] = {}
    for each in _texts(ends, layout):
        key = (each.order, each.state, _without_rank(each.text, layout.label(each.rank)))
        groups.setdefault(key, []).append(each)
    parts = []
    for (_, state, _), same in sorted(groups.items(), key=lambda group: group[0][0]):
        header = _header([each.rank for each in same], request) + (f": {state}" if state else "")
        if len({each.text for each in same}) > 1:
            # The texts differ in the names of the ranks.
            header += f", in the words of rank {same[0].rank}"
        parts.append(f"--- {header} ---\n{same[0].text}".rstrip())
    rank, first = next(iter(ends.failed.items()), (0, None))
    if ends.verdict is not None:
        summary = f"{type(ends.verdict).__name__}: {ends.verdict}"
    elif ends.died and (first is None or first.after):
        summary = f"{layout.label(ends.died[0])} {ends.ranks[ends.died[0]].text}"
    elif first is not None:
        summary = f"{prefix(layout, rank)} {first.reason}".splitlines()[0]
    else:
        summary = parts[0].splitlines()[0].strip("- ")
    return "\n\n".join([summary, *parts])


def _texts(ends: Ends, layout: Layout) -> Iterator[_Text]:
    failed = ends.failed
    for rank, end in enumerate(ends.ranks):
        if rank in failed:
            yield _Text(2 if failed[rank].after else 0, rank, "", failed[rank].text)
            if end.stack:
                yield _Text(4, rank, "when the time was up", end.stack)
        elif end.state == "returned":
            yield _Text(5, rank, "no failure", "")
        elif end.state == "late":
            yield _Text(3, rank, "still running" if failed or ends.died else end.text, end.stack)
        else:
            yield _Text(1, rank, "", f"{layout.label(rank)} {end.text}\n{end.stack}".rstrip())


def _without_rank(text: str, label: str) -> str:
    """`text` without the rank's name, with coords or without, and without addresses."""
    name = label.partition(" (")[0]
    return re.sub(r"\b0x[0-9a-f]+", "0x", re.sub(rf"\b{name}\b", "", text.replace(label, "")))


def _header(ranks: Sequence[int], request: MeshRequest) -> str:
    """Who they are: `rank 1 (dp=0 tp=1) of 4`, `ranks 1 3 (all with tp=1) of 4`."""
    world, layout = request.world_size, request.layout
    if len(ranks) == 1:
        return f"{layout.label(ranks[0])} of {world}"
    if len(ranks) == world:
        return f"all {world} ranks"
    coords = [layout.coords(rank) if rank in layout else {} for rank in ranks]
    common = {dim: at for dim, at in coords[0].items() if all(each.get(dim) == at for each in coords)}
    return f"{ranks_text(ranks)}{f' (all with {coords_text(common)})' if common else ''} of {world}"
