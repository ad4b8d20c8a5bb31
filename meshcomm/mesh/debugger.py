"""Stop one rank in Python's debugger while the others wait for it: `mesh.breakpoint`."""

from __future__ import annotations

import os
import pdb
import sys
from bdb import BdbQuit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import final


def stop_at(frame: FrameType, label: str, meet: Callable[[], None]) -> None:
    """Let the user look around at `frame`, then meet the ranks that wait, then go on.

    meet: called once, whatever the user says but quit. After `n`, `s` or another stepping command the
        debugger stops again at the frame's next line; the others run on and wait in their next call.
    Raises BdbQuit after `q`, and where there is nobody to ask (no terminal, the end of a file).
    """
    with _terminal():
        debugger = _Debugger()
        debugger.message(f"{label} stopped; the others wait until it goes on. c: go on, n: step, q: end")
        debugger.reset()
        debugger.interaction(frame, None)
    if debugger.ends:
        raise BdbQuit
    meet()
    if not debugger.goes_on:
        # The last call made here: the next line that runs in a traced frame is the user's.
        debugger.set_trace(frame)


@final
class _Debugger(pdb.Pdb):
    """pdb, which remembers what the user wanted when it returned."""

    goes_on = False
    ends = False

    def set_continue(self) -> None:
        """After `c`."""
        self.goes_on = True
        super().set_continue()

    def set_quit(self) -> None:
        """After `q` and at the end of the input."""
        self.ends = True
        super().set_quit()


@contextmanager
def _terminal() -> Iterator[None]:
    """sys.stdin as the process got it, where multiprocessing has put nothing in its place."""
    before = sys.stdin
    if before is not None and getattr(before, "name", "") != os.devnull:
        yield
        return
    with open("/dev/stdin") as terminal:
        sys.stdin = terminal
        try:
            yield
        finally:
            sys.stdin = before
