"""How did a test's body end on one rank? Stated there, with the traceback of a failure; read in the main process."""

from __future__ import annotations

import importlib.util
import pickle
import re
import traceback
import unittest
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from traceback import FrameSummary, StackSummary
from typing import Any, Final, Literal, NamedTuple, final

import pytest

import meshcomm
from meshcomm.errors import MeshcommError
from meshcomm.testing.pool import Ended

Kind = Literal["passed", "skipped", "xfailed", "exited", "failed"]
# As faulthandler writes them.
_FRAME: Final = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')


@final
@dataclass(frozen=True)
class Outcome:
    """How the body ended on one rank.

    reason: of a skip, xfail or exit; of a failure, the exception in short. text: the failure's traceback.
    error:  the exception, pickled; None if it cannot be.
    after:  the failure only followed from another rank's.
    """

    kind: Kind
    reason: str = ""
    text: str = ""
    error: bytes | None = None
    after: bool = False
    warnings: tuple[Any, ...] = ()


class Ends(NamedTuple):
    """How a test's body ended on every rank, and a verdict on all ranks together, such as a deadlock.

    The value of a rank that returned is its Outcome; any other rank has a text. `stack` is for people to read:
    what the rank was doing when the time was up or the others had failed.
    """

    ranks: list[Ended]
    verdict: MeshcommError | None = None

    @property
    def returned(self) -> dict[int, Outcome]:
        """Outcomes by rank."""
        return {rank: end.value for rank, end in enumerate(self.ranks) if end.state == "returned"}

    @property
    def failed(self) -> dict[int, Outcome]:
        """Failures by rank; those that only followed from another rank's stand last."""
        failed = [(rank, outcome) for rank, outcome in self.returned.items() if outcome.kind == "failed"]
        return dict(sorted(failed, key=lambda item: item[1].after))

    @property
    def died(self) -> list[int]:
        """Ranks whose processes ended."""
        return [rank for rank, end in enumerate(self.ranks) if end.state in ("died", "raised")]


def outcome_of(body: Callable[[], object], full: bool, follows: type[BaseException] | None = None) -> Outcome:
    """Run `body` and say how it ended; raises nothing.

    full: show all frames of a traceback. follows: an exception that only says that another rank has failed.
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
        return Outcome("failed", short, _traceback(error, full), _pickled(error), after)
    return Outcome("passed")


def _traceback(error: BaseException, full: bool) -> str:
    """As Python prints it, with the user's frames; a fault of meshcomm with its own frames too."""
    if isinstance(error, pytest.fail.Exception) and not error.pytrace:
        return str(error)
    shown = traceback.TracebackException.from_exception(error)
    if not full:
        users = [at for at, frame in enumerate(shown.stack) if _is_users(frame)]
        ours = shown.stack and shown.stack[-1].filename.startswith(_libraries()[0])
        frames = shown.stack[users[0] :] if users else list(shown.stack)
        if not ours or isinstance(error, MeshcommError):
            frames = [shown.stack[at] for at in users] or frames
        shown.stack = StackSummary.from_list(frames)
    # A MeshcommError has the backend's words in its own text.
    return "".join(shown.format(chain=full or not isinstance(error, MeshcommError))).rstrip()


def stack_text(frames: Iterable[FrameSummary], full: bool) -> str:
    """The stack of a rank that did not return, outermost frame first, as Python prints tracebacks.

    The user's frames below the test, and the function that the last of them called; all frames if `full`,
    or if none is the user's.
    """
    shown = list(frames)
    if not full:
        testing = [at for at, f in enumerate(shown) if f.filename.startswith(f"{_libraries()[0]}testing/")]
        below = shown[testing[-1] + 1 :] if testing else shown
        if users := [at for at, frame in enumerate(below) if _is_users(frame)]:
            shown = [*(below[at] for at in users), *below[users[-1] + 1 : users[-1] + 2]]
    return "".join(StackSummary.from_list(shown).format()).rstrip()


def last_stack(text: str) -> list[FrameSummary]:
    """The last stack that a rank's file has, outermost frame first; of a fault, that of its thread.

    text: faulthandler's dumps, of the main thread or of all threads.
    """
    frames: list[FrameSummary] = []
    reading = False
    for line in text.splitlines():
        if "most recent call first" in line:
            reading = line.startswith(("Current thread", "Stack"))
            frames = [] if reading else frames
        elif reading and (frame := _FRAME.match(line)):
            frames.append(FrameSummary(frame[1], int(frame[2].replace("???", "0")), frame[3]))
    return frames[::-1]


@cache
def _libraries() -> tuple[str, ...]:
    specs = map(importlib.util.find_spec, ("torch", "pytest", "_pytest", "pluggy"))
    origins = [meshcomm.__file__, *(spec.origin for spec in specs if spec is not None)]
    return tuple(f"{Path(origin).parent}/" for origin in origins if origin is not None)


def _is_users(frame: FrameSummary) -> bool:
    """Whether a frame is the user's: neither meshcomm's, torch's, pytest's nor that of Python's importer."""
    return not frame.filename.startswith((*_libraries(), "<frozen "))


def _pickled(value: object) -> bytes | None:
    try:
        data = pickle.dumps(value)
        pickle.loads(data)
    except Exception:
        return None
    return data
