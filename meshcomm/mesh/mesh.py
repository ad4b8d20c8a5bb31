"""An open mesh in this process: this rank's coords, and communication along dims by name."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from gc import collect
from operator import index
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, final, overload
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling
from torch.distributed.device_mesh import DeviceMesh

from meshcomm.comm import Communicator, CommunicatorCache, Functional, Handle
from meshcomm.comm.along import AlongDims
from meshcomm.comm.callsite import callsite, users_frame
from meshcomm.comm.checks import seconds_of
from meshcomm.comm.mismatch import CallCheck
from meshcomm.comm.objects import Objects
from meshcomm.errors import (
    CommunicationError,
    ConfigError,
    LaunchError,
    LayoutError,
    MeshClosed,
    MeshcommError,
    MeshMismatchError,
    NotMember,
    RankLost,
    StoreError,
    UnknownDim,
    UnsupportedOp,
)
from meshcomm.layout import Dims, GroupOptions, Layout, Plan
from meshcomm.layout.sizes import fold, whole
from meshcomm.mesh.agree import agree
from meshcomm.mesh.barriers import calls_of, monitored_barrier
from meshcomm.mesh.devices import check_backends
from meshcomm.mesh.outside import OutsideGroups
from meshcomm.mesh.rank_failure import caused_by
from meshcomm.mesh.runtime import WORLD, Metrics, Runtime
from meshcomm.mesh.torch_mesh import TorchMesh
from meshcomm.rendezvous.generation import Generation
from meshcomm.rendezvous.signed import unsigned
from meshcomm.rendezvous.store import MeshStore, prefixed, within
from meshcomm.transport import ProcessGroupTransport, SoloTransport, Transport
from meshcomm.transport.connections import abort_all
from meshcomm.transport.torch_private import (
    default_group,
    group_named,
    held_calls,
    keep_for_good,
    outside_graphs,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from meshcomm.config import TopologyConfig
    from meshcomm.mesh.all_ranks import StatsOfAll, Stragglers
    from meshcomm.mesh.stats import Stats
    from meshcomm.mesh.tracing import Trace
    from meshcomm.pattern.apply import GatherRules, Rearranger
    from meshcomm.show.grid import RankGrid

# Time limit in seconds for NCCL groups to abort their calls when a program leaves a mesh with an error.
_ABORTS_S: Final = 10.0

# Time limit in seconds for NCCL groups to close if CUDA graphs have captured their calls.
_GRAPHS_S: Final = 10.0


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
        warm_up_s: the result of the last `warm_up` call; empty before the first call.
        closed: whether `close` was called.
        is_fake: True in a dry run, where results have a shape but no values.
    """

    def __init__(self, plan: Plan, runtime: Runtime) -> None:
        self.plan = plan
        self.layout: Layout = plan.layout
        self.rank = runtime.rank
        self.device = runtime.device
        self._launch = runtime.launch
        self._topology = runtime.topology
        self._data_dims = runtime.data_dims
        # Whether this is torch's fake backend: no other ranks exist, and results have a shape but no values.
        self.is_fake = runtime.is_fake
        self._store = prefixed("mesh", runtime.store)
        user = unsigned(prefixed("user", self._store))
        lost = partial(_lost, ref(self))
        self.store = MeshStore(user, self.label, plan.defaults.timeout_s, self.is_fake, lost)
        # The result of the last `warm_up` call; empty before the first call.
        self.warm_up_s: Mapping[str, float] = {}
        self.closed = False
        # The process that opened the mesh; differs from this process after a fork.
        self._parent: int | None = None
        self._process = os.getpid()
        _OPENED.add(self)
        self._runtime = runtime
        self._generation, self._recovers = runtime.generation, runtime.generations is not None
        self._transports = runtime.transports
        self._watch = runtime.watch
        self._at = CommunicatorCache(self._explain)
        self.functional = Functional(self._at, self._planner)
        self.objects = Objects(self._at, self.device, self.is_fake)
        self.metrics = Metrics()
        self._torch = TorchMesh(self.layout, self.rank, self.device, self._transports, runtime.prefix)
        # The number of store barriers per group, and of `breakpoint` calls per line.
        self._barriers: dict[str, int] = {}
        self._breakpoints: dict[tuple[str, int], int] = {}
        self._rearranger: Rearranger | None = None
        self._outside: OutsideGroups | None = None
        if self.is_member:
            self._connect()
            if self._watch is not None and self._watch.timed and not self.is_fake:
                self._outside = OutsideGroups(
                    self._watch, self.layout.ranks.tolist(), self.device, self.label, runtime.validate_calls
                )

    # -- where ranks are -------------------------------------------------------------------------

    @property
    def is_member(self) -> bool:
        """Whether this rank is in the mesh."""
        return self.rank in self.layout

    @property
    def local_rank(self) -> int:
        """The local rank of this process on its host, as the launcher sets it. Every host has a local rank 0."""
        return self._launch.local_rank

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

    def get_coords(self, rank: int, view: str | None = None) -> dict[str, int]:
        """Return the coords of any rank, along the base dims or in a view."""
        return self.layout.coords(rank, view)

    def size(self, dims: Dims) -> int:
        """Return the number of ranks along `dims`."""
        return self.layout.size(dims)

    def coord(self, dims: Dims) -> int:
        """Return this rank's coord along `dims`."""
        return self.layout.coord(self._member(), dims)

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
        self._member()
        if self._data_dims is None:
            dims = tuple(self.layout.dims)
            some = f'"{dims[0]}"' if len(dims) == 1 else f'("{dims[0]}", "{dims[1]}")'
            raise LayoutError(
                "the mesh does not know along which dims samples differ",
                given=f"dims {', '.join(dims)}, and no [parallel] section that assigns their roles",
                expected="a mesh opened with a configuration that has [parallel]",
                hint=f"mesh.coord({some}) and mesh.size({some}), with the dims along which your samples differ",
            )
        return self._data_dims

    def ranks(self, dims: Dims) -> list[int]:
        """Return the global ranks of this rank's group along `dims`, indexed by coord."""
        ranks: list[int] = self.layout.group_of(self._member(), dims).tolist()
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
        return self.layout.neighbor_rank(self._member(), dims, offset, wrap=wrap)

    @property
    def label(self) -> str:
        """This rank with its coords, such as `rank 5 (pp=1 dp=0 tp=1)`."""
        return self.layout.label(self.rank)

    @property
    def topology(self) -> TopologyConfig:
        """The placement of ranks on nodes, from the configuration or the launcher."""
        return self._topology()

    @property
    def is_async(self) -> bool:
        """Whether calls return once they are enqueued on the device, as with NCCL. Also True in a dry run."""
        return (
            self.is_fake
            or self.device.type != "cpu"
            or any(each.ordered for each in self._transports.values())
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
        if self._rearranger is None:
            self._rearranger = self._planner()
        return self._rearranger.run(x, pattern, partial, grad, sizes)

    def _planner(self) -> Rearranger:
        from meshcomm.pattern.apply import Rearranger

        return Rearranger(self.layout, self._at, self.functional, self.label)

    # -- barriers ---------------------------------------------------------------------------------

    @overload
    def barrier(
        self, dims: Dims | None = ..., *, timeout_s: float | None = ..., async_op: Literal[False] = ...
    ) -> None: ...
    @overload
    def barrier(self, dims: Dims, *, timeout_s: None = ..., async_op: Literal[True]) -> Handle[None]: ...
    @overload
    def barrier(
        self, dims: Dims | None = ..., *, timeout_s: float | None = ..., async_op: bool
    ) -> Handle[None] | None: ...
    @outside_graphs
    def barrier(
        self, dims: Dims | None = None, *, timeout_s: float | None = None, async_op: bool = False
    ) -> Handle[None] | None:
        """Block until every rank along `dims` has arrived.

        dims:      the dims to synchronize along. If None, all ranks of the mesh synchronize, one dim after another.
        timeout_s: if given, the ranks synchronize through the store instead of the backend, even with NCCL. When the
                   timeout expires, every rank that has arrived raises BarrierTimeout, which names the missing ranks
                   and the call that each of them is executing.
        """
        if async_op and (timeout_s is not None or dims is None):
            self._usable()
            raise UnsupportedOp(
                f"barrier on {self.label}: async_op {'without dims' if dims is None else 'and timeout_s together'}",
                given=f"dims={dims!r}, timeout_s={timeout_s}, async_op=True",
                expected="async_op with dims and without timeout_s: the backend synchronizes the ranks, in one call",
                hint=f'mesh.barrier("{next(iter(self.layout.dims))}", async_op=True)',
            )
        if timeout_s is not None:
            self._meet_at_store(dims, timeout_s)
            return None
        if dims is not None:
            return self._at.along(dims).barrier(async_op)
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
        self._usable()
        seconds: dict[str, float] = {}
        for family in self.plan.families:
            if family.creates:
                start = time.perf_counter()
                self._at[family.name].barrier()
                seconds[family.name] = time.perf_counter() - start
        self.warm_up_s = seconds
        return dict(seconds)

    @outside_graphs
    def breakpoint(self, *, timeout_s: float = 3600.0, skip: int = 0, **coords: int) -> None:
        """Stop one rank in the Python debugger at the line of this call, while the other ranks wait.

        In `mesh.breakpoint(dp=0, tp=1)`, unnamed dims default to coord 0. The debugger reads from the
        stdin of the stopped rank.

        Called by:  every rank of the mesh. The ranks wait on the store, so no group timeout applies.
        timeout_s:  how long the other ranks wait before they raise BarrierTimeout.
        skip:       number of calls at this line to ignore before stopping.
        Raises:     UnknownDim, LayoutError on every rank; bdb.BdbQuit on the stopped rank after `q`.
        """
        self._usable()
        at = {**dict.fromkeys(self.layout.dims, 0), **coords}
        stopped = self.layout.get_rank(**at)
        frame = users_frame()
        line = (frame.f_code.co_filename, frame.f_lineno)
        self._breakpoints[line] = number = self._breakpoints.get(line, 0) + 1
        if number <= skip:
            return
        if self.rank == stopped:
            from meshcomm.mesh.debugger import stop_at

            stop_at(frame, self.label, partial(self._meet_at_store, None, timeout_s))
        else:
            self._meet_at_store(None, timeout_s)

    def _meet_at_store(self, dims: Dims | None, timeout_s: float) -> None:
        self._usable()
        timeout_s = seconds_of(timeout_s, lambda: f"barrier on {self.label}")
        along = tuple(self.layout.dims) if dims is None else dims
        # The first rank identifies the group. Barriers are numbered per group.
        ranks = self.ranks(along)
        key = f"{'.'.join(self.layout.expand(along))}/{ranks[0]}"
        self._barriers[key] = number = self._barriers.get(key, 0) + 1
        try:
            monitored_barrier(
                prefixed(f"barrier/{key}/{number}", self._store),
                ranks.index(self.rank),
                ranks,
                timeout_s,
                f"barrier along {along if isinstance(along, str) else ', '.join(along)} on {self.label}",
                partial(calls_of, self._watch, self.metrics.recorders),
            )
        except (RuntimeError, StoreError) as error:
            if (lost := self.lost(error)) is not None:
                raise lost from error
            raise

    # -- calls over time --------------------------------------------------------------------------

    @outside_graphs
    def stragglers(self) -> Stragglers:
        """Return, for each dim, which ranks were late to start the last 256 collectives of their group.

        The result prints as a table. Under NCCL, a call starts when the host enqueues it.

        Called by: every rank of the mesh.
        """
        from meshcomm.mesh.all_ranks import stragglers

        self._usable()
        names = [family.name for family in self.plan.families if family.size > 1]
        # Names of the same group share one recorder. Keep only the first name.
        first = {id(self._at[name].recorder): name for name in reversed(names)}
        named = {name: self._at[name].recorder for name in names if name in first.values()}
        return stragglers(self, named)

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
        self._usable()
        number = self.metrics.number + 1 if number is None else whole(number, "step")
        self.metrics.step(number, {id(self._at[dims].recorder) for dims in apart}, callsite(1))
        if self._watch is not None:
            self._watch.noted(self.metrics.steps)
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
        self._usable()
        from meshcomm.mesh.stats import stats
        from meshcomm.predict.links import machine

        timed = self.device.type == "cpu"
        counters = [(each.counters, timed and not each.ordered) for each in self.metrics.recorders.values()]
        seconds = time.perf_counter() - self.metrics.opened
        return stats(self.label, seconds, counters, self.plan, machine(self._topology()))

    @outside_graphs
    def global_stats(self) -> StatsOfAll:
        """Return `stats` summed over all ranks, with the fastest and the slowest rank.

        Called by: every rank of the mesh, in the same program order.
        """
        from meshcomm.mesh.all_ranks import of_every_rank, stats_of_all

        own = self.stats()
        records = of_every_rank(self, (self.rank, own.seconds, own.sums))
        return stats_of_all(records, [family.name for family in self.plan.families])

    @outside_graphs
    def trace(self, path: str | PathLike[str]) -> Trace:
        """Record every call in a `with mesh.trace("trace.json"):` block in one file for all ranks.

        The trace keeps up to 200,000 calls per rank. Open the file in Perfetto or chrome://tracing, which show a
        process for each rank and a track for each dim. The first rank of the mesh writes the file. If the block
        raises, each rank that raised writes its own calls: rank 3 writes trace.rank3.json.

        Called by: every rank of the mesh, around the same part of the program.
        Raises:    UnsupportedOp inside another trace, and in the simulator, whose ranks run one at a time.
                   After the block: TrainingError if the file cannot be written, CommunicationError if some
                   ranks do not arrive.
        """
        self._usable()
        if self._watch is not None and not self._watch.timed:
            raise UnsupportedOp(
                f"no trace of simulated ranks, requested on {self.label}",
                given="mesh.trace in the simulator, whose ranks run one at a time",
                expected="processes, whose times are meaningful",
                hint="meshcomm run CONFIG script.py; mesh.stats() works in the simulator too",
            )
        from meshcomm.mesh.tracing import Trace

        return Trace(self, path)

    # -- torch's own objects ------------------------------------------------------------------------

    def group(self, dims: Dims) -> dist.ProcessGroup:
        """Return the torch process group along `dims`. A rank's group rank equals its coord along `dims`.

        Collectives in a group of size 1 only copy data.
        """
        self._usable()
        if self.layout.digits(dims).size > 1 and isinstance(dims, tuple):
            return self._torch.group(self._family_of(dims))
        return self._torch.group(dims if isinstance(dims, str) else dims[0])

    @property
    def device_mesh(self) -> DeviceMesh:
        """A torch DeviceMesh with all base dims, over this mesh's groups."""
        return self[tuple(self.layout.dims)]

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """`mesh["tp"]`, `mesh["dp", "tp"]`: a torch DeviceMesh with these dims, in this order.

        Accepts dims, merged dims, or dims of one view. Slices that keep the order of the base dims share one root
        mesh.
        """
        self._usable()
        return self._torch.device_mesh((names,) if isinstance(names, str) else names)

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
        self._usable()
        plan = self._merged_plan(name, dims, backend, timeout_s, comm_id)
        try:
            agree(
                prefixed(f"create/{name}", self._runtime.store),
                self.rank,
                [self.rank] if self.is_fake else plan.layout.ranks.tolist(),
                plan.facts(),
                plan.defaults.timeout_s,
                f"the merged dim {name}",
            )
        except StoreError as error:
            if (lost := self.lost(error)) is not None:
                raise lost from error
            raise
        family = plan.family(name)
        if family.size == 1:
            transport: Transport = SoloTransport(self.device, family.options.backend)
        elif family.shares is not None:
            transport = self._transports[family.shares]
        else:
            group = next(group for group in plan.for_rank(self.rank).groups if group.name == name)
            transport = self._runtime.create(group, False)
        self.plan, self.layout, self._torch.layout = plan, plan.layout, plan.layout
        self._transports[name] = transport
        self._at.clear()
        self._connect()
        self._rearranger = None

    def _merged_plan(
        self, name: str, dims: tuple[str, ...], backend: str | None, timeout_s: float | None, comm_id: str
    ) -> Plan:
        """Return the plan with one additional merged dim; see `create_group` for the arguments and errors."""
        self.layout.digits(dims)
        dims = self.layout.expand(dims)
        if name in self.layout.merge:
            raise LayoutError(
                f'the mesh already has a merged dim "{name}", on {self.label}',
                given=f'create_group("{name}", {dims!r})',
                expected=f'another name; "{name}" is over {self.layout.merge[name]!r}',
                hint=f'mesh.size("{name}") and all calls accept it; a name keeps its meaning',
            )
        if timeout_s is not None:
            timeout_s = seconds_of(timeout_s, lambda: f'create_group("{name}") on {self.label}')
        if backend is not None and not isinstance(backend, str):
            raise LayoutError(
                f'create_group("{name}") on {self.label}: backend={backend!r} is not a name',
                given=f"backend={backend!r}",
                expected="a backend's name",
                hint='backend="gloo", or leave it out',
            )
        merge = {**self.layout.merge, name: dims}
        layout = Layout(self.layout.dims, self.layout.rank_order, self.layout.views, merge)
        defaults = self.plan.defaults
        options = GroupOptions(backend or defaults.backend, timeout_s or defaults.timeout_s, comm_id)
        plan = Plan(layout, defaults, {**self.plan.options, name: options}, self.plan.device)
        if WORLD.get() is None:
            check_backends(plan)
        return plan

    @contextmanager
    def _without_calls(self) -> Iterator[None]:
        """In this context, calls on this rank raise `MeshClosed`, because other ranks do not make them."""
        self._usable()
        self._at.clear()
        self.closed = True
        try:
            yield
        finally:
            self.closed = False

    def close(self) -> None:
        """Destroy the groups in reverse order of creation. Closing a mesh twice is harmless.

        Called by: every rank, at the same point of the program.
        Raises:    CallMismatchError if `step` found a difference that no earlier call raised. The error is
                   raised after cleanup, and only if no exception is being handled. To find such a difference, `close`
                   waits up to two seconds for the neighbors along each dim to reach the same step.
        """
        self._close(compare=sys.exception() is None)

    def _close(self, compare: bool) -> None:
        if self.closed:
            return
        if compare and self._watch is not None:
            # Closing a group waits for its queued calls, and nothing would explain a hang there.
            self._watch.drain()
        self.closed = True
        differs = self._watch.before_leaving() if compare and self._watch is not None else None
        self._at.clear()
        recorders = [*self.metrics.recorders.values()]
        captured = any(recorder.captured for recorder in recorders)
        # Destroying a group waits for its calls, and calls that differ may never complete.
        apart = [each.group_name for each in recorders if each.check is not None and each.check.is_apart()]
        keep_for_good([group_named(name) for name in apart])
        self.metrics.recorders.clear()
        if self._watch is not None:
            self._watch.close()
        # Close this after the watch, which may still report a call in a group outside the mesh.
        if self._outside is not None:
            self._outside.close()
        if not compare:
            # Other ranks may never make the queued calls.
            self._abort()
        self._torch.close()
        self.store.close()
        held = _closed_with_graphs(self._runtime.resources, self.label) if captured else None
        self._runtime.resources.close()
        # A closed mesh that is kept alive, for example by a reference cycle, must not keep its store connection.
        del self._store, self._runtime
        error = differs or (held if compare else None)
        if error is not None:
            raise error

    @property
    def generation(self) -> Generation:
        """How often the job lost and replaced ranks before this mesh was opened, and which ranks are new."""
        return self._generation

    @property
    def recovers(self) -> bool:
        """Whether the launcher replaces lost ranks, so that `reopen` can connect to the new processes."""
        return self._recovers

    def lost(self, error: BaseException | None = None) -> RankLost | None:
        """Return a RankLost error if ranks were lost and replaced since this mesh was opened, otherwise None.

        error: the exception that interrupted the step. After a communication error, `lost` waits up to five seconds
               for the launcher to announce a replacement.
        """
        generations = None if self.closed else self._runtime.generations
        if generations is None or isinstance(error, RankLost):
            return error if isinstance(error, RankLost) and generations is not None else None
        waits = isinstance(error, RuntimeError | CommunicationError | MeshMismatchError | StoreError)
        # A call outside the mesh is explained here, which reports the hung ranks that it has waited for.
        if isinstance(error, RuntimeError) and self._watch is not None:
            found = self._watch.explain(error)
            if isinstance(found, RankLost):
                return found
        return generations.lost(f"a step on {self.label}", waits, confirms=error is None)

    def reopen(self, error: BaseException | None = None) -> Generation:
        """Rebuild this mesh, with new groups over all ranks of the job, after lost ranks were replaced.

            except Exception as error:
                mesh.reopen(error)      # raises `error` if no rank was lost and replaced

        Calls in flight are abandoned. Names, dims and coords stay valid. Torch DeviceMeshes and DTensors of
        this mesh also stay valid, because the new groups keep the names of the old ones. Recreate groups made by
        `create_group` or `dist.new_group`, and objects that hold such a group; see docs/guide/elastic.md.

        error:     the exception that interrupted the step. If it is not due to a lost rank, `reopen` raises it again.
                   After a communication error, `reopen` waits up to five seconds for the launcher to announce a
                   replacement.
        Called by: every surviving rank. The new processes call `meshcomm.init`.
        Returns:   the new generation, which records the new ranks.
        Raises:    LaunchError if the launcher does not replace ranks; UnsupportedOp if the mesh did not create
                   the default group; any error of `meshcomm.init`.
        """
        generations = None if self.closed else self._runtime.generations
        if generations is None:
            raise error or LaunchError(
                f"this job does not replace lost ranks, so there is nothing to reopen, on {self.label}",
                given="mesh.reopen()",
                expected="a launcher that replaces lost ranks",
                hint="meshcomm run --replace 3 CONFIG script.py",
            )
        if self.lost(error) is None:
            if error is not None:
                raise error
            return self.generation
        reopen = self._runtime.reopen
        if reopen is None:
            raise UnsupportedOp(
                f"this mesh uses a default group that it did not create, and cannot be reopened, on {self.label}",
                given="torch.distributed was initialized before meshcomm.init",
                expected="a program with one mesh, which creates the default group",
                hint="meshcomm.init in place of torch.distributed.init_process_group; mesh.group(dim) where torch needs a group",
            ) from error
        self._abandon()
        plan, runtime = reopen()
        with ExitStack() as opening:
            opening.enter_context(runtime.resources)
            Mesh.__init__(self, plan, runtime)
            opening.pop_all()
        return self.generation

    def finish(self) -> None:
        """Block until every rank has called `finish`. After that, no rank can join the mesh, and ranks may exit.

        Called by: every rank of the mesh, at the end of a program that reopens the mesh, when all results are saved. If a
                   signal then ends a rank, the job does not fail. `meshcomm train` calls `finish` itself.
        Raises:    RankLost if a rank joins the mesh first.
        """
        self._finish(ends=True)

    def _finish(self, *, ends: bool) -> None:
        """See `finish`. ends: whether the program's work is done. If not, a rank that a signal ends makes the job fail."""
        from meshcomm.mesh.all_ranks import is_first, of_every_rank

        of_every_rank(self, None)
        generations = self._runtime.generations
        if generations is None:
            return
        grows = not generations.all_done(ends) if is_first(self) else False
        try:
            grows = any(of_every_rank(self, grows))
        except CommunicationError:
            # A rank may have been lost after the end.
            if not generations.has_ended:
                raise
        if grows and (error := generations.lost(self.label, True)) is not None:
            raise error

    def _abandon(self) -> None:
        """Release everything without waiting for anything."""
        self.closed = True
        self._at.clear()
        self.metrics.recorders.clear()
        if self._watch is not None:
            self._watch.close(abandons=True)
        if self._outside is not None:
            self._outside.close()
        for each in self._transports.values():
            # Abandoned calls need no wait, so suppress the UnwaitedHandle warning.
            each.tells_unwaited = True
        self._abort()
        self._torch.close()
        if held_calls:
            groups = [
                each.group for each in self._transports.values() if isinstance(each, ProcessGroupTransport)
            ]
            keep_for_good([*groups, default_group()])
            held_calls.clear()
        self._runtime.resources.close()

    def _abort(self) -> None:
        """Drop queued calls. Runs in a thread, because aborting a backend may block."""
        if aborts := [*self._runtime.aborts]:
            with suppress(TimeoutError):
                within(_ABORTS_S, partial(abort_all, aborts))

    def __enter__(self) -> Mesh:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        explained = None if error is None else self._explained(error)
        self._close(compare=kind is None)
        if explained is not None:
            raise explained

    def _explained(self, error: BaseException) -> MeshcommError | None:
        """Return the error to raise when `error` ends the mesh's with block, or None to let `error` propagate.

        See Watching.explain.
        """
        found = None if self.closed or self._watch is None else self._watch.explain(error)
        return None if found is None else caused_by(found, error)

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

    def _leave_to_parent(self) -> None:
        """Called in a forked process, where the connections belong to the parent and no thread of the mesh runs."""
        if not self.closed:
            self._parent, self.closed = self._process, True
            self.store.close(f"belongs to process {self._parent}, from which this one was forked")
            self._at.clear()
            self._watch = self._outside = None

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
            name: {"backend": each.name, "timeout_s": each.timeout_s}
            for name, each in self._transports.items()
            if isinstance(each, ProcessGroupTransport) and not each.owned
        }
        return plan_view(self.plan, self.rank if self.is_member else None, self.topology, existing)

    # -- inside ---------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Create a communicator for every name in the plan."""
        for family in self.plan.families:
            self._at[family.name] = self._communicator(family.name, self._transports[family.name])

    def _communicator(self, name: str, transport: Transport) -> Communicator:
        if transport.size == 1 or self._watch is None:
            return Communicator(name, transport, self.label)
        recorders, key = self.metrics.recorders, id(transport)
        if key not in recorders:
            group = next(g for g in self.plan.for_rank(self.rank).groups if g.name == name)
            ranks = list(group.ranks)
            recorder = recorders[key] = self._watch.record(group.label, ranks, transport)
            limit, label = self._runtime.validate_calls, group.label
            recorder.compares(CallCheck(lambda: transport, ranks, limit, label, label, self._watch.shared))
            recorder.plan = f", plan {self.plan.fingerprint}"
            recorder.trace(self.metrics.spans)
            if isinstance(transport, ProcessGroupTransport):
                recorder.watch(transport.group, name, self.label)
        return Communicator(name, transport, self.label, recorders[key])

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
        if self._parent is not None:
            raise MeshClosed(
                f"the mesh {dict(self.layout.dims)} belongs to process {self._parent}; this is process "
                f"{os.getpid()}, which was forked from it",
                given=f"a call on {self.label} in a forked process, such as a DataLoader's worker",
                expected="calls in the process that opened the mesh: a forked process has none of its threads",
                hint="communicate outside the workers",
            )
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
            alone = SoloTransport(self.device, self.plan.defaults.backend)
            return self._communicator(", ".join(dims), alone)
        name = self._family_of(dims)
        return self._communicator(name, self._transports[name])

    def _family_of(self, dims: Dims) -> str:
        """Return the name under which the groups along `dims` are declared. Raises UnknownDim if they are not declared."""
        family = self.plan.covering(dims)
        if family is not None:
            return family.name
        listed = ", ".join(f'"{name}"' for name in dims)
        joined = "_".join(dims)
        raise UnknownDim(
            f"no group was declared over ({listed})",
            given=f"({listed}) on {self.label}",
            expected="one dim, or dims that a merged dim covers: " + (", ".join(self.layout.merge) or "none"),
            hint=f"merge = {{ {joined} = [{listed}] }} in the config, or, on every rank, "
            f'mesh.create_group("{joined}", ({listed}))',
        )


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


def _lost(mesh: ref[Mesh], error: BaseException) -> RankLost | None:
    """Call `Mesh.lost` through a weak reference, for objects that the mesh itself holds."""
    alive = mesh()
    return None if alive is None else alive.lost(error)


def _closed_with_graphs(resources: ExitStack, label: str) -> CommunicationError | None:
    """Close a mesh whose calls were captured in CUDA graphs. Return an error if such a graph still exists.

    NCCL does not destroy or abort a communicator while a graph that captured its calls exists. With NCCL 2.28 and torch
    2.11, `destroy_process_group` then never returns.
    """
    collect()
    try:
        within(_GRAPHS_S, resources.pop_all().close)
    except TimeoutError:
        return CommunicationError(
            f"the mesh closes while a CUDA graph still contains its calls, on {label}",
            given=f"NCCL has not released the groups within {_GRAPHS_S:g} s",
            expected="no graph with the mesh's calls when the mesh closes: NCCL waits for such graphs without a timeout",
            hint="graph.reset(), or del graph, before the mesh closes",
        )
    return None


# The meshes opened in this process that still exist.
_OPENED: WeakSet[Mesh] = WeakSet()


def _after_fork() -> None:
    for mesh in list(_OPENED):
        mesh._leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
