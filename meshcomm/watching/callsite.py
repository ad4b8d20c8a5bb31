"""Finds the line of the user's program that made a call. In a command of meshcomm that runs no code of the user there, it is a
line of meshcomm's training.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, chain, islice, repeat
from operator import methodcaller
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, final

import torch

from meshcomm.lines import source_line
from meshcomm.transport.torch_private import compiled_files

# Frames that are not user code: this package's, and the torch and contextlib frames between the package and user code.
_OURS: Final = (
    f"{Path(__file__).parents[1]}{os.sep}",
    f"{Path(torch.__file__).parent}{os.sep}",
    str(contextlib.__file__),
    *compiled_files(),
)
_LIBRARY: Final = f"{Path(threading.__file__).parent}{os.sep}"
_DISTRIBUTED: Final = f"{Path(torch.__file__).parent / 'distributed'}{os.sep}"
# The files in which torch.distributed calls wait.
C10D: Final = (f"{_DISTRIBUTED}distributed_c10d.py", f"{_DISTRIBUTED}_functional_collectives.py")
# A command of meshcomm starts here. The frames outside it belong to the library that parses its arguments.
_COMMANDS: Final = f"{Path(__file__).parents[1] / 'commands'}{os.sep}"
# This file of the package, which makes the calls of `meshcomm bench`, counts as user code.
_BENCH: Final = f"{_COMMANDS}measure.py"
_TRAINING: Final = f"{Path(__file__).parents[1] / 'train'}{os.sep}"
_COMMAND: Final = -1


@final
class _Ours(dict[str, int]):
    """Maps a file's name to whether its frames lie between the user's code and the call: True, False, or _COMMAND if there
    is no user code outside such a frame.
    """

    def __missing__(self, file: str) -> int:
        ours = file.startswith(_OURS) and file != _BENCH
        between = self[file] = _COMMAND if ours and file.startswith(_COMMANDS) else ours
        return between


_ours: Final = _Ours()
is_ours = _ours.__getitem__


def users_frame(depth: int = 1) -> FrameType:
    """Return the innermost frame of the user's code, starting `depth` frames up. If there is none, return the frame that
    `place_in` names, or the outermost frame.
    """
    frame = sys._getframe(depth)
    while (ours := _ours[frame.f_code.co_filename]) > 0:
        outer = frame.f_back
        if outer is None:
            break
        frame = outer
    if ours == _COMMAND:
        frames = [sys._getframe(depth)]
        while frames[-1] is not frame:
            frames.append(frames[-1].f_back or frame)
        index = place_in([frame.f_code.co_filename for frame in frames])
        return frame if index is None else frames[index]
    return frame


def place_in(files: Sequence[str]) -> int | None:
    """Return the index of the line to show of a stack, by the file of each frame, innermost first.

    This is the innermost frame of the program or, if there is none, of an installed package. In a command of meshcomm without
    either, it is the innermost one of meshcomm's training. Returns None if there is none.
    """
    until = next((index for index, file in enumerate(files) if _ours[file] == _COMMAND), len(files))
    program = (index for index, file in enumerate(files[:until]) if is_program(file))
    installed = (index for index, file in enumerate(files[:until]) if not is_library(file))
    training = (index for index, file in enumerate(files) if file.startswith(_TRAINING))
    return next(chain(program, installed, training), None)


def stack_of(thread: int) -> list[tuple[str, int, str]]:
    """Return file, line and function of each frame of a thread, innermost first; empty if there is no such thread.

    One call into C collects the frames, so that the thread cannot run in the meantime: Python 3.11.7 has crashed with SIGSEGV
    while the frames of a running thread were walked. No frame is stored, because a frame that references itself keeps its
    callers' locals alive until the garbage collector runs.
    """
    frames: list[FrameType] = []
    now = map(methodcaller("get", thread), iter(sys._current_frames, None))
    # The outermost frame has no f_back.
    with without_collection(), contextlib.suppress(AttributeError):
        frames.extend(accumulate(chain(islice(now, 1), repeat("f_back")), getattr))
    # The line where the caller is now, not the first line of its code.
    is_this_thread = thread == threading.get_ident()
    lines = [
        (f.f_code.co_filename, f.f_lineno, f.f_code.co_name) for f in frames[is_this_thread:] if f is not None
    ]
    # This function's own frame may be in the list.
    frames.clear()
    return lines


def is_library(file: str) -> bool:
    """Return whether a file belongs to this package, to torch, or to the standard library, whose code runs
    during waits for the store.
    """
    return bool(is_ours(file)) or (file.startswith((_LIBRARY, "<frozen")) and "-packages" not in file)


def is_program(file: str) -> bool:
    """Return whether a file is none of a library, installed packages included."""
    return not is_library(file) and "-packages" not in file


def is_inside(files: str | tuple[str, ...], but: str = "") -> bool:
    """Return whether another thread is inside a call into the given files. A thread that runs user code during the call,
    such as a signal handler, does not count.

    but: a file whose callers are ignored, because their call has failed and is being diagnosed.
    """
    for thread in thread_frames().keys() - {threading.get_ident()}:
        for file, _, _ in stack_of(thread):
            if file.startswith(files):
                return True
            if file == but or not is_library(file):
                break
    return False


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Disable garbage collection in this context.

    While Python collects all threads' frames or exceptions, it (seen with 3.11.7) holds a lock that the destructor of a
    `threading.local` also takes, so a collection could hang the process forever.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def thread_frames() -> dict[int, FrameType]:
    """Return the innermost frame of every thread, by thread id; `stack_of` gives the stacks."""
    with without_collection():
        frames = sys._current_frames()
    # The line where the caller is now, not the first line of its code.
    frames[threading.get_ident()] = sys._getframe(1)
    return frames


def caller() -> str:
    """Return file:line of the innermost frame of the user's code."""
    frame = users_frame(2)
    return source_line(frame.f_code.co_filename, frame.f_lineno)


def callsite(depth: int) -> tuple[CodeType, int]:
    """Return the code object and instruction offset of the innermost frame of the user's code, starting `depth` frames up."""
    frame = users_frame(depth + 1)
    return frame.f_code, frame.f_lasti


def origin(code: CodeType, instruction: int) -> dict[str, Any]:
    """Return where a call was made, for its record. `words.made_at` says it in errors and reports."""
    return {"callsite": line_of(code, instruction)}


def line_of(code: CodeType, instruction: int) -> str:
    """Return file:line of an instruction. Callers store the instruction, because finding its line takes longer."""
    return source_line(code.co_filename, _line_number(code, instruction))


# Without the file: a function equals its copy in another file, or in another cell.
@lru_cache(maxsize=4096)
def _line_number(code: CodeType, instruction: int) -> int:
    line_number = code.co_firstlineno
    for start, end, line in code.co_lines():
        if line is not None and start <= instruction < end:
            line_number = line
    return line_number
