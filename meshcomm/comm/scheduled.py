"""All-reduces in several steps: by a schedule of messages along one dim, or dim by dim."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from meshcomm.algorithms import (
    Schedule,
    double_tree,
    halving_doubling,
    recursive_doubling,
    ring,
    tree,
    two_level,
)
from meshcomm.algorithms.schedule import bounds
from meshcomm.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from meshcomm.comm.checks import OWN_TAGS, check_input, check_tensor, is_wrapper, value_of
from meshcomm.comm.communicator import Communicator
from meshcomm.comm.handle import Handle
from meshcomm.comm.request import NO_OPTIONS, Options
from meshcomm.comm.shapes import into, materialised, unwatched
from meshcomm.reductions import REDUCTIONS, WIRE_OPS

Scheduled: TypeAlias = Literal[
    "ring", "tree", "double_tree", "recursive_doubling", "halving_doubling", "two_level"
]
SCHEDULED: Final[tuple[str, ...]] = get_args(Scheduled)

# Separates these messages from a user's own messages. Gloo separates tags; NCCL matches by order.
_TAG: Final = OWN_TAGS
# Size of the chunks that a tree sends one after another. For 32 MiB over 8 ranks on 2 cores, 4 chunks were fastest
# of 1, 2, 4 and 8. For 4 MiB, one chunk was fastest.
_CHUNK_BYTES: Final = 8 << 20
_MOST_CHUNKS: Final = 16
# `hierarchical` sends larger tensors in pieces of this size.
_PIECE_BYTES: Final = 4 << 20


class _Moves(NamedTuple):
    """One step, with chunks as ranges of elements: (peer, start, stop). Receives also tell whether to reduce the data."""

    sends: tuple[tuple[int, int, int], ...]
    receives: tuple[tuple[int, int, int, bool], ...]


class Algorithm(NamedTuple):
    """The schedule of an all_reduce.

    inner:  for "two_level", how many neighboring coords form a group.
    chunks: for the trees, the number of pieces into which the data of one tree is split; if None, one
            piece per 8 MiB, and at most 16.
    """

    name: Scheduled
    inner: int = 1
    chunks: int | None = None

    def run(self, comm: Communicator, flat: Tensor, op: str) -> None:
        """Reduce a flat tensor in place over `comm`. op: a key of WIRE_OPS."""
        name, inner, pieces, wire_op = self.name, self.inner, self.chunks, WIRE_OPS[op]
        if pieces is None:
            trees = 2 if name == "double_tree" else 1
            pieces = min(_MOST_CHUNKS, -(-flat.nbytes // (trees * _CHUNK_BYTES)))
        moves = _moves(name, comm.size, inner, pieces, comm.coord, flat.numel())
        with unwatched(flat):
            _run(comm, flat, moves, getattr(torch, wire_op.combine), f"all_reduce by {name}")
            if wire_op.divided:
                flat.div_(comm.size)


def all_reduce(
    comm: Communicator, x: Tensor, op: str, algorithm: Algorithm, options: Options | None = None
) -> Tensor:
    """Reduce `x` in place over `comm` by the schedule of `algorithm`, and return it.

    All arguments must be equal on every rank, as for `Communicator.collective`, whose checks, operations and errors apply.
    Every rank gets bitwise identical values: each sum is computed by one rank and copied, or by two ranks from the same
    operands in the same order.
    """
    # Even with nothing to reduce, the ranks synchronize, so that a skipped call is noticed.
    chosen = algorithm if is_wrapper(x) or x.numel() > 0 else None
    options = (options or NO_OPTIONS)._replace(algorithm=chosen)
    reduced: Tensor = comm.collective(ALL_REDUCE, x, False, op, options=options)
    return reduced


def schedule_of(algorithm: Scheduled, n: int, inner: int = 1, chunks: int = 1) -> Schedule:
    """Return the schedule that `all_reduce` runs over `n` ranks."""
    if algorithm == "two_level":
        return two_level(n, inner)
    if algorithm in ("tree", "double_tree"):
        return (tree if algorithm == "tree" else double_tree)(n, chunks)
    plain = {"ring": ring, "recursive_doubling": recursive_doubling, "halving_doubling": halving_doubling}
    return plain[algorithm](n)


@lru_cache(maxsize=64)
def _moves(
    algorithm: Scheduled, n: int, inner: int, chunks: int, coord: int, length: int
) -> tuple[list[_Moves], int]:
    """Return this rank's non-empty messages, and the largest number of elements that one step reduces."""
    schedule = schedule_of(algorithm, n, inner, chunks)
    cuts = bounds(length, schedule.chunks)
    moves_of_steps, most = [], 0
    for step in schedule.of(coord):
        sends = tuple((s.peer, cuts[s.first], cuts[s.last]) for s in step.sends)
        receives = tuple((r.peer, cuts[r.first], cuts[r.last], r.reduce) for r in step.receives)
        moves = _Moves(
            tuple(send for send in sends if send[2] > send[1]),
            tuple(receive for receive in receives if receive[2] > receive[1]),
        )
        if moves.sends or moves.receives:
            moves_of_steps.append(moves)
        most = max(most, sum(stop - start for _, start, stop, reduced in moves.receives if reduced))
    return moves_of_steps, most


def _run(
    comm: Communicator,
    flat: Tensor,
    program: tuple[list[_Moves], int],
    combine: Callable[..., Tensor],
    call: str,
) -> None:
    steps, most = program
    scratch = flat.new_empty(most)
    coord = comm.coord
    for sends, receives in steps:
        used, outs = 0, []
        for _, start, stop, reduced in receives:
            if reduced:
                outs.append(scratch[used : used + stop - start])
                used += stop - start
            else:
                outs.append(flat[start:stop])
        comm.messages.exchange(
            [(flat[start:stop], peer, _TAG) for peer, start, stop in sends],
            [(out, receive[0], _TAG) for out, receive in zip(outs, receives, strict=True)],
            call=call,
        )
        for out, (peer, start, stop, reduced) in zip(outs, receives, strict=True):
            if reduced:
                mine = flat[start:stop]
                # The lower coord's operand is on the left, so that two partners compute the same value.
                left, right = (mine, out) if coord < peer else (out, mine)
                combine(left, right, out=mine)


def hierarchical(comms: Sequence[Communicator], x: Tensor, op: str, options: Options | None = None) -> Tensor:
    """Reduce `x` in place over the dims of `comms`, outermost first, and return it.

    Along the innermost dim, a reduce_scatter leaves each rank with slice number `coord`. The slices are reduced over the
    outer dims in the same way. Then the slices are gathered along the innermost dim. Only 1/n of the data crosses the
    outer dims, where n is the size of the innermost dim. In a flat ring, all of the data crosses the outer dims. The
    result equals that of a flat all_reduce up to rounding, because the order of summation differs.
    """
    inner = comms[-1]
    where, x = partial(inner.where, "all_reduce"), value_of(x)
    check_tensor(x, inner.kinds, where)
    if len(comms) == 1 or x.numel() == 0:
        # Even with an empty tensor, the ranks synchronize, so that a skipped call is noticed.
        for comm in comms:
            comm.collective(ALL_REDUCE, x, False, op, options=options)
        return x
    check_input(x, inner.kinds, where, ALL_REDUCE.functional, written=True)
    flat = materialised(x).view(-1)
    length = flat.numel()
    padding = -length % inner.size
    padded = flat.new_zeros(length + padding)
    padded[:length] = flat
    most = max(1, _PIECE_BYTES // (inner.size * flat.element_size())) * inner.size
    pieces = padded.split(most)
    # While two pieces cross the outer dims, which are the slow dims, the next piece is reduced inside and the previous
    # piece is gathered.
    crossing: deque[tuple[Handle[Tensor] | None, Tensor, Tensor]] = deque()
    gathering: list[Handle[Tensor]] = []

    def reduce(number: int) -> Any:
        return inner.collective(REDUCE_SCATTER, pieces[number], True, op, options=options)

    def gather() -> None:
        across, mine, piece = crossing.popleft()
        if across is not None:
            across.wait()
        # Gather into the piece's own memory: its input has been reduced already.
        gathering.append(inner.collective(ALL_GATHER, mine, True, out=piece))

    reducing = reduce(0)
    # The inner level has already prepared the values for the operation.
    further = REDUCTIONS[op].wire.name
    for number, piece in enumerate(pieces):
        mine = reducing.wait()
        if number + 1 < len(pieces):
            reducing = reduce(number + 1)
        if len(comms) == 2:
            crossing.append((comms[0].collective(ALL_REDUCE, mine, True, op=further), mine, piece))
        else:
            hierarchical(comms[:-1], mine, further)
            crossing.append((None, mine, piece))
        if len(crossing) == 2:
            gather()
    while crossing:
        gather()
    for handle in gathering:
        handle.wait()
    return into(x, padded[:length].view(x.shape))
