"""Collectives along dims that move the ranks' values and leave them as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

from torch import Tensor

from meshcomm.comm import lists
from meshcomm.comm.along.base import Along, X
from meshcomm.comm.handle import Handle
from meshcomm.layout import Dims
from meshcomm.transport.torch_private import outside_graphs


@outside_graphs
class MovesAlong(Along):
    """broadcast, all_gather, gather, scatter, all_to_all. See AlongDims."""

    @overload
    def broadcast(self, dims: Dims, x: X, src: int, *, async_op: Literal[False] = ...) -> X: ...
    @overload
    def broadcast(self, dims: Dims, x: X, src: int, *, async_op: Literal[True]) -> Handle[X]: ...
    @overload
    def broadcast(self, dims: Dims, x: X, src: int, *, async_op: bool) -> Any: ...

    def broadcast(self, dims: Dims, x: Tensor | Sequence[Tensor], src: int, *, async_op: bool = False) -> Any:
        """Overwrite `x` with the x of coord `src`, and return it. Lists travel together.

        Shape, calling, gradient: as for `all_reduce`; any dtype.
        """
        if isinstance(x, Tensor):
            return self._at.along(dims).broadcast(x, src, async_op)
        return lists.broadcast(self._at.along(dims), x, src, async_op)

    @overload
    def all_gather(
        self,
        dims: Dims,
        x: X,
        axis: int = ...,
        *,
        async_op: Literal[False] = ...,
        out: Tensor | None = ...,
        uneven: bool = ...,
    ) -> X: ...
    @overload
    def all_gather(
        self,
        dims: Dims,
        x: X,
        axis: int = ...,
        *,
        async_op: Literal[True],
        out: Tensor | None = ...,
        uneven: bool = ...,
    ) -> Handle[X]: ...
    @overload
    def all_gather(
        self,
        dims: Dims,
        x: X,
        axis: int = ...,
        *,
        async_op: bool,
        out: Tensor | None = ...,
        uneven: bool = ...,
    ) -> Any: ...

    def all_gather(
        self,
        dims: Dims,
        x: Tensor | Sequence[Tensor],
        axis: int = 0,
        *,
        async_op: bool = False,
        out: Tensor | None = None,
        uneven: bool = False,
    ) -> Any:
        """The x of every rank along `dims`, joined along tensor axis `axis` in coord order.

        Shape:      (b, s, d) -> (b, n*s, d) for axis=1, n the size of `dims`; equal on all ranks.
                    A 0-dim x counts as shape (1,). uneven=True: the sizes of `axis` may differ from
                    rank to rank, 0 included; they are exchanged first.
        Called by:  every rank along `dims`, in the same program order.
        Returns:    new memory or `out`, or a Handle whose wait() returns it; for a list, a list.
        Gradient:   none; see `mesh.functional.all_gather`.
        Raises:     UnknownDim, ShapeError, AutogradError; CommunicationError.
        """
        if isinstance(x, Tensor):
            return self._at.along(dims).all_gather(x, axis, async_op, out, uneven)
        self._only_plain("all_gather", out=out is not None, uneven=uneven)
        return lists.all_gather(self._at.along(dims), x, axis, async_op)

    @overload
    def gather(
        self,
        dims: Dims,
        x: Tensor,
        dst: int,
        axis: int = ...,
        *,
        async_op: Literal[False] = ...,
        uneven: bool = ...,
        out: Tensor | None = ...,
    ) -> Tensor | None: ...
    @overload
    def gather(
        self,
        dims: Dims,
        x: Tensor,
        dst: int,
        axis: int = ...,
        *,
        async_op: Literal[True],
        uneven: bool = ...,
        out: Tensor | None = ...,
    ) -> Handle[Tensor | None]: ...
    @overload
    def gather(
        self,
        dims: Dims,
        x: Tensor,
        dst: int,
        axis: int = ...,
        *,
        async_op: bool,
        uneven: bool = ...,
        out: Tensor | None = ...,
    ) -> Tensor | Handle[Tensor | None] | None: ...

    def gather(
        self,
        dims: Dims,
        x: Tensor,
        dst: int,
        axis: int = 0,
        *,
        async_op: bool = False,
        uneven: bool = False,
        out: Tensor | None = None,
    ) -> Any:
        """What `all_gather` returns, on coord `dst`; None on the others. `out` is only used on `dst`."""
        return self._at.along(dims).gather(x, dst, axis, async_op, uneven, out)

    @overload
    def scatter(
        self,
        dims: Dims,
        x: Tensor | None,
        src: int,
        axis: int = ...,
        *,
        async_op: Literal[False] = ...,
        out: Tensor | None = ...,
    ) -> Tensor: ...
    @overload
    def scatter(
        self,
        dims: Dims,
        x: Tensor | None,
        src: int,
        axis: int = ...,
        *,
        async_op: Literal[True],
        out: Tensor | None = ...,
    ) -> Handle[Tensor]: ...
    @overload
    def scatter(
        self,
        dims: Dims,
        x: Tensor | None,
        src: int,
        axis: int = ...,
        *,
        async_op: bool,
        out: Tensor | None = ...,
    ) -> Tensor | Handle[Tensor]: ...

    def scatter(
        self,
        dims: Dims,
        x: Tensor | None,
        src: int,
        axis: int = 0,
        *,
        async_op: bool = False,
        out: Tensor | None = None,
    ) -> Any:
        """Slice c of tensor axis `axis` of coord src's x, on coord c.

        Shape:      (b, n*s, d) on src -> (b, s, d) for axis=1.
        x:          a tensor on src, ignored elsewhere (None will do).
        out:        on every rank or on none. Without it the shape is told to the ranks first.
        Returns:    new memory or `out`.
        """
        return self._at.along(dims).scatter(x, src, axis, async_op, out)

    @overload
    def all_to_all(
        self,
        dims: Dims,
        x: Tensor,
        split_axis: int = ...,
        concat_axis: int = ...,
        *,
        async_op: Literal[False] = ...,
        splits: Sequence[int] | None = ...,
        out: Tensor | None = ...,
    ) -> Tensor: ...
    @overload
    def all_to_all(
        self,
        dims: Dims,
        x: Tensor,
        split_axis: int = ...,
        concat_axis: int = ...,
        *,
        async_op: Literal[True],
        splits: Sequence[int] | None = ...,
        out: Tensor | None = ...,
    ) -> Handle[Tensor]: ...
    @overload
    def all_to_all(
        self,
        dims: Dims,
        x: Tensor,
        split_axis: int = ...,
        concat_axis: int = ...,
        *,
        async_op: bool,
        splits: Sequence[int] | None = ...,
        out: Tensor | None = ...,
    ) -> Tensor | Handle[Tensor]: ...

    def all_to_all(
        self,
        dims: Dims,
        x: Tensor,
        split_axis: int = 0,
        concat_axis: int = 0,
        *,
        async_op: bool = False,
        splits: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Any:
        """Slice c of `split_axis` goes to coord c; what arrives is joined along `concat_axis`.

        Shape:      (b, n*h, s) -> (b, h, n*s) for split_axis=1, concat_axis=2.
        splits:     how much of `split_axis` goes to each coord, where that is not equal; how much
                    comes from each is exchanged first.
        Called by:  every rank along `dims`, in the same program order.
        Returns:    new memory or `out`; `x` is unchanged.
        Gradient:   none; see `mesh.functional.all_to_all`.
        Raises:     UnknownDim; ShapeError where x.shape[split_axis] is not divisible by n.
        """
        return self._at.along(dims).all_to_all(x, split_axis, concat_axis, async_op, splits, out)
