"""Every call of this rank while a trace is taken: when it began, was left, and was waited for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter as clock
from types import CodeType
from typing import Final, final

from torch import Tensor

from meshcomm.comm.site import caller, line_of
from meshcomm.transport.support import name_of

# The lane of forward and backward passes.
PASSES: Final = "passes"

# The lane of what `mesh.step` tells of.
STEPS: Final = "steps"

# More calls than this a trace does not keep: some 500 bytes each.
MOST: Final = 200_000


@final
class Span:
    """One call, or one named stretch of the program. Times in seconds on the monotonic clock.

    lane: the dim, or what a stretch belongs to. number: of the call on its group; 0 for messages and
    stretches. left: when the program went on, None while it has not; waits: of a call that was only
    started, or of messages; at_once: they follow its start. parts: of messages: (direction, peer's
    coord, tag, number among those).
    """

    __slots__ = (
        "at_once",
        "began",
        "call",
        "dtype",
        "group",
        "lane",
        "left",
        "nbytes",
        "number",
        "parts",
        "shape",
        "site",
        "waits",
    )

    def __init__(self, group: str, lane: str, call: str, number: int, site: str, began: float) -> None:
        self.group = group
        self.lane = lane
        self.call = call
        self.number = number
        self.site = site
        self.began = began
        self.left: float | None = None
        self.at_once = False
        self.nbytes = 0
        self.shape: tuple[int, ...] | None = None
        self.dtype: str | None = None
        self.waits: list[tuple[float, float]] = []
        self.parts: Sequence[tuple[str, int | None, int, int]] = ()

    def waited(self, since: float, now: float) -> None:
        """A wait for the call began at `since` and is over."""
        self.waits.append((since, now))


@final
class Spans:
    """What a trace keeps of one rank.

    dropped: how many more calls there were than are kept. step_began: when the step of the program that is
    under way began, or the trace, whichever was later.
    """

    def __init__(self, most: int = MOST) -> None:
        self.found: list[Span] = []
        self.dropped = 0
        self._most = most
        # The last call on each group.
        self._last: dict[str, tuple[int, Span]] = {}
        self._lines: dict[tuple[CodeType, int], str] = {}
        self.step_began = clock()

    def begin(
        self,
        group: str,
        number: int,
        lane: str,
        call: str,
        x: Tensor | None,
        nbytes: int,
        code: CodeType,
        instruction: int,
        began: float,
    ) -> None:
        """A collective begins; see Recorder.start."""
        span = self._made(group, lane, call, number, self._site(code, instruction), began)
        span.nbytes = nbytes
        if x is not None:
            span.shape, span.dtype = tuple(x.shape), name_of(x.dtype)
        self._last[group] = (number, span)

    def end(self, group: str, number: int, now: float) -> None:
        """The program goes on after a collective."""
        span = self._of(group, number)
        if span is not None:
            span.left = now

    def is_of(self, group: str, number: int, nbytes: int) -> None:
        """See Recorder.is_of."""
        span = self._of(group, number)
        if span is not None:
            span.nbytes = nbytes

    def later(self, group: str, number: int, now: float) -> Span | None:
        """The collective is only started; the span to be told of waits."""
        self.end(group, number, now)
        return self._of(group, number)

    def message(
        self,
        group: str,
        lane: str,
        call: str,
        parts: Sequence[tuple[str, int | None, int, int]],
        tensors: Sequence[Tensor],
        nbytes: int,
        code: CodeType,
        instruction: int,
    ) -> Span:
        """A call of messages begins."""
        span = self._made(group, lane, call, 0, self._site(code, instruction), clock())
        span.nbytes = nbytes
        span.parts = parts
        if len(tensors) == 1:
            span.shape, span.dtype = tuple(tensors[0].shape), name_of(tensors[0].dtype)
        return span

    def step(self, number: int) -> None:
        """A step of the program is over: a stretch from the end of the one before, or the trace's beginning."""
        span = self._made("", STEPS, f"step {number}", 0, caller(), self.step_began)
        span.left = self.step_began = clock()

    def stretch(self, lane: str, name: str) -> AbstractContextManager[None]:
        """The block as a span of its own."""
        return self._stretch(lane, name, caller())

    @contextmanager
    def _stretch(self, lane: str, name: str, site: str) -> Iterator[None]:
        span = self._made("", lane, name, 0, site, clock())
        try:
            yield
        finally:
            span.left = clock()

    def _made(self, group: str, lane: str, call: str, number: int, site: str, began: float) -> Span:
        span = Span(group, lane, call, number, site, began)
        if len(self.found) < self._most:
            self.found.append(span)
        else:
            self.dropped += 1
        return span

    def _of(self, group: str, number: int) -> Span | None:
        last, span = self._last.get(group, (0, None))
        return span if last == number else None

    def _site(self, code: CodeType, instruction: int) -> str:
        key = (code, instruction)
        if key not in self._lines:
            self._lines[key] = f"{code.co_filename}:{line_of(code, instruction)}"
        return self._lines[key]


def stretch(spans: Spans | None, lane: str, name: str) -> AbstractContextManager[None]:
    """`Spans.stretch`, or nothing where no trace is taken."""
    return nullcontext() if spans is None else spans.stretch(lane, name)
