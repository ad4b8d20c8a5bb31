"""Fit the latency and bandwidth of links to measured times, and write them as `[topology]`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import median
from typing import Final, NamedTuple

import numpy as np

from meshcomm.config import Config, Link, Links, TopologyConfig, load_config
from meshcomm.config.write import plain, toml_text
from meshcomm.errors import ConfigError
from meshcomm.layout import Plan
from meshcomm.predict.links import Hop, Machine, Route, span
from meshcomm.predict.times import Operation, lines

# The algorithm that a backend uses for each operation, if it is known and its time is linear in the size.
# Gloo: gloo/allreduce.cc, allgather.cc and alltoall.cc (github.com/pytorch/gloo). NCCL chooses rings or
# trees by its own tables; the model does not cover NCCL's other algorithms.
_RING_AND_PAIRS: Final[Mapping[Operation, str]] = {
    "all_reduce": "ring",
    "all_gather": "ring",
    "all_to_all": "pairwise",
    "sendrecv": "message",
}
ASSUMED: Final[Mapping[str, Mapping[Operation, str]]] = {
    "gloo": _RING_AND_PAIRS,
    "nccl": {**_RING_AND_PAIRS, "reduce_scatter": "ring"},
}
# Operations that consist of one message on every backend.
_ANY_BACKEND: Final[Mapping[Operation, str]] = {"sendrecv": "message"}
# Latency or bandwidth cannot be distinguished from noise if it contributes less than this share of every measured time.
_SEEN: Final = 0.05
# A file may be overwritten only if it begins with these words.
MARK: Final = "# Measured by `meshcomm bench"


class Time(NamedTuple):
    """The measured time of a call."""

    dim: str
    operation: Operation
    size_bytes: int
    seconds: float


class Work(NamedTuple):
    """A call's work in the model. steps: the number of consecutive messages. moved_bytes: the bytes that the busiest
    rank moves.
    """

    steps: float
    moved_bytes: float


@dataclass(frozen=True)
class Fit:
    """The latency and bandwidth fitted to the calls along `dims`, and the model's error relative to the measurements.

    times: how many measured times were fitted. error, worst: the median and the maximum of |model / measured - 1|.
    notes: warnings about the result.
    """

    dims: tuple[str, ...]
    latency_s: float
    bytes_s: float
    times: int
    error: float
    worst: float
    notes: tuple[str, ...] = ()

    @property
    def link(self) -> Link:
        """The `Link` for `[topology.links]`, rounded to four digits."""
        latency_us, gbytes_s = (float(f"{n:.4g}") for n in (self.latency_s * 1e6, self.bytes_s / 1e9))
        return Link(latency_us=latency_us, bandwidth_gbytes_s=gbytes_s)


class Fitted(NamedTuple):
    """The result of a fit.

    dims: one fit per dim. links: one fit per link class, over all dims whose slowest link is of that class.
    left_out: a (dim, operation, reason) tuple for each operation whose times were not used.
    """

    dims: Mapping[str, Fit]
    links: Mapping[str, Fit]
    left_out: tuple[tuple[str, str, str], ...]


def fit_links(times: Sequence[Time], plan: Plan, machine: Machine) -> Fitted:
    """Fit the latency and bandwidth of each dim, and of each link class that the dims cross.

    plan: a plan in which every backend is known, such as a live mesh's plan. A call's steps and bytes are computed for the
    algorithm that `assumed` returns, and all of them are attributed to the slowest link that the dim's groups cross.
    Raises ConfigError for the same reasons as `fit`, and if no measured operation has a known algorithm.
    """
    by_dim: dict[str, list[tuple[Time, Work]]] = {}
    left_out: dict[tuple[str, str], str] = {}
    spans = {time.dim: span(plan.layout.groups(time.dim), machine) for time in times}
    for time in times:
        family = plan.family(time.dim)
        backend = family.options.backend
        if assumed(backend, time.operation) is None:
            left_out[time.dim, time.operation] = f"{backend}'s algorithm for it is not in the model"
        elif time.operation == "all_to_all" and len(spans[time.dim].route.hops) > 1:
            left_out[time.dim, time.operation] = "its messages cross links of two classes"
        else:
            done = work(backend, time.operation, time.size_bytes, family.size)
            by_dim.setdefault(time.dim, []).append((time, done))
    if not by_dim:
        raise ConfigError(
            "latency and bandwidth cannot be computed from any measured operation",
            given=", ".join(f"{operation} along {dim}: {why}" for (dim, operation), why in left_out.items()),
            expected="an operation whose algorithm is known on this backend",
            hint="--op all_reduce --op all_gather --op sendrecv",
        )
    links: dict[str, list[tuple[Time, Work]]] = {level.name: [] for level in machine.levels}
    for dim, pairs in by_dim.items():
        slowest = spans[dim].slowest
        assert slowest is not None
        links[slowest] += pairs
    return Fitted(
        dims={dim: fit(*zip(*pairs, strict=True)) for dim, pairs in by_dim.items()},
        links={name: fit(*zip(*pairs, strict=True)) for name, pairs in links.items() if pairs},
        left_out=tuple((*key, why) for key, why in left_out.items()),
    )


def assumed(backend: str, operation: Operation) -> str | None:
    """Return the algorithm that the model assumes for `operation` on `backend`, or None if the operation is not fitted."""
    return ASSUMED.get(backend, _ANY_BACKEND).get(operation)


def work(backend: str, operation: Operation, size_bytes: int, ranks: int) -> Work:
    """Return the steps and bytes of a call, computed from the same lines that `meshcomm costs` shows.

    `assumed` must return an algorithm for this operation and backend.

    >>> work("gloo", "all_reduce", 4096, 4)
    Work(steps=6.0, moved_bytes=6144.0)
    """
    # With a link that takes one second per message and one per byte, times are counts of steps and bytes.
    every = lines(operation, Route((Hop(ranks, Fraction(1), Fraction(1)),)))
    line = next(row for row in every if row.name == assumed(backend, operation))
    return Work(float(line.fixed_s), float(line.byte_s * size_bytes))


def check_sizes(sizes: Sequence[int]) -> None:
    """Raise ConfigError if there are too few sizes for a fit. This check also runs before measuring."""
    if len(set(sizes)) < 2:
        raise ConfigError(
            "one size cannot separate latency from bandwidth",
            given=f"times of only {sizes[0]} bytes",
            expected="two sizes or more, far apart",
            hint="--bytes 4KiB --bytes 1MiB --bytes 16MiB",
        )


def fit(times: Sequence[Time], works: Sequence[Work]) -> Fit:
    """Return the latency and bandwidth that fit `times` best, by least squares of the relative errors.

    Errors are relative so that a call of 20 us counts as much as one of 20 ms. A negative latency is replaced by 0.
    If latency accounts for less than a twentieth of every time, a note is added.
    Raises ConfigError if all times have the same size, or if bytes account for less than a twentieth of every time.
    """
    dims = tuple(dict.fromkeys(time.dim for time in times))
    sizes = sorted({time.size_bytes for time in times})
    check_sizes(sizes)
    # Each row divided by its time: the residual of alpha * steps + beta * moved = 1 is the relative error.
    table = np.array(works, dtype=np.float64) / np.array([[time.seconds] for time in times])
    steps, moved = table.T
    # Scale the columns to equal norm, because steps and bytes differ by many orders of magnitude.
    lengths = np.linalg.norm(table, axis=0)
    latency_s, byte_s = (
        np.linalg.lstsq(table / lengths, np.ones(len(table)), rcond=None)[0] / lengths
    ).tolist()
    notes = []
    if latency_s < 0:
        latency_s, byte_s = 0.0, float(moved.sum() / (moved @ moved))
    if latency_s * steps.max() < _SEEN:
        notes.append("latency too small to measure: use smaller sizes")
    if byte_s * moved.max() < _SEEN:
        raise ConfigError(
            f"these times show no bandwidth: {', '.join(dims)}",
            given=f"times that do not grow from {sizes[0]} to {sizes[-1]} bytes",
            expected="sizes whose transfer takes longer than the call itself",
            hint=f"--bytes {sizes[0]} --bytes {sizes[-1] * 64}, more --rounds, or a less busy machine",
        )
    errors = np.abs(latency_s * steps + byte_s * moved - 1).tolist()
    return Fit(dims, latency_s, 1 / byte_s, len(times), median(errors), max(errors), tuple(notes))


def measured_text(settings: Config, topology: TopologyConfig, links: Mapping[str, Fit], facts: str) -> str:
    """Return the text of a TOML file with the measured mesh and its `[topology]`, to save as a config or paste into one.

    Links that were not measured are left out. The latencies include the fixed cost of a call, so `call_us` is 0.
    facts: where, when and on what hardware the times were measured, for the first line of the file.
    Raises ConfigError if a part of the text does not load.
    """
    speeds = Links(**{name: fit.link for name, fit in links.items()})
    written = topology.model_copy(update={"links": speeds, "call_us": 0.0})
    whole = plain(written.model_dump(exclude_none=True))
    mesh = plain(settings.mesh.model_dump(exclude_unset=True))
    head = [f"{MARK.removeprefix('# ')} --fit`: {facts}"]
    for name, fit in links.items():
        notes = "".join(f"; {note}" for note in fit.notes)
        head.append(
            f"links.{name}: {fit.times} times along {', '.join(fit.dims)}; "
            f"the model is {fit.error:.0%} off in the median, {fit.worst:.0%} at most{notes}"
        )
    # Check that loading the file restores the measured values.
    assert load_config({"mesh": mesh, "topology": whole}).topology == written
    rest = {name: value for name, value in whole.items() if name != "links" and value != {}}
    mesh = {name: value for name, value in mesh.items() if value != {}}
    return toml_text(head, {"mesh": mesh, "topology": rest, "topology.links": whole["links"]})
