"""Communication along dims by name: what a mesh can say to its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
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
from meshcomm.comm.checks import axis_or_dim
from meshcomm.comm.communicator import CommunicatorCache
from meshcomm.comm.functional import mean_message, mean_of
from meshcomm.comm.handle import Handle
from meshcomm.comm.p2p import Envelope
from meshcomm.errors import UnknownDim, UnsupportedOp
from meshcomm.layout import Dims, Layout
from meshcomm.transport.torch_private import outside_graphs

Algorithm: TypeAlias = Literal["flat", "hierarchical"] | scheduled.Scheduled

Envelopes: TypeAlias = Sequence[Envelope]
# `async_op`: whether the result comes at once, or a Handle of it.
Sync: TypeAlias = Literal[False]
Async: TypeAlias = Literal[True]

# What is given comes back: a tensor, or a list of them. A tuple comes back as a list.
X = TypeVar("X", Tensor, list[Tensor], Sequence[Tensor])


# What a call may be given by name besides `async_op`: for the overloads.
class Factor(TypedDict, total=False):
    factor: float | None


class Summed(Factor, total=False):
    algorithm: Algorithm


class Out(TypedDict, total=False):
    out: Tensor | None


class Axis(TypedDict, total=False):
    dim: int  # torch's word for `axis`


class Reduced(Factor, Out, Axis, total=False):
    pass


class Joined(Out, Axis, total=False):
    uneven: bool


class Sliced(Out, Axis, total=False):
    pass


class Moved(Out, total=False):
    input_split_sizes: Sequence[int] | None
    output_split_sizes: Sequence[int] | None


@outside_graphs
class AlongDims:
    """Collectives and messages whose first argument says along which dims. `Mesh` is one.

    Peers and roots are coords along the dims. A subclass has `layout`, `label` (this rank with its
    coords, for errors) and a CommunicatorCache of communicators.
    """

    layout: Layout
    _at: CommunicatorCache

    @property
    def label(self) -> str:
        """This rank with its coords, as in `rank 5 (pp=1 dp=0 tp=1)`."""
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
        if algorithm != "flat":
            if async_op or not isinstance(x, Tensor):
                raise self._no_algorithm(dims, x, async_op, algorithm)
            return self._by_algorithm(dims, x, op, algorithm, factor)
        comm = self._at[dims] if type(dims) is str else self._at.along(dims)
        if not isinstance(x, Tensor):
            given = {} if factor is None else {"factor": factor}
            return lists.collective(comm, ALL_REDUCE, x, async_op, op=op, **given)
        if factor is not None:
            return comm.collective(ALL_REDUCE, x, async_op, op, factor=factor)
        return comm.collective(ALL_REDUCE, x, async_op, op)

    def mean(self, dims: Dims, values: Tensor, weights: Tensor | float) -> Tensor:
        """The sum of `values` over `dims`, divided by that of `weights`: a mean over ranks with unequally many tokens.

            loss = mesh.mean(("dp", "fsdp"), losses.sum(), (targets != -100).sum())

        Shape:      values any, this rank's sums; weights () or the values' shape, a tensor or a number. -> values' shape,
                    float64 for float64, else float32, in new memory; of nothing, 0 by 0, it is nan.
        Called by:  every rank along `dims`, in the same program order. One message along each name; along a tuple that no
                    group was declared for, one for each of its dims.
        Gradient:   of `values`: grad / the sum of the weights, without communication. It is the part of the mean that is
                    this rank's own, so gradients of parameters are added up over `dims`, not averaged:
                    GradientSync(mesh, dims, module, op="sum").
        Raises:     UnknownDim, ShapeError; AutogradError for weights that need a gradient; CommunicationError.
        """
        sums = mean_message(values, weights, self.label)
        names: Sequence[Dims] = [dims]
        if not isinstance(dims, str):
            try:
                self._at.along(dims)
            except UnknownDim:
                names = self.layout.expand(dims)
        for each in names:
            self.all_reduce(each, sums)
        return mean_of(values, sums)

    def _by_algorithm(self, dims: Dims, x: Tensor, op: str, algorithm: Any, factor: float | None) -> Tensor:
        self.layout.digits(dims)
        expanded = self.layout.expand(dims)
        levels = algorithm in ("hierarchical", "two_level")
        if not (levels or algorithm in scheduled.SCHEDULED) or (levels and len(expanded) < 2):
            raise self._no_algorithm(dims, x, False, algorithm)
        self.layout.digits(expanded)
        if algorithm == "hierarchical":
            return scheduled.hierarchical([self._at[name] for name in expanded], x, op, factor)
        inner = self.layout.size(expanded[-1]) if levels else 1
        chosen = scheduled.Algorithm(algorithm, inner)
        return scheduled.all_reduce(self._at.along(dims), x, op, chosen, factor)

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
        """The reduced x on coord `dst`, None on the others; `x` is unchanged everywhere.

        Shape, op, calling: as for `all_reduce`. Returns new memory.
        """
        comm = self._at.along(dims)
        if factor is not None:
            return comm.collective(REDUCE, x, async_op, op, dst, factor=factor)
        return comm.collective(REDUCE, x, async_op, op, dst)

    @overload
    def reduce_scatter(
        self,
        dims: Dims,
        x: Tensor,
        axis: int | None = ...,
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
        axis: int | None = ...,
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

        Shape:      (b, n*s, d) -> (b, s, d) for axis=1, n the size of `dims`.
        Called by:  every rank along `dims`, in the same program order.
        Returns:    slice number `mesh.coord(dims)`, in new memory or `out`; `x` is unchanged.
        Gradient:   none; see `mesh.functional.reduce_scatter`.
        Raises:     UnknownDim; ShapeError where x.shape[axis] is not divisible by n.
        """
        comm = self._at[dims] if type(dims) is str else self._at.along(dims)
        if dim is not None:
            axis = axis_or_dim(axis, dim, partial(comm.where, "reduce_scatter"))
        axis = 0 if axis is None else axis
        if factor is not None:
            return comm.collective(REDUCE_SCATTER, x, async_op, op, -1, axis, 0, out, factor=factor)
        return comm.collective(REDUCE_SCATTER, x, async_op, op, -1, axis, 0, out)

    # -- moving data ----------------------------------------------------------------------------

    @overload
    def broadcast(self, dims: Dims, x: X, src: int, *, async_op: Sync = ...) -> X: ...
    @overload
    def broadcast(self, dims: Dims, x: X, src: int, *, async_op: Async) -> Handle[X]: ...
    def broadcast(self, dims: Dims, x: Tensor | Sequence[Tensor], src: int, *, async_op: bool = False) -> Any:
        """Overwrite `x` with the x of coord `src`, and return it. Lists travel together.

        Shape, calling, gradient: as for `all_reduce`; any dtype.
        """
        comm = self._at[dims] if type(dims) is str else self._at.along(dims)
        if isinstance(x, Tensor):
            return comm.collective(BROADCAST, x, async_op, None, src)
        return lists.collective(comm, BROADCAST, x, async_op, root=src)

    @overload
    def all_gather(
        self, dims: Dims, x: Tensor, axis: int | None = ..., *, async_op: Sync = ..., **more: Unpack[Joined]
    ) -> Tensor: ...
    @overload
    def all_gather(
        self, dims: Dims, x: Tensor, axis: int | None = ..., *, async_op: Async, **more: Unpack[Joined]
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
        """The x of every rank along `dims`, joined along tensor axis `axis` in coord order.

        Shape:      (b, s, d) -> (b, n*s, d) for axis=1, n the size of `dims`; equal on all ranks.
                    A 0-dim x counts as shape (1,). uneven=True: the sizes of `axis` may differ from
                    rank to rank, 0 included; they are exchanged first.
        Called by:  every rank along `dims`, in the same program order.
        Returns:    new memory or `out`, or a Handle whose wait() returns it.
        Gradient:   none; see `mesh.functional.all_gather`.
        Raises:     UnknownDim, ShapeError, AutogradError; CommunicationError.
        """
        comm = self._at[dims] if type(dims) is str else self._at.along(dims)
        if dim is not None:
            axis = axis_or_dim(axis, dim, partial(comm.where, "all_gather"))
        axis = 0 if axis is None else axis
        if uneven:
            return comm.collective(ALL_GATHER, x, async_op, None, -1, axis, 0, out, uneven=uneven)
        return comm.collective(ALL_GATHER, x, async_op, None, -1, axis, 0, out)

    @overload
    def gather(
        self,
        dims: Dims,
        x: Tensor,
        dst: int,
        axis: int | None = ...,
        *,
        async_op: Sync = ...,
        **more: Unpack[Joined],
    ) -> Tensor | None: ...
    @overload
    def gather(
        self,
        dims: Dims,
        x: Tensor,
        dst: int,
        axis: int | None = ...,
        *,
        async_op: Async,
        **more: Unpack[Joined],
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
        """What `all_gather` returns, on coord `dst`; None on the others. `out` is only used on `dst`."""
        comm = self._at.along(dims)
        if dim is not None:
            axis = axis_or_dim(axis, dim, partial(comm.where, "gather"))
        axis = 0 if axis is None else axis
        if uneven:
            return comm.collective(GATHER, x, async_op, None, dst, axis, 0, out, uneven=uneven)
        return comm.collective(GATHER, x, async_op, None, dst, axis, 0, out)

    @overload
    def scatter(
        self,
        dims: Dims,
        x: Tensor | None,
        src: int,
        axis: int | None = ...,
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
        axis: int | None = ...,
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
        """Slice c of tensor axis `axis` of coord src's x, on coord c.

        Shape:      (b, n*s, d) on src -> (b, s, d) for axis=1.
        x:          a tensor on src, ignored elsewhere (None will do).
        out:        on every rank or on none. Without it the shape is told to the ranks first.
        Returns:    new memory or `out`.
        """
        comm = self._at.along(dims)
        if dim is not None:
            axis = axis_or_dim(axis, dim, partial(comm.where, "scatter"))
        axis = 0 if axis is None else axis
        return comm.collective(SCATTER, x, async_op, None, src, axis, 0, out)

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
        """Slice c of `split_axis` goes to coord c; what arrives is joined along `concat_axis`.

        Shape:      (b, n*h, s) -> (b, h, n*s) for split_axis=1, concat_axis=2.
        input_split_sizes: how much of `split_axis` goes to each coord, where that is not equal.
        output_split_sizes: how much then comes from each, where that is known: on all ranks or on none. Without it
                    that is exchanged first, and the host waits for it; with it only while calls are compared
                    (mesh.validate_calls), when another size is a ShapeError.
        Called by:  every rank along `dims`, in the same program order.
        Returns:    new memory or `out`; `x` is unchanged.
        Gradient:   none; see `mesh.functional.all_to_all`.
        Raises:     UnknownDim; ShapeError where x.shape[split_axis] is not divisible by n.
        """
        comm = self._at[dims] if type(dims) is str else self._at.along(dims)
        if input_split_sizes is None and output_split_sizes is None:
            return comm.collective(ALL_TO_ALL, x, async_op, None, -1, split_axis, concat_axis, out)
        return comm.collective(
            ALL_TO_ALL,
            x,
            async_op,
            None,
            -1,
            split_axis,
            concat_axis,
            out,
            input_split_sizes=input_split_sizes,
            output_split_sizes=output_split_sizes,
        )

    # -- messages -------------------------------------------------------------------------------

    def send(self, dims: Dims, x: Tensor, dst: int, tag: int = 0, *, handshake: bool = False) -> None:
        """Send `x` to coord `dst` along `dims`; returns when `x` may be changed.

        handshake: send shape and dtype first, for a receiver that gives no buffer.
        tag:       only messages with equal tags meet (Gloo; NCCL matches by order).
        """
        comm = self._at[dims] if type(dims) is str else self._at.along(dims)
        comm.messages.send(x, dst, tag, handshake)

    def recv(self, dims: Dims, out: Tensor | None = None, *, src: int, tag: int = 0) -> Tensor:
        """Receive from coord `src` along `dims` into `out`, and return it.

        out: of the sender's shape and dtype; None: the message has a handshake, the result is new.
        """
        comm = self._at[dims] if type(dims) is str else self._at.along(dims)
        found: Tensor = comm.messages.recv(out, src, tag)
        return found

    def recv_any(self, dims: Dims, out: Tensor | None = None, *, tag: int = 0) -> tuple[Tensor, int]:
        """Receive from whichever coord sends first; returns the tensor and that coord. Gloo only."""
        return self._at.along(dims).messages.recv_any(out, tag)

    def isend(
        self, dims: Dims, x: Tensor, dst: int, tag: int = 0, *, handshake: bool = False
    ) -> Handle[None]:
        """Start a send; `x` must not change before the handle's wait() returns.

        NCCL runs messages one after the other. There, UnsupportedOp while a receive that was started by itself is not
        waited for: `exchange` starts both as one.
        """
        comm = self._at[dims] if type(dims) is str else self._at.along(dims)
        found: Handle[None] = comm.messages.send(x, dst, tag, handshake, True)
        return found

    def irecv(self, dims: Dims, out: Tensor, src: int | None, tag: int = 0) -> Handle[Tensor]:
        """Start a receive; the handle's wait() returns `out`, which must not be used before.

        src: None receives from whichever coord sends first, on Gloo; `handle.source` tells which.
        On NCCL, UnsupportedOp while a send that was started by itself is not waited for; see `isend`.
        """
        found: Handle[Tensor] = self._at.along(dims).messages.recv(out, src, tag, True)
        return found

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
        """A set of messages at once: sends as (x, dst), receives as (out, src), coords along `dims`.

        All are started before any is waited for, so no order of them can deadlock. Between two
        ranks, messages of one tag meet in the order in which they are listed; a tag may follow the
        coord: (x, dst, tag).
        Returns: the received tensors, in the order of `recvs`; with async_op a handle whose wait()
                 returns them, until which no tensor of the call may be used.
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
        """Send `x` to the coord `offset` further along `dims`, return what came from as far behind.

        wrap=True: a ring. wrap=False: an open line; the ranks at the edge get None. The semantics
        are those of MPI_Cart_shift followed by MPI_Sendrecv.
        Shape:   equal on all ranks; new memory.
        """
        comm = self._at[dims] if type(dims) is str else self._at.along(dims)
        return comm.messages.shift(x, offset, wrap)
