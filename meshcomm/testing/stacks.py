"""Which frames of a stack belong to the user, and how is the stack of a rank that did not return shown?"""

from __future__ import annotations

import importlib.util
import linecache
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final

import meshcomm

# As faulthandler writes them.
_FRAME: Final = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
_THREAD: Final = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+).*most recent call first")


@cache
def _libraries() -> tuple[str, ...]:
    specs = map(importlib.util.find_spec, ("torch", "pytest", "_pytest", "pluggy"))
    origins = [meshcomm.__file__, *(spec.origin for spec in specs if spec is not None)]
    return tuple(f"{Path(origin).parent}/" for origin in origins if origin is not None)


def is_users(path: str) -> bool:
    """Whether a frame in this file is the user's: neither meshcomm, torch, pytest nor Python's importer."""
    return not path.startswith((*_libraries(), "<frozen "))


def is_ours(path: str) -> bool:
    """Whether this is a file of meshcomm."""
    return path.startswith(_libraries()[0])


def stack_text(frames: Sequence[tuple[str, str, str]], full: bool) -> str:
    """A stack as Python prints tracebacks. frames: path, line and function, outermost first.

    The user's frames below the test, and the function that the last of them called; all frames if `full`,
    or if none is the user's.
    """
    if not full:
        runner = [at for at, (path, *_) in enumerate(frames) if path.startswith(f"{_libraries()[0]}testing/")]
        below = frames[runner[-1] + 1 :] if runner else frames
        users = [at for at, (path, *_) in enumerate(below) if is_users(path)]
        if users:
            frames = [*(below[at] for at in users), *below[users[-1] + 1 : users[-1] + 2]]
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
