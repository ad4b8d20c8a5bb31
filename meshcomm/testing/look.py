"""How was pytest asked to show failures? Read in the main process, obeyed on the ranks."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, final

import _pytest.assertion
from _pytest.assertion import util

import meshcomm

_ASSERTIONS: Final = "assertions"
_INIS: Final = ("assertion_text_diff_style", "truncation_limit_lines", "truncation_limit_chars")


@final
@dataclass(frozen=True)
class Look:
    """Options of pytest that change what a failure's text is. style: --tb. folder: where pytest was started."""

    style: str
    full: bool
    showlocals: bool
    verbosity: int
    of_assertions: int
    inis: Mapping[str, Any]
    folder: str


def look_of(config: Any) -> Look:
    """The look that `config`, a pytest.Config, asks for."""
    inis = {}
    for name in _INIS:
        # Not every version of pytest has each of them.
        with contextlib.suppress(ValueError, KeyError):
            inis[name] = config.getini(name)
    return Look(
        style=config.getoption("tbstyle", "auto"),
        full=config.getoption("fulltrace", False),
        showlocals=config.getoption("showlocals", False),
        verbosity=config.get_verbosity(),
        of_assertions=config.get_verbosity(_ASSERTIONS),
        inis=inis,
        folder=str(config.invocation_params.dir),
    )


@final
class _Config:
    """What pytest's comparison of two values asks a pytest.Config; a rank has none. Tried on pytest 9.2."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self.pluginmanager = self

    def has_plugin(self, name: str) -> bool:
        return False

    def get_verbosity(self, kind: str | None = None) -> int:
        return self._look.of_assertions if kind == _ASSERTIONS else self._look.verbosity

    def getini(self, name: str) -> Any:
        return self._look.inis[name]


@contextlib.contextmanager
def explained(look: Look) -> Iterator[None]:
    """Let rewritten asserts compare values in detail, as they do in pytest's own process."""
    config: Any = _Config(look)

    def compare(op: str, left: object, right: object) -> str | None:
        try:
            lines = _pytest.assertion.pytest_assertrepr_compare(config, op, left, right)
        except (AttributeError, KeyError, TypeError):
            # Another pytest that asks for more: the values are shown, without their difference.
            return None
        return (
            None if not lines else "\n~".join(line.replace("\n", "\\n") for line in lines).replace("%", "%%")
        )

    before = util._reprcompare, util._config
    util._reprcompare, util._config = compare, config
    try:
        yield
    finally:
        util._reprcompare, util._config = before


@cache
def _libraries() -> tuple[str, ...]:
    found = [str(Path(meshcomm.__file__).parent)]
    for name in ("torch", "_pytest", "pytest", "pluggy"):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            found.append(str(Path(spec.origin).parent))
    return tuple(f"{folder}/" for folder in found)


def is_users(path: str) -> bool:
    """Whether a frame in this file is shown: neither ours, nor torch's, nor pytest's, nor Python's importer."""
    return not path.startswith((*_libraries(), "<frozen "))


def is_ours(path: str) -> bool:
    """Whether this is a file of meshcomm."""
    return path.startswith(_libraries()[0])


def leads_to_the_test(path: str) -> bool:
    """Whether a frame in this file is only there to run a test on a rank."""
    return path.startswith(f"{_libraries()[0]}testing/")
