"""Collectives along one dim, or along several merged into one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import index
from time import perf_counter as clock
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from meshcomm.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    GATHER,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
    Call,
    Collective,
)
from meshcomm.comm.checks import (
    check_coord,
    check_divisible,
    check_factor,
    check_in_place,
    check_tensor,
    check_written,
    normal_axis,
    number_of,
)
from meshcomm.comm.counters import counter_of
from meshcomm.comm.fast_path import FastPath, Key, Ready, fits, share_memory
from meshcomm.comm.flight_recorder import FlightRecorder
from meshcomm.comm.handle import Handle, failure
from meshcomm.comm.mismatch import CallCheck
from meshcomm.comm.p2p import Messages
from meshcomm.comm.shapes import (
    CARRIED,
    as_ordered,
    blank_header,
    buffer_for,
    described_by,
    from_ordered,
    header_of,
    into,
    is_ordered,
    join,
    materialised,
    rows_beside,
    split,
    unwatched,
    wire,
    without,
)
from meshcomm.errors import MeshcommError, ShapeError
from meshcomm.transport import Transport
from meshcomm.transport.support import WIDENED, check_reduce, name_of
from meshcomm.transport.torch_private import written

T = TypeVar("T")


@final
class Communicator:
    """What talks along `name`. Shape rules live here, once for every transport.

    Methods take what the Mesh methods of the same name take, after the dims, and keep the same
    promises; with `async_op` they return a Handle of what they otherwise return.

    Every call goes one of two ways. The first of its kind is checked, compared with the other ranks', and
    prepared. Those after it, where each tensor is `usable` as it is, go straight to the backend: `_go`.

    Args:
        name: the dim or dims, as errors show them.
        transport: the group.
        who: this rank with its coords, for errors, as in `rank 5 (pp=1 dp=0 tp=1)`.
        calls: compares the first calls on this group between its ranks.
        recorder: watches the group, and knows whom to ask when a call fails.
    """

    __slots__ = (
        "_calls",
        "_fast",
        "_kinds",
        "coord",
        "messages",
        "name",
        "recorder",
        "size",
        "transport",
        "who",
    )

    def __init__(
        self,
        name: str,
        transport: Transport,
        who: str,
        calls: CallCheck | None = None,
        recorder: FlightRecorder | None = None,
    ) -> None:
        self.name = name
        self.recorder = recorder or FlightRecorder(name, [], lambda _, where, error: failure(where, error))
        # None once there is nothing left to compare: what is off costs nothing.
        self._calls = calls
        self.transport = transport
        self.size = transport.size
        self._kinds = transport.kinds
        self.coord = transport.coord
        self.who = who
        self._fast = FastPath(name, self.recorder)
        self.messages = Messages(name, transport, who, self.recorder)

    def where(self, call: str) -> str:
        """What opens an error about a call."""
        return f'{call} along "{self.name}" on {self.who}'

    def failed(self, call: str, error: BaseException) -> MeshcommError:
        """The error for a call that the backend gave up on."""
        return self.recorder.inquire(self.recorder, self.where(call), error)

    @contextmanager
    def named(self, call: str, group: bool = True) -> Iterator[tuple[Communicator, Callable[[int], None]]]:
        """Make one call of several: it is recorded and counted as `call`, its parts are not.

        Yields what makes the parts, a communicator whose calls are not compared and may have the library's own
        tags, and a function that is told how many bytes the call moves.
        group: whether every rank of the group makes the call, so that it has a sequence number.
        """
        recorder, where = self.recorder, self.where(call)
        counter, began, moved = counter_of(recorder.counters, self.name, call), clock(), [0]
        parts = FlightRecorder(
            recorder.label, recorder.ranks, lambda _, __, error: recorder.inquire(recorder, where, error)
        )
        parts.messages = recorder.messages
        parts.under_way = True
        made = Communicator(self.name, self.transport, self.who, None, parts)
        if group:
            with recorder.call(self, counter, 0, None):
                yield made, recorder.is_of
            return
        try:
            yield made, moved.append
        finally:
            counter.calls += 1
            counter.nbytes += moved[-1]
            counter.seconds += clock() - began

    # -- reductions -----------------------------------------------------------------------------

    def all_reduce(
        self,
        x: Tensor,
        op: str = "sum",
        async_op: bool = False,
        factor: float | None = None,
        algorithm: tuple[str, Callable[[Tensor, str], None]] | None = None,
    ) -> Any:
        """Reduce `x` over the dim, in place. See `Mesh.all_reduce`.

        algorithm: its name, and what reduces a flat tensor in place instead of the backend, by messages.
        """
        key = ("all_reduce", op, async_op)
        if factor is None and algorithm is None and (ready := self._fast.find(key, x)) is not None:
            return self._go(ready, x.nbytes, x, None, x, async_op)
        self._door(x, "all_reduce")
        check_written(x, lambda: self.where("all_reduce"))
        self._check_op(op, x.dtype, factor, "all_reduce")
        with self._recorded(ALL_REDUCE, x):
            # Each rank has a factor of its own, so it is not compared.
            told = {} if algorithm is None else {"algorithm": algorithm[0]}
            self._compare(ALL_REDUCE, x, op=op, **told)
            carried, plain_op = self.carried(x, op, factor, own=True)
            if algorithm is not None:
                algorithm[1](wire(carried.detach(), True), plain_op)
                return self.put_back(x, carried, op)
            plain = carried is x and factor is None
            self._keep(key, x, ALL_REDUCE, plain, async_op, op)
            call = Call(ALL_REDUCE, wire(carried, True), op=plain_op, blocking=not async_op)
            return self._run(call, lambda: self.put_back(x, carried, op), async_op)

    def reduce(
        self, x: Tensor, dst: int, op: str = "sum", async_op: bool = False, factor: float | None = None
    ) -> Any:
        """The reduced x in new memory on coord `dst`, None elsewhere. See `Mesh.reduce`."""
        key = ("reduce", op, dst, type(dst), async_op)
        if factor is None and (ready := self._fast.find(key, x)) is not None:
            own = x.clone()
            return self._go(ready, x.nbytes, own, None, own if self.coord == dst else None, async_op)
        check_coord(dst, self.size, "dst", lambda: self.where("reduce"))
        self._door(x, "reduce", "all_reduce")
        self._check_op(op, x.dtype, factor, "reduce")
        with self._recorded(REDUCE, x):
            self._compare(REDUCE, x, op=op, dst=dst)
            carried, plain_op = self.carried(x, op, factor)
            plain = carried is x and factor is None
            self._keep(key, x, REDUCE, plain, async_op, op, dst)
            # Backends leave partial results in the tensors of the other ranks; x stays as it was.
            own = carried.clone() if carried is x else carried
            call = Call(REDUCE, wire(own, True), op=plain_op, root=dst, blocking=not async_op)
            if self.coord != dst:
                return self._run(call, lambda: None, async_op)
            return self._run(call, lambda: from_ordered(own, x.dtype, op).to(x.dtype), async_op)

    def reduce_scatter(
        self,
        x: Tensor,
        axis: int = 0,
        op: str = "sum",
        async_op: bool = False,
        out: Tensor | None = None,
        factor: float | None = None,
    ) -> Any:
        """Reduce `x`, keep this rank's slice of `axis`. See `Mesh.reduce_scatter`."""
        key = ("reduce_scatter", op, axis, type(axis), async_op)
        if (
            factor is None
            and (ready := self._fast.find(key, x)) is not None
            and (sizes := x.shape)
            and not sizes[0] % self.size
            and (result := self._room(REDUCE_SCATTER, x, out, ready)) is not None
        ):
            return self._go(ready, x.nbytes, x, result, result, async_op)
        self._door(x, "reduce_scatter")
        self._check_op(op, x.dtype, factor, "reduce_scatter")
        parts = self._parts(x, axis, "reduce_scatter")
        result = self.result_for(out, parts.shape[1:], x, "reduce_scatter")
        with self._recorded(REDUCE_SCATTER, x):
            self._compare(REDUCE_SCATTER, x, axis=axis % x.ndim, op=op)
            carried, plain_op = self.carried(parts, op, factor, own=parts.data_ptr() != x.data_ptr())
            plain = carried is parts and factor is None and not axis and materialised(x) is x
            self._keep(key, x, REDUCE_SCATTER, plain, async_op, op)
            same = carried.dtype == x.dtype
            buffer = buffer_for(result) if same else carried.new_empty(carried.shape[1:])
            call = Call(
                REDUCE_SCATTER, wire(carried, True), wire(buffer, True), plain_op, blocking=not async_op
            )
            return self._run(call, lambda: self.put_back(result, buffer, op), async_op)

    # -- moving data ----------------------------------------------------------------------------

    def broadcast(self, x: Tensor, src: int, async_op: bool = False) -> Any:
        """Overwrite `x` with the x of coord `src`. See `Mesh.broadcast`."""
        key = ("broadcast", src, type(src), async_op)
        if (ready := self._fast.find(key, x)) is not None:
            return self._go(ready, x.nbytes, x, None, x, async_op)
        check_coord(src, self.size, "src", lambda: self.where("broadcast"))
        self._door(x, "broadcast")
        check_written(x, lambda: self.where("broadcast"))
        with self._recorded(BROADCAST, x):
            self._compare(BROADCAST, x, src=src)
            dense = materialised(x)
            self._keep(key, x, BROADCAST, dense is x, async_op, root=src)
            call = Call(BROADCAST, wire(dense), root=src, blocking=not async_op)
            return self._run(call, lambda: into(x, dense), async_op)

    def all_gather(
        self,
        x: Tensor,
        axis: int = 0,
        async_op: bool = False,
        out: Tensor | None = None,
        uneven: bool = False,
    ) -> Any:
        """Every rank's x, one after the other along `axis`. See `Mesh.all_gather`."""
        key = ("all_gather", axis, type(axis), async_op)
        if (
            not uneven
            and (ready := self._fast.find(key, x)) is not None
            and x.ndim
            and (result := self._room(ALL_GATHER, x, out, ready)) is not None
        ):
            return self._go(ready, x.nbytes * self.size, x, result, result, async_op)
        return self._gathered(ALL_GATHER, x, None, axis, async_op, out, uneven, key)

    def gather(
        self,
        x: Tensor,
        dst: int,
        axis: int = 0,
        async_op: bool = False,
        uneven: bool = False,
        out: Tensor | None = None,
    ) -> Any:
        """`all_gather` on coord `dst`, None elsewhere. See `Mesh.gather`."""
        key = ("gather", dst, type(dst), axis, type(axis), async_op)
        if not uneven and (ready := self._fast.find(key, x)) is not None and x.ndim:
            room = self._room(GATHER, x, out, ready) if self.coord == dst else None
            if room is not None or self.coord != dst:
                return self._go(ready, x.nbytes * self.size, x, room, room, async_op)
        check_coord(dst, self.size, "dst", lambda: self.where("gather"))
        # The others know nothing of an out: what is wrong with it is said when they have their part of the call.
        return self._gathered(GATHER, x, dst, axis, async_op, out if self.coord == dst else None, uneven, key)

    def _gathered(
        self,
        row: Collective,
        x: Tensor,
        dst: int | None,
        axis: int,
        async_op: bool,
        out: Tensor | None,
        uneven: bool,
        key: Key,
    ) -> Any:
        self._door(x, row.name, "all_gather")
        source = materialised(x.unsqueeze(0) if x.ndim == 0 else x)
        axis = normal_axis(source, axis, lambda: self.where(row.name))
        shape = row.shape(source.shape, axis, self.size)
        problem = None if out is None or uneven else self.misfit(out, shape, x, row.name)
        if problem is not None and dst is None:
            raise problem
        gets = dst is None or self.coord == dst
        with self._recorded(row, source):
            like = without(source, axis) if uneven else source
            self._compare(row, like, axis=axis, uneven=uneven, dst=dst)
            if uneven:
                return self._gather_uneven(row, source, axis, dst, async_op, out)
            self._keep(key, x, row, axis == 0 and source is x, async_op, root=-1 if dst is None else dst)
            # Along axis 0 the parts lie as they come, so that an `out` needs no copy.
            direct = out if out is not None and axis == 0 and problem is None else None
            buffer = None
            if gets:
                parts = source.new_empty((self.size, *source.shape))
                buffer = parts if direct is None else buffer_for(direct)

            def finish() -> Tensor | None:
                if problem is not None:
                    raise problem
                if buffer is None:
                    return None
                if direct is not None:
                    return into(direct, buffer)
                joined = join(buffer, axis)
                return joined if out is None else into(out, joined)

            root = -1 if dst is None else dst
            came = None if buffer is None else wire(buffer)
            return self._run(
                Call(row, wire(source), came, root=root, blocking=not async_op), finish, async_op
            )

    def scatter(
        self,
        x: Tensor | None,
        src: int,
        axis: int = 0,
        async_op: bool = False,
        out: Tensor | None = None,
    ) -> Any:
        """Slice c of coord src's x on coord c. See `Mesh.scatter`."""
        check_coord(src, self.size, "src", lambda: self.where("scatter"))
        if out is not None:
            self.writes(out, "scatter")
        parts, problem = None, None
        if self.coord == src:
            try:
                parts = self._scattered(x, src, axis, out)
            except MeshcommError as error:
                problem = error  # the others know nothing of x, and must hear of it
        refused = "not to be scattered" if problem is not None and out is not None else None
        with self._recorded(SCATTER):
            try:
                self._compare(SCATTER, None, src=src, out=out is not None, x_is=refused)
            except MeshcommError:
                if problem is not None:
                    raise problem from None
                raise
            if out is None:
                result = buffer = self._announced(None if parts is None else parts[0], src, problem)
            elif problem is not None:
                raise problem
            else:
                result, buffer = out, buffer_for(out)
            self.recorder.is_of(buffer.nbytes * self.size)
            brought = None if parts is None else wire(parts)
            call = Call(SCATTER, brought, wire(buffer), root=src, blocking=not async_op)
            return self._run(call, lambda: into(result, buffer), async_op)

    def _scattered(self, x: Tensor | None, src: int, axis: int, out: Tensor | None) -> Tensor:
        """What the source of a scatter sends, the part of each coord in front."""
        if x is None:
            raise ShapeError(
                f"{self.where('scatter')}: the source has nothing to scatter",
                given=f"x=None on coord {src}, which is src",
                expected="a tensor on src; None on the others",
                hint="x if mesh.coord(dims) == src else None",
            )
        self._door(x, "scatter", "slice")
        parts = self._parts(x, axis, "scatter")
        if out is not None:
            self.result_for(out, parts.shape[1:], parts, "scatter")
        return parts

    def _announced(self, x: Tensor | None, src: int, problem: MeshcommError | None) -> Tensor:
        """Tell every rank shape and dtype of coord src's `x`: new memory like it, everywhere.

        problem: why coord src has no `x`, which the others are told of and src raises.
        """
        header = blank_header(self.transport.device)
        try:
            if x is not None:
                header = header_of(x, self.where("scatter"))
        except ShapeError as error:
            problem = error
        if problem is not None:
            header[0] = -1
        self._now(Call(BROADCAST, header, root=src))
        if problem is not None:
            raise problem
        if header[0] < 0:
            raise ShapeError(
                f"{self.where('scatter')}: coord {src} has nothing that can be scattered",
                given=f"what coord {src}, the source, was called with",
                expected=f"a tensor there whose axis can be cut into {self.size}",
                hint=f"look at the error of coord {src}",
            )
        return described_by(header)

    def all_to_all(
        self,
        x: Tensor,
        split_axis: int = 0,
        concat_axis: int = 0,
        async_op: bool = False,
        splits: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Any:
        """Slice c of `split_axis` goes to coord c; what comes in is joined along `concat_axis`."""
        key = ("all_to_all", split_axis, type(split_axis), concat_axis, type(concat_axis), async_op)
        if (
            splits is None
            and (ready := self._fast.find(key, x)) is not None
            and (sizes := x.shape)
            and not sizes[0] % self.size
            and (result := self._room(ALL_TO_ALL, x, out, ready)) is not None
            # What comes in must not overwrite what is still to leave.
            and (out is None or not share_memory(out, x))
        ):
            return self._go(ready, x.nbytes, x, result, result, async_op)
        self._door(x, "all_to_all")
        concat = normal_axis(x, concat_axis, lambda: self.where("all_to_all"))
        own = normal_axis(x, split_axis, lambda: self.where("all_to_all"))
        if splits is None:
            check_divisible(x, own, self.size, lambda: self.where("all_to_all"), lambda: self.who)
            if out is not None:
                shape = list(x.shape)
                shape[own] //= self.size
                shape[concat] *= self.size
                self.result_for(out, shape, x, "all_to_all")
        else:
            splits = self._checked_splits(x, own, splits)
        like = x if splits is None else without(x, own)
        with self._recorded(ALL_TO_ALL, x):
            self._compare(ALL_TO_ALL, like, split_axis=own, concat_axis=concat, splits=splits is not None)
            if splits is not None:
                return self._all_to_all_uneven(x, own, concat, splits, async_op, out)
            parts = self._parts(x, own, "all_to_all")
            plain = not own and not concat and materialised(x) is x
            self._keep(key, x, ALL_TO_ALL, plain, async_op)
            received = torch.empty_like(parts)

            def finish() -> Tensor:
                joined = join(received, concat)
                return joined if out is None else into(out, joined)

            call = Call(ALL_TO_ALL, wire(parts), wire(received), blocking=not async_op)
            return self._run(call, finish, async_op)

    def barrier(self, async_op: bool = False) -> Handle[None] | None:
        """Return when every rank of the group has come."""
        with self._recorded(BARRIER):
            self._compare(BARRIER, None)
            found: Handle[None] | None = self._run(
                Call(BARRIER, blocking=not async_op), lambda: None, async_op
            )
            return found

    # -- sizes that differ from rank to rank: exchanged first, then everything in its own size ------

    def _gather_uneven(
        self,
        row: Collective,
        source: Tensor,
        axis: int,
        dst: int | None,
        async_op: bool,
        out: Tensor | None,
    ) -> Any:
        mine = torch.tensor([source.shape[axis]], dtype=torch.int64, device=source.device)
        found = mine.new_empty(self.size)
        self._now(Call(ALL_GATHER, mine, found))
        sizes: list[int] = found.tolist()
        count = rows_beside(source, axis)
        self.recorder.is_of(sum(sizes) * count * source.element_size())
        gets = dst is None or self.coord == dst
        coming = [size * count if gets else 0 for size in sizes]
        moved = materialised(source.movedim(axis, 0)).view(-1)
        leaving = [moved.numel() if dst is None or c == dst else 0 for c in range(self.size)]
        buffer = source.new_empty(sum(coming))
        rest = [s for i, s in enumerate(source.shape) if i != axis]
        problem = None
        if out is not None:
            shape = list(source.shape)
            shape[axis] = sum(sizes)
            # Of this rank alone, maybe: the others have their part of the call before it is said.
            problem = self.misfit(out, shape, source, row.name)

        def finish() -> Tensor | None:
            if problem is not None:
                raise problem
            if not gets:
                return None
            whole = buffer.view(sum(sizes), *rest).movedim(0, axis)
            return whole.contiguous() if out is None else into(out, whole)

        sent = moved.repeat(self.size) if dst is None else moved
        return self._run(self._uneven(sent, leaving, buffer, coming, async_op), finish, async_op)

    def _all_to_all_uneven(
        self, x: Tensor, axis: int, concat: int, splits: list[int], async_op: bool, out: Tensor | None
    ) -> Any:
        mine = torch.tensor(splits, dtype=torch.int64, device=x.device)
        theirs = torch.empty_like(mine)
        self._now(Call(ALL_TO_ALL, mine, theirs))
        sizes: list[int] = theirs.tolist()
        # What arrives has the sender's other axes; only the split axis differs from rank to rank.
        shapes = [(*x.shape[:axis], size, *x.shape[axis + 1 :]) for size in sizes]
        # What is wrong for this rank alone is said when the others have their part of the call.
        problem: MeshcommError | None = None
        if concat != axis and len(set(sizes)) > 1:
            problem = ShapeError(
                f"{self.where('all_to_all')}: parts of unequal size cannot be joined along axis {concat}",
                given=f"sizes {sizes} of axis {axis} from coords 0 to {self.size - 1}",
                expected=f"equal sizes, or concat_axis={axis}",
                hint=f"concat_axis={axis}",
            )
        elif out is not None:
            shape = list(shapes[0])
            shape[concat] = sum(each[concat] for each in shapes)
            problem = self.misfit(out, shape, x, "all_to_all")
        leaving = [materialised(part) for part in x.split(splits, axis)]
        coming = [int(torch.Size(shape).numel()) for shape in shapes]
        flat = torch.cat([part.view(-1) for part in leaving])
        buffer = flat.new_empty(sum(coming))

        def finish() -> Tensor:
            if problem is not None:
                raise problem
            pieces = buffer.split(coming)
            whole = torch.cat([p.view(s) for p, s in zip(pieces, shapes, strict=True)], concat)
            return whole if out is None else into(out, whole)

        lengths = [part.numel() for part in leaving]
        return self._run(self._uneven(flat, lengths, buffer, coming, async_op), finish, async_op)

    @staticmethod
    def _uneven(x: Tensor, leaving: list[int], out: Tensor, coming: list[int], async_op: bool) -> Call:
        source = wire(x)
        # Lengths count what is carried: bytes where the dtype travels as bytes.
        unit = 1 if source.dtype == x.dtype else x.element_size()
        lengths = ([n * unit for n in coming], [n * unit for n in leaving])
        return Call(ALL_TO_ALL, source, wire(out), lengths=lengths, blocking=not async_op)

    def _checked_splits(self, x: Tensor, axis: int, splits: Sequence[int]) -> list[int]:
        """`splits` as plain sizes, which must cut axis `axis` of `x` into one part for each coord."""
        try:
            sizes = [index(size) for size in splits]
        except TypeError:
            sizes = []
        if len(sizes) != self.size or sum(sizes) != x.shape[axis] or min(sizes) < 0:
            raise ShapeError(
                f"{self.where('all_to_all')}: splits do not cut axis {axis}",
                given=f"splits={splits}, x of shape {tuple(x.shape)}",
                expected=f"{self.size} sizes of 0 or more whose sum is {x.shape[axis]}",
                hint=f"splits={[x.shape[axis] // self.size] * self.size}"
                if x.shape[axis] % self.size == 0
                else "one size for each coord",
            )
        return sizes

    # -- the fast path --------------------------------------------------------------------------

    def _go(
        self, ready: Ready, nbytes: int, x: Tensor, out: Tensor | None, result: Any, async_op: bool
    ) -> Any:
        """Make a call that was checked before, with tensors that are usable as they are."""
        start, options, row, counter, _ = ready
        if out is None:
            written([x])
        with self.recorder.call(self, counter, nbytes, x):
            work = start(*row.arguments(x, out, self.size, ()), options)
            if async_op:
                works = () if work is None else (work,)
                return Handle(works, self, row.name, result=result, pending=self.recorder.later(), held=x)
            if work is not None:
                work.wait()
        return result

    def _room(self, row: Collective, x: Tensor, out: Tensor | None, ready: Ready) -> Tensor | None:
        """Where the result of a call along axis 0 goes; None where `out` cannot take it as it is."""
        sizes = x.shape
        if row.result == "joined":
            sizes = torch.Size((sizes[0] * self.size, *sizes[1:]))
        elif row.result == "split":
            sizes = torch.Size((sizes[0] // self.size, *sizes[1:]))
        if out is None:
            return x.new_empty(sizes)
        if not fits(out, sizes, x, ready.device):
            return None
        written([out])
        return out

    def _keep(
        self,
        key: Key,
        x: Tensor,
        row: Collective,
        plain: bool,
        async_op: bool,
        op: str | None = None,
        root: int = -1,
    ) -> None:
        """Make calls like this one without asking again, where they are no longer compared or traced."""
        if plain and self._calls is None and self.recorder.spans is None and x.dtype in CARRIED:
            self._fast.keep(key, x, row, self.transport.prepare(row, op, root, not async_op))

    # -- the checked path -----------------------------------------------------------------------

    def _recorded(self, row: Collective, x: Tensor | None = None) -> FlightRecorder:
        """The block of a call that moves `x`: recorded, and counted, under its own name or that of the whole."""
        nbytes = 0 if x is None else row.moved(x.nbytes, self.size)
        counter = counter_of(self.recorder.counters, self.name, row.name)
        return self.recorder.call(self, counter, nbytes, x)

    def _compare(self, row: Collective, x: Tensor | None, **facts: object) -> None:
        """Tell the other ranks of the call while calls are still compared; raises where they make another."""
        if self._calls is None:
            return
        if not self._calls.active:
            self._calls = None
            return
        if x is not None:
            facts = {"shape": list(x.shape), "dtype": name_of(x.dtype), **facts}
        try:
            self._calls.compare(self.name, row.name, facts)
        except MeshcommError:
            self.recorder.refuse()
            raise

    def _run(self, call: Call, finish: Callable[[], T], async_op: bool) -> Any:
        work = self.transport.start(call)
        if async_op:
            works = () if work is None else (work,)
            return Handle(works, self, call.row.name, finish, pending=self.recorder.later(), held=call)
        if work is not None:
            work.wait()
        return finish()

    def _now(self, call: Call) -> None:
        """A part of the call under way."""
        work = self.transport.start(call)
        if work is not None:
            work.wait()

    def _door(self, x: Tensor, call: str, functional: str = "") -> None:
        check_tensor(x, self._kinds, lambda: self.where(call))
        check_in_place(x, lambda: self.where(call), functional or call)

    def _parts(self, x: Tensor, axis: int, call: str) -> Tensor:
        """`x` as (size, ...), the slices of `axis` in front, contiguous."""
        axis = normal_axis(x, axis, lambda: self.where(call))
        check_divisible(x, axis, self.size, lambda: self.where(call), lambda: self.who)
        return split(x, axis, self.size)

    def _check_op(self, op: str, dtype: torch.dtype, factor: float | None, call: str) -> None:
        """Refuse what the backend cannot reduce; before the others hear of the call."""
        check_reduce(self.transport.name, op, dtype, lambda: self.where(call))
        check_factor(factor, op, dtype, lambda: self.where(call))

    def carried(self, x: Tensor, op: str, factor: float | None, own: bool = False) -> tuple[Tensor, str]:
        """What travels for `x`, and the operation that the backend does with it; see `put_back`.

        The same memory where that will do; `own`: x may be scaled in place.
        """
        dense = materialised(x)
        if is_ordered(x.dtype, op):
            return as_ordered(dense, op), op
        if x.dtype in WIDENED:
            return dense.to(WIDENED[x.dtype]), op
        if factor is None:
            return dense, op
        number = number_of(factor, x.dtype, lambda: self.where("premul_sum"))
        if own or dense is not x:
            with unwatched(dense):
                return dense.mul_(number), "sum"
        return dense * number, "sum"

    def put_back(self, out: Tensor, carried: Tensor, op: str) -> Tensor:
        """`out` with the values of what has travelled for it."""
        return into(out, from_ordered(carried, out.dtype, op))

    def result_for(self, out: Tensor | None, shape: Sequence[int], like: Tensor, call: str) -> Tensor:
        """`out` where it fits, else new memory where there is none."""
        if out is None:
            return like.new_empty(tuple(shape))
        self.writes(out, call)
        if tuple(out.shape) != tuple(shape) or out.dtype != like.dtype or out.device != like.device:
            raise ShapeError(
                f"{self.where(call)}: out does not fit the result",
                given=f"out of shape {tuple(out.shape)}, {out.dtype}, {out.device}",
                expected=f"shape {tuple(shape)}, {like.dtype}, {like.device}",
                hint=f"out=x.new_empty({tuple(shape)}), or no out",
            )
        return out

    def misfit(self, out: Tensor, shape: Sequence[int], like: Tensor, call: str) -> MeshcommError | None:
        """Why a result of this shape cannot be put into `out`; None where it can."""
        try:
            self.result_for(out, shape, like, call)
        except MeshcommError as error:
            return error
        return None

    def writes(self, out: Tensor, call: str) -> None:
        """Refuse an `out` that nothing can be received into, of whatever shape."""
        check_tensor(out, self._kinds, lambda: f"{self.where(call)}: out")
        check_in_place(out, lambda: self.where(call), call)
        check_written(out, lambda: f"{self.where(call)}: out")
