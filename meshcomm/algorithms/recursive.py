"""With partners at distances 1, 2, 4, ...: everyone is a root, so nothing has to come down again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from meshcomm.algorithms.schedule import IDLE, Receive, Schedule, Send, Step, check_counts

Core: TypeAlias = "Callable[[int, Fold], list[Step]]"


def recursive_doubling(n: int) -> Schedule:
    """Exchange all data with a partner and add, at distances 1, 2, 4, ...

    Where n is no power of two, 2 (n - p) ranks first fold into half of them, p the largest power
    of two up to n, and are told the result at the end.

    Steps:    log2 p, and 2 more where n is no power of two; each carries all data.
    Order:    pairs, pairs of pairs, ...; partners compute the same sums, with the same operand left.
    Source:   Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in
              MPICH", 2005.
    """
    check_counts("recursive_doubling", n)

    def core(at: int, fold: Fold) -> list[Step]:
        return [
            Step((Send(peer, 0, 1),), (Receive(peer, 0, 1, True),))
            for level in range(fold.levels)
            for peer in [fold.coord(at ^ (1 << level))]
        ]

    fold = Fold(n, 1)
    return Schedule(
        "recursive_doubling", n, 1, fold.levels + fold.extra_steps, lambda me: fold.around(me, core)
    )


def halving_doubling(n: int) -> Schedule:
    """Reduce-scatter by halves with partners at distances p/2, ..., 2, 1, then all-gather back.

    Folds as `recursive_doubling` does where n is no power of two.

    Steps:    2 log2 p, and 2 more where n is no power of two; for powers of two as few bytes as a ring.
    Order:    pairs at distance p/2, then pairs of those, ...; each chunk is finished by one rank.
    Source:   Rabenseifner, "Optimization of collective reduction operations", 2004; Thakur,
              Rabenseifner, Gropp, 2005.
    """
    check_counts("halving_doubling", n)

    def core(at: int, fold: Fold) -> list[Step]:
        steps: list[Step] = []
        distances = [1 << level for level in range(fold.levels)]
        for distance in reversed(distances):
            # Of 2 * distance chunks that the partners share, each keeps the half that it is in.
            peer = fold.coord(at ^ distance)
            mine, theirs = _half(at, distance), _half(at ^ distance, distance)
            steps.append(Step((Send(peer, *theirs),), (Receive(peer, *mine, True),)))
        for distance in distances:
            peer = fold.coord(at ^ distance)
            mine, theirs = _half(at, distance), _half(at ^ distance, distance)
            steps.append(Step((Send(peer, *mine),), (Receive(peer, *theirs, False),)))
        return steps

    fold = Fold(n, 1 << (n.bit_length() - 1))
    steps = 2 * fold.levels + fold.extra_steps
    return Schedule("halving_doubling", n, fold.chunks, steps, lambda me: fold.around(me, core))


def _half(at: int, distance: int) -> tuple[int, int]:
    first = at & ~(distance - 1)
    return first, first + distance


class Fold:
    """n ranks as the largest power of two of them: of the first 2 * extra, the odd speak for two."""

    def __init__(self, n: int, chunks: int) -> None:
        self.levels = n.bit_length() - 1
        self.chunks = chunks
        self.extra = n - (1 << self.levels)
        self.extra_steps = 2 if self.extra else 0

    def coord(self, at: int) -> int:
        """The rank that is number `at` of the power of two."""
        return 2 * at + 1 if at < self.extra else at + self.extra

    def around(self, me: int, core: Core) -> tuple[Step, ...]:
        """Fold, what `core` says for the folded ranks, and the result back."""
        folded = me < 2 * self.extra
        if folded and me % 2 == 0:
            idle = [IDLE] * len(core(0, self))
            there, back = Send(me + 1, 0, self.chunks), Receive(me + 1, 0, self.chunks, False)
            return (Step((there,)), *idle, Step((), (back,)))
        steps = core(me // 2 if folded else me - self.extra, self)
        if not self.extra:
            return tuple(steps)
        if not folded:
            return (IDLE, *steps, IDLE)
        here, answer = Receive(me - 1, 0, self.chunks, True), Send(me - 1, 0, self.chunks)
        return (Step((), (here,)), *steps, Step((answer,)))
