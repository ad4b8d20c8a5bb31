"""What has gone along each dim, how long it took, and what the model of the links says to that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from meshcomm.comm.counters import Counters
from meshcomm.layout import Plan
from meshcomm.predict.links import slowest_level, span
from meshcomm.predict.machine import Machine
from meshcomm.predict.times import OPERATIONS, Line, Operation, backend_lines, best, bus_factor
from meshcomm.show.page import as_text, page_view
from meshcomm.show.stats import spread_page, stats_page

if TYPE_CHECKING:
    from rich.console import RenderableType

# What moves data as one of the modelled operations does.
_AS: Final[dict[str, Operation]] = {
    **{name: name for name in OPERATIONS},
    "send": "sendrecv",
    "recv": "sendrecv",
    "exchange": "sendrecv",
    "shift": "sendrecv",
}
# nccl-tests' factors of those that are not modelled.
_BUS_LIKE: Final[dict[str, Operation]] = {"gather": "all_gather", "scatter": "reduce_scatter"}


@dataclass(frozen=True, slots=True)
class Row:
    """One call on one dim, by this rank, summed up.

    ranks:       of the group.
    async_op:    of asynchronous calls, once they were waited for; the others are blocking ones.
    nbytes:      of the data as nccl-tests count it: what a rank brings; of all_gather, gather and scatter
                 the whole; of a message what is sent, or received where nothing is.
    seconds:     that the program was blocked in the calls: until they returned, or while starting them and
                 waiting for them. None where nobody knows: on devices that calls are only enqueued on, and of
                 calls that were not made through the mesh.
    span_s:      from start to the end of the wait, whatever the program did in between; None as above.
    predicted_s: of the same calls by meshcomm.predict, all as of their mean size; None where the links'
                 speeds are not known or the operation is not modelled.
    """

    dim: str
    call: str
    async_op: bool
    ranks: int
    calls: int
    nbytes: int
    seconds: float | None
    span_s: float | None
    predicted_s: float | None = None

    @property
    def algbw(self) -> float | None:
        """Bytes per second of blocking calls; None for asynchronous ones, whose own time is not known."""
        return None if self.async_op or not self.nbytes or not self.seconds else self.nbytes / self.seconds

    @property
    def busbw(self) -> float | None:
        """algbw times nccl-tests' factor for the ranks of the group; None where it has none."""
        operation = _AS.get(self.call) or _BUS_LIKE.get(self.call)
        if self.algbw is None or operation is None:
            return None
        return self.algbw * float(bus_factor(operation, self.ranks))

    @property
    def ratio(self) -> float | None:
        """Measured over predicted seconds, of blocking calls."""
        if self.async_op or not self.predicted_s or self.seconds is None:
            return None
        return self.seconds / self.predicted_s

    def less(self, before: Row) -> Row:
        """What came after `before`, a row of the same call."""

        def minus(name: str) -> Any:
            a, b = getattr(self, name), getattr(before, name)
            return a if a is None or b is None else a - b

        summed = ("calls", "nbytes", "seconds", "span_s", "predicted_s")
        return replace(self, **{name: minus(name) for name in summed})


@dataclass(frozen=True, slots=True)
class Stats:
    """What `Mesh.stats` found. rows: of this rank. seconds: since the mesh was opened, or `since`."""

    label: str
    seconds: float
    rows: tuple[Row, ...]

    def since(self, earlier: Stats) -> Stats:
        """What has been added after `earlier`, which the same mesh said."""
        before = {(row.dim, row.call, row.async_op): row for row in earlier.rows}
        rows = (row.less(before.get((row.dim, row.call, row.async_op), _NOTHING)) for row in self.rows)
        return Stats(self.label, self.seconds - earlier.seconds, tuple(row for row in rows if row.calls))

    def facts(self) -> dict[str, Any]:
        """As data that JSON can hold; rates in bytes per second."""
        listed = [
            {**asdict(row), "algbw": row.algbw, "busbw": row.busbw, "ratio": row.ratio} for row in self.rows
        ]
        return {"rank": self.label, "seconds": self.seconds, "rows": listed}

    def __rich__(self) -> RenderableType:
        """A table, a line for each call of each dim."""
        return page_view(stats_page(self.facts()))

    def __str__(self) -> str:
        return as_text(self.__rich__())


_NOTHING: Final = Row("", "", False, 0, 0, 0, 0.0, 0.0, 0.0)


class Spread(NamedTuple):
    """One call on one dim, over all ranks that made it.

    calls, nbytes: of all of them together. mean_s: seconds that a rank was blocked in the calls, on average.
    fastest, slowest: the ranks that were blocked least and most. All times None where a rank's are not known.
    """

    dim: str
    call: str
    async_op: bool
    ranks: int
    calls: int
    nbytes: int
    mean_s: float | None
    fastest: int
    fastest_s: float | None
    slowest: int
    slowest_s: float | None


@dataclass(frozen=True, slots=True)
class StatsOfAll:
    """What `Mesh.stats_of_all_ranks` found, the same on every rank."""

    seconds: float
    rows: tuple[Spread, ...]

    def facts(self) -> dict[str, Any]:
        """As data that JSON can hold."""
        return {"seconds": self.seconds, "rows": [row._asdict() for row in self.rows]}

    def __rich__(self) -> RenderableType:
        """A table, a line for each call of each dim."""
        return page_view(spread_page(self.facts()))

    def __str__(self) -> str:
        return as_text(self.__rich__())


def stats(
    label: str,
    seconds: float,
    counters: Iterable[tuple[Counters, bool]],
    plan: Plan,
    machine: Machine | None,
) -> Stats:
    """The table of one rank, from the counters of its groups; what was never called is left out.

    counters: of each group, and whether its calls return when they are over; else their seconds are not told.
    machine: what is known of the links; None predicts nothing.
    """
    predict = _predictor(plan, machine)
    order = {family.name: place for place, family in enumerate(plan.families)}
    rows: list[Row] = []
    # A copy, as another thread may make the first call of a kind meanwhile.
    for total, timed in [(total, timed) for each, timed in counters for total in list(each.values())]:
        call = f"{total.call} (torch)" if total.past else total.call
        known = timed and not total.past
        for async_op, sums in ((False, total), (True, total.async_op)):
            if sums.calls:
                spent = sums.seconds if known else None
                spans = sums.span_s if known and async_op else spent
                expected = predict(total.name, call, sums.calls, sums.nbytes)
                ranks = plan.layout.size(total.name)
                counted = (sums.calls, sums.nbytes, spent, spans, expected)
                rows.append(Row(total.name, call, async_op, ranks, *counted))
    return Stats(label, seconds, tuple(sorted(rows, key=lambda row: order.get(row.dim, len(order)))))


def of_all(
    own: Stats,
    rank: int,
    dims: Sequence[str],
    gather: Callable[[str, Any], list[Any]],
    names: Sequence[str],
) -> StatsOfAll:
    """Sum up the ranks' tables dim by dim, so that no rank ever holds more than a few of them.

    gather: (dim, object) -> everyone's along it. names: of all dims, in the order to show them.
    Called by every rank of the mesh with the same dims.
    """
    table = [
        Spread(r.dim, r.call, r.async_op, 1, r.calls, r.nbytes, r.seconds, rank, r.seconds, rank, r.seconds)
        for r in own.rows
    ]
    longest = own.seconds
    for dim in dims:
        everyone = gather(dim, (longest, [tuple(row) for row in table]))
        longest = max(each for each, _ in everyone)
        merged: dict[tuple[str, str, bool], Spread] = {}
        for row in (Spread(*plain) for _, rows in everyone for plain in rows):
            merged[row[:3]] = _merged(merged[row[:3]], row) if row[:3] in merged else row
        table = list(merged.values())
    order = list(dict.fromkeys([*names, *(row.dim for row in table)]))
    return StatsOfAll(longest, tuple(sorted(table, key=lambda row: order.index(row.dim))))


def _merged(a: Spread, b: Spread) -> Spread:
    """Two sets of ranks as one; of equally fast or slow ranks the lower one is named."""
    both = a._replace(ranks=a.ranks + b.ranks, calls=a.calls + b.calls, nbytes=a.nbytes + b.nbytes)
    if a.mean_s is None or b.mean_s is None:
        return both._replace(mean_s=None, fastest_s=None, slowest_s=None)
    fastest_s, fastest = min((row.fastest_s or 0.0, row.fastest) for row in (a, b))
    slowest_s, slowest = min((-(row.slowest_s or 0.0), row.slowest) for row in (a, b))
    return both._replace(
        mean_s=(a.ranks * a.mean_s + b.ranks * b.mean_s) / both.ranks,
        fastest=fastest,
        fastest_s=fastest_s,
        slowest=slowest,
        slowest_s=-slowest_s,
    )


def _predictor(plan: Plan, machine: Machine | None) -> Callable[[str, str, int, int], float | None]:
    """The model's seconds for what was counted; None where it has none."""

    @cache
    def algorithms(dim: str, operation: Operation) -> list[Line]:
        """Those that a backend may choose from; none where a link's speed was not said."""
        assert machine is not None
        found = span(plan.layout.groups(dim), machine)
        if slowest_level(found, machine).assumed:
            return []
        return backend_lines(operation, found.route)

    def predict(dim: str, call: str, calls: int, nbytes: int) -> float | None:
        operation = _AS.get(call)
        if operation is None or machine is None or not algorithms(dim, operation):
            return None
        mean = nbytes / calls
        return calls * best(algorithms(dim, operation), mean).seconds(mean)

    return predict
