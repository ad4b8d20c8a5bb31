"""Collectives along one dim, or along several merged into one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from sys import _getframe as frame_at
from time import perf_counter as clock
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from meshcomm.comm import uneven as uneven_forms
from meshcomm.comm.checks import check_coord, check_divisible, check_in_place, check_tensor, normal_axis
from meshcomm.comm.handle import Handle, failure
from meshcomm.comm.messages import Messages
from meshcomm.comm.recorder import KEPT, Recorder
from meshcomm.comm.shapes import buffer_for, filled, into, join, materialised, split, without
from meshcomm.comm.straight import Ready, Straight, fits
from meshcomm.comm.validation import CallCheck
from meshcomm.errors import CommunicationError, MeshcommError, ShapeError
from meshcomm.transport import Transport, Work
from meshcomm.transport.profile import labelled, profiling
from meshcomm.transport.support import WIDENED, check_reduce, name_of

T = TypeVar("T")


@final
class Communicator:
    """What talks along `name`. Shape rules live here, once for every transport.

    Args:
        name: the dim or dims, as errors show them.
        transport: the group.
        who: this rank with its coords, for errors, as in `rank 5 (pp=1 dp=0 tp=1)`.
        calls: compares the first calls on this group between its ranks.
        recorder: remembers the calls on this group, and knows whom to ask when one fails.

    Methods take what the Mesh methods of the same name take, after the dims, and keep the same
    promises; with `async_op` they return a Handle of what they otherwise return.
    """

    __slots__ = (
        "_calls",
        "_kinds",
        "_ready",
        "_straight",
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
        recorder: Recorder | None = None,
    ) -> None:
        self.name = name
        self.recorder = recorder or Recorder(name, [], lambda _, where, error: failure(where, error))
        # None once there is nothing left to compare: what is off costs nothing.
        self._calls = calls
        self.transport = transport
        self.size = transport.size
        self._kinds = transport.kinds
        self.coord = transport.coord
        self.who = who
        self.messages = Messages(name, transport, who, self.recorder)
        self._straight = Straight(name, self.recorder)
        self._ready: dict[object, dict[torch.dtype, Ready]] = self._straight.ready

    # -- reductions -----------------------------------------------------------------------------

    def all_reduce(
        self, x: Tensor, op: str = "sum", async_op: bool = False, factor: float | None = None
    ) -> Tensor | Handle[Tensor]:
        """Reduce `x` over the dim, in place. See `Mesh.all_reduce`."""
        # The usual call: nothing to check again, nothing to prepare, nothing to hand back later. What
        # Recorder.start and .end do is written out, as each call of a function would be felt.
        try:
            ready = self._ready[op][x.dtype]
        except KeyError:
            ready = None
        if (
            ready is not None
            and type(x) is Tensor
            and not async_op
            and factor is None
            and not x.requires_grad
            and x.is_contiguous()
            and not x.is_neg()
            and not profiling()
        ):
            start, options, total, recorder = ready
            frame = frame_at(2)  # over this and AlongDims.all_reduce
            recorder.started = number = recorder.started + 1
            place = number % KEPT
            nbytes = x.nbytes
            recorder.under_way = x
            began = clock()
            recorder.ring[place] = (total, nbytes, frame.f_code, frame.f_lasti, began)
            try:
                work = start([x], options)
                if work is not None:
                    work.wait()
            except RuntimeError as error:
                raise self.failed("all_reduce", error) from error
            recorder.left[place] = left = clock()
            recorder.under_way = None
            total.calls += 1
            total.nbytes += nbytes
            total.seconds += left - began
            return x
        if async_op and factor is None and (later := self._straight.find((op, "later"), x)) is not None:
            return self._straight.start(self, later, x.nbytes, x, [x])
        return self.checked_all_reduce(x, op, async_op, factor)

    def checked_all_reduce(
        self, x: Tensor, op: str = "sum", async_op: bool = False, factor: float | None = None
    ) -> Tensor | Handle[Tensor]:
        """`all_reduce` for callers inside this package: it finds the user's line however far up that is."""
        self._door(x, "all_reduce", "all_reduce")
        self._check_op(op, x.dtype, factor, "all_reduce")
        # Each rank has a factor of its own, so it is not compared.
        self._begin("all_reduce", x, op=op)
        carried, plain_op = self._carried(x, op, factor, "all_reduce")
        if (
            self._settled
            and carried is x
            and op == plain_op
            and not x.dtype.is_complex
            and x.dtype != torch.bool
        ):
            self._straight.keep(op, "all_reduce", x.dtype, self.transport.all_reduce_call(op))
            later = self.transport.straight("all_reduce", x.dtype, op=op)
            self._straight.keep((op, "later"), "all_reduce", x.dtype, later)
        return self.run(
            "all_reduce",
            lambda b: self.transport.all_reduce(carried, plain_op, b),
            lambda: into(x, carried),
            async_op,
        )

    def reduce(
        self, x: Tensor, dst: int, op: str = "sum", async_op: bool = False, factor: float | None = None
    ) -> Tensor | Handle[Tensor | None] | None:
        """The reduced x in new memory on coord `dst`, None elsewhere. See `Mesh.reduce`."""
        if (
            not async_op
            and factor is None
            and (ready := self._straight.find(("reduce", dst, op), x)) is not None
        ):
            own = x.clone()
            self._straight.go(self, ready, x.nbytes, x, [own])
            return own if self.coord == dst else None
        check_coord(dst, self.size, "dst", lambda: self.where("reduce"))
        self._door(x, "reduce", "all_reduce")
        self._check_op(op, x.dtype, factor, "reduce")
        self._begin("reduce", x, op=op, dst=dst)
        carried, plain_op = self._carried(x, op, factor, "reduce")
        if self._settled and carried is x and op == plain_op:
            found = self.transport.straight("reduce", x.dtype, op=op, root=dst)
            self._straight.keep(("reduce", dst, op), "reduce", x.dtype, found)
        # Backends leave partial results in the tensors of the other ranks; x stays as it was.
        carried = carried.clone() if carried is x else carried
        return self.run(
            "reduce",
            lambda b: self.transport.reduce(carried, dst, plain_op, b),
            lambda: carried.to(x.dtype) if self.coord == dst else None,
            async_op,
        )

    def reduce_scatter(
        self,
        x: Tensor,
        axis: int = 0,
        op: str = "sum",
        async_op: bool = False,
        out: Tensor | None = None,
        factor: float | None = None,
    ) -> Tensor | Handle[Tensor]:
        """Reduce `x`, keep this rank's slice of `axis`. See `Mesh.reduce_scatter`."""
        if (
            not (axis or async_op)
            and factor is None
            and (ready := self._straight.find(("reduce_scatter", op), x)) is not None
            and (sizes := x.shape)
            and not sizes[0] % self.size
        ):
            part = (sizes[0] // self.size, *sizes[1:])
            slice_ = x.new_empty(part) if out is None else out
            if out is None or fits(out, part, x):
                self._straight.go(self, ready, x.nbytes, x, slice_, x)
                return slice_
        self._door(x, "reduce_scatter", "reduce_scatter")
        self._check_op(op, x.dtype, factor, "reduce_scatter")
        parts = self._parts(x, axis, "reduce_scatter")
        result = self.result_for(out, parts.shape[1:], x.dtype, x, "reduce_scatter")
        self._begin("reduce_scatter", x, axis=axis % x.ndim, op=op)
        if self._settled and not axis and factor is None and x.dtype not in WIDENED and materialised(x) is x:
            found = self.transport.straight("reduce_scatter", x.dtype, op=op)
            self._straight.keep(("reduce_scatter", op), "reduce_scatter", x.dtype, found)
        parts, plain_op = self._carried(
            parts, op, factor, "reduce_scatter", own=parts.data_ptr() != x.data_ptr()
        )
        buffer = buffer_for(result) if parts.dtype == x.dtype else parts.new_empty(parts.shape[1:])
        return self.run(
            "reduce_scatter",
            lambda b: self.transport.reduce_scatter(buffer, parts, plain_op, b),
            lambda: into(result, buffer),
            async_op,
        )

    def _check_op(self, op: str, dtype: torch.dtype, factor: float | None, call: str) -> None:
        """Refuse what the backend cannot reduce; before the others hear of the call."""
        check_reduce(self.transport.name, op, dtype, lambda: self.where(call))
        if factor is not None and op != "premul_sum":
            raise ShapeError(
                f"{self.where(call)}: factor has no effect with op={op!r}",
                given=f"op={op!r}, factor={factor}",
                expected='op="premul_sum" beside a factor',
                hint='op="premul_sum"',
            )
        if factor is None and op == "premul_sum":
            raise ShapeError(
                f'{self.where(call)}: op="premul_sum" without a factor',
                given='op="premul_sum"',
                expected="the number that each rank multiplies its x by before the sum",
                hint="factor=0.5",
            )

    def _carried(
        self, x: Tensor, op: str, factor: float | None, call: str, own: bool = False
    ) -> tuple[Tensor, str]:
        """What travels for `x`, and the operation that the backend does with it.

        The same memory where that will do; `own`: x is scratch memory that may be scaled in place.
        """
        dense = materialised(x)
        if x.dtype in WIDENED:
            return dense.to(WIDENED[x.dtype]), op
        if factor is None:
            return dense, op
        scaled = dense.mul_(factor) if own or dense is not x or call == "all_reduce" else dense * factor
        return scaled, "sum"

    # -- moving data ----------------------------------------------------------------------------

    def broadcast(self, x: Tensor, src: int, async_op: bool = False) -> Tensor | Handle[Tensor]:
        """Overwrite `x` with the x of coord `src`. See `Mesh.broadcast`."""
        if not async_op and (ready := self._straight.find(("broadcast", src), x)) is not None:
            self._straight.go(self, ready, x.nbytes, x, [x])
            return x
        check_coord(src, self.size, "src", lambda: self.where("broadcast"))
        self._door(x, "broadcast", "broadcast")
        self._begin("broadcast", x, src=src)
        dense = materialised(x)
        if self._settled and dense is x:
            self._straight.keep(
                ("broadcast", src),
                "broadcast",
                x.dtype,
                self.transport.straight("broadcast", x.dtype, root=src),
            )
        return self.run(
            "broadcast",
            lambda b: self.transport.broadcast(dense, src, b),
            lambda: into(x, dense),
            async_op,
        )

    def all_gather(
        self,
        x: Tensor,
        axis: int = 0,
        async_op: bool = False,
        out: Tensor | None = None,
        uneven: bool = False,
    ) -> Tensor | Handle[Tensor]:
        """Every rank's x, one after the other along `axis`. See `Mesh.all_gather`."""
        if (
            not (axis or async_op or uneven)
            and (ready := self._straight.find("all_gather", x)) is not None
            and (sizes := x.shape)
        ):
            whole = (sizes[0] * self.size, *sizes[1:])
            gathered = x.new_empty(whole) if out is None else out
            if out is None or fits(out, whole, x):
                self._straight.go(self, ready, x.nbytes * self.size, x, gathered, x)
                return gathered
        self._door(x, "all_gather", "all_gather")
        source = materialised(x.unsqueeze(0) if x.ndim == 0 else x)
        axis = normal_axis(source, axis, lambda: self.where("all_gather"))
        shape = list(source.shape)
        shape[axis] *= self.size
        result = None
        if not uneven and (axis == 0 or out is not None):
            result = self.result_for(out, shape, x.dtype, x, "all_gather")
        like = without(source, axis) if uneven else source
        self._begin("all_gather", like, moves=source, axis=axis, uneven=uneven)
        if uneven:
            return uneven_forms.gather(self, source, axis, None, async_op, out)
        if axis == 0:
            assert result is not None
            buffer = buffer_for(result)
            if self._settled and source is x:
                found = self.transport.straight("all_gather", x.dtype)
                self._straight.keep("all_gather", "all_gather", x.dtype, found)
            return self.run(
                "all_gather",
                lambda b: self.transport.all_gather(buffer, source, b),
                lambda: into(result, buffer),
                async_op,
            )
        parts = source.new_empty((self.size, *source.shape))
        return self.run(
            "all_gather",
            lambda b: self.transport.all_gather(parts, source, b),
            lambda: filled(out, join(parts, axis)),
            async_op,
        )

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
        check_coord(dst, self.size, "dst", lambda: self.where("gather"))
        self._door(x, "gather", "all_gather")
        source = materialised(x.unsqueeze(0) if x.ndim == 0 else x)
        axis = normal_axis(source, axis, lambda: self.where("gather"))
        if out is not None and self.coord == dst and not uneven:
            shape = list(source.shape)
            shape[axis] *= self.size
            self.result_for(out, shape, x.dtype, x, "gather")
        like = without(source, axis) if uneven else source
        self._begin("gather", like, moves=source, axis=axis, uneven=uneven, dst=dst)
        if uneven:
            return uneven_forms.gather(self, source, axis, dst, async_op, out if self.coord == dst else None)
        parts = source.new_empty((self.size, *source.shape)) if self.coord == dst else None
        return self.run(
            "gather",
            lambda b: self.transport.gather(parts, source, dst, b),
            lambda: None if parts is None else filled(out, join(parts, axis)),
            async_op,
        )

    def scatter(
        self,
        x: Tensor | None,
        src: int,
        axis: int = 0,
        async_op: bool = False,
        out: Tensor | None = None,
    ) -> Tensor | Handle[Tensor]:
        """Slice c of coord src's x on coord c. See `Mesh.scatter`."""
        check_coord(src, self.size, "src", lambda: self.where("scatter"))
        parts = None
        if self.coord == src:
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
                self.result_for(out, parts.shape[1:], parts.dtype, parts, "scatter")
        self._begin("scatter", src=src, out=out is not None)
        if out is None:
            like = self.messages.announce(None if parts is None else parts[0], src)
            result = buffer = like
        else:
            result, buffer = out, buffer_for(out)
        self.recorder.is_of(buffer.nbytes * self.size)
        return self.run(
            "scatter",
            lambda b: self.transport.scatter(buffer, parts, src, b),
            lambda: into(result, buffer),
            async_op,
        )

    def all_to_all(
        self,
        x: Tensor,
        split_axis: int = 0,
        concat_axis: int = 0,
        async_op: bool = False,
        splits: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Tensor | Handle[Tensor]:
        """Slice c of `split_axis` goes to coord c; what comes in is joined along `concat_axis`."""
        if (
            not (split_axis or concat_axis or async_op)
            and splits is None
            and (ready := self._straight.find("all_to_all", x)) is not None
            and (sizes := x.shape)
            and not sizes[0] % self.size
        ):
            came = torch.empty_like(x) if out is None else out
            if out is None or fits(out, sizes, x):
                self._straight.go(self, ready, x.nbytes, x, came, x, [], [])
                return came
        self._door(x, "all_to_all", "all_to_all")
        concat = normal_axis(x, concat_axis, lambda: self.where("all_to_all"))
        own = normal_axis(x, split_axis, lambda: self.where("all_to_all"))
        if splits is None:
            check_divisible(x, own, self.size, lambda: self.where("all_to_all"), lambda: self.who)
            if out is not None:
                shape = list(x.shape)
                shape[own] //= self.size
                shape[concat] *= self.size
                self.result_for(out, shape, x.dtype, x, "all_to_all")
        else:
            uneven_forms.check_splits(self, x, own, splits)
        like = x if splits is None else without(x, own)
        told = {"split_axis": own, "concat_axis": concat, "splits": splits is not None}
        self._begin("all_to_all", like, moves=x, **told)
        if splits is not None:
            return uneven_forms.all_to_all(self, x, own, concat, list(splits), async_op, out)
        parts = self._parts(x, split_axis, "all_to_all")
        if self._settled and not own and not concat and materialised(x) is x:
            found = self.transport.straight("all_to_all", x.dtype)
            self._straight.keep("all_to_all", "all_to_all", x.dtype, found)
        received = torch.empty_like(parts)
        return self.run(
            "all_to_all",
            lambda b: self.transport.all_to_all(received, parts, b),
            lambda: filled(out, join(received, concat)),
            async_op,
        )

    def barrier(self, async_op: bool = False) -> Handle[None] | None:
        """Return when every rank of the group has come."""
        self._begin("barrier")
        return self.run("barrier", lambda b: self.transport.barrier(b), lambda: None, async_op)

    # -- shared ---------------------------------------------------------------------------------

    @property
    def _settled(self) -> bool:
        """Whether calls are no longer compared, and nobody asks for each of them."""
        return self._calls is None and self.recorder.spans is None

    def _door(self, x: Tensor, call: str, functional: str) -> None:
        check_tensor(x, self._kinds, lambda: self.where(call))
        check_in_place(x, lambda: self.where(call), functional)

    def where(self, call: str) -> str:
        return f'{call} along "{self.name}" on {self.who}'

    def failed(self, call: str, error: BaseException) -> CommunicationError:
        """The error for a call that the backend gave up on."""
        found = self.recorder.inquire(self.recorder, self.where(call), error)
        self.recorder.end()
        return found

    def _begin(
        self, call: str, x: Tensor | None = None, *, moves: Tensor | None = None, **facts: object
    ) -> None:
        """Remember the call, and tell the other ranks of it while calls are still compared.

        moves: what moves, where x only stands for what is compared.
        """
        self.recorder.start(self.name, call, x if moves is None else moves, 3)
        if self._calls is None:
            return
        if not self._calls.active:
            self._calls = None
            return
        if x is not None:
            facts = {"shape": list(x.shape), "dtype": name_of(x.dtype), **facts}
        try:
            self._calls.compare(self.name, call, facts)
        except MeshcommError:
            self.recorder.end()
            raise
        except RuntimeError as error:
            raise self.failed(call, error) from error

    def _parts(self, x: Tensor, axis: int, call: str) -> Tensor:
        """`x` as (size, ...), the slices of `axis` in front, contiguous."""
        axis = normal_axis(x, axis, lambda: self.where(call))
        check_divisible(x, axis, self.size, lambda: self.where(call), lambda: self.who)
        return split(x, axis, self.size)

    def result_for(
        self, out: Tensor | None, shape: Sequence[int], dtype: torch.dtype, like: Tensor, call: str
    ) -> Tensor:
        """`out` where it fits, else new memory where there is none."""
        if out is None:
            return like.new_empty(tuple(shape), dtype=dtype)
        if tuple(out.shape) != tuple(shape) or out.dtype != dtype or out.device != like.device:
            raise ShapeError(
                f"{self.where(call)}: out does not fit the result",
                given=f"out of shape {tuple(out.shape)}, {out.dtype}, {out.device}",
                expected=f"shape {tuple(shape)}, {dtype}, {like.device}",
                hint=f"out=x.new_empty({tuple(shape)}), or no out",
            )
        self._door(out, call, call)
        return out

    def run(
        self, call: str, start: Callable[[bool], Work], finish: Callable[[], T], async_op: bool
    ) -> T | Handle[T]:
        try:
            if profiling():
                with labelled(f"meshcomm::{call} {self.name}{self.recorder.plan}"):
                    work = start(not async_op)
                    if not async_op and work is not None:
                        work.wait()
            else:
                work = start(not async_op)
                if not async_op and work is not None:
                    work.wait()
        except RuntimeError as error:
            raise self.failed(call, error) from error
        if async_op:
            return Handle(
                (work,),
                finish,
                lambda: self.where(call),
                fail=lambda error: self.failed(call, error),
                later=self.recorder.later(),
            )
        self.recorder.end()
        return finish()
