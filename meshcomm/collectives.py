"""The properties of each collective: one row, read by all code that checks, sends, records, simulates, prices or documents it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, Literal, NamedTuple, TypeAlias

# The table can be read without torch.
Tensor: TypeAlias = Any
# Combines one flat tensor of each rank, in coord order, by the name of an operation.
Reduce: TypeAlias = Callable[[Sequence[Tensor], str], Tensor]


class Call(NamedTuple):
    """One collective as a transport receives it.

    x:        this rank's input, contiguous and of a dtype that every backend supports; None if it has no input.
              A collective in place writes its result there.
    out:      the buffer of the result; None if in place, and on ranks without a result.
    op, root: the reduction, and the coord with the whole input or result (-1 if there is none).
    lengths:  elements from and to each coord, if they differ; otherwise ().
    blocking: the caller waits immediately, which lets NCCL stay on the current stream.
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
    """One collective.

    methods:   torch's ProcessGroup methods, newest name first. options: their type. hooks: its names in group hooks.
    arguments: the method's arguments before the options, from x, out, size and lengths.
    root:      the keyword for the coord with the whole input ("src") or the whole result ("dst").
    in_place:  x becomes the result.
    splits, joins: whether an axis of x is split into a part per coord, and whether all coords' parts are joined.
    whole:     nccl-tests count the data of all ranks. bus: for n ranks, the bytes on the busiest link per byte counted.
    functional: the call of `mesh.functional` with a gradient, if its name differs; "" if there is none.
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
    functional: str | None = None

    @property
    def with_gradient(self) -> str:
        """The call of `mesh.functional` that has a gradient; "" if there is none."""
        return self.name if self.functional is None else self.functional

    def moved(self, nbytes: int, size: int) -> int:
        """Return the bytes of a call as nccl-tests count them, from the bytes of one rank's tensor."""
        return nbytes * size if self.whole else nbytes

    def shape(self, shape: Sequence[int], axis: int, size: int, concat: int = 0) -> tuple[int, ...]:
        """Return the shape of the result along `axis`, from the shape of x. concat: the axis that an all_to_all joins.

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
    functional="",
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

# The row of each name that torch's group hooks report.
HOOKED: Final = {hook: row for row in ROWS.values() for hook in row.hooks}


def write_results(calls: Sequence[Call], reduce: Reduce) -> None:
    """Write every rank's result of a collective. calls: every rank's call in coord order, with contiguous tensors."""
    row, root, size = calls[0].row, calls[0].root, len(calls)
    if row is BARRIER:
        return
    brought: list[Any] = [call.x.view(-1) for call in calls if call.x is not None]
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
        results = list(whole.view(size, -1)) if row.splits else [whole] * size
    for coord, (call, result) in enumerate(zip(calls, results, strict=True)):
        if row.root != "dst" or coord == root:
            target: Any = call.x if row.in_place else call.out
            target.view(-1).copy_(result)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Flat tensors one after the other."""
    lengths = [part.numel() for part in parts]
    whole = parts[0].new_empty(sum(lengths))
    for place, part in zip(whole.split(lengths), parts, strict=True):
        place.copy_(part)
    return whole
