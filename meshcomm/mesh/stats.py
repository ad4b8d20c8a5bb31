"""The calls of one rank along each dim: bytes, seconds, and the link model's predicted time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from meshcomm.comm.counters import Counters
from meshcomm.comm.flight_recorder import FlightRecorder
from meshcomm.layout import Plan
from meshcomm.predict.links import Machine, slowest_level, span
from meshcomm.predict.times import OPERATIONS, Line, Operation, backend_lines, best, bus_factor
from meshcomm.show.page import as_text, page_view
from meshcomm.show.stats import stats_page

if TYPE_CHECKING:
    from rich.console import RenderableType

# Calls that move data like one of the modeled operations.
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
    """One call of this rank on one dim, summed over its uses.

    Asynchronous calls have a row of their own, separate from blocking ones.

    nbytes:      counted as in nccl-tests: the input of a rank, or the full tensor for all_gather, gather and
                 scatter. For a message, the bytes sent, or the bytes received if none are sent.
    seconds:     how long the calls blocked the program, including waits. None if unknown: on devices where
                 calls are only enqueued, and for calls that were not made through the mesh.
    span_s:      from the start to the end of the wait, including other work of the program in between; None as
                 for `seconds`.
    predicted_s: predicted by meshcomm.predict for the mean size; None if the link speeds are unknown or the
                 operation is not modeled.
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
        """algbw times the factor of nccl-tests for the group's size; None for calls without such a factor."""
        operation = _AS.get(self.call) or _BUS_LIKE.get(self.call)
        if self.algbw is None or operation is None:
            return None
        return self.algbw * float(bus_factor(operation, self.ranks))

    @property
    def ratio(self) -> float | None:
        """Measured divided by predicted seconds, for blocking calls."""
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

    rows: the calls of this rank. seconds: since the mesh was opened, or since the argument of `since`.
    """

    label: str
    seconds: float
    rows: tuple[CallStats, ...]

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
        """Return JSON-serializable data; rates in bytes per second."""
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
    """Return the calls after `before`; values that were unknown then stay unchanged."""
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
    """Return the table of one rank, without calls that were never made.

    counters: those of each group, and whether its calls block until they complete; if not, their seconds are unknown.
    machine: the speeds of links; if None, nothing is predicted.
    """
    predict = _predictor(plan, machine)
    order = {family.name: place for place, family in enumerate(plan.families)}
    rows: list[CallStats] = []
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
                rows.append(CallStats(total.name, call, async_op, ranks, *counted))
    return Stats(label, seconds, tuple(sorted(rows, key=lambda row: order.get(row.dim, len(order)))))


def stats_of_groups(label: str, seconds: float, recorders: Iterable[FlightRecorder]) -> Stats:
    """Return the table of one rank's calls on groups outside any plan, group by group; their durations are unknown."""
    rows: list[CallStats] = []
    for recorder in recorders:
        for total in list(recorder.counters.values()):
            counted = (len(recorder.ranks), total.calls, total.nbytes, None, None)
            rows.append(CallStats(recorder.label, total.call, False, *counted))
    return Stats(label, seconds, tuple(rows))


def _predictor(plan: Plan, machine: Machine | None) -> Callable[[str, str, int, int], float | None]:
    """Return the prediction (dim, call, number of calls, bytes) -> seconds; None if the model does not cover the call."""

    @cache
    def algorithms(dim: str, operation: Operation) -> list[Line]:
        """Return the models from which a backend may choose; empty if a link's speed is unknown."""
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
