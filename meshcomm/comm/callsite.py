"""Which line of the user's program made a call?"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from functools import lru_cache
from itertools import accumulate, chain, islice, repeat
from operator import methodcaller
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
_LIBRARY: Final = f"{Path(threading.__file__).parent}{os.sep}"
_DISTRIBUTED: Final = f"{Path(torch.__file__).parent / 'distributed'}{os.sep}"
# Where torch's own calls wait.
C10D: Final = (f"{_DISTRIBUTED}distributed_c10d.py", f"{_DISTRIBUTED}_functional_collectives.py")
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


def stack_of(thread: int) -> list[tuple[str, int, str]]:
    """File, line and function of each frame of a thread, the innermost first; empty where there is no such thread.

    In one call into C, so that the thread cannot run in between: Python 3.11.7 has died by SIGSEGV where the frames of a
    running thread were walked. No frame is kept: one that holds itself keeps its callers' locals until Python looks
    for cycles.
    """
    frames: list[FrameType] = []
    now = map(methodcaller("get", thread), iter(sys._current_frames, None))
    collects = gc.isenabled()
    gc.disable()
    try:
        # Ends where the outermost frame has none behind it.
        with contextlib.suppress(AttributeError):
            frames.extend(accumulate(chain(islice(now, 1), repeat("f_back")), getattr))
    finally:
        if collects:
            gc.enable()
    # Where the caller is, not where this is.
    own = thread == threading.get_ident()
    lines = [(f.f_code.co_filename, f.f_lineno, f.f_code.co_name) for f in frames[own:] if f is not None]
    # This function's own frame may be among them.
    frames.clear()
    return lines


def is_library(file: str) -> bool:
    """Whether a file is of this package, of torch, or of Python's own library, where a wait for the store is."""
    return is_ours(file) or (file.startswith(_LIBRARY) and "-packages" not in file)


def is_inside(files: str | tuple[str, ...], but: str = "") -> bool:
    """Whether another thread is in a call of these files, and has not returned to the program, as by a signal's handler.

    but: a file in whose calls a thread does not count: its call has failed, and it is asking why.
    """
    for thread in thread_frames().keys() - {threading.get_ident()}:
        for file, _, _ in stack_of(thread):
            if file.startswith(files):
                return True
            if file == but or not is_library(file):
                break
    return False


def thread_frames() -> dict[int, FrameType]:
    """Where every thread is, by its number; for their stacks see `stack_of`.

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
