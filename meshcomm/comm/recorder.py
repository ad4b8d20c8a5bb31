"""The last calls on one group: which, with what, from which line, and whether one is under way."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any, Final, final

import torch

from meshcomm.errors import CommunicationError

# Frames that are not the user's: this package, and torch between it and the user (autograd).
_OURS: Final = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))
_KEPT: Final = 256

Entry = tuple[str, str, object, CodeType, int]
Inquire = Callable[["Recorder", str, BaseException], CommunicationError]


@final
class Recorder:
    """A ring of the last 256 calls on one group, whatever names the group has. Written on every call.

    started counts the calls; as ranks of a group call in the same order, the count tells which of
    them have come to a call. inside is true while a blocking call is under way.

    Args:
        label: the group with its common coords, as in `tp[pp=0 dp=1]`.
        ranks: its global ranks, in coord order.
        inquire: asked for the error when a call fails: who has not come, doing what instead.
    """

    __slots__ = ("inquire", "inside", "label", "ranks", "ring", "started")

    def __init__(self, label: str, ranks: list[int], inquire: Inquire) -> None:
        self.label = label
        self.ranks = ranks
        self.inquire = inquire
        self.started = 0
        self.inside = False
        self.ring: list[Entry | None] = [None] * _KEPT

    def start(self, name: str, call: str, shape: object, depth: int) -> None:
        """A call on the dim `name` begins; `depth` frames up is the innermost that may be the user's."""
        frame: Any = sys._getframe(depth)
        while frame.f_code.co_filename.startswith(_OURS) and frame.f_back is not None:
            frame = frame.f_back
        self.started = number = self.started + 1
        self.inside = True
        # The instruction, not the line: finding the line takes longer than the rest together.
        self.ring[number % _KEPT] = (name, call, shape, frame.f_code, frame.f_lasti)

    def last(self) -> dict[str, Any] | None:
        """The latest call as plain data, or None where there was none."""
        entry = self.ring[self.started % _KEPT]
        if entry is None:
            return None
        name, call, shape, code, instruction = entry
        return {
            "number": self.started,
            "dim": name,
            "call": call,
            "shape": None if shape is None else list(shape),  # type: ignore[call-overload]
            "site": f"{code.co_filename}:{_line(code, instruction)}",
            "inside": self.inside,
        }


def caller() -> str:
    """file:line of the innermost frame that is the user's."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return "an unknown line" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _line(code: CodeType, instruction: int) -> int:
    found = code.co_firstlineno
    for start, end, line in code.co_lines():
        if line is not None and start <= instruction < end:
            found = line
    return found
