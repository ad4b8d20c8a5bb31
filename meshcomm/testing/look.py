"""How was pytest asked to show failures, and which frames of a stack does it show?"""

from __future__ import annotations

import contextlib
import importlib.util
import linecache
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, final

import _pytest.assertion
from _pytest.assertion import util

import meshcomm

_ASSERTIONS: Final = "assertions"
_INIS: Final = ("assertion_text_diff_style", "truncation_limit_lines", "truncation_limit_chars")
# As faulthandler writes them.
_FRAME: Final = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
_THREAD: Final = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+).*most recent call first")


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
        text = "\n~".join(line.replace("\n", "\\n") for line in lines or ())
        return text.replace("%", "%%") or None

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


def stack_text(frames: Sequence[tuple[str, str, str]], look: Look) -> str:
    """A stack as Python prints tracebacks. frames: path, line and function, outermost first.

    What leads to the test is left out, and of what is not the user's all but the one function that the
    user's code called last; where no frame is the user's, or with --full-trace, all are shown.
    """
    if not look.full:
        lead = [
            place for place, (path, *_) in enumerate(frames) if path.startswith(f"{_libraries()[0]}testing/")
        ]
        inside = frames[lead[-1] + 1 :] if lead else frames
        users = [place for place, (path, *_) in enumerate(inside) if is_users(path)]
        if users:
            frames = [*(inside[place] for place in users), *inside[users[-1] + 1 : users[-1] + 2]]
    lines = []
    for path, number, name in frames:
        lines.append(f'  File "{path}", line {number}, in {name}')
        if number.isdigit() and (source := linecache.getline(path, int(number)).strip()):
            lines.append(f"    {source}")
    return "\n".join(lines)


def main_thread(text: str) -> list[tuple[str, str, str]]:
    """Path, line and function of the main thread's last stack, outermost first.

    text: a rank's file: `main 0x...` with the main thread's number, then faulthandler's dumps.
    """
    head, _, rest = text.partition("\n")
    main = int(head.removeprefix("main "), 16) if head.startswith("main 0x") else None
    frames: list[tuple[str, str, str]] = []
    reading = False
    for line in rest.splitlines():
        if thread := _THREAD.match(line):
            reading = main in (None, int(thread[1], 16))
            frames = [] if reading else frames
        elif reading and (frame := _FRAME.match(line)):
            frames.append((frame[1], frame[2], frame[3]))
    return frames[::-1]
