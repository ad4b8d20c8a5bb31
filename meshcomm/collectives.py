"""The properties of each collective, in one table for all code that checks, sends, records, simulates or documents calls."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce as reduce_pairs
from typing import Any, Final, Literal, NamedTuple, TypeAlias

# Code can read the table without importing torch.
Tensor: TypeAlias = Any
# Reduces flat tensors, one per rank in coord order, with the named operation.
Reduce: TypeAlias = Callable[[Sequence[Tensor], str], Tensor]


class Call(NamedTuple):
    """One collective as a transport receives it.

    x:        this rank's input, contiguous and of a dtype that every backend supports; None if the rank has no input.
              An in-place collective writes its result to x.
    out:      the result buffer; None for in-place collectives and on ranks without a result.
    op, root: the reduction, and the coord that has the whole input or gets the whole result (-1 if there is no root).
    lengths:  the numbers of elements received from and sent to each coord if they differ; otherwise ().
    blocking: whether the caller waits immediately, which lets NCCL stay on the current stream.
    """

    row: Collective
    x: Tensor | None = None
    out: Tensor | None = None
    op: str | None = None
    root: int = -1
    lengths: tuple[list[int], list[int]] | tuple[()] = ()
    blocking: bool = True


def _ring(n: int) -> Fraction:
    return Fraction(n - 1, n)


@dataclass(frozen=True, slots=True, eq=False)
class Collective:
    """The properties of one collective.

    methods:   names of torch's ProcessGroup method, newest first. options: the name of its options class. hooks: the
               collective's names in group hooks.
    arguments: computes the method's arguments, except the options, from x, out, size and lengths.
    root:      the keyword for the coord with the whole input ("src") or the whole result ("dst").
    in_place:  whether the result overwrites x, the method's only tensor.
    splits, joins: whether an axis of x is split into one part per coord, and whether the parts of all coords are joined.
    whole:     whether nccl-tests counts the data of all ranks. bus: for n ranks, bytes on the busiest link per counted byte.
    functional: the name of the differentiable call in `mesh.functional`; "" if there is none.
    """

    name: str
    methods: tuple[str, ...]
    options: str
    hooks: tuple[str, ...]
    arguments: Callable[[Any, Any, int, Any], tuple[Any, ...]] = lambda x, out, size, lengths: ([x],)
    root: Literal["src", "dst"] | None = None
    in_place: bool = False
    reduces: bool = False
    splits: bool = False
    joins: bool = False
    whole: bool = False
    bus: Callable[[int], Fraction] = lambda n: Fraction(1)
    functional: str = ""

    def waits_for_all(self, nbytes: int) -> bool:
        """Return whether every rank's blocking call on Gloo ends only when all ranks have made it, given the bytes that it
        moves. An empty call moves nothing, but an all_to_all waits for empty parts too. Measured with torch 2.15.
        """
        return self.root is None and (nbytes > 0 or self.name in ("all_to_all", "barrier"))

    def needs(self, coord: int, root: int, size: int) -> set[int]:
        """Return the coords that must have made a call before it ends on `coord`, as on Gloo (measured with torch 2.15).

        >>> ROWS["gather"].needs(1, 0, 4), ROWS["gather"].needs(0, 0, 4), ROWS["broadcast"].needs(0, 0, 4)
        ({0, 1}, {0, 1, 2, 3}, {0, 1, 2})
        """
        place = (coord - root) % size
        if self.name == "broadcast":
            # A binomial tree: in round i, each of the first 2**i places sends to the place 2**i further on.
            descendants, above = {place}, place
            while above:
                above -= 1 << (above.bit_length() - 1)
                descendants.add(above)
            descendants |= {
                place + (1 << i) for i in range(place.bit_length(), (size - 1 - place).bit_length())
            }
            return {(descendant + root) % size for descendant in descendants}
        if self.name in ("gather", "scatter") and place:
            return {coord, root}
        return set(range(size))

    def moved(self, nbytes: int, size: int) -> int:
        """Return a call's bytes as nccl-tests counts them, given the size of one rank's tensor."""
        return nbytes * size if self.whole else nbytes

    def shape(self, shape: Sequence[int], axis: int, size: int, concat: int = 0) -> tuple[int, ...]:
        """Return the result's shape for a call along `axis`, given the shape of x. concat: the axis that an all_to_all joins.

        >>> ROWS["all_gather"].shape((2, 3), 1, 4), ROWS["reduce_scatter"].shape((8, 3), 0, 4)
        ((2, 12), (2, 3))
        >>> ROWS["all_to_all"].shape((2, 8), 1, 4, concat=0)
        (8, 2)
        """
        sizes = list(shape)
        if self.splits:
            sizes[axis] //= size
        if self.joins:
            sizes[concat if self.splits else axis] *= size
        return tuple(sizes)


def _parts(x: Any, size: int) -> list[list[Any]]:
    return [] if x is None else [list(x.view(size, -1))]


ALL_REDUCE: Final = Collective(
    "all_reduce",
    ("allreduce",),
    "AllreduceOptions",
    hooks=("ALLREDUCE", "ALLREDUCE_COALESCED"),
    in_place=True,
    reduces=True,
    bus=lambda n: 2 * _ring(n),
    functional="all_reduce",
)
REDUCE: Final = Collective(
    "reduce",
    ("reduce",),
    "ReduceOptions",
    hooks=("REDUCE",),
    root="dst",
    in_place=True,
    reduces=True,
    functional="all_reduce",
)
BROADCAST: Final = Collective(
    "broadcast",
    ("broadcast",),
    "BroadcastOptions",
    hooks=("BROADCAST",),
    root="src",
    in_place=True,
)
ALL_GATHER: Final = Collective(
    "all_gather",
    ("all_gather_single", "_allgather_base"),
    "AllgatherOptions",
    hooks=("ALLGATHER_BASE", "ALLGATHER", "ALLGATHER_COALESCED", "ALLGATHER_INTO_TENSOR_COALESCED"),
    arguments=lambda x, out, size, lengths: (out, x),
    joins=True,
    whole=True,
    bus=_ring,
    functional="all_gather",
)
GATHER: Final = Collective(
    "gather",
    ("gather",),
    "GatherOptions",
    hooks=("GATHER",),
    arguments=lambda x, out, size, lengths: (_parts(out, size), [x.view(-1)]),
    root="dst",
    joins=True,
    whole=True,
    functional="all_gather",
)
SCATTER: Final = Collective(
    "scatter",
    ("scatter",),
    "ScatterOptions",
    hooks=("SCATTER",),
    arguments=lambda x, out, size, lengths: ([out.view(-1)], _parts(x, size)),
    root="src",
    splits=True,
    functional="slice",
)
REDUCE_SCATTER: Final = Collective(
    "reduce_scatter",
    ("reduce_scatter_single", "_reduce_scatter_base"),
    "ReduceScatterOptions",
    hooks=("REDUCE_SCATTER_BASE", "REDUCE_SCATTER", "REDUCE_SCATTER_TENSOR_COALESCED"),
    arguments=lambda x, out, size, lengths: (out, x),
    reduces=True,
    splits=True,
    bus=_ring,
    functional="reduce_scatter",
)
ALL_TO_ALL: Final = Collective(
    "all_to_all",
    ("all_to_all_single", "alltoall_base"),
    "AllToAllOptions",
    hooks=("ALLTOALL_BASE", "ALLTOALL"),
    arguments=lambda x, out, size, lengths: (out, x, *(lengths or ([], []))),
    splits=True,
    joins=True,
    bus=_ring,
    functional="all_to_all",
)
BARRIER: Final = Collective(
    "barrier", ("barrier",), "BarrierOptions", hooks=("BARRIER",), arguments=lambda x, out, size, lengths: ()
)

ROWS: Final = {
    row.name: row
    for row in (
        ALL_REDUCE, REDUCE, REDUCE_SCATTER, BROADCAST, ALL_GATHER, GATHER, SCATTER, ALL_TO_ALL, BARRIER,
    )
}  # fmt: skip

# The row for each name that torch's group hooks report.
HOOKED: Final = {hook: row for row in ROWS.values() for hook in row.hooks}


def write_results(calls: Sequence[Call], reduce: Reduce) -> None:
    """Write a collective's result on every rank. calls: each rank's call, in coord order, with contiguous tensors."""
    row, root, size = calls[0].row, calls[0].root, len(calls)
    if row is BARRIER:
        return
    given: list[Any] = [call.x for call in calls if call.x is not None]
    if given[0].is_sparse:
        # As Gloo adds them, entry by entry in rank order.
        total = reduce_pairs(operator.add, [x.coalesce() for x in given]).coalesce()
        for x in given:
            x.copy_(total)
        return
    brought = [x.view(-1) for x in given]
    if row is ALL_TO_ALL:
        parts = [
            x.split(call.lengths[1]) if call.lengths else x.view(size, -1)
            for x, call in zip(brought, calls, strict=True)
        ]
        results = [_joined([part[coord] for part in parts]) for coord in range(size)]
    else:
        if row.reduces:
            whole = reduce(brought, calls[0].op or "sum")
        else:
            # Only the source of a scatter has an input.
            whole = _joined(brought) if row.joins else brought[root if row.in_place else 0]
        lengths = calls[0].lengths
        parts = whole.split(lengths[1]) if lengths else whole.view(size, -1) if row.splits else [whole] * size
        results = list(parts)
    for coord, (call, result) in enumerate(zip(calls, results, strict=True)):
        if row.root != "dst" or coord == root:
            target: Any = call.x if row.in_place else call.out
            target.view(-1).copy_(result)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Return flat tensors concatenated into one."""
    lengths = [part.numel() for part in parts]
    whole = parts[0].new_empty(sum(lengths))
    for place, part in zip(whole.split(lengths), parts, strict=True):
        place.copy_(part)
    return whole
