"""Collectives that only move data: what each rank gets of whose tensor, and along which axis it is joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshcomm.comm import uneven as uneven_forms
from meshcomm.comm.calls import Calls
from meshcomm.comm.checks import check_coord, check_divisible, check_written, normal_axis
from meshcomm.comm.handle import Handle
from meshcomm.comm.shapes import buffer_for, filled, into, join, materialised, without
from meshcomm.comm.straight import along_first, fits, share_memory
from meshcomm.errors import MeshcommError, ShapeError
from meshcomm.transport.torch_private import written


class Moves(Calls):
    """broadcast, all_gather, gather, scatter, all_to_all and barrier along one dim."""

    __slots__ = ()

    def broadcast(self, x: Tensor, src: int, async_op: bool = False) -> Tensor | Handle[Tensor]:
        """Overwrite `x` with the x of coord `src`. See `Mesh.broadcast`."""
        if (
            not async_op
            and type(src) is int
            and (ready := self._straight.find(("broadcast", src), x)) is not None
        ):
            given = [x]
            written(given)
            self._straight.go(self, ready, x.nbytes, x, given)
            return x
        check_coord(src, self.size, "src", lambda: self.where("broadcast"))
        self._door(x, "broadcast", "broadcast")
        check_written(x, lambda: self.where("broadcast"))
        self._begin("broadcast", x, src=src)
        dense = materialised(x)
        if self._settled and dense is x:
            found = self.transport.straight("broadcast", x.dtype, root=src)
            self._straight.keep(("broadcast", src), x, found)
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
            axis == 0
            and not (async_op or uneven)
            and (ready := self._straight.find(("all_gather",), x)) is not None
            and (sizes := x.shape)
        ):
            whole = along_first(sizes, sizes[0] * self.size)
            gathered = x.new_empty(whole) if out is None else out
            if out is None or fits(out, whole, x, ready):
                if out is not None:
                    written([out])
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
                self._straight.keep(("all_gather",), x, found)
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
        # The others know nothing of an out: what is wrong with it is said when they have their part of the call.
        out, problem = (out if self.coord == dst else None), None
        if out is not None and not uneven:
            shape = list(source.shape)
            shape[axis] *= self.size
            problem = self.misfit(out, shape, x, "gather")
        like = without(source, axis) if uneven else source
        self._begin("gather", like, moves=source, axis=axis, uneven=uneven, dst=dst)
        if uneven:
            return uneven_forms.gather(self, source, axis, dst, async_op, out)
        parts = source.new_empty((self.size, *source.shape)) if self.coord == dst else None

        def finish() -> Tensor | None:
            if problem is not None:
                raise problem
            return None if parts is None else filled(out, join(parts, axis))

        return self.run("gather", lambda b: self.transport.gather(parts, source, dst, b), finish, async_op)

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
        if out is not None:
            self.writes(out, "scatter")
        parts, problem = None, None
        if self.coord == src:
            try:
                parts = self._scattered(x, src, axis, out)
            except MeshcommError as error:
                problem = error  # the others know nothing of x, and must hear of it
        refused = "not to be scattered" if problem is not None and out is not None else None
        try:
            self._begin("scatter", src=src, out=out is not None, x_is=refused)
        except MeshcommError:
            if problem is not None:
                raise problem from None
            raise
        if out is None:
            try:
                like = self.messages.announce(None if parts is None else parts[0], src, problem)
            except MeshcommError:
                self.recorder.end()
                raise
            result = buffer = like
        elif problem is not None:
            self.recorder.end()
            raise problem
        else:
            result, buffer = out, buffer_for(out)
        self.recorder.is_of(buffer.nbytes * self.size)
        return self.run(
            "scatter",
            lambda b: self.transport.scatter(buffer, parts, src, b),
            lambda: into(result, buffer),
            async_op,
        )

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
            self.result_for(out, parts.shape[1:], parts.dtype, parts, "scatter")
        return parts

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
            split_axis == 0 == concat_axis
            and not async_op
            and splits is None
            and (ready := self._straight.find(("all_to_all",), x)) is not None
            and (sizes := x.shape)
            and not sizes[0] % self.size
        ):
            came = torch.empty_like(x) if out is None else out
            # What comes in must not overwrite what is still to leave.
            if out is None or (fits(out, sizes, x, ready) and not share_memory(out, x)):
                if out is not None:
                    written([out])
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
            splits = uneven_forms.checked_splits(self, x, own, splits)
        like = x if splits is None else without(x, own)
        told = {"split_axis": own, "concat_axis": concat, "splits": splits is not None}
        self._begin("all_to_all", like, moves=x, **told)
        if splits is not None:
            return uneven_forms.all_to_all(self, x, own, concat, splits, async_op, out)
        parts = self._parts(x, split_axis, "all_to_all")
        if self._settled and not own and not concat and materialised(x) is x:
            found = self.transport.straight("all_to_all", x.dtype)
            self._straight.keep(("all_to_all",), x, found)
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
