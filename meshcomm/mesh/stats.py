"""One rank's calls along each dim: bytes, seconds, and the time that the link model predicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from meshcomm.layout import Plan
from meshcomm.predict.links import Machine, slowest_level, span
from meshcomm.predict.times import OPERATIONS, Line, Operation, backend_lines, best, bus_factor
from meshcomm.show.page import as_text, page_view
from meshcomm.show.stats import stats_page
from meshcomm.watching.counters import Counters
from meshcomm.watching.recorder import FlightRecorder

if TYPE_CHECKING:
    from rich.console import RenderableType

# Calls that move the same data as one of the modeled operations.
_AS: Final[dict[str, Operation]] = {
    **{name: name for name in OPERATIONS},
    "send": "sendrecv",
    "recv": "sendrecv",
    "exchange": "sendrecv",
    "shift": "sendrecv",
}
_SUMS: Final = ("calls", "nbytes", "seconds", "span_s", "predicted_s")
# The factors by which nccl-tests multiplies algbw to get busbw, for the other operations.
_BUS_LIKE: Final[dict[str, Operation]] = {"gather": "all_gather", "scatter": "reduce_scatter"}


@dataclass(frozen=True, slots=True)
class CallStats:
    """This rank's calls of one kind along one dim, summed.

    Asynchronous and blocking calls have separate rows.

    nbytes:      counted as in nccl-tests: a rank's input or, for all_gather, gather and scatter, the full tensor.
                 For a message, the bytes sent, or the bytes received if none are sent.
    seconds:     how long the calls blocked the program, including waits. None if unknown: on devices where
                 calls are only enqueued, and for calls that were not made through the mesh.
    span_s:      time from the start of each call to the end of its wait, including other work of the program in
                 between; None in the same cases as `seconds`.
    predicted_s: time that meshcomm.predict predicts for the mean size; None if the link speeds are unknown or
                 the operation is not modeled.
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
        """Bytes per second of blocking calls; None for asynchronous calls, whose duration is unknown."""
        return None if self.async_op or not self.nbytes or not self.seconds else self.nbytes / self.seconds

    @property
    def busbw(self) -> float | None:
        """algbw times nccl-tests' factor for the group's size; None for calls without such a factor."""
        operation = _AS.get(self.call) or _BUS_LIKE.get(self.call)
        if self.algbw is None or operation is None:
            return None
        return self.algbw * float(bus_factor(operation, self.ranks))

    @property
    def ratio(self) -> float | None:
        """Measured seconds divided by predicted seconds, for blocking calls."""
        if self.async_op or not self.predicted_s or self.seconds is None:
            return None
        return self.seconds / self.predicted_s

    @property
    def key(self) -> tuple[str, str, bool]:
        """The dim, the call and async_op, which identify a row."""
        return self.dim, self.call, self.async_op


@dataclass(frozen=True, slots=True)
class Stats:
    """The result of `Mesh.stats`.

    rows: this rank's calls.
    seconds: the time since the mesh was opened, or since the argument of `since`.
    """

    label: str
    seconds: float
    rows: tuple[CallStats, ...] = field(repr=False)

    def since(self, earlier: Stats) -> Stats:
        """Return the calls made after `earlier`, an earlier result for the same mesh."""
        before = {row.key: row for row in earlier.rows}
        rows = []
        for row in self.rows:
            past = before.get(row.key)
            rows.append(row if past is None else _less(row, past))
        return Stats(self.label, self.seconds - earlier.seconds, tuple(row for row in rows if row.calls))

    @property
    def sums(self) -> list[tuple[Any, ...]]:
        """The part of each row that other ranks read: dim, call, async_op, calls, bytes, seconds."""
        return [(*row.key, row.calls, row.nbytes, row.seconds) for row in self.rows]

    def facts(self) -> dict[str, Any]:
        """Return JSON-serializable data, with rates in bytes per second."""
        listed = [
            {**asdict(row), "algbw": row.algbw, "busbw": row.busbw, "ratio": row.ratio} for row in self.rows
        ]
        return {"rank": self.label, "seconds": self.seconds, "rows": listed}

    def __rich__(self) -> RenderableType:
        """Return a table with a line for each call on each dim."""
        return page_view(stats_page(self.facts()))

    def __str__(self) -> str:
        return as_text(self.__rich__())


def _less(now: CallStats, before: CallStats) -> CallStats:
    """Return the calls made after `before`. Values that are unknown in `before` stay unchanged."""
    pairs = {name: (getattr(now, name), getattr(before, name)) for name in _SUMS}
    less: dict[str, Any] = {name: a if None in (a, b) else a - b for name, (a, b) in pairs.items()}
    return replace(now, **less)


def stats(
    label: str,
    seconds: float,
    counters: Iterable[tuple[Counters, bool]],
    plan: Plan,
    machine: Machine | None,
) -> Stats:
    """Return one rank's table, without calls that were never made.

    counters: each group's counters, and whether its calls block until they complete; if not, their seconds are unknown.
    machine: the link speeds; if None, nothing is predicted.
    """
    predict = _predictor(plan, machine)
    order = {family.name: place for place, family in enumerate(plan.families)}
    rows: list[CallStats] = []
    # Iterate over a copy, because another thread may make its first call of a kind in the meantime.
    for total, timed in [
        (total, timed) for counters_of_call, timed in counters for total in list(counters_of_call.values())
    ]:
        call = f"{total.call} (torch)" if total.past else total.call
        known = timed and not total.past
        for async_op, sums in ((False, total), (True, total.async_op)):
            if sums.calls:
                spent = sums.seconds if known else None
                spans = sums.span_s if known and async_op else spent
                expected = predict(total.name, call, sums.calls, sums.nbytes)
                ranks = plan.layout.size(total.name)
                counted = (sums.calls, sums.nbytes, spent, spans, expected)
                rows.append(CallStats(total.name, call, async_op, ranks, *counted))
    return Stats(label, seconds, tuple(sorted(rows, key=lambda row: order.get(row.dim, len(order)))))


def stats_of_groups(label: str, seconds: float, recorders: Iterable[FlightRecorder]) -> Stats:
    """Return the table of one rank's calls in groups outside any plan, group by group. The durations are unknown."""
    rows = [
        CallStats(
            recorder.label, total.call, False, len(recorder.ranks), total.calls, total.nbytes, None, None
        )
        for recorder in recorders
        for total in list(recorder.counters.values())
    ]
    return Stats(label, seconds, tuple(rows))


def _predictor(plan: Plan, machine: Machine | None) -> Callable[[str, str, int, int], float | None]:
    """Return a function (dim, call, number of calls, bytes) -> predicted seconds, or None for calls that are not modeled."""

    @cache
    def algorithms(dim: str, operation: Operation) -> list[Line]:
        """Return the models of the algorithms that a backend may choose; empty if a link's speed is unknown."""
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
