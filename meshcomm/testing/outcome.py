"""How did a test's body end on one rank? Written there, in pytest's words, and read in the main process."""

from __future__ import annotations

import os
import pickle
import re
import unittest
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, final

import pytest
from _pytest._code.code import ReprFuncArgs, Traceback

from meshcomm.errors import MeshcommError
from meshcomm.testing.look import Look, is_ours, is_users
from meshcomm.testing.pool import Ended

Kind = Literal["passed", "skipped", "xfailed", "exited", "failed"]


@final
@dataclass(frozen=True)
class Outcome:
    """One rank's end of the body.

    reason: of a skip, xfail or exit; of a failure, what was raised, in short.
    shown:  pickled: what pytest would show of the failure, or its text. key: equal where only the rank differs.
    error:  the exception, pickled; None where it cannot be.
    after:  it only followed from another rank's failure.
    """

    kind: Kind
    reason: str = ""
    path: str = ""
    line: int = 0
    shown: bytes = b""
    key: str = ""
    error: bytes | None = None
    after: bool = False
    warnings: tuple[Any, ...] = ()


class Ends(NamedTuple):
    """How a test's body ended on every rank, and a verdict on all of them together, a deadlock say.

    The value of a rank that returned is its Outcome; another one has a text. stack, as a person reads it:
    what the rank was doing when the time was up or the others had failed.
    """

    ranks: list[Ended]
    verdict: MeshcommError | None = None


def outcome_of(
    body: Callable[[], object],
    label: str,
    look: Look,
    follows: Callable[[BaseException], bool] = lambda error: False,
) -> Outcome:
    """Run `body` and say how it ended; raises nothing.

    label: of the rank, as in errors: texts that differ in nothing else are told once.
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
        return _failure(error, label, look, follows(error))
    return Outcome("passed")


def _place(error: BaseException) -> tuple[str, int]:
    """The user's line that raised it."""
    entries = [
        entry for entry in pytest.ExceptionInfo.from_exception(error).traceback if is_users(str(entry.path))
    ]
    return (str(entries[-1].path), entries[-1].lineno + 1) if entries else ("", 0)


def _failure(error: BaseException, label: str, look: Look, after: bool) -> Outcome:
    info = pytest.ExceptionInfo.from_exception(error)
    ours = isinstance(error, MeshcommError)

    shown: Any = info.getrepr(
        showlocals=look.showlocals,
        style=_style(error, look),
        abspath=os.getcwd() != look.folder,
        tbfilter=False if look.full else partial(_users, look=look),
        funcargs=True,
        truncate_locals=look.verbosity <= 1,
        truncate_args=look.verbosity <= 2,
        # What the backend said is in the error's own words already.
        chain=look.full or not ours,
    )
    _without_the_mesh(shown)
    text = str(shown)
    path, line = _place(error)
    return Outcome(
        "failed",
        info.exconly(tryshort=True),
        path,
        line,
        shown=_pickled(shown) or pickle.dumps(text),
        key=_without_rank(text, label),
        error=_pickled(error),
        after=after,
    )


def _without_rank(text: str, label: str) -> str:
    """`text` without what tells one rank from another: its name, with coords or without, and addresses."""
    name = label.partition(" (")[0]
    return re.sub(r"\b0x[0-9a-f]+", "0x", re.sub(rf"\b{name}\b", "", text.replace(label, "")))


def _style(error: BaseException, look: Look) -> Any:
    if isinstance(error, pytest.fail.Exception) and not error.pytrace:
        return "value"
    return look.style if look.style in ("short", "native") and not look.full else "long"


def _users(info: pytest.ExceptionInfo[BaseException], look: Look) -> Traceback:
    whole = info.traceback
    if whole and is_ours(str(whole[-1].path)) and not isinstance(info.value, MeshcommError):
        # An error that we did not mean to raise: our lines are what there is to see.
        first = next((at for at, entry in enumerate(whole) if is_users(str(entry.path))), 0)
        return Traceback(list(whole)[first:])
    kept = whole.filter(lambda entry: is_users(str(entry.path)) and not entry.ishidden(info))
    if look.style == "auto" and len(kept) > 2:
        middle = [entry.with_repr_style("short") for entry in list(kept)[1:-1]]
        kept = Traceback([kept[0], *middle, kept[-1]])
    return kept or whole


def _without_the_mesh(shown: Any) -> None:
    """Leave `mesh = ...` out of the arguments: the header names the rank, and else no two texts are equal."""
    for traceback, *_ in getattr(shown, "chain", [(getattr(shown, "reprtraceback", None),)]):
        for entry in getattr(traceback, "reprentries", ()):
            arguments = getattr(entry, "reprfuncargs", None)
            if arguments is not None:
                entry.reprfuncargs = ReprFuncArgs([each for each in arguments.args if each[0] != "mesh"])


def _pickled(value: object) -> bytes | None:
    try:
        data = pickle.dumps(value)
        pickle.loads(data)
    except Exception:
        return None
    return data
