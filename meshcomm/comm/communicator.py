"""Collectives along one dim, or along several merged into one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from operator import index
from time import perf_counter as clock
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor

from meshcomm.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    REDUCE,
    SCATTER,
    Call,
    Collective,
)
from meshcomm.comm.checks import (
    OWN_TAGS,
    apart,
    check_answered,
    check_coord,
    check_divisible,
    check_factor,
    check_in_place,
    check_tensor,
    check_written,
    normal_axis,
    number_of,
    usable,
)
from meshcomm.comm.counters import CallCounter, counter_of
from meshcomm.comm.flight_recorder import Caller, FlightRecorder
from meshcomm.comm.handle import Handle, failure
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
    split,
    unwatched,
    wire,
    without,
)
from meshcomm.errors import MeshcommError, ShapeError
from meshcomm.layout import Dims
from meshcomm.transport import P2P, Transport, Work
from meshcomm.transport.support import WIDENED, check_reduce, name_of
from meshcomm.transport.torch_private import written

# Of the messages of a collective: a user's own do not meet them.
_TAG: Final = OWN_TAGS


class Ready(NamedTuple):
    """One kind of call for one dtype: the backend's method, its options, where calls are counted, on which device."""

    start: Callable[..., Any]
    options: Any
    counter: CallCounter
    device: torch.device


@final
class Communicator(Caller):
    """What talks along `name`. Shape rules live here, once for every transport.

    Every call goes one of two ways. The first of its kind is checked, compared with the other ranks', and
    prepared. Those after it, where each tensor is `usable` as it is, go straight to the backend.

    Args:
        name: the dim or dims, as errors show them.
        transport: the group.
        who: this rank with its coords, for errors, as in `rank 5 (pp=1 dp=0 tp=1)`.
        recorder: watches the group, compares its first calls between its ranks, and knows whom to ask when one fails.
    """

    def __init__(
        self,
        name: str,
        transport: Transport,
        who: str,
        recorder: FlightRecorder | None = None,
    ) -> None:
        recorder = recorder or FlightRecorder(name, [], lambda _, where, error: failure(where, error))
        super().__init__(name, transport, who, recorder)
        self._kinds = transport.kinds
        # Whether calls run after they have returned, so that somebody has to look after them.
        self._queues = self.recorder.ordered
        # The prepared calls. Nothing in it leads back here: this and its group have to go with their last reference.
        self._ready: dict[tuple[object, ...], Ready] = {}
        self.recorder.quick.append(self._ready)
        self.messages = Messages(name, transport, who, self.recorder)

    @contextmanager
    def named(
        self, call: str, group: bool = True, root: int = -1, facts: dict[str, Any] | None = None
    ) -> Iterator[tuple[Communicator, Callable[[int], None]]]:
        """Make one call of several: it is recorded, compared and counted as `call`, its parts are not.

        Yields what makes the parts, a communicator whose calls are not compared and may have the library's own
        tags, and a function that is told how many bytes the call moves.
        group: whether every rank of the group makes the call, so that it has a sequence number.
        facts: what has to be equal on all of them.
        """
        recorder, where = self.recorder, self.where(call)
        counter, began, moved = counter_of(recorder.counters, self.name, call), clock(), [0]
        parts = FlightRecorder(
            recorder.label, recorder.ranks, lambda _, __, error: recorder.inquire(recorder, where, error)
        )
        parts.messages = recorder.messages
        parts.under_way = True
        made = Communicator(self.name, self.transport, self.who, parts)
        if group:
            with recorder.call(self, counter, 0, None, root=root):
                recorder.compare(self.name, call, facts or {})
                yield made, recorder.is_of
            return
        try:
            yield made, moved.append
        finally:
            counter.calls += 1
            counter.nbytes += moved[-1]
            counter.seconds += clock() - began

    def collective(
        self,
        row: Collective,
        x: Tensor,
        async_op: bool = False,
        *,
        op: Any = None,
        root: int = -1,
        axis: int = 0,
        concat: int = 0,
        out: Tensor | None = None,
        factor: float | None = None,
        uneven: bool = False,
        splits: Sequence[int] | None = None,
        received: Sequence[int] | None = None,
        algorithm: tuple[str, Callable[[Tensor, str], None]] | None = None,
    ) -> Any:
        """Any collective but a scatter and a barrier; see `Mesh` for what each promises. With `async_op` a Handle.

        concat: the axis that an all_to_all joins; `axis` is the one that it splits, and the only one of the others.
        algorithm: its name, and what reduces a flat tensor in place instead of the backend, by messages.
        """
        if (
            (factor is None and splits is received is None and not uneven and algorithm is None)
            # True, 1.0 and NumPy's 1 would find what was prepared for 1; a negative axis is another one of each x.
            and type(root) is int
            and (row.in_place or (type(axis) is type(concat) is int and axis == concat == 0))
            and (ready := self._find(row, op, root, async_op, x)) is not None
            and (found := self._go(row, ready, x, root, out, async_op)) is not NotImplemented
        ):
            return found
        sizes = splits, received
        return self._checked(row, x, async_op, op, root, axis, concat, out, factor, uneven, sizes, algorithm)

    def _checked(
        self,
        row: Collective,
        x: Tensor,
        async_op: bool,
        op: Any,
        root: int,
        axis: int,
        concat: int,
        out: Tensor | None,
        factor: float | None,
        uneven: bool,
        sizes: tuple[Sequence[int] | None, Sequence[int] | None],
        algorithm: tuple[str, Callable[[Tensor, str], None]] | None,
    ) -> Any:
        """`collective`, for a call that is checked, compared and prepared; apart, as its closures cost every call."""
        where = partial(self.where, row.name)
        if row.root is not None:
            check_coord(root, self.size, row.root, where)
        check_tensor(x, self._kinds, where)
        check_in_place(x, where, row.with_gradient)
        if row.in_place and row is not REDUCE:
            check_written(x, where)
        if row.reduces:
            check_reduce(self.transport.name, op, x.dtype, where)
            check_factor(factor, op, x.dtype, where)
        source = x.unsqueeze(0) if row.joins and not row.splits and x.ndim == 0 else x
        if not row.in_place:
            concat = normal_axis(source, concat, where)
            axis = normal_axis(source, axis, where)
        splits, received = sizes
        if received is not None:
            received = self._known(received, splits)
        if splits is not None:
            splits = self._sizes(x, axis, splits)
        elif row.splits:
            check_divisible(x, axis, self.size, where, self.who)
        gets = row.root != "dst" or root == self.coord
        problem = None
        if out is not None and gets and not uneven and splits is None:
            problem = self._misfit(out, row.shape(source.shape, axis, self.size, concat), x, where)
            # The others know nothing of the out of one root: it is refused when they have their part of the call.
            if problem is not None and row.root is None:
                raise problem
        # By another algorithm, it is another call.
        by = "" if algorithm is None else f" by {algorithm[0]}"
        with self._recorded(row, source, op, root, by):
            facts: dict[str, object] = {} if row.in_place else {"axis": axis}
            if row is ALL_TO_ALL:
                facts = {"split_axis": axis, "concat_axis": concat, "splits": splits is not None}
                facts |= {"received": True} if received is not None else {}
            elif row.joins:
                facts["uneven"] = bool(uneven)
            # Each rank has a factor of its own, so it is not compared.
            facts |= {"op": op} if row.reduces else {}
            facts |= {row.root: root} if row.root is not None else {}
            differs = uneven or splits is not None
            compared = self._compare(row, without(source, axis) if differs else source, facts, by)
            if differs:
                joined = concat if row.splits else axis
                known = received, compared
                return self._uneven(row, source, axis, joined, splits, known, root, async_op, out)
            dense = split(source, axis, self.size) if row.splits else materialised(source)
            carried, plain_op = dense, op
            if row.reduces:
                own = row is ALL_REDUCE or dense.untyped_storage() is not x.untyped_storage()
                carried, plain_op = self._carried(dense, op, factor, own)
            plain = source is x and carried is dense and factor is None and axis == concat == 0
            if plain and algorithm is None and materialised(x) is x:
                self._keep(row, op, root, async_op, x)
            # Backends leave partial results in the tensors of the other ranks; x stays as it was.
            if row is REDUCE and carried is x:
                carried = carried.clone()
            # Where the parts lie as they come, an `out` needs no copy.
            straight = row.splits != row.joins and not (row.joins and axis) and carried.dtype == x.dtype
            target = x if row.in_place and row is not REDUCE else out
            came, direct = carried if row.in_place else None, False
            if out is not None and straight and gets and problem is None:
                came, direct = self._room(out, carried), True
            elif gets and not row.in_place:
                part = carried.shape[1:] if row.splits else carried.shape
                came = carried.new_empty((self.size, *part) if row.joins else part)

            def finish() -> Tensor | None:
                if problem is not None:
                    raise problem
                if came is None or not gets:
                    return None
                found = from_ordered(came, x.dtype, op)
                if row.joins and not direct:
                    found = join(found, concat if row.splits else axis)
                return found.to(x.dtype) if target is None else into(target, found)

            if algorithm is not None:
                algorithm[1](wire(carried.detach(), True), plain_op)
                return finish()
            room = None if row.in_place or came is None else wire(came, row.reduces)
            call = Call(row, wire(carried, row.reduces), room, plain_op, root, blocking=not async_op)
            return self._run(call, finish, async_op)

    def barrier(self, async_op: bool = False) -> Handle[None] | None:
        """Return when every rank of the group has come."""
        with self._recorded(BARRIER):
            self._compare(BARRIER, None, {})
            found: Handle[None] | None = self._run(
                Call(BARRIER, blocking=not async_op), lambda: None, async_op
            )
            return found

    def scatter(
        self, x: Tensor | None, src: int, axis: int = 0, async_op: bool = False, out: Tensor | None = None
    ) -> Any:
        """Slice c of coord src's x on coord c. See `Mesh.scatter`."""
        where = partial(self.where, "scatter")
        check_coord(src, self.size, "src", where)
        if out is not None:
            self._check_written(out, where)
        header, parts, problem = blank_header(self.transport.device), None, None
        if self.coord == src:
            try:
                parts = self._parts(x, src, axis, out)
                header = header if out is not None else header_of(parts[0], where())
            except MeshcommError as error:
                problem = error  # the others know nothing of x, and must hear of it
        refused = "not to be scattered" if problem is not None and out is not None else None
        with self._recorded(SCATTER, root=src):
            try:
                self._compare(SCATTER, None, {"src": src, "out": out is not None, "x_is": refused})
            except MeshcommError:
                if problem is not None:
                    raise problem from None
                raise
            if out is None:
                if problem is not None:
                    header[0] = -1
                self._run(Call(BROADCAST, header, root=src))
            if problem is not None:
                raise problem
            if header[0] < 0:
                raise ShapeError(
                    f"{where()}: coord {src} has nothing that can be scattered",
                    given=f"what coord {src}, the source, was called with",
                    expected=f"a tensor there whose axis can be cut into {self.size}",
                    hint=f"look at the error of coord {src}",
                )
            if out is not None:
                result = out
            elif parts is not None:
                result = parts.new_empty(parts.shape[1:])
            else:
                check_answered(self.transport.name, "the slice's shape", where(), "out=torch.empty(...)")
                result = described_by(header)
            buffer = buffer_for(result) if parts is None else self._room(result, parts)
            self.recorder.is_of(buffer.nbytes * self.size)
            brought = None if parts is None else wire(parts)
            call = Call(SCATTER, brought, wire(buffer), root=src, blocking=not async_op)
            return self._run(call, lambda: into(result, buffer), async_op)

    def _parts(self, x: Tensor | None, src: int, axis: int, out: Tensor | None) -> Tensor:
        """What the source of a scatter sends, the part of each coord in front."""
        where = partial(self.where, "scatter")
        if x is None:
            raise ShapeError(
                f"{where()}: the source has nothing to scatter",
                given=f"x=None on coord {src}, which is src",
                expected="a tensor on src; None on the others",
                hint="x if mesh.coord(dims) == src else None",
            )
        check_tensor(x, self._kinds, where)
        check_in_place(x, where, "slice")
        axis = normal_axis(x, axis, where)
        check_divisible(x, axis, self.size, where, self.who)
        parts = split(x, axis, self.size)
        if out is not None and (problem := self._misfit(out, parts.shape[1:], parts, where)) is not None:
            raise problem
        return parts

    # -- sizes that differ from rank to rank: exchanged first, then everything in its own size ------

    def _uneven(
        self,
        row: Collective,
        x: Tensor,
        axis: int,
        concat: int,
        splits: Sequence[int] | None,
        known: tuple[list[int] | None, bool],
        root: int,
        async_op: bool,
        out: Tensor | None,
    ) -> Any:
        """A gather of, or an all_to_all with, sizes of `axis` that differ; what comes is joined along `concat`.

        known: how much comes from each coord, if that was given, and whether it is to be compared with what they send.
        """
        received, compared = known
        if received is None or (compared and self.transport.name != "fake"):
            hint = (
                "received=, the sizes that come"
                if row is ALL_TO_ALL
                else "equal sizes: pad, and cut behind the call"
            )
            check_answered(self.transport.name, "the sizes of their parts", self.where(row.name), hint)
            told = torch.tensor(
                [x.shape[axis]] if splits is None else splits, dtype=torch.int64, device=x.device
            )
            answer = told.new_empty(self.size)
            self._run(Call(ALL_GATHER if splits is None else ALL_TO_ALL, told, answer))
            sizes: list[int] = answer.tolist()
        else:
            sizes = received
        gets = row.root != "dst" or root == self.coord
        rest = [*x.shape[:axis], *x.shape[axis + 1 :]]
        count = prod(rest)
        if splits is None:
            self.recorder.is_of(sum(sizes) * count * x.element_size())
        # What is wrong for this rank alone is said when the others have their part of the call.
        problem: MeshcommError | None = None
        if received not in (None, sizes):
            problem = ShapeError(
                f"{self.where(row.name)}: the other ranks send something else than this one expects",
                given=f"received={received}",
                expected=f"received={sizes}, which is in the splits of coords 0 to {self.size - 1}",
                hint="leave out received, which costs a small exchange before each call",
            )
        elif concat != axis and len(set(sizes)) > 1:
            problem = ShapeError(
                f"{self.where(row.name)}: parts of unequal size cannot be joined along axis {concat}",
                given=f"sizes {sizes} of axis {axis} from coords 0 to {self.size - 1}",
                expected=f"equal sizes, or concat_axis={axis}",
                hint=f"concat_axis={axis}",
            )
        elif out is not None and gets:
            shape = list(x.shape)
            shape[axis] = sizes[0]
            shape[concat] = sum(sizes) if concat == axis else shape[concat] * self.size
            problem = self._misfit(out, shape, x, partial(self.where, row.name))
        sent = materialised(x.movedim(axis, 0)).view(-1)
        coming = [size * count if gets else 0 for size in sizes]
        works, held, came = self._start_uneven(row, sent, coming, splits, count, root, async_op)

        def finish() -> Tensor | None:
            if problem is not None:
                raise problem
            if not gets:
                return None
            # Padded parts are cut to what they are.
            flat = (
                came
                if came.ndim == 1
                else torch.cat([part[:n] for part, n in zip(came, coming, strict=True)])
            )
            if concat == axis:
                whole = flat.view(sum(sizes), *rest).movedim(0, axis)
            else:
                whole = join(flat.view(self.size, sizes[0], *rest).movedim(1, axis + 1), concat)
            return whole.contiguous() if out is None else into(out, whole)

        return self._finished(works, row.name, finish, async_op, held)

    def _start_uneven(
        self,
        row: Collective,
        sent: Tensor,
        coming: list[int],
        splits: Sequence[int] | None,
        count: int,
        root: int,
        async_op: bool,
    ) -> tuple[Sequence[Work], object, Tensor]:
        """Start what moves `sent`, flat: its Works, what to keep until they are over, and where it arrives.

        What arrives is flat, or has a padded row for each coord. An all_gather needs no copy of what it sends for each
        of the others: where a backend queues its calls all parts are padded to the longest and gathered as one kernel,
        else each part is a message straight to its place.
        """
        transport = self.transport
        if splits is None and root < 0 and self.size > 1:
            if transport.ordered or sent.device.type not in transport.message_kinds:
                longest = max(coming)
                padded = sent
                if sent.numel() < longest:
                    padded = torch.cat([sent, sent.new_zeros(longest - sent.numel())])
                room = sent.new_empty(self.size, longest)
                call = Call(ALL_GATHER, wire(padded), wire(room), blocking=not async_op)
                return self._started(call), call, room if len(set(coming)) > 1 else room.view(-1)
            came = sent.new_empty(sum(coming))
            parts = came.split(coming)
            parts[self.coord].copy_(sent)
            others = [coord for coord in range(self.size) if coord != self.coord]
            batch = [P2P("recv", wire(parts[coord]), coord, _TAG) for coord in others if coming[coord]]
            batch += [P2P("send", wire(sent), coord, _TAG) for coord in others if sent.numel()]
            return transport.start_p2p(batch), batch, came
        leaving = [sent.numel() if root in (-1, coord) else 0 for coord in range(self.size)]
        if splits is not None:
            leaving = [size * count for size in splits]
        came, source = sent.new_empty(sum(coming)), wire(sent)
        # Lengths count what is carried: bytes where the dtype travels as bytes.
        unit = 1 if source.dtype == sent.dtype else sent.element_size()
        lengths = ([n * unit for n in coming], [n * unit for n in leaving])
        call = Call(ALL_TO_ALL, source, wire(came), lengths=lengths, blocking=not async_op)
        return self._started(call), call, came

    def _known(self, received: Sequence[int], splits: Sequence[int] | None) -> list[int]:
        """`received` as plain sizes, one for each coord, beside `splits`."""
        try:
            sizes = [index(size) for size in received]
        except TypeError:
            sizes = []
        if splits is None or len(sizes) != self.size or min(sizes) < 0:
            raise ShapeError(
                f"{self.where('all_to_all')}: received does not say what comes from each coord",
                given=f"received={received}, splits={splits}",
                expected=f"{self.size} sizes of 0 or more, beside the splits",
                hint="leave out received, or give both",
            )
        return sizes

    def _sizes(self, x: Tensor, axis: int, splits: Sequence[int]) -> list[int]:
        """`splits` as plain sizes, which must cut axis `axis` of `x` into one part for each coord."""
        try:
            sizes = [index(size) for size in splits]
        except TypeError:
            sizes = []
        length = x.shape[axis]
        if len(sizes) != self.size or sum(sizes) != length or min(sizes) < 0:
            even = length % self.size == 0
            raise ShapeError(
                f"{self.where('all_to_all')}: splits do not cut axis {axis}",
                given=f"splits={splits}, x of shape {tuple(x.shape)}",
                expected=f"{self.size} sizes of 0 or more whose sum is {length}",
                hint=f"splits={[length // self.size] * self.size}" if even else "one size for each coord",
            )
        return sizes

    # -- the fast path --------------------------------------------------------------------------

    def _find(self, row: Collective, op: object, root: int, async_op: bool, x: Any) -> Ready | None:
        """What was prepared for a call like this, where `x` is a tensor that it will do for."""
        try:
            ready = self._ready[row, op, root, async_op, x.dtype]
            return ready if usable(x, ready.device) else None
        except (KeyError, AttributeError, TypeError, RuntimeError):
            # Not prepared, or no tensor, or one of another kind: whoever checks will say what it is.
            return None

    def _go(
        self, row: Collective, ready: Ready, x: Tensor, root: int, out: Tensor | None, async_op: bool
    ) -> Any:
        """Make a call that was checked before, of an x that is usable as it is; NotImplemented where more is to be asked."""
        start, options, counter, device = ready
        sent, came, result = x, None, x
        gets = row.root != "dst" or root == self.coord
        if row.in_place:
            if row is REDUCE:
                sent = result = x.clone()
            written([sent])
        else:
            shape = x.shape
            if not shape or (row.splits and shape[0] % self.size):
                return NotImplemented
            if row.splits != row.joins:
                length = shape[0] * self.size if row.joins else shape[0] // self.size
                shape = torch.Size((length, *shape[1:]))
            if not gets:
                pass
            elif out is None:
                came = result = x.new_empty(shape)
            elif (
                not usable(out, device)
                or out.dtype is not x.dtype
                or out.shape != shape
                # What comes in must not overwrite what is still to leave.
                or not apart(out, x, self.coord)
            ):
                return NotImplemented
            else:
                written([out])
                came = result = out
        made = result if gets else None
        nbytes = x.nbytes * self.size if row.whole else x.nbytes
        with self.recorder.call(self, counter, nbytes, x):
            work = start(*row.arguments(sent, came, self.size, ()), options)
            if self._queues:
                self.recorder.queued(work)
            if async_op:
                works = () if work is None else (work,)
                return Handle(works, self, row.name, result=made, pending=self.recorder.later(), held=sent)
            if work is not None:
                work.wait()
        return made

    def _keep(self, row: Collective, op: str | None, root: int, async_op: bool, x: Tensor) -> None:
        """Make calls like this one without asking again, where they are no longer compared or traced."""
        if self.recorder.check is None and self.recorder.spans is None and x.dtype in CARRIED:
            prepared = self.transport.prepare(row, op, root, not async_op)
            if prepared is not None:
                counter = counter_of(self.recorder.counters, self.name, row.name)
                self._ready[row, op, root, async_op, x.dtype] = Ready(*prepared, counter, x.device)

    # -- the checked path -----------------------------------------------------------------------

    def _recorded(
        self, row: Collective, x: Tensor | None = None, op: str | None = None, root: int = -1, by: str = ""
    ) -> FlightRecorder:
        """The block of a call that moves `x`: recorded, and counted, under its name with that of its algorithm."""
        nbytes = 0 if x is None else row.moved(x.nbytes, self.size)
        counter = counter_of(self.recorder.counters, self.name, row.name + by)
        return self.recorder.call(self, counter, nbytes, x, op, root)

    def _compare(self, row: Collective, x: Tensor | None, facts: dict[str, object], by: str = "") -> bool:
        """See `FlightRecorder.compare`."""
        if x is not None and self.recorder.check is not None:
            facts = {"shape": list(x.shape), "dtype": name_of(x.dtype), **facts}
        return self.recorder.compare(self.name, row.name + by, facts)

    def _run(self, call: Call, finish: Callable[[], Any] = lambda: None, async_op: bool = False) -> Any:
        return self._finished(self._started(call), call.row.name, finish, async_op, call)

    def _started(self, call: Call) -> Sequence[Work]:
        work = self.transport.start(call)
        if self._queues:
            self.recorder.queued(work)
        return () if work is None else (work,)

    def _finished(
        self, works: Sequence[Work], name: str, finish: Callable[[], Any], async_op: bool, held: object
    ) -> Any:
        """What `finish` makes when `works` are over, or the handle whose wait does; `held` is kept till then."""
        if async_op:
            return Handle(works, self, name, finish, pending=self.recorder.later(), held=held)
        for work in works:
            work.wait()
        return finish()

    def _carried(self, x: Tensor, op: str, factor: float | None, own: bool) -> tuple[Tensor, str]:
        """What travels for a dense `x`, and the operation that the backend does with it; see `from_ordered`.

        The same memory where that will do; `own`: x may be scaled in place.
        """
        if is_ordered(x.dtype, op):
            return as_ordered(x, op), op
        if x.dtype in WIDENED:
            return x.to(WIDENED[x.dtype]), op
        if factor is None:
            return x, op
        number = number_of(factor, x.dtype, lambda: self.where("premul_sum"))
        if own:
            with unwatched(x):
                return x.mul_(number), "sum"
        return x * number, "sum"

    def _room(self, out: Tensor, sent: Tensor) -> Tensor:
        """Where a result can arrive while `sent` leaves: `out` itself, or new memory of its shape."""
        return buffer_for(out) if apart(out, sent, self.coord) else out.new_empty(out.shape)

    def _check_written(self, out: Tensor, where: Callable[[], str]) -> None:
        """Refuse an `out` that nothing can be received into, of whatever shape."""
        check_tensor(out, self._kinds, lambda: f"{where()}: out")
        check_in_place(out, where, "")
        check_written(out, lambda: f"{where()}: out")

    def _misfit(
        self, out: Tensor, shape: Sequence[int], like: Tensor, where: Callable[[], str]
    ) -> MeshcommError | None:
        """Why a result of this shape cannot be put into `out`; None where it can."""
        try:
            self._check_written(out, where)
        except MeshcommError as error:
            return error
        shape = tuple(shape)
        if (tuple(out.shape), out.dtype, out.device) == (shape, like.dtype, like.device):
            return None
        return ShapeError(
            f"{where()}: out does not fit the result",
            given=f"out of shape {tuple(out.shape)}, {out.dtype}, {out.device}",
            expected=f"shape {shape}, {like.dtype}, {like.device}",
            hint=f"out=x.new_empty({shape}), or no out",
        )


@final
class CommunicatorCache(dict[Dims, Communicator]):
    """From dims to what talks along them: a dictionary, so that the hot path is one look-up.

    `explain(dims)` is called for dims that are not in it: it returns a communicator that they can
    share, or raises UnknownDim (or MeshClosed, or NotMember).
    """

    def __init__(self, explain: Callable[[Dims], Communicator]) -> None:
        super().__init__()
        self._explain = explain

    def along(self, dims: Dims) -> Communicator:
        """`self[dims]`, also for what no dictionary takes, such as a list: it is refused by name."""
        try:
            return self[dims]
        except TypeError:
            return self._explain(dims)

    def __missing__(self, dims: Dims) -> Communicator:
        found = self._explain(dims)
        self[dims] = found
        return found
