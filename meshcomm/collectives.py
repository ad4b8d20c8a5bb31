"""What each collective is: one row, read by all that checks, sends, records, simulates, prices or documents it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, Literal, NamedTuple, TypeAlias

# The table is read without torch too.
Tensor: TypeAlias = Any
# Combines one flat tensor of each rank, in coord order, by the name of an operation.
Reduce: TypeAlias = Callable[[Sequence[Tensor], str], Tensor]


class Call(NamedTuple):
    """One collective as a transport gets it.

    x:        what this rank brings, contiguous and of a dtype that every backend carries; None where it
              brings nothing. A collective in place writes its result there.
    out:      where the result goes; None in place, and on ranks that get none.
    op, root: the reduction; the coord that has or gets the whole, -1 where there is none.
    lengths:  elements that come from and go to each coord, where they differ; () where they do not.
    blocking: the caller waits at once, which lets NCCL stay on the current stream.
    """

    row: Collective
    x: Tensor | None = None
    out: Tensor | None = None
    op: str | None = None
    root: int = -1
    lengths: tuple[list[int], list[int]] | tuple[()] = ()
    blocking: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Collective:
    """One collective.

    methods:   of torch's ProcessGroup, the newest name first. options: the type of its options.
    hooks:     what torch's group hooks call it, and its other forms.
    arguments: what the method takes before the options, from x, out, size and lengths.
    value:     writes the result of every rank, from the calls of all in coord order.
    root:      what the coord is called that has ("src") or gets ("dst") the whole.
    whole:     nccl-tests count the data of all ranks, not that of one.
    bus:       bytes over the busiest link for each byte of the size, for n ranks: nccl-tests' factor.
    result:    the factor (multiplied by n, divided by n) of the axis that the collective joins or splits.
    """

    name: str
    methods: tuple[str, ...]
    options: str
    hooks: tuple[str, ...]
    arguments: Callable[[Any, Any, int, Any], tuple[Any, ...]]
    value: Callable[[Sequence[Call], Reduce], None]
    root: Literal["src", "dst"] | None = None
    reduces: bool = False
    whole: bool = False
    bus: Callable[[int], Fraction] = lambda n: Fraction(1)
    result: Literal["same", "joined", "split"] = "same"

    def moved(self, nbytes: int, size: int) -> int:
        """Bytes of a call as nccl-tests count them, from those of the tensor that a rank brings."""
        return nbytes * size if self.whole else nbytes

    def shape(self, shape: Sequence[int], axis: int, size: int) -> tuple[int, ...]:
        """The shape of the result along `axis`, from that of x.

        >>> ROWS["all_gather"].shape((2, 3), 1, 4), ROWS["reduce_scatter"].shape((8, 3), 0, 4)
        ((2, 12), (2, 3))
        """
        if self.result == "same":
            return tuple(shape)
        length = shape[axis] * size if self.result == "joined" else shape[axis] // size
        return (*shape[:axis], length, *shape[axis + 1 :])


def _ring(n: int) -> Fraction:
    return Fraction(n - 1, n)


# -- what every rank gets: `calls` in coord order, tensors contiguous ------------------------------


def _all_reduce(calls: Sequence[Call], reduce: Reduce) -> None:
    flats = [_x(call) for call in calls]
    total = reduce(flats, calls[0].op or "sum")
    for flat in flats:
        flat.copy_(total)


def _reduce(calls: Sequence[Call], reduce: Reduce) -> None:
    flats = [_x(call) for call in calls]
    flats[calls[0].root].copy_(reduce(flats, calls[0].op or "sum"))


def _reduce_scatter(calls: Sequence[Call], reduce: Reduce) -> None:
    total = reduce([_x(call) for call in calls], calls[0].op or "sum")
    for call, part in zip(calls, total.view(len(calls), -1), strict=True):
        _out(call).copy_(part)


def _broadcast(calls: Sequence[Call], reduce: Reduce) -> None:
    for coord, call in enumerate(calls):
        if coord != call.root:
            _x(call).copy_(_x(calls[call.root]))


def _all_gather(calls: Sequence[Call], reduce: Reduce) -> None:
    whole = _joined([_x(call) for call in calls])
    for call in calls:
        _out(call).copy_(whole)


def _gather(calls: Sequence[Call], reduce: Reduce) -> None:
    _out(calls[calls[0].root]).copy_(_joined([_x(call) for call in calls]))


def _scatter(calls: Sequence[Call], reduce: Reduce) -> None:
    for call, part in zip(calls, _x(calls[calls[0].root]).view(len(calls), -1), strict=True):
        _out(call).copy_(part)


def _all_to_all(calls: Sequence[Call], reduce: Reduce) -> None:
    parts = [
        _x(call).split(call.lengths[1]) if call.lengths else _x(call).view(len(calls), -1) for call in calls
    ]
    for coord, call in enumerate(calls):
        _out(call).copy_(_joined([part[coord] for part in parts]))


def _barrier(calls: Sequence[Call], reduce: Reduce) -> None:
    return None


def _x(call: Call) -> Tensor:
    assert call.x is not None
    return call.x.view(-1)


def _out(call: Call) -> Tensor:
    assert call.out is not None
    return call.out.view(-1)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Flat tensors one after the other."""
    lengths = [part.numel() for part in parts]
    whole = parts[0].new_empty(sum(lengths))
    for place, part in zip(whole.split(lengths), parts, strict=True):
        place.copy_(part)
    return whole


def _parts(x: Any, size: int) -> list[list[Any]]:
    return [] if x is None else [list(x.view(size, -1))]


ALL_REDUCE: Final = Collective(
    name="all_reduce",
    methods=("allreduce",),
    options="AllreduceOptions",
    hooks=("ALLREDUCE", "ALLREDUCE_COALESCED"),
    arguments=lambda x, out, size, lengths: ([x],),
    value=_all_reduce,
    reduces=True,
    bus=lambda n: 2 * _ring(n),
)
REDUCE: Final = Collective(
    name="reduce",
    methods=("reduce",),
    options="ReduceOptions",
    hooks=("REDUCE",),
    arguments=lambda x, out, size, lengths: ([x],),
    value=_reduce,
    root="dst",
    reduces=True,
)
BROADCAST: Final = Collective(
    name="broadcast",
    methods=("broadcast",),
    options="BroadcastOptions",
    hooks=("BROADCAST",),
    arguments=lambda x, out, size, lengths: ([x],),
    value=_broadcast,
    root="src",
)
ALL_GATHER: Final = Collective(
    name="all_gather",
    methods=("all_gather_single", "_allgather_base"),
    options="AllgatherOptions",
    hooks=("ALLGATHER_BASE", "ALLGATHER", "ALLGATHER_COALESCED", "ALLGATHER_INTO_TENSOR_COALESCED"),
    arguments=lambda x, out, size, lengths: (out, x),
    value=_all_gather,
    whole=True,
    bus=_ring,
    result="joined",
)
GATHER: Final = Collective(
    name="gather",
    methods=("gather",),
    options="GatherOptions",
    hooks=("GATHER",),
    arguments=lambda x, out, size, lengths: (_parts(out, size), [x.view(-1)]),
    value=_gather,
    root="dst",
    whole=True,
    result="joined",
)
SCATTER: Final = Collective(
    name="scatter",
    methods=("scatter",),
    options="ScatterOptions",
    hooks=("SCATTER",),
    arguments=lambda x, out, size, lengths: ([out.view(-1)], _parts(x, size)),
    value=_scatter,
    root="src",
    result="split",
)
REDUCE_SCATTER: Final = Collective(
    name="reduce_scatter",
    methods=("reduce_scatter_single", "_reduce_scatter_base"),
    options="ReduceScatterOptions",
    hooks=("REDUCE_SCATTER_BASE", "REDUCE_SCATTER", "REDUCE_SCATTER_TENSOR_COALESCED"),
    arguments=lambda x, out, size, lengths: (out, x),
    value=_reduce_scatter,
    reduces=True,
    bus=_ring,
    result="split",
)
ALL_TO_ALL: Final = Collective(
    name="all_to_all",
    methods=("all_to_all_single", "alltoall_base"),
    options="AllToAllOptions",
    hooks=("ALLTOALL_BASE", "ALLTOALL"),
    arguments=lambda x, out, size, lengths: (out, x, *(lengths or ([], []))),
    value=_all_to_all,
    bus=_ring,
)
BARRIER: Final = Collective(
    name="barrier",
    methods=("barrier",),
    options="BarrierOptions",
    hooks=("BARRIER",),
    arguments=lambda x, out, size, lengths: (),
    value=_barrier,
)

ROWS: Final = {
    row.name: row
    for row in (
        ALL_REDUCE, REDUCE, REDUCE_SCATTER, BROADCAST, ALL_GATHER, GATHER, SCATTER, ALL_TO_ALL, BARRIER,
    )
}  # fmt: skip

# The row of each name that torch's group hooks give.
HOOKED: Final = {hook: row for row in ROWS.values() for hook in row.hooks}
