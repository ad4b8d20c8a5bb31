"""Which line of the user's program made a call?"""

from __future__ import annotations

import sys
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Final

import torch

# Frames that are not the user's: this package, and torch between it and the user (autograd).
_OURS: Final = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))
# A user of the package inside of the package.
_BENCH: Final = str(Path(__file__).parents[1] / "bench")


@lru_cache(maxsize=4096)
def is_ours(file: str) -> bool:
    """Whether a frame of this file is between the user and the call, not the user's own."""
    return file.startswith(_OURS) and not file.startswith(_BENCH)


def users_frame(depth: int = 1) -> FrameType:
    """The innermost frame that is the user's, from `depth` frames up on; the outermost where none is.

    What happens at every call (recorder.py, message_log.py, straight.py) has this loop written out: a
    function more would be seen in the time of a call.
    """
    frame = sys._getframe(depth)
    while is_ours(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def caller() -> str:
    """file:line of the innermost frame that is the user's."""
    frame = users_frame(2)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def place_of_call(depth: int) -> tuple[CodeType, int]:
    """Code and instruction of the innermost frame that is the user's, from `depth` frames up on."""
    frame = users_frame(depth + 1)
    return frame.f_code, frame.f_lasti


def line_of(code: CodeType, instruction: int) -> int:
    """The line of an instruction: kept instead of the line, which takes longer to find."""
    found = code.co_firstlineno
    for start, end, line in code.co_lines():
        if line is not None and start <= instruction < end:
            found = line
    return found
