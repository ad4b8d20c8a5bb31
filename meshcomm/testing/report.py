"""Reports how a test's body ended on every rank. Each failure is shown once, with the coords of the ranks that failed."""

from __future__ import annotations

import inspect
import re
import sys
import traceback
import unittest
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from traceback import FrameSummary, StackSummary
from typing import Any, Final, Literal, NamedTuple, final

import pytest
import torch

import meshcomm
from meshcomm.errors import MeshcommError
from meshcomm.layout import Layout
from meshcomm.layout.sizes import coords_text, ranks_text
from meshcomm.mesh.logs import prefix
from meshcomm.testing.marker import MeshRequest
from meshcomm.testing.pool import Ended

_MESHCOMM: Final = f"{Path(meshcomm.__file__).parent}/"
_STANDARD: Final = f"{Path(traceback.__file__).parent}/"
PYTEST: Final = f"{Path(inspect.getfile(pytest.Session)).parent}/"
_OTHERS: Final = (torch, pytest, type(pytest.hookimpl))
_LIBRARIES: Final = (
    *(_MESHCOMM, "<frozen ", PYTEST),
    *(f"{Path(inspect.getfile(each)).parent}/" for each in _OTHERS),
)
# A frame in faulthandler's format.
_FRAME: Final = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')


@final
@dataclass(frozen=True)
class Outcome:
    """How the body ended on one rank.

    reason: the reason for a skip, xfail or exit; for a failure, a short form of the exception. text: the traceback.
    after:  whether the failure is only a consequence of another rank's failure.
    """

    kind: Literal["passed", "skipped", "xfailed", "exited", "failed"]
    reason: str = ""
    text: str = ""
    after: bool = False
    warnings: tuple[Any, ...] = ()


class Ends(NamedTuple):
    """How a test's body ended on every rank. verdict: an error that concerns all ranks, such as a deadlock.

    The `value` of a rank that returned is its Outcome; every other rank has a `text`. `stack` is the rank's stack when the
    time was up or after another rank had failed.
    """

    ranks: list[Ended]
    verdict: MeshcommError | None = None

    @property
    def returned(self) -> dict[int, Outcome]:
        """The outcomes of the ranks that returned, by rank."""
        return {rank: end.value for rank, end in enumerate(self.ranks) if end.state == "returned"}

    @property
    def failed(self) -> dict[int, Outcome]:
        """The failures by rank. Failures that are only consequences of another rank's failure come last."""
        failed = [(rank, outcome) for rank, outcome in self.returned.items() if outcome.kind == "failed"]
        return dict(sorted(failed, key=lambda item: item[1].after))

    @property
    def died(self) -> list[int]:
        """The ranks whose processes died or could not return an outcome."""
        return [rank for rank, end in enumerate(self.ranks) if end.state in ("died", "raised")]


# -- on a rank --------------------------------------------------------------------------------------


def outcome_of(body: Callable[[], object], full: bool, follows: type[BaseException] | None = None) -> Outcome:
    """Run `body` and return how it ended. Never raises an exception.

    full: whether to show all frames of a traceback. follows: an exception type that means that another rank failed first.
    """
    try:
        body()
    except (pytest.skip.Exception, unittest.SkipTest) as error:
        return Outcome("skipped", str(error))
    except pytest.xfail.Exception as error:
        return Outcome("xfailed", str(error))
    except pytest.exit.Exception as error:
        return Outcome("exited", str(error))
    except BaseException as error:
        short = pytest.ExceptionInfo.from_exception(error).exconly(tryshort=True)
        after = follows is not None and isinstance(error, follows)
        return Outcome("failed", short, _traceback(error, full), after)
    return Outcome("passed")


def _traceback(error: BaseException, full: bool) -> str:
    if isinstance(error, pytest.fail.Exception) and not error.pytrace:
        return str(error)
    shown = traceback.TracebackException.from_exception(error)
    shown.stack = _users(shown.stack, full)
    # The chain is not needed for a MeshcommError, because its text includes the backend's message.
    return "".join(shown.format(chain=full or not isinstance(error, MeshcommError))).rstrip()


def stack_text(frames: Iterable[FrameSummary], full: bool) -> str:
    """Return the stack of a rank that did not return, formatted like a Python traceback. frames: outermost first."""
    return "".join(_users(frames, full).format()).rstrip()


def last_stack(text: str) -> list[FrameSummary]:
    """Return the last stack that faulthandler wrote, outermost frame first. After a fault, this is the faulting thread's
    stack.
    """
    begins = max(text.rfind("Current thread"), text.rfind("Stack (most recent"))
    frames = _FRAME.findall(text[begins:].partition("\n\n")[0]) if begins >= 0 else []
    return [FrameSummary(file, int(line.replace("???", "0")), name) for file, line, name in reversed(frames)]


def _users(frames: Iterable[FrameSummary], full: bool) -> StackSummary:
    """Return the test's frames outside libraries. If `full` is true or there are none, return all frames."""
    shown = list(frames)
    if not full:
        testing = [index for index, f in enumerate(shown) if f.filename.startswith(f"{_MESHCOMM}testing/")]
        shown = shown[testing[-1] + 1 :] if testing else shown
        shown = [frame for frame in shown if not _is_library(frame.filename)] or shown
    return StackSummary.from_list(shown)


def _is_library(file: str) -> bool:
    """Return whether a file belongs to meshcomm, torch, pytest or Python.

    Python's folder may also contain packages that the user installed.
    """
    return file.startswith(_LIBRARIES) or (file.startswith(_STANDARD) and "site-packages" not in file)


# -- in the main process ----------------------------------------------------------------------------


def settle(request: MeshRequest, ends: Ends) -> None:
    """Print the ranks' output. Then return, skip, xfail or fail, as the ranks did."""
    __tracebackhide__ = True
    _print(request.layout, ends)
    by_kind = {outcome.kind: outcome for outcome in reversed(ends.returned.values())}
    if "exited" in by_kind:
        pytest.exit(by_kind["exited"].reason)
    own_failure = ends.died or not all(outcome.after for outcome in ends.failed.values())
    if "xfailed" in by_kind and not own_failure:
        # Any rank that was still waiting was waiting for the ranks that had ended.
        pytest.xfail(by_kind["xfailed"].reason)
    failure = failure_of(ends, request)
    if failure is not None:
        pytest.fail(failure, pytrace=False)
    if [*by_kind] == ["skipped"]:
        pytest.skip(by_kind["skipped"].reason)


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


def failure_of(ends: Ends, request: MeshRequest) -> str | None:
    """Return a summary line and a section for each group of ranks with the same text, or None if no rank failed."""
    failed, layout = ends.failed, request.layout
    if not (failed or ends.verdict) and len(ends.returned) == len(ends.ranks):
        return None
    groups: dict[tuple[int, str, str], list[tuple[int, str]]] = {}
    for rank in range(len(ends.ranks)):
        order, state, text = _part(rank, ends, layout)
        groups.setdefault((order, state, _without_rank(text, layout.label(rank))), []).append((rank, text))
    parts = []
    for (_, state, _), same in sorted(groups.items(), key=lambda group: group[0][0]):
        header = _header([rank for rank, _ in same], request) + (f": {state}" if state else "")
        if len({text for _, text in same}) > 1:
            # The texts differ only in rank names or addresses.
            header += f", as reported by rank {same[0][0]}"
        parts.append(f"--- {header} ---\n{same[0][1]}".rstrip())
    rank, first = next(iter(failed.items()), (0, None))
    if ends.verdict is not None:
        summary = f"{type(ends.verdict).__name__}: {ends.verdict}"
    elif ends.died and (first is None or first.after):
        summary = f"{layout.label(ends.died[0])} {ends.ranks[ends.died[0]].text}"
    elif first is not None:
        summary = f"{prefix(layout, rank)} {first.reason}".splitlines()[0]
    else:
        summary = parts[0].splitlines()[0].strip("- ")
    return "\n\n".join([summary, *parts])


def _part(rank: int, ends: Ends, layout: Layout) -> tuple[int, str, str]:
    """Return the sort key of a rank's section, the rank's state as text, and the section's text."""
    end, outcome = ends.ranks[rank], ends.failed.get(rank)
    if outcome is not None:
        late = f"\n\nwhen the time was up:\n{end.stack}" if end.stack else ""
        return 2 if outcome.after else 0, "", outcome.text + late
    if end.state == "returned":
        return 4, "no failure", ""
    if end.state == "late":
        return 3, "still running" if ends.failed or ends.died else end.text, end.stack
    return 1, "", f"{layout.label(rank)} {end.text}\n{end.stack}".rstrip()


def _without_rank(text: str, label: str) -> str:
    """Return `text` without the rank's name and coords, and without addresses."""
    name = label.partition(" (")[0]
    return re.sub(r"\b0x[0-9a-f]+", "0x", re.sub(rf"\b{name}\b", "", text.replace(label, "")))


def _header(ranks: Sequence[int], request: MeshRequest) -> str:
    """Return text that names ranks, such as `rank 1 (dp=0 tp=1) of 4` or `ranks 1 3 (all with tp=1) of 4`."""
    world, layout = request.world_size, request.layout
    if len(ranks) == 1:
        return f"{layout.label(ranks[0])} of {world}"
    if len(ranks) == world:
        return f"all {world} ranks"
    coords = [layout.coords(rank) if rank in layout else {} for rank in ranks]
    common = {
        dim: coord_of_all
        for dim, coord_of_all in coords[0].items()
        if all(coord.get(dim) == coord_of_all for coord in coords)
    }
    return f"{ranks_text(ranks)}{f' (all with {coords_text(common)})' if common else ''} of {world}"
