"""Implements `mesh.debug.breakpoint`, which stops one rank in the Python debugger while the other ranks wait."""

from __future__ import annotations

import os
import pdb
import sys
from bdb import BdbQuit
from collections.abc import Callable
from types import FrameType
from typing import IO, final


def stop_at(frame: FrameType, label: str, meet: Callable[[], None]) -> None:
    """Open the debugger at `frame`. Afterwards, release the waiting ranks and continue.

    meet: called once, after any command except quit. After `n`, `s` or another stepping command, the debugger
        stops again at the frame's next line, while the other ranks continue and wait in their next call.
    Raises BdbQuit after `q`, or if there is no input to read (no terminal, or end of file).
    """
    debugger = _Debugger(stdin=_terminal())
    debugger.message(f"{label} stopped; the others wait until it continues. c: continue, n: step, q: end")
    debugger.reset()
    debugger.interaction(frame, None)
    if debugger.quitting:
        raise BdbQuit
    meet()
    if not debugger.goes_on:
        # This must be the last call in the function, so that the next line to run in a traced frame is the user's.
        debugger.set_trace(frame)


@final
class _Debugger(pdb.Pdb):
    """A pdb that records whether the user chose to continue."""

    goes_on = False

    def set_continue(self) -> None:
        """After `c`."""
        self.goes_on = True
        super().set_continue()

    def set_stepinstr(self) -> None:
        """Called by set_trace since Python 3.13. The next instruction is still on the line of the user's call."""
        self.set_step()


def _terminal() -> IO[str] | None:
    """Return the process's original stdin if sys.stdin was replaced, as by multiprocessing, or None to use sys.stdin."""
    replaced = sys.stdin is None or getattr(sys.stdin, "name", "") == os.devnull
    return open(0, closefd=False) if replaced else None
