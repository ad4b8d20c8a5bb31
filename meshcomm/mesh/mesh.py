"""A plan that is live in this process: who am I, and communication along dims by name."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NoReturn, final
from weakref import WeakValueDictionary

from torch import Tensor
from torch.compiler import is_compiling

from meshcomm.comm import Communicator, CommunicatorCache, Functional
from meshcomm.comm.along import AlongDims
from meshcomm.comm.checks import seconds_of
from meshcomm.comm.mismatch import CallCheck
from meshcomm.comm.objects import Objects
from meshcomm.errors import LayoutError, MeshClosed, MeshcommError, UnknownDim, UnsupportedOp
from meshcomm.layout import Dims, GroupOptions, Layout, Plan
from meshcomm.mesh.agree import agree
from meshcomm.mesh.barriers import Barriers
from meshcomm.mesh.devices import check_backends
from meshcomm.mesh.endings import caused_by
from meshcomm.mesh.metrics import Metrics
from meshcomm.mesh.outside import OutsideGroups
from meshcomm.mesh.random_numbers import RandomNumbers
from meshcomm.mesh.runtime import WORLD, Runtime
from meshcomm.mesh.store import MeshStore
from meshcomm.mesh.torch_mesh import TorchMesh
from meshcomm.mesh.torch_store import prefixed, within
from meshcomm.transport import ProcessGroupTransport, SoloTransport, Transport

if TYPE_CHECKING:
    from rich.console import RenderableType

    from meshcomm.config import TopologyConfig
    from meshcomm.pattern.apply import GatherRules, Rearranger
    from meshcomm.show.grid import RankGrid

# How long the groups of NCCL may take to let go of their calls, where a program leaves a mesh by an error.
_ABORTS_S: Final = 10.0


@final
class Mesh(Barriers, Metrics, RandomNumbers, TorchMesh, AlongDims):
    """Named dims over the ranks of a job, with a communicator along each.

    Made by `meshcomm.init`. The first argument of every method says along which dims: a name, a
    merged dim's name, or a tuple of names that a declared group covers. Peers and roots are coords
    along the dims, never global ranks. A dim of size 1 is a dim; its collectives return at once.

    On a rank that the mesh does not cover, `is_member` is False and everything that needs a place
    in the mesh raises NotMember.
    """

    def __init__(self, plan: Plan, runtime: Runtime, startup_s: Mapping[str, float]) -> None:
        Barriers.__init__(self)
        Metrics.__init__(self)
        TorchMesh.__init__(self)
        self.plan = plan
        self.layout: Layout = plan.layout
        self.rank = runtime.rank
        self.device = runtime.device
        self._launch = runtime.launch
        self._topology = runtime.topology
        self._data_dims = runtime.data_dims
        # Of torch's fake backend: nobody answers, and results have a shape and no values.
        self.pretended = runtime.pretended
        self._prefix = runtime.prefix
        self._store = prefixed("mesh", runtime.store)
        self.store = MeshStore(
            prefixed("user", self._store), lambda: self.label, plan.defaults.timeout_s, self.pretended
        )
        # Seconds that this rank spent on "agree", waiting for the others included, and on "create".
        self.startup_s = startup_s
        self.closed = False
        # The process that opened the mesh, in a process that was forked from it since.
        self._parent: int | None = None
        self._process = os.getpid()
        _OPENED[time.monotonic_ns()] = self
        self._runtime = runtime
        self._transports = runtime.transports
        self._watch = runtime.watch
        self._at = CommunicatorCache(self._explain)
        self.functional = Functional(self._at)
        self.objects = Objects(self._at, self.device, self.pretended)
        self._rearranger: Rearranger | None = None
        self._outside: OutsideGroups | None = None
        if self.is_member:
            self._connect()
            if self._watch is not None and self._watch.timed and not self.pretended:
                self._outside = OutsideGroups(
                    self._watch, self.layout.ranks.tolist(), self.device, self.label, runtime.validate_calls
                )

    @property
    def topology(self) -> TopologyConfig:
        """How ranks lie on machines, as the configuration or the launcher says it; for what is shown."""
        return self._topology()

    @property
    def asynchronous(self) -> bool:
        """Whether calls return when they are queued on the device, as with NCCL: to look at a result waits for it.

        So it is in a pretended world, where there is nothing to look at.
        """
        return (
            self.pretended
            or self.device.type != "cpu"
            or any(each.ordered for each in self._transports.values())
        )

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
        if is_compiling():
            from meshcomm.pattern.apply import rearrange_in_graph

            return rearrange_in_graph(self, x, pattern, partial, grad, sizes)
        if self._rearranger is None:
            from meshcomm.pattern.apply import Rearranger

            self._rearranger = Rearranger(self.layout, self._at, self.functional, self.label)
        return self._rearranger.run(x, pattern, partial, grad, sizes)

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
        self.layout.digits(dims)
        dims = self.layout.expand(dims)
        if name in self.layout.merge:
            raise LayoutError(
                f'the mesh has a merged dim "{name}" already, on {self.label}',
                given=f'create("{name}", {dims!r})',
                expected=f'another name; "{name}" is over {self.layout.merge[name]!r}',
                hint=f'mesh.size("{name}") and all calls take it as it is; a name keeps its meaning',
            )
        if timeout_s is not None:
            timeout_s = seconds_of(timeout_s, lambda: f'create("{name}") on {self.label}')
        if backend is not None and not isinstance(backend, str):
            raise LayoutError(
                f'create("{name}") on {self.label}: backend={backend!r} is not a name',
                given=f"backend={backend!r}",
                expected="a backend's name",
                hint='backend="gloo", or leave it out',
            )
        merge = {**self.layout.merge, name: dims}
        layout = Layout(self.layout.dims, self.layout.rank_order, self.layout.views, merge)
        own = GroupOptions(
            backend=backend or self.plan.defaults.backend,
            timeout_s=timeout_s or self.plan.defaults.timeout_s,
            lane=lane,
        )
        plan = Plan(layout, self.plan.defaults, {**self.plan.options, name: own}, self.plan.device)
        if WORLD.get() is None:
            check_backends(plan)
        agree(
            prefixed(f"create/{name}", self._runtime.store),
            self.rank,
            1 if self.pretended else self.world_size,
            plan.facts(),
            plan.defaults.timeout_s,
            what=f"the merged dim {name}",
            ranks=[self.rank] if self.pretended else layout.ranks.tolist(),
        )
        family = plan.family(name)
        if family.size == 1:
            transport: Transport = SoloTransport(self.device, own.backend)
        elif family.shares is not None:
            transport = self._transports[family.shares]
        else:
            group = next(each for each in plan.for_rank(self.rank).groups if each.name == name)
            transport = self._runtime.create(group, False)
        self.plan, self.layout = plan, layout
        self._transports[name] = transport
        self._at.clear()
        self._connect()
        self._rearranger = None

    def close(self) -> None:
        """Give every group back, last created first. Closing twice is harmless.

        Called by: every rank, at the same point of the program.
        Raises:    where `step` was used and no exception is under way: CallMismatchError, when all is given
                   back, for ranks that differ in a step and were not told. Waits up to two seconds for
                   the neighbours along each dim to come as far as this rank.
        """
        self._close(compare=sys.exception() is None)

    def _close(self, compare: bool) -> None:
        if self.closed:
            return
        if compare and self._watch is not None:
            # Closing a group waits for what is queued on it, and nobody would hear why that does not end.
            self._watch.drain()
        self.closed = True
        differs = self._watch.before_leaving() if compare and self._watch is not None else None
        self._at.clear()
        self._recorders.clear()
        if self._outside is not None:
            self._outside.close()
        if self._watch is not None:
            self._watch.close()
        ordered = [each for each in self._transports.values() if each.ordered]
        if ordered and not compare:
            # Others may never come to what is queued. In a thread, as a backend may wait even so.
            with suppress(TimeoutError, RuntimeError):
                within(_ABORTS_S, lambda: _abort(set(ordered)))
        self._forget()
        self.store.close()
        self._runtime.resources.close()
        # What is kept alive by a closed mesh, in a cycle say, keeps no connection to the store.
        del self._store, self._runtime
        if differs is not None:
            raise differs

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
        """What to raise in place of `error`, by which the program leaves the mesh, with `error` as its cause.

        None where it is no error of a backend, or not of a call that this mesh knows. May wait for seconds.
        """
        found = None if self.closed or self._watch is None else self._watch.explain(error)
        return None if found is None else caused_by(found, error)

    def __copy__(self) -> Mesh:
        return self  # as a copied module still communicates with the same ranks

    def __deepcopy__(self, memo: dict[int, Any]) -> Mesh:
        return self

    def __reduce__(self) -> NoReturn:
        raise UnsupportedOp(
            f"a mesh cannot be pickled, on {self.label}",
            given="pickle.dumps, or sending to another process, of the mesh or of what holds it",
            expected="a mesh that each process opens itself",
            hint="pickle mesh.layout or mesh.plan, and meshcomm.init there",
        )

    def _leave_to_parent(self) -> None:
        """Called in a forked process: the connections are the parent's, and no thread of the mesh runs here."""
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
        """The ranks of the whole mesh as coloured blocks, a colour for each group along `by`; this rank marked.

        by: a dim, merged dim or view's dim, or a tuple of them. None: the innermost dim.
        Returns: what prints as text, in colour by rich, as a picture in a notebook; `.save("topo.svg")`.
        Asks no other rank. Raises UnknownDim.
        """
        from meshcomm.show.grid import RankGrid, grid_facts

        return RankGrid(grid_facts(self.plan, by, self.topology, self.rank if self.is_member else None))

    def __str__(self) -> str:
        """Dims, groups and neighbours as a table of 100 columns, without colour."""
        from meshcomm.show.page import as_text

        return as_text(self.__rich__())

    def __rich__(self) -> RenderableType:
        """What rich prints: the same table at the console's width."""
        from meshcomm.show.plan import plan_view

        return plan_view(self.plan, self.rank if self.is_member else None, self.topology)

    # -- inside ---------------------------------------------------------------------------------

    def _connect(self) -> None:
        """A communicator for every name of the plan."""
        for family in self.plan.families:
            self._at[family.name] = self._communicator(family.name, self._transports[family.name])

    def _communicator(self, name: str, transport: Transport) -> Communicator:
        if transport.size == 1 or self._watch is None:
            return Communicator(name, transport, self.label)
        key = id(transport)
        if key not in self._recorders:
            group = next(g for g in self.plan.for_rank(self.rank).groups if g.name == name)
            ranks = list(group.ranks)
            recorder = self._recorders[key] = self._watch.record(group.label, ranks, transport)
            recorder.check = CallCheck(lambda: transport, ranks, self._runtime.validate_calls)
            recorder.plan = f", plan {self.plan.fingerprint}"
            recorder.trace(self.spans)
            if isinstance(transport, ProcessGroupTransport):
                recorder.watch(transport.group, name, self.label)
        return Communicator(name, transport, self.label, self._recorders[key])

    def _usable(self) -> None:
        self._member()
        if self._parent is not None:
            raise MeshClosed(
                f"the mesh {dict(self.layout.dims)} belongs to process {self._parent}; this is process "
                f"{os.getpid()}, which was forked from it",
                given=f"a call on {self.label} in a forked process, as a DataLoader's workers are",
                expected="calls in the process that opened the mesh: a fork has none of its threads",
                hint="communicate outside of the workers",
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
        """The name whose groups are those of `dims`. Raises UnknownDim where no group was declared."""
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
            f'mesh.create("{joined}", ({listed}))',
        )


def _abort(transports: Iterable[Transport]) -> None:
    for transport in transports:
        transport.abort()


# Those that were opened and are still there, by when.
_OPENED: WeakValueDictionary[int, Mesh] = WeakValueDictionary()


def _latest() -> list[Mesh]:
    return [mesh for _, mesh in sorted(_OPENED.items(), reverse=True)]


def explained(error: BaseException) -> BaseException:
    """The error that explains `error`, by which the process ends, where a mesh is open that can; else `error`."""
    return next((found for mesh in _latest() if (found := mesh._explained(error)) is not None), error)


def leave_all() -> None:
    """Tell the other ranks of every open mesh that this one ends by the exception under way."""
    for mesh in _latest():
        if mesh._watch is not None:
            mesh._watch.close()


def latest_label() -> str | None:
    """This rank with its coords in the mesh that was opened last; None where it is in none."""
    return next((mesh.label for mesh in _latest() if mesh.is_member), None)


def _after_fork() -> None:
    for mesh in _latest():
        mesh._leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
