"""How do a test's fixtures and parameters get from the main process to the ranks?"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import pytest

from meshcomm.errors import MeshTestError


@final
@dataclass(frozen=True)
class OwnMonkeyPatch:
    """Stands for the fixture `monkeypatch`: every rank gets one of its own, undone after the body."""


@final
@dataclass(frozen=True)
class Loaded:
    """Values as a rank has them. of_self: what fixtures and setup_method have set on `self`."""

    arguments: Mapping[str, Any]
    of_self: Mapping[str, Any]


@final
@dataclass(frozen=True)
class Values:
    """Values on their way. Each load makes new ones."""

    data: bytes

    def load(self) -> Loaded:
        """The values, for one rank."""
        loaded: Loaded = pickle.loads(self.data)
        return loaded


def pack(test: str, arguments: Mapping[str, Any], of_self: Mapping[str, Any]) -> Values:
    """Make values ready to cross. Raises MeshTestError that names the one that cannot."""
    sent = {
        name: OwnMonkeyPatch() if isinstance(value, pytest.MonkeyPatch) else value
        for name, value in arguments.items()
    }
    try:
        return Values(pickle.dumps(Loaded(sent, of_self)))
    except Exception as whole:
        first: Exception = whole
    for where, values in (("", sent), ("self.", of_self)):
        for name, value in values.items():
            try:
                pickle.dumps(value)
            except Exception as error:
                raise MeshTestError(
                    f"{where}{name} cannot be given to the ranks of {test}",
                    given=f"{where}{name}, a {type(value).__module__}.{type(value).__qualname__}: {error}",
                    expected="fixtures and parameters that can be pickled: they are made once, in the main "
                    "process, and every rank gets a copy",
                    hint=_hint(name, value),
                ) from None
    raise MeshTestError(
        f"the fixtures of {test} cannot be given to the ranks",
        given=str(first),
        expected="values that can be pickled",
        hint="make them inside the test",
    )


def copies(arguments: Mapping[str, Any], of_self: Mapping[str, Any]) -> Callable[[], Loaded]:
    """Makes a copy of the values for each rank of this process; what cannot be pickled is shared."""
    return lambda: Loaded(_copy(arguments), _copy(of_self))


def _copy(values: Mapping[str, Any]) -> dict[str, Any]:
    copied = {}
    for name, value in values.items():
        copied[name] = value
        if not isinstance(value, pytest.MonkeyPatch):  # what it changes is the process, which all share
            with contextlib.suppress(Exception):
                copied[name] = pickle.loads(pickle.dumps(value))
    return copied


def _hint(name: str, value: object) -> str:
    if type(value).__module__.startswith("_pytest."):
        return f"{name} is pytest's own and stays in the main process; use it in a fixture, not in the test"
    if callable(value):
        return "a function at the top of a module, or functools.partial of one; lambdas cannot be pickled"
    return "make it inside the test, or let the fixture return what it is made from"
