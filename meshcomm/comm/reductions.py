"""Collectives that add up, or reduce otherwise: what each backend is asked for, and in which dtype."""

from __future__ import annotations

from sys import _getframe as frame_at
from time import perf_counter as clock

import torch
from torch import Tensor

from meshcomm.comm.calls import Calls
from meshcomm.comm.checks import check_coord, check_written, number_of
from meshcomm.comm.handle import Handle
from meshcomm.comm.recorder import KEPT
from meshcomm.comm.shapes import buffer_for, into, materialised, unwatched
from meshcomm.comm.straight import STRIDED, along_first, fits
from meshcomm.errors import ShapeError
from meshcomm.transport.profile import profiling
from meshcomm.transport.support import WIDENED, check_reduce
from meshcomm.transport.torch_private import written


class Reductions(Calls):
    """all_reduce, reduce and reduce_scatter along one dim."""

    __slots__ = ()

    def all_reduce(
        self, x: Tensor, op: str = "sum", async_op: bool = False, factor: float | None = None
    ) -> Tensor | Handle[Tensor]:
        """Reduce `x` over the dim, in place. See `Mesh.all_reduce`."""
        # The usual call: nothing to check again, nothing to prepare. What Straight.find and .go do is
        # written out, as each call of a function would be felt.
        try:
            ready = (self._later if async_op else self._ready)[op][x.dtype]
        except (KeyError, TypeError):
            ready = None
        if (
            ready is not None
            and type(x) is Tensor
            and factor is None
            and x.device == ready[4]
            and x.layout is STRIDED
            and not x.is_nested
            and not x.requires_grad
            and x.is_contiguous()
            and not x.is_neg()
            and not profiling()
        ):
            given = [x]
            written(given)
            if async_op:
                return self._straight.start(self, ready, x.nbytes, x, given)
            start, options, total, recorder, _ = ready
            frame = frame_at(2)  # over this and AlongDims.all_reduce
            recorder.started = number = recorder.started + 1
            place = number % KEPT
            nbytes = x.nbytes
            recorder.under_way = x
            began = clock()
            recorder.ring[place] = (total, nbytes, frame.f_code, frame.f_lasti, began)
            try:
                work = start(given, options)
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
        return self.checked_all_reduce(x, op, async_op, factor)

    def checked_all_reduce(
        self, x: Tensor, op: str = "sum", async_op: bool = False, factor: float | None = None
    ) -> Tensor | Handle[Tensor]:
        """`all_reduce` for callers inside this package: it finds the user's line however far up that is."""
        self._door(x, "all_reduce", "all_reduce")
        check_written(x, lambda: self.where("all_reduce"))
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
            now, later = (self.transport.all_reduce_call(op, blocking) for blocking in (True, False))
            self._straight.keep_all_reduce(op, x, now, later)
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
            and type(dst) is int
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
            self._straight.keep(("reduce", dst, op), x, found)
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
            axis == 0
            and not async_op
            and factor is None
            and (ready := self._straight.find(("reduce_scatter", op), x)) is not None
            and (sizes := x.shape)
            and not sizes[0] % self.size
        ):
            part = along_first(sizes, sizes[0] // self.size)
            slice_ = x.new_empty(part) if out is None else out
            if out is None or fits(out, part, x, ready):
                if out is not None:
                    written([out])
                self._straight.go(self, ready, x.nbytes, x, slice_, x)
                return slice_
        self._door(x, "reduce_scatter", "reduce_scatter")
        self._check_op(op, x.dtype, factor, "reduce_scatter")
        parts = self._parts(x, axis, "reduce_scatter")
        result = self.result_for(out, parts.shape[1:], x.dtype, x, "reduce_scatter")
        self._begin("reduce_scatter", x, axis=axis % x.ndim, op=op)
        if self._settled and not axis and factor is None and x.dtype not in WIDENED and materialised(x) is x:
            found = self.transport.straight("reduce_scatter", x.dtype, op=op)
            self._straight.keep(("reduce_scatter", op), x, found)
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
        if factor is not None:
            number_of(factor, dtype, lambda: self.where(call))

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
        number = number_of(factor, x.dtype, lambda: self.where(call))
        if own or dense is not x or call == "all_reduce":
            with unwatched(dense):
                return dense.mul_(number), "sum"
        return dense * number, "sum"
