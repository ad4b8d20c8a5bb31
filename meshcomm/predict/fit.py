"""Which latency and bandwidth do measured times say the links have, if the model is right? And a `[topology]` that says it."""

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

# By which algorithm a backend carries an operation out, where that is known and its times are a line over
# the size. Gloo: gloo/allreduce.cc, allgather.cc and alltoall.cc (github.com/pytorch/gloo). NCCL takes rings
# or trees as its own tables say; of the others that it has, the model does not know the pieces.
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
# What is one message on every backend.
_ANY_BACKEND: Final[Mapping[Operation, str]] = {"sendrecv": "message"}
# A part of no measured time that is larger than this is not told from noise.
_SEEN: Final = 0.05
# The first words of a file that may be written over.
MARK: Final = "# Measured by `meshcomm bench"


class Time(NamedTuple):
    """A measured time of a call."""

    dim: str
    operation: Operation
    size_bytes: int
    seconds: float


class Work(NamedTuple):
    """What a call does, as the model counts it: messages one after the other, and bytes at the busiest rank."""

    steps: float
    moved_bytes: float


@dataclass(frozen=True)
class Fit:
    """alpha and beta of the calls along `dims`, and how far the model then is from what was measured.

    times: how many were fitted. error, worst: the median and the largest of |model / measured - 1|.
    notes: what to know before these numbers are used.
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
        """As `[topology.links]` has it, in four digits."""
        latency_us, gbytes_s = (float(f"{n:.4g}") for n in (self.latency_s * 1e6, self.bytes_s / 1e9))
        return Link(latency_us=latency_us, bandwidth_gbytes_s=gbytes_s)


class Fitted(NamedTuple):
    """What the times say.

    dims: each dim's own numbers. links: by link class, all dims of the class together.
    left_out: (dim, operation, why) for times that no constant was made from.
    """

    dims: Mapping[str, Fit]
    links: Mapping[str, Fit]
    left_out: tuple[tuple[str, str, str], ...]


def fit_links(times: Sequence[Time], plan: Plan, machine: Machine) -> Fitted:
    """Fit latency and bandwidth of each dim, and of each link class that the dims cross.

    plan: with every backend decided, as that of a live mesh. Each call's steps and bytes are those of the
    algorithm that `assumed` names, all on the slowest link that the dim's groups cross.
    Raises ConfigError as `fit` does, and where no operation was measured whose algorithm is known.
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
            "no operation was measured from which latency and bandwidth follow",
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
    """The algorithm that the model takes for `operation` on `backend`; None: not fitted."""
    return ASSUMED.get(backend, _ANY_BACKEND).get(operation)


def work(backend: str, operation: Operation, size_bytes: int, ranks: int) -> Work:
    """Steps and bytes of a call, from the same lines that `meshcomm costs` shows.

    Called for operations that `assumed` knows on the backend.

    >>> work("gloo", "all_reduce", 4096, 4)
    Work(steps=6.0, moved_bytes=6144.0)
    """
    # On a link of one second for a message and one for a byte.
    every = lines(operation, Route((Hop(ranks, Fraction(1), Fraction(1)),)))
    line = next(each for each in every if each.name == assumed(backend, operation))
    return Work(float(line.fixed_s), float(line.byte_s * size_bytes))


def check_sizes(sizes: Sequence[int]) -> None:
    """Raise ConfigError where so few sizes cannot be fitted; also before they are measured."""
    if len(set(sizes)) < 2:
        raise ConfigError(
            "one size does not tell latency and bandwidth apart",
            given=f"times of {sizes[0]} bytes alone",
            expected="two sizes or more, far apart",
            hint="--bytes 4KiB --bytes 1MiB --bytes 16MiB",
        )


def fit(times: Sequence[Time], works: Sequence[Work]) -> Fit:
    """The alpha and beta whose model is nearest to `times`: least squares of relative errors.

    Relative, so that a call of 20 us counts as much as one of 20 ms. Neither is below zero: a latency
    that would be is 0; where it is less than a twentieth of every time, there is a note.
    Raises ConfigError where the times do not tell the two apart, or bytes take less than a twentieth of each.
    """
    dims = tuple(dict.fromkeys(time.dim for time in times))
    sizes = sorted({time.size_bytes for time in times})
    check_sizes(sizes)
    # Each row divided by its time: the residual of alpha * steps + beta * moved = 1 is the relative error.
    table = np.array(works, dtype=np.float64) / np.array([[time.seconds] for time in times])
    steps, moved = table.T
    # Columns of equal length: seconds and seconds for each byte are twelve powers of ten apart.
    lengths = np.linalg.norm(table, axis=0)
    latency_s, byte_s = (
        np.linalg.lstsq(table / lengths, np.ones(len(table)), rcond=None)[0] / lengths
    ).tolist()
    notes = []
    if latency_s < 0:
        latency_s, byte_s = 0.0, float(moved.sum() / (moved @ moved))
    if latency_s * steps.max() < _SEEN:
        notes.append("hardly any latency seen: smaller sizes would show it")
    if byte_s * moved.max() < _SEEN:
        raise ConfigError(
            f"no bandwidth is in these times: {', '.join(dims)}",
            given=f"times that do not grow from {sizes[0]} to {sizes[-1]} bytes",
            expected="sizes whose bytes take longer than the call itself",
            hint=f"--bytes {sizes[0]} --bytes {sizes[-1] * 64}, more --rounds, or a machine with less other work",
        )
    errors = np.abs(latency_s * steps + byte_s * moved - 1).tolist()
    return Fit(dims, latency_s, 1 / byte_s, len(times), median(errors), max(errors), tuple(notes))


def measured_text(settings: Config, topology: TopologyConfig, links: Mapping[str, Fit], facts: str) -> str:
    """A TOML file with the mesh that was measured and `[topology]`: a config of its own, or to be pasted.

    A link that was not measured is not known there; what a call costs beside its messages is in the latencies,
    so `call_us` is 0. facts: where, when and on what, for the first lines. Raises ConfigError where a part of it
    does not load.
    """
    speeds = Links(**{name: found.link for name, found in links.items()})
    written = topology.model_copy(update={"links": speeds, "call_us": 0.0})
    whole = plain(written.model_dump(exclude_none=True))
    mesh = plain(settings.mesh.model_dump(exclude_unset=True))
    head = [f"{MARK.removeprefix('# ')} --fit`: {facts}"]
    for name, found in links.items():
        notes = "".join(f"; {note}" for note in found.notes)
        head.append(
            f"links.{name}: {found.times} times along {', '.join(found.dims)}; "
            f"the model is {found.error:.0%} off in the median, {found.worst:.0%} at most{notes}"
        )
    # What is written must be what was measured, before anyone plans by it.
    assert load_config({"mesh": mesh, "topology": whole}).topology == written
    rest = {name: value for name, value in whole.items() if name != "links" and value != {}}
    mesh = {name: value for name, value in mesh.items() if value != {}}
    return toml_text(head, {"mesh": mesh, "topology": rest, "topology.links": whole["links"]})
