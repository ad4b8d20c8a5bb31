"""Which line of the user's program made a call?"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import re
import sys
import tempfile
import threading
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Final, final

import torch

from meshcomm.transport.torch_private import compiled_files

# Frames that are not the user's: this package, and between it and the user torch (autograd, what it compiled) and contextlib.
_OURS: Final = (
    f"{Path(__file__).parents[1]}{os.sep}",
    f"{Path(torch.__file__).parent}{os.sep}",
    str(contextlib.__file__),
    *compiled_files(),
)
# A user of the package inside of the package.
_BENCH: Final = f"{Path(__file__).parents[1] / 'bench'}{os.sep}"


@final
class _Ours(dict[str, bool]):
    """Whether a frame of a file is between the user and the call, not the user's own: by the file's name."""

    def __missing__(self, file: str) -> bool:
        found = self[file] = file.startswith(_OURS) and not file.startswith(_BENCH)
        return found


_ours: Final = _Ours()
is_ours = _ours.__getitem__


def users_frame(depth: int = 1) -> FrameType:
    """The innermost frame that is the user's, from `depth` frames up on; the outermost where none is."""
    frame = sys._getframe(depth)
    while _ours[frame.f_code.co_filename]:
        outer = frame.f_back
        if outer is None:
            break
        frame = outer
    return frame


_IN_MEMORY: Final = hasattr(os, "memfd_create")
# What `faulthandler` writes of a thread and of a frame; other characters than ASCII are escaped.
_THREAD: Final = re.compile(r"(?:Thread|Current thread) 0x([0-9a-f]+)")
_FRAME: Final = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_ESCAPED: Final = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")


def thread_stacks() -> dict[int, list[tuple[str, int, str]]]:
    """File, line and function of each frame of each thread by its number, the innermost first; of 100 threads and
    100 frames at most.

    `faulthandler` reads them without a frame object: to walk those of a thread that runs meanwhile can end the
    process by SIGSEGV (Python 3.11.7, seen in `f_back`; as in python/cpython#99110 and #111363).
    """
    found: dict[int, list[tuple[str, int, str]]] = {}
    stack: list[tuple[str, int, str]] = []
    # In memory where there is such a file: a full disk is no reason to know nothing.
    with os.fdopen(os.memfd_create("stacks"), "w+") if _IN_MEMORY else tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        for line in file:
            if thread := _THREAD.match(line):
                # A thread that begins has its parent's number, and no frames.
                stack = found.setdefault(int(thread[1], 16), [])
            elif frame := _FRAME.match(line):
                stack.append((_plain(frame[1]), int(frame[2]), _plain(frame[3])))
    # Where the caller is, not where this is.
    del found.get(threading.get_ident(), [])[:1]
    return found


def _plain(escaped: str) -> str:
    return _ESCAPED.sub(lambda code: chr(int(code[1] or code[2] or code[3], 16)), escaped)


def thread_frames() -> dict[int, FrameType]:
    """Where every thread is, by its number; for threads that wait, see `thread_stacks`.

    Without a garbage collection inside of it: Python (3.11.7 tried) holds a lock meanwhile that the end of a
    `threading.local` waits for, and the process would hang for ever.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        found = sys._current_frames()
    finally:
        if collects:
            gc.enable()
    # Where the caller is, not where this is.
    found[threading.get_ident()] = sys._getframe(1)
    return found


def caller() -> str:
    """file:line of the innermost frame that is the user's."""
    frame = users_frame(2)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def callsite(depth: int) -> tuple[CodeType, int]:
    """Code and instruction of the innermost frame that is the user's, from `depth` frames up on."""
    frame = users_frame(depth + 1)
    return frame.f_code, frame.f_lasti


@lru_cache(maxsize=4096)
def line_of(code: CodeType, instruction: int) -> str:
    """file:line of an instruction, which is kept instead, as the line takes longer to find."""
    found = code.co_firstlineno
    for start, end, line in code.co_lines():
        if line is not None and start <= instruction < end:
            found = line
    return f"{code.co_filename}:{found}"
