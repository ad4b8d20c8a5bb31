"""Which latency and bandwidth do measured times say a link has, if the model is right?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import median
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshcomm.config import Link
from meshcomm.costs.operations import Operation, lines
from meshcomm.costs.route import Hop, Route
from meshcomm.errors import ConfigError

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
# A part of no measured time that is larger than this is not told from noise.
_SEEN: Final = 0.05
# What is one message on every backend.
_ANY_BACKEND: Final[Mapping[Operation, str]] = {"sendrecv": "message"}


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
        return Link(
            latency_us=_rounded(self.latency_s * 1e6), bandwidth_gbytes_s=_rounded(self.bytes_s / 1e9)
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
    name = assumed(backend, operation)

    def line(alpha: int, beta: int) -> float:
        # Where one of the two is nothing, the time is the other's share.
        way = Route((Hop(ranks, Fraction(alpha), Fraction(beta)),))
        return next(each for each in lines(operation, way) if each.name == name).seconds(size_bytes)

    return Work(line(1, 0), line(0, 1))


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
    named = ", ".join(dims)
    sizes = sorted({time.size_bytes for time in times})
    check_sizes(sizes)
    measured = np.array([time.seconds for time in times])
    # Each row divided by its time: the residual is the relative error.
    steps, moved = np.array(works, dtype=np.float64).T / measured
    latency_s, byte_s = _least_squares(steps, moved)
    notes = []
    if latency_s < 0:
        latency_s, byte_s = 0.0, float(moved.sum() / (moved @ moved))
    if latency_s * steps.max() < _SEEN:
        notes.append("hardly any latency seen: smaller sizes would show it")
    if byte_s * moved.max() < _SEEN:
        raise ConfigError(
            f"no bandwidth is in these times: {named}",
            given=f"times that do not grow from {sizes[0]} to {sizes[-1]} bytes",
            expected="sizes whose bytes take longer than the call itself",
            hint=f"--bytes {sizes[0]} --bytes {sizes[-1] * 64}, more --rounds, or a machine with less other work",
        )
    errors = np.abs(latency_s * steps + byte_s * moved - 1)
    return Fit(
        dims, latency_s, 1 / byte_s, len(times), median(errors.tolist()), float(errors.max()), tuple(notes)
    )


def _least_squares(steps: NDArray[np.float64], moved: NDArray[np.float64]) -> tuple[float, float]:
    """(alpha, beta) for which alpha * steps + beta * moved is nearest to 1."""
    # Columns of equal length: seconds and seconds for each byte are twelve powers of ten apart.
    table = np.stack([steps / np.linalg.norm(steps), moved / np.linalg.norm(moved)], axis=1)
    found, *_ = np.linalg.lstsq(table, np.ones(len(table)), rcond=None)
    return float(found[0] / np.linalg.norm(steps)), float(found[1] / np.linalg.norm(moved))


def _rounded(number: float) -> float:
    return float(f"{number:.4g}")
