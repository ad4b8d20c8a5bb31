"""Collectives along dims that combine the ranks' values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, overload

from torch import Tensor

from meshcomm.comm import hierarchical, lists, scheduled
from meshcomm.comm.along.base import Along, X
from meshcomm.comm.handle import Handle
from meshcomm.errors import UnsupportedOp
from meshcomm.layout import Dims
from meshcomm.transport.torch_private import outside_graphs

Algorithm: TypeAlias = Literal["flat", "hierarchical"] | scheduled.Scheduled


@outside_graphs
class ReductionsAlong(Along):
    """all_reduce, reduce, reduce_scatter. See AlongDims."""

    @overload
    def all_reduce(
        self,
        dims: Dims,
        x: X,
        op: str = ...,
        *,
        async_op: Literal[False] = ...,
        factor: float | None = ...,
        algorithm: Algorithm = ...,
    ) -> X: ...
    @overload
    def all_reduce(
        self,
        dims: Dims,
        x: X,
        op: str = ...,
        *,
        async_op: Literal[True],
        factor: float | None = ...,
        algorithm: Algorithm = ...,
    ) -> Handle[X]: ...
    @overload
    def all_reduce(
        self,
        dims: Dims,
        x: X,
        op: str = ...,
        *,
        async_op: bool,
        factor: float | None = ...,
        algorithm: Algorithm = ...,
    ) -> Any: ...

    def all_reduce(
        self,
        dims: Dims,
        x: Tensor | Sequence[Tensor],
        op: str = "sum",
        *,
        async_op: bool = False,
        factor: float | None = None,
        algorithm: Algorithm = "flat",
    ) -> Any:
        """Reduce `x` over `dims`, in place, and return it.

        Shape:      any, equal on all ranks; any memory layout. A list of tensors, of any shapes and
                    dtypes, travels as one message per dtype.
        Called by:  every rank along `dims`, in the same program order.
        op:         "sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum" (each
                    rank's x times its `factor`, then the sum). What a backend lacks is refused.
        async_op:   return a Handle at once; its wait() returns x.
        algorithm:  "flat": one call on the group of `dims`. "hierarchical", for a tuple of dims:
                    inside the last dim, across the others on the slice, and back; needs no group
                    over all of them. Equal up to rounding.
                    "ring", "tree", "double_tree", "recursive_doubling", "halving_doubling", and for
                    two or more dims "two_level": step by step over messages, bit-equal on all
                    ranks; which sums come first: `meshcomm.algorithms`. For one tensor, without
                    async_op, as "hierarchical". On Gloo with several ranks for each core "tree"
                    was faster than "flat" up to 1 MiB (docs/benchmarks.md); nothing else is known
                    to pay, and nothing switches by itself.
        Gradient:   none; on a tensor that needs one: AutogradError. See `mesh.functional`.
        Raises:     UnknownDim, UnsupportedOp, AutogradError; CommunicationError.
        """
        if algorithm == "flat":
            # Written out where a call more would be felt: see Directory.along.
            try:
                comm = self._at[dims]
            except TypeError:
                comm = self._at.along(dims)
            if isinstance(x, Tensor):
                return comm.all_reduce(x, op, async_op, factor)
            return lists.all_reduce(comm, x, op, async_op, factor)
        return self._by_algorithm(dims, x, op, async_op, factor, algorithm)

    def _by_algorithm(
        self,
        dims: Dims,
        x: Tensor | Sequence[Tensor],
        op: str,
        async_op: bool,
        factor: float | None,
        algorithm: str,
    ) -> Tensor:
        self.layout.digits(dims)
        expanded = self.layout.expand(dims)
        levels = algorithm in ("hierarchical", "two_level")
        known = levels or algorithm in scheduled.SCHEDULED
        if not known or async_op or not isinstance(x, Tensor) or (levels and len(expanded) < 2):
            choices = '"ring", "tree", "double_tree", "recursive_doubling", "halving_doubling"'
            raise UnsupportedOp(
                f"all_reduce on {self.label}: this call has no algorithm {algorithm!r}",
                given=f"dims {dims!r}, algorithm={algorithm!r}, async_op={async_op}, x a {type(x).__name__}",
                expected=f"for one tensor, without async_op: {choices}, "
                'and over two or more dims "hierarchical", "two_level"; else "flat"',
                hint='algorithm="flat"',
            )
        self.layout.digits(expanded)
        if algorithm == "hierarchical":
            return hierarchical.all_reduce([self._at[name] for name in expanded], x, op, factor)
        inner = self.layout.size(expanded[-1]) if levels else 1
        return scheduled.all_reduce(self._at.along(dims), x, op, factor, algorithm, inner)  # type: ignore[arg-type]

    @overload
    def reduce(
        self,
        dims: Dims,
        x: Tensor,
        dst: int,
        op: str = ...,
        *,
        async_op: Literal[False] = ...,
        factor: float | None = ...,
    ) -> Tensor | None: ...
    @overload
    def reduce(
        self,
        dims: Dims,
        x: Tensor,
        dst: int,
        op: str = ...,
        *,
        async_op: Literal[True],
        factor: float | None = ...,
    ) -> Handle[Tensor | None]: ...
    @overload
    def reduce(
        self, dims: Dims, x: Tensor, dst: int, op: str = ..., *, async_op: bool, factor: float | None = ...
    ) -> Tensor | Handle[Tensor | None] | None: ...

    def reduce(
        self,
        dims: Dims,
        x: Tensor,
        dst: int,
        op: str = "sum",
        *,
        async_op: bool = False,
        factor: float | None = None,
    ) -> Any:
        """The reduced x on coord `dst`, None on the others; `x` is unchanged everywhere.

        Shape, op, calling: as for `all_reduce`. Returns new memory.
        """
        return self._at.along(dims).reduce(x, dst, op, async_op, factor)

    @overload
    def reduce_scatter(
        self,
        dims: Dims,
        x: X,
        axis: int = ...,
        op: str = ...,
        *,
        async_op: Literal[False] = ...,
        out: Tensor | None = ...,
        factor: float | None = ...,
    ) -> X: ...
    @overload
    def reduce_scatter(
        self,
        dims: Dims,
        x: X,
        axis: int = ...,
        op: str = ...,
        *,
        async_op: Literal[True],
        out: Tensor | None = ...,
        factor: float | None = ...,
    ) -> Handle[X]: ...
    @overload
    def reduce_scatter(
        self,
        dims: Dims,
        x: X,
        axis: int = ...,
        op: str = ...,
        *,
        async_op: bool,
        out: Tensor | None = ...,
        factor: float | None = ...,
    ) -> Any: ...

    def reduce_scatter(
        self,
        dims: Dims,
        x: Tensor | Sequence[Tensor],
        axis: int = 0,
        op: str = "sum",
        *,
        async_op: bool = False,
        out: Tensor | None = None,
        factor: float | None = None,
    ) -> Any:
        """Reduce `x` over `dims` and keep this rank's slice of tensor axis `axis`.

        Shape:      (b, n*s, d) -> (b, s, d) for axis=1, n the size of `dims`. Lists travel together.
        Called by:  every rank along `dims`, in the same program order.
        Returns:    slice number `mesh.coord(dims)`, in new memory or `out`; `x` is unchanged.
        Gradient:   none; see `mesh.functional.reduce_scatter`.
        Raises:     UnknownDim; ShapeError where x.shape[axis] is not divisible by n.
        """
        if isinstance(x, Tensor):
            return self._at.along(dims).reduce_scatter(x, axis, op, async_op, out, factor)
        self._only_plain("reduce_scatter", out=out is not None)
        return lists.reduce_scatter(self._at.along(dims), x, axis, op, async_op, factor)
