"""What were the threads of a rank doing? faulthandler's text, taken from outside and read."""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_FRAME = re.compile(r'  File "(?P<path>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)')
_THREAD = re.compile(r"(?:Current thread|Thread) (?P<ident>0x[0-9a-f]+).*most recent call first")


def dump(ranks: Sequence[tuple[int, Path]]) -> list[str]:
    """Ask processes for the stacks of all their threads; return the texts, in the same order.

    ranks: process id and the file that its faulthandler, registered for SIGUSR1, writes to.
    """
    before = [path.stat().st_size if path.exists() else 0 for _, path in ranks]
    for pid, _ in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    # The text has no end mark: it is whole when it has begun everywhere and stopped growing.
    deadline, last, sizes = time.monotonic() + 2.0, [-1], before
    while time.monotonic() < deadline and (sizes != last or any(map(int.__eq__, sizes, before))):
        time.sleep(0.05)
        last, sizes = sizes, [path.stat().st_size if path.exists() else 0 for _, path in ranks]
    return [path.read_text() if path.exists() else "" for _, path in ranks]


def main_stack(text: str, is_users: Callable[[str], bool], is_outer: Callable[[str], bool]) -> str:
    """The main thread's last stack in `text`, outermost frame first, as Python prints tracebacks.

    text:     a rank's file: `main 0x...` with the main thread's number, then faulthandler's dumps.
    is_outer: whether a file only leads to the test; what lies outside the last such frame is left out.
    is_users: whether a file is the user's. Others are left out, but for the one function that the
              user's code called last. Where no frame is the user's, all are shown.
    """
    return told(_frames(text), is_users, is_outer)


def told(
    frames: Sequence[tuple[str, str, str]], is_users: Callable[[str], bool], is_outer: Callable[[str], bool]
) -> str:
    """As main_stack, for frames given as path, line and function, outermost first."""
    outer = [place for place, (path, _, _) in enumerate(frames) if is_outer(path)]
    inside = frames[outer[-1] + 1 :] if outer else frames
    users = [place for place, (path, _, _) in enumerate(inside) if is_users(path)]
    if users:
        called = inside[users[-1] + 1 : users[-1] + 2]
        frames = [*(inside[place] for place in users), *called]
    lines = []
    for path, number, name in frames:
        lines.append(f'  File "{path}", line {number}, in {name}')
        if number.isdigit() and (source := linecache.getline(path, int(number)).strip()):
            lines.append(f"    {source}")
    return "\n".join(lines)


def _frames(text: str) -> list[tuple[str, str, str]]:
    """Path, line and function of the main thread's last stack, outermost first."""
    head, _, rest = text.partition("\n")
    main = int(head.removeprefix("main "), 16) if head.startswith("main 0x") else None
    frames: list[tuple[str, str, str]] = []
    reading = False
    for line in rest.splitlines():
        thread = _THREAD.match(line)
        if thread is not None:
            reading = main is None or int(thread["ident"], 16) == main
            if reading:
                frames = []
        elif reading and (frame := _FRAME.match(line)):
            frames.append((frame["path"], frame["line"], frame["name"]))
    return frames[::-1]
