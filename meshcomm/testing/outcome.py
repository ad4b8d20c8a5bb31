"""How did a test's body end on one rank? Written there, with the text of a failure, and read in the main process."""

from __future__ import annotations

import pickle
import re
import unittest
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, final

import pytest

from meshcomm.errors import MeshcommError
from meshcomm.testing.pool import Ended
from meshcomm.testing.stacks import is_ours, is_users

Kind = Literal["passed", "skipped", "xfailed", "exited", "failed"]


@final
@dataclass(frozen=True)
class Outcome:
    """How the body ended on one rank.

    reason: of a skip, xfail or exit; of a failure, the exception in short. text: the failure's traceback.
    key:    the text without the rank's name: ranks with equal keys are shown once.
    error:  the exception, pickled; None if it cannot be.
    after:  the failure only followed from another rank's.
    """

    kind: Kind
    reason: str = ""
    path: str = ""
    line: int = 0
    text: str = ""
    key: str = ""
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

    @property
    def late(self) -> list[int]:
        """Ranks that did not return in time."""
        return [rank for rank, end in enumerate(self.ranks) if end.state == "late"]


def outcome_of(
    body: Callable[[], object],
    label: str,
    config: pytest.Config,
    follows: Callable[[BaseException], bool] = lambda error: False,
) -> Outcome:
    """Run `body` and say how it ended; raises nothing.

    label: of the rank, as in errors: texts that differ in nothing else are shown once.
    config: has the options --tb, --showlocals and --full-trace.
    follows: whether an exception only says that another rank has failed.
    """
    try:
        body()
    except (pytest.skip.Exception, unittest.SkipTest) as error:
        path, line = _place(error)
        return Outcome("skipped", str(error), path, line)
    except pytest.xfail.Exception as error:
        return Outcome("xfailed", str(error))
    except pytest.exit.Exception as error:
        return Outcome("exited", str(error))
    except BaseException as error:
        path, line = _place(error)
        text = _text(error, config)
        short = pytest.ExceptionInfo.from_exception(error).exconly(tryshort=True)
        key = _without_rank(text, label)
        return Outcome("failed", short, path, line, text, key, _pickled(error), follows(error))
    return Outcome("passed")


def _place(error: BaseException) -> tuple[str, int]:
    """The user's line that raised it."""
    for entry in reversed(pytest.ExceptionInfo.from_exception(error).traceback):
        if is_users(str(entry.path)):
            return str(entry.path), entry.lineno + 1
    return "", 0


def _text(error: BaseException, config: pytest.Config) -> str:
    """The traceback as pytest writes it, with the user's frames."""
    full, style = config.getoption("fulltrace"), config.getoption("tbstyle")
    if isinstance(error, pytest.fail.Exception) and not error.pytrace:
        style = "value"
    elif full or style not in ("short", "native"):
        style = "long"
    shown = pytest.ExceptionInfo.from_exception(error).getrepr(
        style=style,
        showlocals=config.getoption("showlocals"),
        truncate_locals=config.get_verbosity() <= 1,
        tbfilter=False if full else _users_frames,
        # The values of the test's arguments are in its name; `mesh` differs on every rank.
        funcargs=False,
        # A MeshcommError has the backend's words in its own text.
        chain=full or not isinstance(error, MeshcommError),
    )
    text = str(shown)
    # str() has stripped the indentation of the first line of source.
    return f"    {text}" if style == "long" and not text.startswith((">", "E")) else text


def _users_frames(info: pytest.ExceptionInfo[BaseException]) -> Any:
    frames = info.traceback
    if frames and is_ours(str(frames[-1].path)) and not isinstance(info.value, MeshcommError):
        # A fault of meshcomm: its lines are what there is to see.
        first = next((at for at, entry in enumerate(frames) if is_users(str(entry.path))), 0)
        return frames[first:]
    return frames.filter(lambda entry: is_users(str(entry.path)) and not entry.ishidden(info)) or frames


def _without_rank(text: str, label: str) -> str:
    """`text` without the rank's name, with coords or without, and without addresses."""
    name = label.partition(" (")[0]
    return re.sub(r"\b0x[0-9a-f]+", "0x", re.sub(rf"\b{name}\b", "", text.replace(label, "")))


def _pickled(value: object) -> bytes | None:
    try:
        data = pickle.dumps(value)
        pickle.loads(data)
    except Exception:
        return None
    return data
