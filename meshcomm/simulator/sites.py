"""Which line is a rank at, and in which call of the mesh?"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from meshcomm.comm.site import is_ours


class Site(NamedTuple):
    """call: the outermost function of meshcomm or torch on the way down, as in `all_reduce`. line: file:line."""

    call: str
    line: str


def here() -> Site:
    """Of the caller."""
    return _walk(sys._getframe(1))


def of_thread(ident: int) -> Site:
    """Of a thread that does not run."""
    frame = sys._current_frames().get(ident)
    return Site("?", "an unknown line") if frame is None else _walk(frame)


def of_error(error: BaseException) -> Site:
    """The innermost line of the program that an exception passed through."""
    found = Site("?", "an unknown line")
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not is_ours(code.co_filename):
            found = Site(code.co_name, f"{code.co_filename}:{trace.tb_lineno}")
        trace = trace.tb_next
    return found


def _walk(frame: Any) -> Site:
    call = "?"
    while is_ours(frame.f_code.co_filename) and frame.f_back is not None:
        call = frame.f_code.co_name
        frame = frame.f_back
    return Site(call, f"{frame.f_code.co_filename}:{frame.f_lineno}")
