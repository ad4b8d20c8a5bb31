"""Steps of ranks that are written down instead of run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from meshcomm.dryrun.ledger import PARTS, Peak
from meshcomm.dryrun.rank import Event, RankStep
from meshcomm.layout import Layout
from meshcomm.layout.plan import Plan
from meshcomm.watching.spans import Span


class Rank:
    """The calls of a program on one rank. Each is waited for at once, unless `wait` is false."""

    def __init__(self, layout: Layout, rank: int) -> None:
        self.layout, self.rank = layout, rank
        self.coords = layout.coords(rank)
        self.groups = {group.label: list(group.ranks) for group in Plan(layout).for_rank(rank).groups}
        self.calls: list[Span] = []
        self.events: list[Event] = []
        self.flops = self.moved = 0
        self._messages: dict[Any, int] = {}

    def collective(
        self,
        call: str,
        dim: str,
        shape: tuple[int, ...] = (4,),
        *,
        line: int = 1,
        wait: bool = True,
        **facts: Any,
    ) -> int:
        """Record a call. Returns its number, for `wait`."""
        nbytes = 4
        for size in shape:
            nbytes *= size
        facts |= {"nbytes": nbytes, "shape": shape, "dtype": "float32"}
        return self._made(Span(self._group(dim), dim, call, f"train.py:{line}", 0.0, **facts), wait)

    def message(
        self,
        direction: str,
        dim: str,
        peer: int,
        shape: tuple[int, ...] = (4,),
        *,
        line: int = 1,
        wait: bool = True,
    ) -> int:
        """Record a send to, or a receive from, a coord along a dim."""
        number = self._messages[direction, dim, peer] = self._messages.get((direction, dim, peer), 0) + 1
        span = Span(
            self._group(dim), dim, direction, f"train.py:{line}", 0.0, nbytes=16, shape=shape, dtype="float32"
        )
        span.parts = [(direction, peer, 0, number)]
        return self._made(span, wait)

    def compute(self, flops: int) -> None:
        """Record computation."""
        self.flops += flops

    def wait(self, call: int) -> None:
        """Wait for a call that was started with `wait=False`."""
        self.events.append(Event("wait", call, self.flops, self.moved))

    def step(self) -> RankStep:
        """The recorded step."""
        peak = Peak(0, dict.fromkeys(PARTS, 0), "", "", "")
        held = dict.fromkeys(PARTS, 0)
        return RankStep(
            self.rank, self.coords, 0, held, peak, [], self.calls, self.groups, self.events, self.flops,
            self.moved,
        )  # fmt: skip

    def _group(self, dim: str) -> str:
        return next(label for label in self.groups if label.partition("[")[0] == dim)

    def _made(self, span: Span, wait: bool) -> int:
        number = len(self.calls)
        self.calls.append(span)
        self.events.append(Event("start", number, self.flops, self.moved))
        if wait:
            self.wait(number)
        return number


def steps(
    layout: Layout, program: Callable[[Rank], None], ranks: Sequence[int] | None = None
) -> list[RankStep]:
    """The program's steps on these ranks, or on all."""
    found = []
    for rank in range(layout.world_size) if ranks is None else ranks:
        made = Rank(layout, rank)
        program(made)
        found.append(made.step())
    return found


def where(layout: Layout) -> Callable[[int], str]:
    """A function that describes a rank in words."""
    return lambda rank: (
        f"rank {rank} ({' '.join(f'{dim}={coord}' for dim, coord in layout.coords(rank).items())})"
    )
