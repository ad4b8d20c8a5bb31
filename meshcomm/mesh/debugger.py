"""Stop one rank in Python's debugger while the others wait for it: `mesh.breakpoint`."""

from __future__ import annotations

import os
import pdb
import sys
from bdb import BdbQuit
from collections.abc import Callable
from types import FrameType
from typing import IO, final


def stop_at(frame: FrameType, label: str, meet: Callable[[], None]) -> None:
    """Open the debugger at `frame`, then release the waiting ranks, then continue.

    meet: called once, after any command except quit. After `n`, `s` or another stepping command the debugger
        stops again at the frame's next line; the other ranks continue and wait in their next call.
    Raises BdbQuit after `q`, and if there is no input to read (no terminal, or end of file).
    """
    debugger = _Debugger(stdin=_terminal())
    debugger.message(f"{label} stopped; the others wait until it continues. c: continue, n: step, q: end")
    debugger.reset()
    debugger.interaction(frame, None)
    if debugger.quitting:
        raise BdbQuit
    meet()
    if not debugger.goes_on:
        # The last call made here: the next line that runs in a traced frame is the user's.
        debugger.set_trace(frame)


@final
class _Debugger(pdb.Pdb):
    """pdb that records whether the user chose to continue."""

    goes_on = False

    def set_continue(self) -> None:
        """After `c`."""
        self.goes_on = True
        super().set_continue()

    def set_stepinstr(self) -> None:
        """Called by set_trace since Python 3.13: the next instruction is still on the line of the user's own call."""
        self.set_step()


def _terminal() -> IO[str] | None:
    """Return the process's own stdin, if multiprocessing has not replaced it; None to use sys.stdin."""
    replaced = sys.stdin is None or getattr(sys.stdin, "name", "") == os.devnull
    return open(0, closefd=False) if replaced else None
