"""The time that each algorithm takes for a collective on given links, and the bytes that it moves.

Times are computed exactly by the alpha-beta model, for every applicable algorithm. Sizes are counted as in nccl-tests:
the full data for all_gather and reduce_scatter; one rank's full input, including the part it keeps, for all_to_all;
the tensor for the other operations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, Final, Literal, NamedTuple, TypeAlias, assert_never, get_args

from meshcomm.algorithms import formulas
from meshcomm.collectives import ROWS
from meshcomm.errors import ConfigError
from meshcomm.layout.names import did_you_mean
from meshcomm.predict.links import Route

Operation: TypeAlias = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "sendrecv"
]
OPERATIONS: Final[tuple[Operation, ...]] = get_args(Operation)
# The tensor whose bytes are counted as the size of each operation.
COUNTED: Final[Mapping[Operation, str]] = {
    "all_reduce": "the tensor, which is input and output",
    "all_gather": "the output: all ranks' parts together",
    "reduce_scatter": "the input: all ranks' parts together",
    "all_to_all": "the input, including the part that a rank keeps",
    "broadcast": "the tensor",
    "reduce": "the tensor",
    "sendrecv": "the message",
}
# The algorithms that a backend is assumed to choose from: NCCL's rings, its double tree, and hierarchical rings.
BACKENDS_OWN: Final = ("ring", "double_tree", "hierarchical", "pairwise", "message")
# The numbers of chunks that tree algorithms may split the data into.
CHUNKS: Final = tuple(2**power for power in range(13))
# float32, the dtype of measurements.
DTYPE_BYTES: Final = 4


class Line(NamedTuple):
    """One algorithm, whose time is exactly fixed_s seconds plus byte_s seconds per byte.

    chunks: the number of pieces that the data is split into; 1 for algorithms that do not split it.
    """

    name: str
    chunks: int
    fixed_s: Fraction
    byte_s: Fraction

    def seconds(self, size_bytes: float) -> float:
        """Return the time for `size_bytes` bytes."""
        return float(self.fixed_s + self.byte_s * Fraction(size_bytes))


def lines(operation: Operation, route: Route) -> list[Line]:
    """Return the time of every algorithm for `operation` along `route`.

    Algorithms without levels run all steps at the slowest link's alpha and beta. Hierarchical algorithms need an even
    route with at least two levels, and run each level at its own alpha and beta. Calls in groups of one rank take no time.
    """
    if route.ranks == 1:
        return [Line("none", 1, Fraction(0), Fraction(0))]
    n, alpha_s, beta_s = route.slowest
    rows = [
        Line(name, chunks, steps * alpha_s, moved * beta_s)
        for name, chunks, steps, moved in _flat(operation, n)
    ]
    if operation == "all_to_all":
        rows.insert(0, _pairwise(route))
    rounds = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}.get(operation)
    if rounds and len(route.hops) > 1 and route.even:
        rows.append(_hierarchical(route, rounds))
    return [line._replace(fixed_s=line.fixed_s + route.call_s) for line in rows]


def best(lines: Sequence[Line], size_bytes: float) -> Line:
    """Return the line with the shortest time, or the first of them if several are equal."""
    size = Fraction(size_bytes)
    return min(lines, key=lambda line: line.fixed_s + line.byte_s * size)


def backend_lines(operation: Operation, route: Route) -> list[Line]:
    """Return the lines that a backend chooses from, or all of `lines` if the backend's choices are unknown."""
    every = lines(operation, route)
    return [line for line in every if line.name in BACKENDS_OWN] or every


def fastest(operation: Operation, route: Route, size_bytes: float) -> Line:
    """Return the line that a backend is assumed to use for a call: the best of `backend_lines`.

    `.seconds(size_bytes)` returns the call's time.
    """
    return best(backend_lines(operation, route), size_bytes)


def bus_factor(operation: Operation, ranks: int) -> Fraction:
    """Return busbw / algbw. algbw is size / time; for all_gather and reduce_scatter, the size is that of the full data.

    For a single rank, the factor is 1. Source: nccl-tests, doc/PERFORMANCE.md (github.com/NVIDIA/nccl-tests).

    >>> bus_factor("all_reduce", 8), bus_factor("all_gather", 8)
    (Fraction(7, 4), Fraction(7, 8))
    """
    return Fraction(1) if ranks == 1 or operation == "sendrecv" else ROWS[operation].bus(ranks)


def bandwidths(operation: Operation, ranks: int, size_bytes: int, seconds: float) -> dict[str, float]:
    """Return algbw and busbw in GB/s (10^9 bytes/s). algbw is bytes / time, and busbw is counted as in nccl-tests."""
    algbw = size_bytes / seconds / 1e9
    return {"algbw_gbytes_s": algbw, "busbw_gbytes_s": algbw * float(bus_factor(operation, ranks))}


def counted_bytes(operation: Operation, size_bytes: int, dim: str, ranks: int) -> int:
    """Return the largest size up to `size_bytes` that holds whole float32 elements, with the same number for each rank if
    the operation splits the data.

    Raises ConfigError if there is no such size.

    >>> counted_bytes("all_reduce", 4099, "dp", 3), counted_bytes("all_gather", 4099, "dp", 3)
    (4096, 4092)
    """
    row = ROWS.get(operation)
    in_parts = row is not None and (row.splits or row.joins)
    unit = DTYPE_BYTES * (ranks if in_parts else 1)
    if size_bytes < unit:
        parts = f", one for each of {ranks} ranks along {dim}" if in_parts else ""
        raise ConfigError(
            f"{size_bytes} bytes are too few for {operation} along {dim}",
            given=f"--bytes {size_bytes}",
            expected=f"at least {unit} bytes: float32 of {DTYPE_BYTES} bytes{parts}",
            hint=f"--bytes {unit}, or other operations with --op",
        )
    return size_bytes - size_bytes % unit


def named_operations(names: Sequence[str]) -> tuple[Operation, ...]:
    """Return the operations with these names, or all if `names` is empty. Raises ConfigError for an unknown name."""
    for name in names:
        if name not in OPERATIONS:
            raise ConfigError(
                f"no operation {name}",
                given=f"--op {name}",
                expected="one of " + ", ".join(OPERATIONS),
                hint=did_you_mean(name, OPERATIONS) or "--op all_reduce",
            )
    return tuple(operation for operation in OPERATIONS if operation in names or not names)


def _flat(operation: Operation, n: int) -> Iterator[tuple[str, int, int, Any]]:
    """Yield each algorithm without levels: its name, chunks, steps, and the exact number of bytes moved per byte of size."""
    one: Any = Fraction(1)
    match operation:
        case "all_reduce":
            for name, cost in formulas.ALL_REDUCE.items():
                for chunks in CHUNKS if "tree" in name else (1,):
                    steps, path, busiest, _ = cost(n, one, chunks)
                    yield name, chunks, steps, max(path, busiest)
        case "all_gather" | "reduce_scatter":
            # Each is one half of a ring all-reduce.
            yield "ring", 1, n - 1, Fraction(n - 1, n)
            if n & (n - 1) == 0:
                yield "recursive", 1, n.bit_length() - 1, Fraction(n - 1, n)
        case "all_to_all":
            # Bruck et al. 1997: ceil(log2 n) rounds that each send at most half of the data.
            rounds = [sum(1 for i in range(n) if i >> bit & 1) for bit in range((n - 1).bit_length())]
            yield "bruck", 1, len(rounds), Fraction(sum(rounds), n)
        case "broadcast" | "reduce":
            for chunks in CHUNKS:
                # One direction of a tree, see formulas.tree. An inner rank has two children and exchanges the data
                # with both through one port.
                steps = n.bit_length() - 1 + chunks - 1
                yield "tree", chunks, steps, max(Fraction(steps, chunks), one if n == 2 else 2 * one)
                chain = n - 1 + chunks - 1
                yield "chain", chunks, chain, Fraction(chain, chunks)
        case "sendrecv":
            yield "message", 1, 1, one
        case _:
            assert_never(operation)


def _hierarchical(route: Route, rounds: int) -> Line:
    """Return the line for rings at each level, where each outer ring moves only the part that one unit holds. This
    extends formulas.two_level to any number of levels. rounds: 2 for an all-reduce, 1 for each of its halves.
    """
    fixed = byte = Fraction(0)
    share = Fraction(1)
    for hop in route.hops:
        fixed += rounds * (hop.ranks - 1) * hop.alpha_s
        byte += rounds * share * Fraction(hop.ranks - 1, hop.ranks) * hop.beta_s
        share /= hop.ranks
    return Line("hierarchical", 1, fixed, byte)


def _pairwise(route: Route) -> Line:
    """Each rank sends to all other ranks in turn, each time over the link between the sender and the receiver."""
    fixed = byte = Fraction(0)
    inner = 1
    for hop in route.hops:
        peers = inner * (hop.ranks - 1)
        fixed += peers * hop.alpha_s
        byte += Fraction(peers, route.ranks) * hop.beta_s
        inner *= hop.ranks
    return Line("pairwise", 1, fixed, byte)
