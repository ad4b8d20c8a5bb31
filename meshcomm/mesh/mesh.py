"""An open mesh in this process: this rank's coords, and communication along dims by name."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from operator import index
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, final, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling
from torch.distributed.device_mesh import DeviceMesh

from meshcomm.comm import CommunicatorCache, Functional, Handle
from meshcomm.comm.along import AlongDims
from meshcomm.comm.objects import Objects
from meshcomm.errors import ConfigError, LayoutError, UnsupportedOp
from meshcomm.layout import Dims, Layout, Plan
from meshcomm.layout.sizes import whole
from meshcomm.mesh.debug import Debug
from meshcomm.mesh.elastic import Elastic
from meshcomm.mesh.state import State
from meshcomm.rendezvous.store import MeshStore
from meshcomm.transport import ProcessGroupTransport
from meshcomm.transport.torch_private import outside_graphs
from meshcomm.watching.callsite import callsite
from meshcomm.watching.exceptions import caused_by

if TYPE_CHECKING:
    from rich.console import RenderableType

    from meshcomm.config import TopologyConfig
    from meshcomm.mesh.stats import Stats
    from meshcomm.pattern.apply import GatherRules, Rearranger
    from meshcomm.show.grid import RankGrid


def _of_state(name: str) -> Any:
    """Return a property that is an attribute of the mesh's state."""

    # A Python function, as torch.compile traces the properties that a program reads in a graph.
    def read(mesh: Mesh) -> Any:
        return getattr(mesh._state, name)

    return property(read, doc="")


@final
class Mesh(AlongDims):
    """Named dims over the ranks of a job, with a communicator along each dim. Created by `meshcomm.init`.

    The first argument of every communication method selects the dims: the name of a dim or of a merged dim, or
    a tuple of names that a declared group covers. Peers and roots are coords along the dims, never global
    ranks.

    On a rank outside the mesh, `is_member` is False, and every method that only ranks of the mesh may call raises
    NotMember.

    Attributes:
        rank: the global rank of this process.
        device: the torch device of this rank.
        layout: a `Layout` with the positions of all ranks.
        plan: a `Plan` with the groups of the mesh.
        functional: collectives that support autograd.
        objects: collectives and messages for Python objects.
        store: the job's key-value store.
        debug: breakpoints, traces, stragglers, and barriers that name the missing ranks.
        elastic: what to do after ranks were lost and replaced.
        dims: base dims and their sizes, outermost first.
        world_size: number of ranks in the mesh.
        is_member: whether this rank is in the mesh.
        local_rank: the local rank of this process on its host, as the launcher sets it. Every host has a local rank 0.
        label: this rank with its coords, such as `rank 5 (pp=1 dp=0 tp=1)`.
        warm_up_s: the result of the last `warm_up` call; empty before the first call.
        closed: whether `close` was called.
        is_fake: True in a dry run, where results have a shape but no values.
    """

    rank: int = _of_state("rank")
    layout: Layout = _of_state("layout")
    plan: Plan = _of_state("plan")
    store: MeshStore = _of_state("store")
    dims: Mapping[str, int] = _of_state("dims")
    world_size: int = _of_state("world_size")
    is_member: bool = _of_state("is_member")
    local_rank: int = _of_state("local_rank")
    label: str = _of_state("label")
    warm_up_s: Mapping[str, float] = _of_state("warm_up_s")
    closed: bool = _of_state("closed")
    device: torch.device
    is_fake: bool
    functional: Functional

    def __init__(self, state: State) -> None:
        self._at = CommunicatorCache(lambda dims: self._state.explain(dims))
        self.device, self.is_fake = state.device, state.is_fake
        self._live(state)
        self.objects: Objects = Objects(self._at, self.device, self.is_fake)
        self.debug: Debug = Debug(self)
        self.elastic: Elastic = Elastic(self)

    def _live(self, state: State) -> None:
        """Take a state, also that of a reopened mesh. All else stays but `functional`, as graphs from before are refused."""
        with ExitStack() as opening:
            opening.enter_context(state.held.resources)
            state.connect(self._at)
            opening.pop_all()
        self._state = state
        self.functional = Functional(self._at, self._planner)

    # -- where ranks are -------------------------------------------------------------------------

    @property
    def coords(self) -> dict[str, int]:
        """This rank's coords, by base dim."""
        return self.layout.coords(self._state.member())

    def get_coords(self, rank: int, view: str | None = None) -> dict[str, int]:
        """Return the coords of any rank, along the base dims or in a view."""
        return self.layout.coords(rank, view)

    def size(self, dims: Dims) -> int:
        """Return the number of ranks along `dims`."""
        return self.layout.size(dims)

    def coord(self, dims: Dims) -> int:
        """Return this rank's coord along `dims`."""
        return self.layout.coord(self._state.member(), dims)

    @property
    def data_rank(self) -> int:
        """This rank's shard of the samples: its coord along the data and shard dims.

        Pass it to DistributedSampler as `rank`. Raises LayoutError if the mesh was opened without [parallel],
        which assigns roles to the dims.
        """
        dims = self._samples_differ_along()
        return self.coord(dims) if dims else 0

    @property
    def data_world_size(self) -> int:
        """Number of shards that the samples are split into. Pass it to DistributedSampler as `num_replicas`.

        Raises the same errors as `data_rank`.
        """
        dims = self._samples_differ_along()
        return self.size(dims) if dims else 1

    def _samples_differ_along(self) -> tuple[str, ...]:
        self._state.member()
        if self._state.data_dims is None:
            dims = tuple(self.layout.dims)
            raise LayoutError(
                "the mesh does not know along which dims samples differ",
                given=f"dims {', '.join(dims)}, and no [parallel] section that assigns their roles",
                expected="a mesh opened with a configuration that has [parallel]",
                hint=f'mesh.coord("{dims[0]}") and mesh.size("{dims[0]}"), or a merged dim, without dims whose ranks read the '
                "same samples: tensor, pipeline, context",
            )
        return self._state.data_dims

    def ranks(self, dims: Dims) -> list[int]:
        """Return the global ranks of this rank's group along `dims`, indexed by coord."""
        ranks: list[int] = self.layout.group_of(self._state.member(), dims).tolist()
        return ranks

    def get_rank(self, **coords: int) -> int:
        """Return the global rank at these coords."""
        return self.layout.get_rank(**coords)

    @overload
    def neighbor_rank(self, dims: Dims, offset: int, *, wrap: Literal[True] = ...) -> int: ...
    @overload
    def neighbor_rank(self, dims: Dims, offset: int, *, wrap: bool) -> int | None: ...
    def neighbor_rank(self, dims: Dims, offset: int, *, wrap: bool = True) -> int | None:
        """Return the global rank whose coord along `dims` is `offset` higher. Without `wrap`, return None past the edge.

        Use it for logging and lookups: sends and receives take coords, not global ranks.
        """
        return self.layout.neighbor_rank(self._state.member(), dims, offset, wrap=wrap)

    @property
    def topology(self) -> TopologyConfig:
        """The placement of ranks on nodes, from the configuration or the launcher."""
        return self._state.topology()

    @property
    def is_async(self) -> bool:
        """Whether calls return once they are enqueued on the device, as with NCCL. Also True in a dry run."""
        return (
            self.is_fake
            or self.device.type != "cpu"
            or any(transport.ordered for transport in self._state.transports.values())
        )

    def seed(self, *key: int | str, along: Dims = ()) -> int:
        """Return a seed that differs along the dims in `along` and is equal along all other dims.

            torch.manual_seed(mesh.seed(0, step, along=("dp", "cp")))   # equal along tp, where activations are

        key:     values that the seed depends on, such as a base seed, a step or a name. Integers count by their value,
                 whatever their type: 5, numpy.int64(5), torch.tensor(5) and 5.0 give the same seed.
        Returns: an integer from 0 to 2^63 - 1, derived from the SHA-256 of the key and the coords. If every coord
                 is 0, the seed is the same on every mesh.
        Raises:  UnknownDim; NotMember; ConfigError if no key is given, or a value that is neither an integer nor text.
        """
        if not key:
            raise ConfigError(
                "a seed needs a key",
                given=f"mesh.seed(along={along!r})",
                expected="one or more numbers, equal on the ranks that must draw the same values",
                hint="mesh.seed(0, along=...), followed by the step for different numbers in each step",
            )
        names = (along,) if isinstance(along, str) else along
        coords = {name: self.coord(name) for name in sorted(set(names))}
        digest = hashlib.sha256(f"{tuple(map(_key_part, key))!r} {coords!r}".encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1

    def generator(
        self, *key: int | str, along: Dims = (), device: torch.device | str | None = None
    ) -> torch.Generator:
        """Return a new generator seeded with the result of `seed`, on `device` or, by default, this rank's device.

        With the same seed, CPU and GPU generators draw different numbers.
        """
        return torch.Generator(device or self.device).manual_seed(self.seed(*key, along=along))

    # -- patterns ---------------------------------------------------------------------------------

    def rearrange(
        self,
        x: Tensor,
        pattern: str,
        /,
        *,
        partial: str | None = None,
        grad: GatherRules | None = None,
        **sizes: int,
    ) -> Tensor:
        """Run einops.rearrange with mesh dims in the pattern. A dim's name marks the axis that is split along that dim.

        A dim that appears only on the right is gathered. A dim that appears only on the left is sliced or, with
        `partial` ("sum", "avg", "min", ...), reduced and scattered. Moving a dim to another axis is an
        all-to-all. See docs/guide/patterns.md.

            mesh.rearrange(x, "b s h -> b s (tp h)")                      all_gather along tp
            mesh.rearrange(x, "b s (tp h) -> b s h", partial="sum")       reduce_scatter along tp
            mesh.rearrange(x, "b s (cp h) d -> b (cp s) h d")             all_to_all along cp

        Called by:  every rank along the dims of the pattern, in the same program order.
        Gradient:   if x requires grad, a gather needs `grad`: "slice" or "reduce_scatter", as in
                    `mesh.functional.all_gather`. Every other step has only one possible gradient.
        Raises:     PatternError, ShapeError; UnknownDim, AutogradError, CommunicationError.
        """
        if is_compiling():
            from meshcomm.pattern.apply import rearrange_in_graph

            return rearrange_in_graph(self, x, pattern, partial, grad, sizes)
        state = self._state
        if state.rearranger is None:
            state.rearranger = self._planner()
        return state.rearranger.run(x, pattern, partial, grad, sizes)

    def _planner(self) -> Rearranger:
        from meshcomm.pattern.apply import Rearranger

        return Rearranger(self.layout, self._at, self.functional, self.label)

    # -- barriers ---------------------------------------------------------------------------------

    @overload
    def barrier(self, dims: Dims | None = ..., *, async_op: Literal[False] = ...) -> None: ...
    @overload
    def barrier(self, dims: Dims, *, async_op: Literal[True]) -> Handle[None]: ...
    @overload
    def barrier(self, dims: Dims | None = ..., *, async_op: bool) -> Handle[None] | None: ...
    @outside_graphs
    def barrier(self, dims: Dims | None = None, *, async_op: bool = False) -> Handle[None] | None:
        """Block until every rank along `dims` has arrived.

        dims:     the dims to synchronize along. If None, all ranks of the mesh synchronize, one dim after another.
        async_op: return a Handle immediately. Requires dims.

        `mesh.debug.monitored_barrier` has a timeout of its own, and names the ranks that did not arrive.
        """
        if dims is not None:
            return self._at.along(dims).barrier(async_op)
        if async_op:
            self._state.usable()
            raise UnsupportedOp(
                f"barrier on {self.label}: async_op without dims",
                given="dims=None, async_op=True",
                expected="async_op with dims: the backend synchronizes their ranks in one call",
                hint=f'mesh.barrier("{next(iter(self.layout.dims))}", async_op=True)',
            )
        for name in self.layout.dims:
            self._at[name].barrier()
        return None

    @outside_graphs
    def warm_up(self) -> dict[str, float]:
        """Use every group once, in plan order, so that later calls do not have to connect first.

        `meshcomm.init` calls this if the configuration has `warm_up = true`.

        Called by: every rank of the mesh. NCCL requires all ranks of a group to join its first call.
        Returns:   the seconds that each group took on this rank, by group name. `warm_up_s` keeps the last result.
        """
        self._state.usable()
        seconds: dict[str, float] = {}
        for family in self.plan.families:
            if family.creates:
                start = time.perf_counter()
                self._at[family.name].barrier()
                seconds[family.name] = time.perf_counter() - start
        self._state.warm_up_s = seconds
        return dict(seconds)

    # -- calls over time --------------------------------------------------------------------------

    @outside_graphs
    def step(self, number: int | None = None, *, apart: Sequence[Dims] = ()) -> int:
        """Mark the end of a program step, in which all ranks of a group must have issued the same collectives.

        This call sends nothing and takes microseconds. A background thread compares the calls of each step across
        ranks. The comparison detects calls and steps that one rank skipped, and extra calls among identical
        ones.
        docs/guide/hangs.md describes the detection delay.

        Called by: every rank of the mesh, at the same point of the program.
        number:    the program's step number, equal on all ranks. If None, the previous number plus one, starting
                   at 1.
        apart:     dims whose groups are also used by other threads of this rank. Calls in these groups are not compared.
        Returns:   the step number.
        Raises:    CallMismatchError on every rank of a group whose ranks differed in this or an earlier step, as
                   soon as the difference is known. `close` and calls that fail in the meantime raise it too.
        """
        self._state.usable()
        metrics, watch = self._state.metrics, self._state.watch
        number = metrics.number + 1 if number is None else whole(number, "step")
        metrics.step(number, {id(self._at[dims].recorder) for dims in apart}, callsite(1))
        if watch is not None:
            watch.noted(metrics.steps)
        return number

    @outside_graphs
    def stats(self) -> Stats:
        """Return this rank's call counts, bytes and seconds since the mesh was opened.

        The result has a row for each kind of call along each dim of size 2 or more, and prints as a table.
        `after.since(before)` is the difference between two results. `stats` does not communicate.

        From torch 2.14 on, calls that torch makes on `group` or `device_mesh`, for example in FSDP or pipelining, are
        listed under names such as `all_gather (torch)`, without a time. If [topology] has link speeds, the result
        includes predicted times.

        The seconds measure how long calls blocked the program. On devices other than cpu and in NCCL groups, a
        call returns once it is enqueued, so the seconds are None, shown as "-" in the table.
        """
        self._state.usable()
        from meshcomm.mesh.stats import stats
        from meshcomm.predict.links import machine

        timed = self.device.type == "cpu"
        metrics = self._state.metrics
        counters = [
            (recorder.counters, timed and not recorder.ordered) for recorder in metrics.recorders.values()
        ]
        seconds = time.perf_counter() - metrics.opened
        return stats(self.label, seconds, counters, self.plan, machine(self.topology))

    # -- torch's own objects ------------------------------------------------------------------------

    def group(self, dims: Dims) -> dist.ProcessGroup:
        """Return the torch process group along `dims`. A rank's group rank equals its coord along `dims`.

        Collectives in a group of size 1 only copy data.
        """
        self._state.usable()
        if self.layout.digits(dims).size > 1 and isinstance(dims, tuple):
            return self._state.torch.group(self._state.family_of(dims))
        return self._state.torch.group(dims if isinstance(dims, str) else dims[0])

    @property
    def device_mesh(self) -> DeviceMesh:
        """A torch DeviceMesh with all base dims, over this mesh's groups."""
        return self[tuple(self.layout.dims)]

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """`mesh["tp"]`, `mesh["dp", "tp"]`: a torch DeviceMesh with these dims, in this order.

        Accepts dims, merged dims, or dims of one view. Slices that keep the order of the base dims share one root
        mesh. Raises UnsupportedOp for a link between two jobs, whose ranks are not those of torch's default group.
        """
        self._state.usable()
        if not self._state.of_job:
            raise UnsupportedOp(
                f"a link between two jobs has no DeviceMesh, on {self.label}",
                given=f"mesh[{names!r}]",
                expected="a mesh of one job: torch counts the ranks of a DeviceMesh in its default group",
                hint="mesh.group(dims), or the job's own mesh",
            )
        return self._state.torch.device_mesh((names,) if isinstance(names, str) else names)

    # -- life -----------------------------------------------------------------------------------

    def create_group(
        self,
        name: str,
        dims: tuple[str, ...],
        *,
        backend: str | None = None,
        timeout_s: float | None = None,
        comm_id: str = "",
    ) -> None:
        """Declare the merged dim `name` on the open mesh and create its groups.

        Called by: every rank of the mesh, in the same program order. The ranks first compare their arguments.
        Raises:    LayoutError, UnknownDim; MeshMismatchError if ranks request different groups.
        """
        self._state.create_group(name, dims, backend, timeout_s, comm_id)

    def close(self) -> None:
        """Destroy the groups in reverse order of creation. Closing a mesh twice is harmless.

        Called by: every rank, at the same point of the program.
        Raises:    CallMismatchError if `step` found a difference that no earlier call raised. The error is
                   raised after cleanup, and only if no exception is being handled. To find such a difference, `close`
                   waits up to two seconds for the neighbors along each dim to reach the same step.
        """
        self._state.close(compare=sys.exception() is None)

    def __enter__(self) -> Mesh:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        state, explained = self._state, None
        if error is not None and state.watch is not None and not state.closed:
            explained = state.watch.explain(error)
        state.close(compare=error is None)
        if error is not None and explained is not None:
            raise caused_by(explained, error)

    def __copy__(self) -> Mesh:
        return self  # a copied module still communicates with the same ranks

    def __deepcopy__(self, memo: dict[int, Any]) -> Mesh:
        return self

    def __reduce__(self) -> NoReturn:
        raise UnsupportedOp(
            f"a mesh cannot be pickled, on {self.label}",
            given="pickling the mesh or an object that holds it, or sending one of these to another process",
            expected="a mesh that each process opens itself",
            hint="pickle mesh.layout or mesh.plan, and call meshcomm.init in the other process",
        )

    def __repr__(self) -> str:
        dims = ", ".join(f"{name}={size}" for name, size in self.layout.dims.items())
        state = "closed" if self.closed else f"rank {self.rank}" if self.is_member else "not a member"
        return f"Mesh({dims}; {state}, {self.device.type})"

    def show(self, by: Dims | None = None) -> RankGrid:
        """Return the ranks of the full mesh as colored blocks, one color for each group along `by`. This rank is
        marked.

        by:      the dims to color by. If None, the innermost dim.
        Returns: an object that prints as text, in color with rich, and displays as a picture in a notebook. Write it
                 to a file with `.save("topo.svg")`. Does not communicate.
        Raises:  UnknownDim.
        """
        from meshcomm.show.grid import RankGrid, grid_facts

        return RankGrid(grid_facts(self.plan, by, self.topology, self.rank if self.is_member else None))

    def __str__(self) -> str:
        """Return dims, groups and neighbors as a table 100 columns wide, without color."""
        from meshcomm.show.page import as_text

        return as_text(self.__rich__())

    def __rich__(self) -> RenderableType:
        """Return the same table fitted to the width of the console."""
        from meshcomm.show.plan import plan_view

        existing = {
            name: {"backend": transport.name, "timeout_s": transport.timeout_s}
            for name, transport in self._state.transports.items()
            if isinstance(transport, ProcessGroupTransport) and not transport.owned
        }
        return plan_view(self.plan, self.rank if self.is_member else None, self.topology, existing)


def _key_part(part: Any) -> int | str:
    """Return one value of a seed's key, so that equal values of other types, and of types with other reprs, are equal."""
    if isinstance(part, str):
        return "".join(part)
    try:
        number = part.item() if hasattr(part, "item") else part
        return index(int(number) if isinstance(number, float) and number.is_integer() else number)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(
            "a seed's key has a value that is neither an integer nor text",
            given=f"{part!r}, a {type(part).__name__}",
            expected="integers of any type, and text",
            hint="an integer that stands for the value, or its text, such as str(x)",
        ) from None
