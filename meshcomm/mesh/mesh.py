"""A plan that is live in this process: who am I, and communication along dims by name."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, final, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshcomm.comm import Communicator, Directory, Functional, Handle, hierarchical, lists
from meshcomm.comm.messages import Message
from meshcomm.comm.objects import Objects
from meshcomm.comm.roll_call import roll_call
from meshcomm.errors import MeshClosed, NotMember, UnknownDim, UnsupportedOp
from meshcomm.layout import Dims, GroupOptions, Layout, Plan
from meshcomm.layout.sizes import fold
from meshcomm.mesh.store import MeshStore
from meshcomm.mesh.torch_mesh import TorchMeshes
from meshcomm.pattern.apply import GatherRules, Rearranger
from meshcomm.show.plan import plan_view
from meshcomm.transport import SoloTransport, Transport

if TYPE_CHECKING:
    from rich.console import RenderableType

Algorithm: TypeAlias = Literal["flat", "hierarchical"]


@final
class Mesh:
    """Named dims over the ranks of a job, with a communicator along each.

    Made by `meshcomm.init`. The first argument of every method says along which dims: a name, a
    merged dim's name, or a tuple of names that a declared group covers. Peers and roots are coords
    along the dims, never global ranks. A dim of size 1 is a dim; its collectives return at once.

    On a rank that the mesh does not cover, `is_member` is False and everything that needs a place
    in the mesh raises NotMember.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        *,
        device: torch.device,
        store: dist.Store,
        prefix: str,
        transports: dict[str, Transport],
        startup_s: Mapping[str, float],
        add: Callable[[Mesh, Plan, str], Transport],
        on_close: Callable[[], None],
    ) -> None:
        self.plan = plan
        self.layout: Layout = plan.layout
        self.rank = rank
        self.device = device
        self.store = MeshStore(dist.PrefixStore("user", store), lambda: self.label, plan.defaults.timeout_s)
        self._store = store
        self._barriers: dict[str, int] = {}
        # Seconds that this rank spent on "agree", waiting for the others included, and on "create".
        self.startup_s = startup_s
        self.closed = False
        self._add = add
        self._on_close = on_close
        self._transports = transports
        self._torch = TorchMeshes(self.layout, rank, device, prefix, self._transport_of)
        self._at = Directory(self._explain)
        self.functional = Functional(self._at)
        self.objects = Objects(self._at, device)
        self._rearranger = Rearranger(self.layout, self._at, self.functional, self.label)
        if self.is_member:
            for family in plan.families:
                self._at[family.name] = self._communicator(family.name, transports[family.name])

    # -- who am I -------------------------------------------------------------------------------

    @property
    def is_member(self) -> bool:
        """Whether this rank is in the mesh."""
        return self.rank in self.layout

    @property
    def world_size(self) -> int:
        """Number of ranks in the mesh."""
        return self.layout.world_size

    @property
    def dims(self) -> Mapping[str, int]:
        """Base dims and their sizes, outermost first."""
        return self.layout.dims

    @property
    def coords(self) -> dict[str, int]:
        """This rank's coords, by base dim."""
        return self.layout.coords(self._member())

    def coords_of(self, rank: int, view: str | None = None) -> dict[str, int]:
        """The coords of any rank, in the base or in a view."""
        return self.layout.coords(rank, view)

    def size(self, dims: Dims) -> int:
        """Number of ranks along `dims`."""
        return self.layout.size(dims)

    def coord(self, dims: Dims) -> int:
        """This rank's coord along `dims`."""
        return self.layout.coord(self._member(), dims)

    def ranks(self, dims: Dims) -> list[int]:
        """The global ranks of this rank's group along `dims`; element c has coord c."""
        ranks: list[int] = self.layout.group_of(self._member(), dims).tolist()
        return ranks

    def rank_at(self, **coords: int) -> int:
        """The global rank at these coords."""
        return self.layout.rank_at(**coords)

    def peer(self, dims: Dims, offset: int, wrap: bool = True) -> int | None:
        """The global rank `offset` coords further along `dims`; None past the edge without `wrap`."""
        return self.layout.peer(self._member(), dims, offset, wrap)

    # -- torch's objects over the same groups ---------------------------------------------------

    def group(self, dims: Dims) -> dist.ProcessGroup:
        """The torch process group along `dims`; group rank == coord. For size 1: one that copies."""
        self._member()
        if isinstance(dims, tuple) and self.size(dims) > 1:
            return self._torch.group(self._family_of(dims))
        return self._torch.group(dims if isinstance(dims, str) else dims[0])

    @property
    def device_mesh(self) -> DeviceMesh:
        """All base dims as one torch DeviceMesh over this mesh's groups."""
        return self[tuple(self.layout.dims)]

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """`mesh["tp"]`, `mesh["dp", "tp"]`: a torch DeviceMesh with these dims, in this order.

        Dims, merged dims, or dims of one view. Slices that keep the dims' order share one root.
        """
        self._member()
        chosen = (names,) if isinstance(names, str) else names
        self.layout.digits(chosen)
        for name in chosen:
            self.layout.digits(name)
        return self._torch.over(chosen)

    # -- collectives ----------------------------------------------------------------------------

    @overload
    def all_reduce(
        self,
        dims: Dims,
        x: Tensor,
        op: str = ...,
        *,
        async_op: Literal[False] = ...,
        factor: float | None = ...,
        algorithm: Algorithm = ...,
    ) -> Tensor: ...
    @overload
    def all_reduce(
        self,
        dims: Dims,
        x: Tensor,
        op: str = ...,
        *,
        async_op: Literal[True],
        factor: float | None = ...,
        algorithm: Algorithm = ...,
    ) -> Handle[Tensor]: ...
    @overload
    def all_reduce(
        self,
        dims: Dims,
        x: Sequence[Tensor],
        op: str = ...,
        *,
        async_op: bool = ...,
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
        Gradient:   none; on a tensor that needs one: AutogradError. See `mesh.functional`.
        Raises:     UnknownDim, UnsupportedOp, AutogradError; CommunicationError.
        """
        if algorithm == "flat":
            if isinstance(x, Tensor):
                return self._at[dims].all_reduce(x, op, async_op, factor)
            return lists.all_reduce(self._at[dims], x, op, async_op, factor)
        return self._hierarchical(dims, x, op, async_op, factor, algorithm)

    def _hierarchical(
        self,
        dims: Dims,
        x: Tensor | Sequence[Tensor],
        op: str,
        async_op: bool,
        factor: float | None,
        algorithm: str,
    ) -> Tensor:
        expanded = self.layout.expand(dims)
        if algorithm != "hierarchical" or async_op or not isinstance(x, Tensor) or len(expanded) < 2:
            raise UnsupportedOp(
                f"all_reduce on {self.label}: this call has no algorithm {algorithm!r}",
                given=f"dims {dims!r}, algorithm={algorithm!r}, async_op={async_op}, x a {type(x).__name__}",
                expected='"hierarchical" for one tensor over two or more dims, without async_op; else "flat"',
                hint='algorithm="flat"',
            )
        self.layout.digits(expanded)
        return hierarchical.all_reduce([self._at[name] for name in expanded], x, op, factor)

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
        return self._at[dims].reduce(x, dst, op, async_op, factor)

    def broadcast(self, dims: Dims, x: Tensor | Sequence[Tensor], src: int, *, async_op: bool = False) -> Any:
        """Overwrite `x` with the x of coord `src`, and return it. Lists travel together.

        Shape, calling, gradient: as for `all_reduce`; any dtype.
        """
        if isinstance(x, Tensor):
            return self._at[dims].broadcast(x, src, async_op)
        return lists.broadcast(self._at[dims], x, src, async_op)

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
            return self._at[dims].all_gather(x, axis, async_op, out, uneven)
        self._only_plain("all_gather", out=out is not None, uneven=uneven)
        return lists.all_gather(self._at[dims], x, axis, async_op)

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
        return self._at[dims].gather(x, dst, axis, async_op, uneven, out)

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
        return self._at[dims].scatter(x, src, axis, async_op, out)

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
            return self._at[dims].reduce_scatter(x, axis, op, async_op, out, factor)
        self._only_plain("reduce_scatter", out=out is not None)
        return lists.reduce_scatter(self._at[dims], x, axis, op, async_op, factor)

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
        Returns:    new memory; `x` is unchanged.
        Gradient:   none; see `mesh.functional.all_to_all`.
        Raises:     UnknownDim; ShapeError where x.shape[split_axis] is not divisible by n.
        """
        return self._at[dims].all_to_all(x, split_axis, concat_axis, async_op, splits, out)

    def barrier(
        self, dims: Dims | None = None, *, timeout_s: float | None = None, async_op: bool = False
    ) -> Any:
        """Return when every rank along `dims` has come. None: every rank of the mesh, dim by dim.

        timeout_s: meet at the store instead of at the backend; ranks that have not come in time
                   are named by a BarrierTimeout on every rank that has. Works under NCCL too.
        """
        if timeout_s is not None:
            return self._roll_call(dims, timeout_s, async_op)
        if dims is not None:
            return self._at[dims].barrier(async_op)
        for name in self.layout.dims:
            self._at[name].barrier()
        return None

    def _roll_call(self, dims: Dims | None, timeout_s: float, async_op: bool) -> None:
        self._usable()
        if async_op:
            raise UnsupportedOp(
                f"barrier on {self.label}: async_op and timeout_s together",
                given=f"timeout_s={timeout_s}, async_op=True",
                expected="one of the two",
                hint="mesh.barrier(dims, timeout_s=...) in a thread of its own",
            )
        along = tuple(self.layout.dims) if dims is None else dims
        digits = self.layout.digits(along)
        # The group is told apart by its first rank; the calls on it are counted.
        ranks = self.ranks(along)
        key = f"{'.'.join(self.layout.expand(along))}/{ranks[0]}"
        self._barriers[key] = number = self._barriers.get(key, 0) + 1
        roll_call(
            dist.PrefixStore(f"barrier/{key}/{number}", self._store),
            digits.coord(self.layout.position(self.rank)),
            ranks,
            timeout_s,
            f"barrier along {along if isinstance(along, str) else ', '.join(along)} on {self.label}",
        )

    def warm_up(self) -> dict[str, float]:
        """Use every group once, in plan order, so that no later call pays for connecting.

        Called by: every rank of the mesh. On NCCL this also satisfies the rule that the first call
        on a group involves all of its ranks.
        Returns: seconds by name, of this rank.
        """
        self._usable()
        seconds = {}
        for family in self.plan.families:
            if family.creates:
                start = time.perf_counter()
                self._at[family.name].barrier()
                seconds[family.name] = time.perf_counter() - start
        return seconds

    def _only_plain(self, call: str, **given: bool) -> None:
        for name, is_given in given.items():
            if is_given:
                raise UnsupportedOp(
                    f"{call} of a list on {self.label}: {name} has no effect",
                    given=f"a list of tensors and {name}",
                    expected=f"{name} beside a single tensor",
                    hint="one call for each tensor",
                )

    def rearrange(
        self,
        x: Tensor,
        pattern: str,
        *,
        partial: str | None = None,
        grad: GatherRules | None = None,
        **sizes: int,
    ) -> Tensor:
        """einops.rearrange with mesh dims: where a dim's name stands says where it lies in `x`.

        On the right only, it is gathered; on the left only, this rank keeps its slice, or with
        `partial` ("sum", "avg", "min", ...) the ranks' values are reduced and scattered; on both
        sides at different places, it is an all-to-all. docs/guide/patterns.md has the rules.

            mesh.rearrange(x, "b s h -> b s (tp h)")                      all_gather along tp
            mesh.rearrange(x, "b s (tp h) -> b s h", partial="sum")       reduce_scatter along tp
            mesh.rearrange(x, "b s (cp h) d -> b (cp s) h d")             all_to_all along cp

        Called by:  every rank along the dims of the pattern, in the same program order.
        Gradient:   where x needs one, a gather needs `grad`, "slice" or "reduce_scatter", as in
                    `mesh.functional.all_gather`; everything else has one meaning.
        Raises:     PatternError, ShapeError; UnknownDim, AutogradError, CommunicationError.
        """
        return self._rearranger.run(x, pattern, partial, grad, sizes)

    # -- messages -------------------------------------------------------------------------------

    def send(self, dims: Dims, x: Tensor, dst: int, tag: int = 0, *, handshake: bool = False) -> None:
        """Send `x` to coord `dst` along `dims`; returns when `x` may be changed.

        handshake: send shape and dtype first, for a receiver that gives no buffer.
        tag:       only messages with equal tags meet (Gloo; NCCL matches by order).
        """
        self._at[dims].messages.isend(x, dst, tag, handshake).wait()

    def recv(self, dims: Dims, out: Tensor | None = None, *, src: int, tag: int = 0) -> Tensor:
        """Receive from coord `src` along `dims` into `out`, and return it.

        out: of the sender's shape and dtype; None: the message has a handshake, the result is new.
        """
        return self._at[dims].messages.recv(out, src, tag)

    def recv_any(self, dims: Dims, out: Tensor | None = None, *, tag: int = 0) -> tuple[Tensor, int]:
        """Receive from whichever coord sends first; returns the tensor and that coord. Gloo only."""
        return self._at[dims].messages.recv_any(out, tag)

    def isend(
        self, dims: Dims, x: Tensor, dst: int, tag: int = 0, *, handshake: bool = False
    ) -> Handle[None]:
        """Start a send; `x` must not change before the handle's wait() returns."""
        return self._at[dims].messages.isend(x, dst, tag, handshake)

    def irecv(self, dims: Dims, out: Tensor, src: int, tag: int = 0) -> Handle[Tensor]:
        """Start a receive; the handle's wait() returns `out`, which must not be used before."""
        return self._at[dims].messages.irecv(out, src, tag)

    def exchange(
        self, dims: Dims, sends: Sequence[Message] = (), recvs: Sequence[Message] = ()
    ) -> list[Tensor]:
        """A set of messages at once: sends as (x, dst), receives as (out, src), coords along `dims`.

        All are started before any is waited for, so no order of them can deadlock. Between two
        ranks, messages of one tag meet in the order in which they are listed; a tag may follow the
        coord: (x, dst, tag).
        Returns: the received tensors, in the order of `recvs`.
        """
        return self._at[dims].messages.exchange(sends, recvs)

    def shift(
        self, dims: Dims, x: Tensor, offset: int = 1, *, wrap: bool = True, handshake: bool = False
    ) -> Tensor | None:
        """Send `x` to the coord `offset` further along `dims`, return what came from as far behind.

        wrap=True: a ring. wrap=False: an open line; the ranks at the edge get None. The semantics
        are those of MPI_Cart_shift followed by MPI_Sendrecv.
        Shape:   equal on all ranks, or any with handshake=True; new memory.
        """
        return self._at[dims].messages.shift(x, offset, wrap, handshake)

    # -- life -----------------------------------------------------------------------------------

    def create(
        self,
        name: str,
        dims: tuple[str, ...],
        *,
        backend: str | None = None,
        timeout_s: float | None = None,
        lane: str = "",
    ) -> None:
        """Declare the merged dim `name` on the live mesh and create its groups.

        Called by: every rank of the mesh, in the same program order. Ranks agree on it first.
        Raises:    LayoutError, UnknownDim; MeshMismatchError where ranks ask for different groups.
        """
        self._usable()
        merge = {**self.layout.merge, name: dims}
        layout = Layout(self.layout.dims, self.layout.rank_order, self.layout.views, merge)
        own = GroupOptions(
            backend=backend or self.plan.defaults.backend,
            timeout_s=timeout_s or self.plan.defaults.timeout_s,
            lane=lane,
        )
        plan = Plan(layout, self.plan.defaults, {**self.plan.options, name: own}, self.plan.device)
        transport = self._add(self, plan, name)
        self.plan, self.layout = plan, layout
        self._transports[name] = transport
        self._at.clear()
        for family in plan.families:
            self._at[family.name] = self._communicator(family.name, self._transports[family.name])
        self._torch.relayout(layout)
        self._rearranger = Rearranger(layout, self._at, self.functional, self.label)

    def close(self) -> None:
        """Give every group back, last created first. Closing twice is harmless.

        Called by: every rank, at the same point of the program.
        """
        if not self.closed:
            self.closed = True
            self._at.clear()
            self._torch.close()
            self.store.close()
            self._on_close()

    def __enter__(self) -> Mesh:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        dims = ", ".join(f"{name}={size}" for name, size in self.layout.dims.items())
        state = "closed" if self.closed else f"rank {self.rank}" if self.is_member else "not a member"
        return f"Mesh({dims}; {state}, {self.device.type})"

    def __str__(self) -> str:
        """Dims, groups and neighbours as a table of 100 columns, without colour."""
        from rich.console import Console

        console = Console(width=100, color_system=None)
        with console.capture() as capture:
            console.print(self.__rich__())
        return capture.get()

    def __rich__(self) -> RenderableType:
        """What rich prints: the same table at the console's width."""
        return plan_view(self.plan, self.rank if self.is_member else None)

    @property
    def label(self) -> str:
        """This rank with its coords, as in `rank 5 (pp=1 dp=0 tp=1)`."""
        if not self.is_member:
            return f"rank {self.rank} (not in the mesh)"
        inner = " ".join(f"{name}={coord}" for name, coord in self.coords.items())
        return f"rank {self.rank} ({inner})"

    # -- inside ---------------------------------------------------------------------------------

    def _communicator(self, name: str, transport: Transport) -> Communicator:
        return Communicator(name, transport, self.label)

    def _transport_of(self, name: str) -> Transport:
        self._usable()
        return self._transports[name]

    def _member(self) -> int:
        if not self.is_member:
            raise NotMember(
                f"rank {self.rank} is not in the mesh {dict(self.layout.dims)}",
                given=f"rank {self.rank}; the mesh covers ranks {fold(self.layout.ranks)}",
                expected="a rank of the mesh",
                hint="if mesh.is_member:",
            )
        return self.rank

    def _usable(self) -> None:
        self._member()
        if self.closed:
            raise MeshClosed(
                f"the mesh {dict(self.layout.dims)} is closed on {self.label}",
                given="a call after close(), or after the with block",
                expected="an open mesh",
                hint="move the call into the with block, or init a new mesh",
            )

    def _explain(self, dims: Dims) -> Communicator:
        self._usable()
        if not isinstance(dims, str) and self.size(dims) == 1:
            return self._communicator(", ".join(dims), SoloTransport(self.device))
        name = self._family_of(dims)
        return self._communicator(name, self._transports[name])

    def _family_of(self, dims: Dims) -> str:
        """The name whose groups are those of `dims`. Raises UnknownDim where no group was declared."""
        wanted = self.layout.digits(dims).canonical()
        for family in self.plan.families:
            if self.layout.digits(family.name).canonical() == wanted:
                return family.name
        listed = ", ".join(f'"{name}"' for name in dims)
        joined = "_".join(dims)
        raise UnknownDim(
            f"no group was declared over ({listed})",
            given=f"({listed}) on {self.label}",
            expected="one dim, or dims that a merged dim covers: " + (", ".join(self.layout.merge) or "none"),
            hint=f"merge = {{ {joined} = [{listed}] }} in the config, or, on every rank, "
            f'mesh.create("{joined}", ({listed}))',
        )
