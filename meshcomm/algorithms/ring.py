"""Around a ring: each rank talks to its two neighbours only, and all send at once."""

from __future__ import annotations

from collections.abc import Callable

from meshcomm.algorithms.schedule import Receive, Schedule, Send, Step, check_counts, check_inner

Span = tuple[int, int]


def ring(n: int) -> Schedule:
    """Reduce-scatter around the ring, then all-gather around it.

    Steps:    2 (n - 1), each with 1/n of the data on every link; optimal in bytes, linear in latency.
    Order:    chunk c is summed from coord c + 1 upwards, round the end, and finished by coord c.
    Source:   Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
              workstations", 2009.
    """
    check_counts("ring", n)

    def program(me: int) -> tuple[Step, ...]:
        around = _Ring(n, me, lambda place: place)
        return (*around.reduce(lambda c: (c, c + 1)), *around.gather(lambda c: (c, c + 1)))

    return Schedule("ring", n, n, 2 * (n - 1), program)


def two_level(n: int, inner: int) -> Schedule:
    """Groups of `inner` neighbouring coords, and a ring across the groups for each place in them.

    A ring inside each group leaves each rank one slice of the group's sum; rings across the groups
    all-reduce the slices; the rings inside gather them. Between groups goes 1/inner of the data.

    Steps:    2 (inner - 1) inside and 2 (n / inner - 1) across.
    Order:    as `ring`, first inside the groups, then across them.
    Source:   Mikami et al., "Massively distributed SGD: ImageNet/ResNet-50 training in a flash", 2018,
              as 2D-torus all-reduce.
    Raises:   LayoutError where `inner` does not divide n.
    """
    check_inner(n, inner)
    outer = n // inner

    def program(me: int) -> tuple[Step, ...]:
        group, place = divmod(me, inner)
        inside = _Ring(inner, place, lambda p: group * inner + p)
        across = _Ring(outer, group, lambda g: g * inner + place)

        # Slice i of the group is chunks i * outer to (i + 1) * outer - 1, one for each group.
        def whole(i: int) -> Span:
            return i * outer, (i + 1) * outer

        def part(g: int) -> Span:
            return place * outer + g, place * outer + g + 1

        return (*inside.reduce(whole), *across.reduce(part), *across.gather(part), *inside.gather(whole))

    return Schedule("two_level", n, n, 2 * (inner - 1) + 2 * (outer - 1), program)


class _Ring:
    """The neighbours of place `place` of `size`; `coord` says which rank sits at a place."""

    def __init__(self, size: int, place: int, coord: Callable[[int], int]) -> None:
        self._size = size
        self._place = place
        self._next = coord((place + 1) % size)
        self._last = coord((place - 1) % size)

    def reduce(self, span: Callable[[int], Span]) -> list[Step]:
        """Place p ends with the sum of span p."""
        return [self._step(span, -s - 1, True) for s in range(self._size - 1)]

    def gather(self, span: Callable[[int], Span]) -> list[Step]:
        """Place p starts with span p; all end with all spans."""
        return [self._step(span, -s, False) for s in range(self._size - 1)]

    def _step(self, span: Callable[[int], Span], offset: int, reduce: bool) -> Step:
        leaves = span((self._place + offset) % self._size)
        comes = span((self._place + offset - 1) % self._size)
        return Step((Send(self._next, *leaves),), (Receive(self._last, *comes, reduce),))
