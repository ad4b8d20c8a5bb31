"""Communication along dims by name: the collectives and messages of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar, Unpack, overload

from torch import Tensor

from meshcomm.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    GATHER,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
)
from meshcomm.comm import lists, scheduled
from meshcomm.comm.checks import value_of
from meshcomm.comm.communicator import CommunicatorCache
from meshcomm.comm.functional import mean_message, mean_of
from meshcomm.comm.handle import Handle
from meshcomm.comm.p2p import Envelope
from meshcomm.comm.request import Options
from meshcomm.errors import UnknownDim, UnsupportedOp
from meshcomm.layout import Dims, Layout
from meshcomm.transport.torch_private import outside_graphs

Algorithm: TypeAlias = Literal["flat", "hierarchical"] | scheduled.Scheduled

Envelopes: TypeAlias = Sequence[Envelope]
Axis: TypeAlias = int | None
# `async_op`: whether the call returns its result, or a Handle for it.
Sync: TypeAlias = Literal[False]
Async: TypeAlias = Literal[True]

# The result has the type of the argument: a tensor, or a list of tensors. A tuple is returned as a list.
X = TypeVar("X", Tensor, list[Tensor], Sequence[Tensor])


# The keywords that a call takes in addition to `async_op`, for the overloads.
class Factor(TypedDict, total=False):
    factor: float | None


class Summed(Factor, total=False):
    algorithm: Algorithm


class Out(TypedDict, total=False):
    out: Tensor | None


class Dim(TypedDict, total=False):
    dim: int  # torch's word for `axis`


class Reduced(Factor, Out, Dim, total=False):
    pass


class Joined(Out, Dim, total=False):
    uneven: bool


class Sliced(Out, Dim, total=False):
    pass


class Moved(Out, total=False):
    input_split_sizes: Sequence[int] | None
    output_split_sizes: Sequence[int] | None


@outside_graphs
class AlongDims:
    """Collectives and point-to-point messages whose first argument selects the dims. `Mesh` is a subclass.

    Peers and roots are coords along the dims. A subclass provides `layout`, `label` (this rank and its coords,
    for error messages) and a CommunicatorCache.
    """

    layout: Layout
    _at: CommunicatorCache

    @property
    def label(self) -> str:
        """This rank and its coords, such as `rank 5 (pp=1 dp=0 tp=1)`."""
        raise NotImplementedError

    # -- reductions -----------------------------------------------------------------------------

    @overload
    def all_reduce(
        self, dims: Dims, x: X, op: str = ..., *, async_op: Sync = ..., **more: Unpack[Summed]
    ) -> X: ...
    @overload
    def all_reduce(
        self, dims: Dims, x: X, op: str = ..., *, async_op: Async, **more: Unpack[Summed]
    ) -> Handle[X]: ...
    def all_reduce(
        self,
        dims: Dims,
        x: Tensor | Sequence[Tensor],
        op: str = "sum",
        *,
        async_op: bool = False,
        algorithm: Algorithm = "flat",
        factor: float | None = None,
    ) -> Any:
        """Reduce `x` over `dims`, in place, and return it.

        Shape:      any, equal on all ranks; any memory layout. A list of tensors, of any shapes and dtypes, is
                    sent as one message per dtype. An element that appears in several tensors of the list is
                    reduced once; tensors of different dtypes that share memory raise ShapeError.
        Called by:  every rank along `dims`, in the same program order.
        op:         "sum", "avg", "product", "min", "max", "band", "bor", "bxor", or "premul_sum" (multiplies
                    each rank's x by its `factor`, then sums). An op that the backend lacks raises
                    UnsupportedOp.
        async_op:   return a Handle immediately; its wait() returns x.
        algorithm:  "flat": one call on the group of `dims`.
                    "hierarchical", for a tuple of dims: reduce_scatter inside the last dim, all_reduce of the
                    slice across the other dims, all_gather inside the last dim. It needs no group that spans all the
                    dims. Results equal those of "flat" up to rounding.
                    "ring", "tree", "double_tree", "recursive_doubling", "halving_doubling" and, for two or more
                    dims, "two_level": run step by step over messages; bit-identical on all ranks. See
                    `meshcomm.algorithms` for the order of summation.
                    All algorithms except "flat" take a single tensor and no async_op, and must be requested.
                    With Gloo and several ranks per core, "tree" was faster than "flat" up to 1 MiB
                    (docs/benchmarks.md). No other case is known in which an algorithm is faster than "flat".
        Gradient:   none. A tensor that requires a gradient raises AutogradError; see `mesh.functional`.
        Raises:     UnknownDim, UnsupportedOp, AutogradError; CommunicationError.
        """
        options = None if factor is None else Options(factor=factor)
        if algorithm != "flat":
            if async_op or not isinstance(x, Tensor):
                raise self._no_algorithm(dims, x, async_op, algorithm)
            return self._by_algorithm(dims, x, op, algorithm, options)
        comm = self._at[dims] if type(dims) is str else self._at.along(dims)
        if not isinstance(x, Tensor):
            return lists.collective(comm, ALL_REDUCE, x, async_op, op, options=options)
        return comm.collective(ALL_REDUCE, x, async_op, op, options=options)

    def mean(self, dims: Dims, values: Tensor, weights: Tensor | float) -> Tensor:
        """Return the sum of `values` over `dims`, divided by the sum of `weights` over `dims`.

        Use it for a mean over ranks that have different numbers of tokens.

            loss = mesh.mean(("dp", "fsdp"), losses.sum(), (targets != -100).sum())

        Shape:      values: any shape, this rank's sums. weights: a number, or a tensor of shape () or of
                    the shape of values. The result has the shape of values, in new memory: float64 for
                    float64 values, otherwise float32. It is nan where both values and weights sum to 0.
        Called by:  every rank along `dims`, in the same program order. Sends one message. If
                    no declared group covers a tuple of dims, sends one message along each dim instead.
        Gradient:   for `values`: grad divided by the sum of the weights, computed without communication. Each
                    rank gets only its own share, so sum parameter gradients over `dims` instead of averaging them:
                    GradientSync(mesh, dims, module, op="sum").
        Raises:     UnknownDim, ShapeError; AutogradError if weights require a gradient; CommunicationError.
        """
        values, weights = value_of(values), value_of(weights)
        sums, parts = mean_message(values, weights, self.label)
        names: Sequence[Dims] = [dims]
        if not isinstance(dims, str):
            try:
                self._at.along(dims)
            except UnknownDim:
                names = self.layout.expand(dims)
        for name in names:
            comm = self._at.along(name)
            comm.collective(ALL_REDUCE, sums, False, "sum", options=lists.packed(comm, parts))
        return mean_of(values, sums)

    def _by_algorithm(
        self, dims: Dims, x: Tensor, op: str, algorithm: Any, options: Options | None
    ) -> Tensor:
        self.layout.digits(dims)
        expanded = self.layout.expand(dims)
        levels = algorithm in ("hierarchical", "two_level")
        if not (levels or algorithm in scheduled.SCHEDULED) or (levels and len(expanded) < 2):
            raise self._no_algorithm(dims, x, False, algorithm)
        self.layout.digits(expanded)
        if algorithm == "hierarchical":
            return scheduled.hierarchical([self._at[name] for name in expanded], x, op, options)
        inner = self.layout.size(expanded[-1]) if levels else 1
        chosen = scheduled.Algorithm(algorithm, inner)
        return scheduled.all_reduce(self._at.along(dims), x, op, chosen, options)

    def _no_algorithm(self, dims: Dims, x: object, async_op: bool, algorithm: str) -> UnsupportedOp:
        self.layout.digits(dims)
        choices = '"ring", "tree", "double_tree", "recursive_doubling", "halving_doubling"'
        return UnsupportedOp(
            f"all_reduce on {self.label}: this call has no algorithm {algorithm!r}",
            given=f"dims {dims!r}, algorithm={algorithm!r}, async_op={async_op}, x a {type(x).__name__}",
            expected=f"for one tensor, without async_op: {choices}, "
            'and over two or more dims "hierarchical", "two_level"; else "flat"',
            hint='algorithm="flat"',
        )

    @overload
    def reduce(
        self, dims: Dims, x: Tensor, dst: int, op: str = ..., *, async_op: Sync = ..., **more: Unpack[Factor]
    ) -> Tensor | None: ...
    @overload
    def reduce(
        self, dims: Dims, x: Tensor, dst: int, op: str = ..., *, async_op: Async, **more: Unpack[Factor]
    ) -> Handle[Tensor | None]: ...
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
        """Reduce `x` over `dims` to coord `dst`; `x` is unchanged on all ranks.

        Shape, op, calling: as for `all_reduce`.
        Returns:    the reduced x in new memory on coord `dst`; None on other ranks.
        """
        comm = self._at.along(dims)
        options = None if factor is None else Options(factor=factor)
        return comm.collective(REDUCE, x, async_op, op, root=dst, options=options)

    @overload
    def reduce_scatter(
        self,
        dims: Dims,
        x: Tensor,
        axis: Axis = ...,
        op: str = ...,
        *,
        async_op: Sync = ...,
        **more: Unpack[Reduced],
    ) -> Tensor: ...
    @overload
    def reduce_scatter(
        self,
        dims: Dims,
        x: Tensor,
        axis: Axis = ...,
        op: str = ...,
        *,
        async_op: Async,
        **more: Unpack[Reduced],
    ) -> Handle[Tensor]: ...
    def reduce_scatter(
        self,
        dims: Dims,
        x: Tensor,
        axis: int | None = None,
        op: str = "sum",
        *,
        async_op: bool = False,
        dim: int | None = None,
        out: Tensor | None = None,
        factor: float | None = None,
    ) -> Any:
        """Reduce `x` over `dims` and keep this rank's slice of tensor axis `axis`.

        Shape:      (b, n*s, d) -> (b, s, d) for axis=1, where n is the size of `dims`.
        Called by:  every rank along `dims`, in the same program order.
        Returns:    slice number `mesh.coord(dims)`, in new memory or `out`; `x` is unchanged.
        Gradient:   none; see `mesh.functional.reduce_scatter`.
        Raises:     UnknownDim; ShapeError if x.shape[axis] is not divisible by n.
        """
        comm = self._at[dims] if type(dims) is str else self._at.along(dims)
        options = None if factor is None else Options(factor=factor)
        return comm.collective(REDUCE_SCATTER, x, async_op, op, axis=axis, dim=dim, out=out, options=options)

    # -- moving data ----------------------------------------------------------------------------

    @overload
    def broadcast(self, dims: Dims, x: X, src: int, *, async_op: Sync = ...) -> X: ...
    @overload
    def broadcast(self, dims: Dims, x: X, src: int, *, async_op: Async) -> Handle[X]: ...
    def broadcast(self, dims: Dims, x: Tensor | Sequence[Tensor], src: int, *, async_op: bool = False) -> Any:
        """Overwrite `x` with the x of coord `src`, and return `x`. The tensors in a list are sent together.

        Shape, calling, gradient: as for `all_reduce`; any dtype.
        """
        comm = self._at[dims] if type(dims) is str else self._at.along(dims)
        if isinstance(x, Tensor):
            return comm.collective(BROADCAST, x, async_op, root=src)
        return lists.collective(comm, BROADCAST, x, async_op, root=src)

    @overload
    def all_gather(
        self, dims: Dims, x: Tensor, axis: Axis = ..., *, async_op: Sync = ..., **more: Unpack[Joined]
    ) -> Tensor: ...
    @overload
    def all_gather(
        self, dims: Dims, x: Tensor, axis: Axis = ..., *, async_op: Async, **more: Unpack[Joined]
    ) -> Handle[Tensor]: ...
    def all_gather(
        self,
        dims: Dims,
        x: Tensor,
        axis: int | None = None,
        *,
        async_op: bool = False,
        dim: int | None = None,
        out: Tensor | None = None,
        uneven: bool = False,
    ) -> Any:
        """Gather the x of every rank along `dims`, concatenated along tensor axis `axis` in coord order.

        Shape:      (b, s, d) -> (b, n*s, d) for axis=1, where n is the size of `dims`; equal on all ranks.
                    A 0-dim x counts as shape (1,). With uneven=True, the size of `axis` may differ between
                    ranks and may be 0; the sizes are exchanged first.
        Called by:  every rank along `dims`, in the same program order.
        Returns:    new memory or `out`, or a Handle whose wait() returns it.
        Gradient:   none; see `mesh.functional.all_gather`.
        Raises:     UnknownDim, ShapeError, AutogradError; CommunicationError.
        """
        comm = self._at[dims] if type(dims) is str else self._at.along(dims)
        options = Options(uneven=True) if uneven else None
        return comm.collective(ALL_GATHER, x, async_op, axis=axis, dim=dim, out=out, options=options)

    @overload
    def gather(
        self,
        dims: Dims,
        x: Tensor,
        dst: int,
        axis: Axis = ...,
        *,
        async_op: Sync = ...,
        **more: Unpack[Joined],
    ) -> Tensor | None: ...
    @overload
    def gather(
        self, dims: Dims, x: Tensor, dst: int, axis: Axis = ..., *, async_op: Async, **more: Unpack[Joined]
    ) -> Handle[Tensor | None]: ...
    def gather(
        self,
        dims: Dims,
        x: Tensor,
        dst: int,
        axis: int | None = None,
        *,
        async_op: bool = False,
        dim: int | None = None,
        out: Tensor | None = None,
        uneven: bool = False,
    ) -> Any:
        """Gather like `all_gather`, but only to coord `dst`; return None on other ranks. `out` is used only on `dst`."""
        comm = self._at.along(dims)
        options = Options(uneven=True) if uneven else None
        return comm.collective(GATHER, x, async_op, root=dst, axis=axis, dim=dim, out=out, options=options)

    @overload
    def scatter(
        self,
        dims: Dims,
        x: Tensor | None,
        src: int,
        axis: Axis = ...,
        *,
        async_op: Sync = ...,
        **more: Unpack[Sliced],
    ) -> Tensor: ...
    @overload
    def scatter(
        self,
        dims: Dims,
        x: Tensor | None,
        src: int,
        axis: Axis = ...,
        *,
        async_op: Async,
        **more: Unpack[Sliced],
    ) -> Handle[Tensor]: ...
    def scatter(
        self,
        dims: Dims,
        x: Tensor | None,
        src: int,
        axis: int | None = None,
        *,
        async_op: bool = False,
        dim: int | None = None,
        out: Tensor | None = None,
    ) -> Any:
        """Split tensor axis `axis` of the x on coord `src`; coord c receives slice c.

        Shape:      (b, n*s, d) on src -> (b, s, d) for axis=1.
        x:          a tensor on src; ignored on other ranks, where it may be None.
        out:        pass it on every rank or on none. Without `out`, src first sends the shape to the other ranks.
        Returns:    new memory or `out`.
        """
        comm = self._at.along(dims)
        return comm.collective(SCATTER, x, async_op, root=src, axis=axis, dim=dim, out=out)

    @overload
    def all_to_all(
        self,
        dims: Dims,
        x: Tensor,
        split_axis: int = 0,
        concat_axis: int = 0,
        *,
        async_op: Sync = ...,
        **more: Unpack[Moved],
    ) -> Tensor: ...
    @overload
    def all_to_all(
        self,
        dims: Dims,
        x: Tensor,
        split_axis: int = 0,
        concat_axis: int = 0,
        *,
        async_op: Async,
        **more: Unpack[Moved],
    ) -> Handle[Tensor]: ...
    def all_to_all(
        self,
        dims: Dims,
        x: Tensor,
        split_axis: int = 0,
        concat_axis: int = 0,
        *,
        async_op: bool = False,
        out: Tensor | None = None,
        input_split_sizes: Sequence[int] | None = None,
        output_split_sizes: Sequence[int] | None = None,
    ) -> Any:
        """Send slice c of `split_axis` to coord c, and concatenate the received slices along `concat_axis`.

        Shape:      (b, n*h, s) -> (b, h, n*s) for split_axis=1, concat_axis=2.
        input_split_sizes: the size along `split_axis` to send to each coord, if the sizes are not equal.
        output_split_sizes: the size received from each coord, if known; pass it on all ranks or on none.
                    If it is omitted, the ranks first exchange the sizes, and the host waits for them. If it is given,
                    sizes are compared only while calls are compared (mesh.validate_calls). A wrong size then raises
                    CallMismatchError on every rank.
        Called by:  every rank along `dims`, in the same program order.
        Returns:    new memory or `out`; `x` is unchanged.
        Gradient:   none; see `mesh.functional.all_to_all`.
        Raises:     UnknownDim; ShapeError if x.shape[split_axis] is not divisible by n.
        """
        comm = self._at[dims] if type(dims) is str else self._at.along(dims)
        options = None
        if input_split_sizes is not None or output_split_sizes is not None:
            options = Options(input_split_sizes=input_split_sizes, output_split_sizes=output_split_sizes)
        return comm.collective(
            ALL_TO_ALL, x, async_op, axis=split_axis, concat=concat_axis, out=out, options=options
        )

    # -- messages -------------------------------------------------------------------------------

    def send(self, dims: Dims, x: Tensor, dst: int, tag: int = 0, *, handshake: bool = False) -> None:
        """Send `x` to coord `dst` along `dims`, and return when `x` may be modified.

        handshake: send shape and dtype first, for a receiver that passes no buffer.
        tag:       a send matches only a receive with the same tag (Gloo; NCCL matches by order).
        """
        comm = self._at[dims] if type(dims) is str else self._at.along(dims)
        comm.messages.send(x, dst, tag, handshake)

    def recv(self, dims: Dims, out: Tensor | None = None, *, src: int, tag: int = 0) -> Tensor:
        """Receive from coord `src` along `dims` into `out`, and return it.

        out: a tensor with the sender's shape and dtype. If None, the sender must use handshake=True, and the
             result is new memory.
        """
        comm = self._at[dims] if type(dims) is str else self._at.along(dims)
        received: Tensor = comm.messages.recv(out, src, tag)
        return received

    def recv_any(self, dims: Dims, out: Tensor | None = None, *, tag: int = 0) -> tuple[Tensor, int]:
        """Receive from the coord that sends first, and return the tensor and the sender's coord. Gloo only."""
        return self._at.along(dims).messages.recv_any(out, tag)

    def isend(
        self, dims: Dims, x: Tensor, dst: int, tag: int = 0, *, handshake: bool = False
    ) -> Handle[None]:
        """Start a send. Do not modify `x` before the handle's wait() returns.

        NCCL runs messages one after another, so on NCCL this raises UnsupportedOp while a separately started
        receive is pending. Use `exchange` to start a send and a receive together.
        """
        comm = self._at[dims] if type(dims) is str else self._at.along(dims)
        handle: Handle[None] = comm.messages.send(x, dst, tag, handshake, True)
        return handle

    def irecv(self, dims: Dims, out: Tensor, src: int | None, tag: int = 0) -> Handle[Tensor]:
        """Start a receive. The handle's wait() returns `out`. Do not use `out` before wait() returns.

        src: None receives from the coord that sends first (Gloo only); `handle.source` is that coord.
        On NCCL, this raises UnsupportedOp while a separately started send is pending; see `isend`.
        """
        handle: Handle[Tensor] = self._at.along(dims).messages.recv(out, src, tag, True)
        return handle

    @overload
    def exchange(
        self, dims: Dims, sends: Envelopes = ..., recvs: Envelopes = ..., *, async_op: Sync = ...
    ) -> list[Tensor]: ...
    @overload
    def exchange(
        self, dims: Dims, sends: Envelopes = ..., recvs: Envelopes = ..., *, async_op: Async
    ) -> Handle[list[Tensor]]: ...
    def exchange(
        self,
        dims: Dims,
        sends: Sequence[Envelope] = (),
        recvs: Sequence[Envelope] = (),
        *,
        async_op: bool = False,
    ) -> list[Tensor] | Handle[list[Tensor]]:
        """Send and receive several messages concurrently.

        All messages start before the call waits for any of them, so their order cannot cause a deadlock. Between two ranks,
        messages with the same tag match in the order in which they are listed.

        sends:   (x, dst) or (x, dst, tag), with coords along `dims`.
        recvs:   (out, src) or (out, src, tag).

        Returns: the received tensors, in the order of `recvs`. With async_op, this is a handle whose wait()
                 returns them. Do not use the call's tensors before wait() returns.
        On NCCL: both ends of a message must belong to an exchange or a shift, not to a send or a recv. If only some
                 ranks along `dims` call exchange, every rank along `dims` must already have made a call along `dims`.
        """
        found: list[Tensor] | Handle[list[Tensor]] = self._at.along(dims).messages.exchange(
            sends, recvs, async_op
        )
        return found

    @overload
    def shift(self, dims: Dims, x: Tensor, offset: int = ..., *, wrap: Literal[True] = ...) -> Tensor: ...
    @overload
    def shift(self, dims: Dims, x: Tensor, offset: int = ..., *, wrap: bool) -> Tensor | None: ...
    def shift(self, dims: Dims, x: Tensor, offset: int = 1, *, wrap: bool = True) -> Tensor | None:
        """Send `x` to the coord `offset` further along `dims`, and return the tensor from the coord `offset` before this one.

        wrap:    True for a ring. False for an open line, where the ranks at the edge receive None.
                 Equivalent to MPI_Cart_shift followed by MPI_Sendrecv.
        Shape:   equal on all ranks; returns new memory.
        """
        comm = self._at[dims] if type(dims) is str else self._at.along(dims)
        return comm.messages.shift(x, offset, wrap)
