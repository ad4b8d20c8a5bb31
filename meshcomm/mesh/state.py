"""The life of a mesh: what it consists of from its opening to its close, and a new State after a reopening."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from gc import collect
from typing import TYPE_CHECKING, Any, Final, final
from weakref import WeakMethod, WeakSet, ref

import torch
import torch.distributed as dist

from meshcomm.comm import Communicator, CommunicatorCache
from meshcomm.comm.checks import seconds_of
from meshcomm.errors import (
    CommunicationError,
    LayoutError,
    MeshClosed,
    MeshcommError,
    MeshMismatchError,
    NotMember,
    RankLost,
    StoreError,
    UnknownDim,
)
from meshcomm.layout import Dims, Group, GroupOptions, Layout, Plan, RankPlan
from meshcomm.layout.sizes import fold
from meshcomm.mesh.agree import agree
from meshcomm.mesh.devices import check_backends
from meshcomm.mesh.outside import OutsideGroups
from meshcomm.mesh.runtime import WORLD, Metrics, Watching
from meshcomm.mesh.torch_mesh import TorchMesh
from meshcomm.rendezvous.generation import Generation, Generations
from meshcomm.rendezvous.launcher import Launch
from meshcomm.rendezvous.signed import unsigned
from meshcomm.rendezvous.store import MeshStore, prefixed, within
from meshcomm.transport import ProcessGroupTransport, SoloTransport, Transport
from meshcomm.transport.connections import Connections, abort_all
from meshcomm.transport.torch_changes import held_calls
from meshcomm.transport.torch_private import default_group, keep_for_good
from meshcomm.watching.compare import CallCheck
from meshcomm.watching.hooks import observe

if TYPE_CHECKING:
    from meshcomm.config import TopologyConfig
    from meshcomm.pattern.apply import Rearranger

# Time limit in seconds for NCCL groups to abort their calls when a program leaves a mesh with an error.
_ABORTS_S: Final = 10.0

# Time limit in seconds for NCCL groups to close if CUDA graphs have captured their calls.
_GRAPHS_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Held:
    """What a mesh releases when it closes.

    store: the job's store, under `prefix`, which is unique to the mesh.
    connections: cut when a newer generation starts; None if lost ranks are not replaced.
    resources: releases everything, in reverse order.
    aborts: drop the queued calls of the mesh's groups, including torch's default group.
    """

    store: Any
    prefix: str
    connections: Connections | None
    resources: ExitStack
    aborts: list[Callable[[], object]]


@final
@dataclass(eq=False)
class State:
    """One rank's part of a mesh, after all ranks have agreed on the mesh and its groups exist.

    label: this rank with its coords. mine: its part of the plan as the mesh opened; None if it is not in the mesh.
    topology: the placement of ranks on nodes.
    validate_calls: how many calls of each kind are compared; None if all are, or if the world compares them.
    create: creates one group. The second argument of `create` is whether NCCL may split the group from the world.
    reopen: opens the mesh again in the latest generation; None if the mesh did not create the default group.
    generations: None if lost ranks are not replaced.
    data_dims: the dims along which samples differ, if the configuration has [parallel].
    is_fake: whether this is torch's fake backend: no other ranks exist, and results have a shape but no values.
    of_job: whether the ranks are those of the job, and not those of a link between two jobs.
    """

    plan: Plan
    launch: Launch
    rank: int
    label: str
    mine: RankPlan | None
    device: torch.device
    topology: Callable[[], TopologyConfig]
    transports: dict[str, Transport]
    watch: Watching | None
    validate_calls: int | None
    data_dims: tuple[str, ...] | None
    is_fake: bool
    generation: Generation
    generations: Generations | None
    held: Held
    create: Callable[[Group, bool], Transport]
    reopen: Callable[[], State] | None
    of_job: bool = True

    def __post_init__(self) -> None:
        self.layout: Layout = self.plan.layout
        self.dims, self.world_size = self.layout.dims, self.layout.world_size
        self.local_rank, self.is_member = self.launch.local_rank, self.mine is not None
        self.closed = False
        # The process that opened the mesh, in a process that was forked from it.
        self.parent: int | None = None
        self._process = os.getpid()
        lost, user = _lost_by(self), unsigned(prefixed("mesh/user", self.held.store))
        self.store = MeshStore(user, self.label, self.plan.defaults.timeout_s, self.is_fake, lost)
        self.warm_up_s: Mapping[str, float] = {}
        self.metrics = Metrics()
        self.torch = TorchMesh(self.layout, self.rank, self.device, self.transports, self.held.prefix)
        # The number of store barriers per group, and of `breakpoint` calls per line.
        self.barriers: Counter[str] = Counter()
        self.breakpoints: Counter[tuple[str, int]] = Counter()
        # Made at the first `rearrange` call after the opening, or after dims were added.
        self.rearranger: Rearranger | None = None
        self._outside: OutsideGroups | None = None

    def connect(self, at: CommunicatorCache) -> None:
        """Fill a mesh's communicators, which outlive this state, and watch torch's other groups."""
        self._at = at
        # From here on, a forked process can give this state to its parent.
        _ALL.add(self)
        if self.mine is not None:
            self._connect(self.mine)
            if self.watch is not None and self.watch.timed and not self.is_fake and self.of_job:
                ranks = self.layout.ranks.tolist()
                self._outside = OutsideGroups(self.watch, ranks, self.device, self.label, self.validate_calls)

    # -- communicators ----------------------------------------------------------------------------

    def _connect(self, mine: RankPlan) -> None:
        """Create a communicator for every name in the plan."""
        groups = {group.name: group for group in mine.groups}
        for name, transport in self.transports.items():
            self._at[name] = self._communicator(name, transport, groups.get(name))

    def _communicator(self, name: str, transport: Transport, group: Group | None = None) -> Communicator:
        """Return a communicator. group: the group of the transport, of which it may be the first communicator."""
        if transport.size == 1 or self.watch is None:
            return Communicator(name, transport, self.label)
        recorders, key = self.metrics.recorders, id(transport)
        if key not in recorders and group is not None:
            label, ranks, limit = group.label, list(group.ranks), self.validate_calls
            recorder = recorders[key] = self.watch.record(label, ranks, transport)
            recorder.compares(CallCheck(ref(transport), ranks, limit, label, label, self.watch.shared))
            recorder.plan = f", plan {self.plan.fingerprint}"
            recorder.trace(self.metrics.spans)
            if isinstance(transport, ProcessGroupTransport):
                observe(recorder, transport.group, name, self.label)
        return Communicator(name, transport, self.label, recorders[key])

    def explain(self, dims: Dims) -> Communicator:
        """Return the communicator of dims that no communicator was created for. See CommunicatorCache."""
        self.usable()
        if not isinstance(dims, str) and self.layout.size(dims) == 1:
            alone = SoloTransport(self.device, self.plan.defaults.backend)
            return self._communicator(", ".join(dims), alone)
        name = self.family_of(dims)
        return self._communicator(name, self.transports[name])

    def family_of(self, dims: Dims) -> str:
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

    def member(self) -> int:
        """Return this rank. Raises NotMember if it is not in the mesh."""
        if not self.is_member:
            raise NotMember(
                f"rank {self.rank} is not in the mesh {dict(self.layout.dims)}",
                given=f"rank {self.rank}; the mesh covers ranks {fold(self.layout.ranks)}",
                expected="a rank of the mesh",
                hint="if mesh.is_member:",
            )
        return self.rank

    def usable(self) -> None:
        """Raise NotMember or MeshClosed if this process cannot call the mesh."""
        self.member()
        if self.parent is not None:
            raise MeshClosed(
                f"the mesh {dict(self.layout.dims)} belongs to process {self.parent}; this is process "
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

    # -- groups that are added ----------------------------------------------------------------------

    def create_group(
        self, name: str, dims: tuple[str, ...], backend: str | None, timeout_s: float | None, comm_id: str
    ) -> None:
        """See Mesh.create_group."""
        self.usable()
        plan = self._merged_plan(name, dims, backend, timeout_s, comm_id)
        try:
            agree(
                prefixed(f"create/{name}", self.held.store),
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
        family, mine = plan.family(name), plan.for_rank(self.rank)
        if family.size == 1:
            transport: Transport = SoloTransport(self.device, family.options.backend)
        elif family.shares is not None:
            transport = self.transports[family.shares]
        else:
            group = next(group for group in mine.groups if group.name == name)
            transport = self.create(group, False)
        self.plan, self.layout, self.torch.layout = plan, plan.layout, plan.layout
        self.transports[name] = transport
        self._at.clear()
        self._connect(mine)
        self.rearranger = None

    def _merged_plan(
        self, name: str, dims: tuple[str, ...], backend: str | None, timeout_s: float | None, comm_id: str
    ) -> Plan:
        """Return the plan with one additional merged dim. See Mesh.create_group."""
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

    # -- the end ------------------------------------------------------------------------------------

    def lost(self, error: BaseException | None = None) -> RankLost | None:
        """See Elastic.lost."""
        generations = self.generations
        if self.closed or generations is None:
            return None
        if isinstance(error, RankLost):
            return error
        waits = isinstance(error, RuntimeError | CommunicationError | MeshMismatchError | StoreError)
        # A call outside the mesh is explained here, which reports the hung ranks that it has waited for.
        if isinstance(error, RuntimeError) and self.watch is not None:
            explained = self.watch.explain(error)
            if isinstance(explained, RankLost):
                return explained
        return generations.lost(f"a step on {self.label}", waits, confirms=error is None)

    def close(self, compare: bool) -> None:
        """Release everything, in reverse order of creation. Closing twice is harmless.

        compare: whether the other ranks make the queued calls, too. Then wait for these, and raise the error if ranks differ in
        a step, or if CUDA graphs keep the groups.
        """
        if self.closed:
            return
        watch = self.watch
        if compare and watch is not None:
            # Closing a group waits for its queued calls, and nothing would explain a hang there.
            watch.drain()
        self.closed = True
        differs = watch.before_leaving() if compare and watch is not None else None
        self._at.clear()
        recorders = [*self.metrics.recorders.values()]
        captured = any(recorder.captured for recorder in recorders)
        # Destroying a group waits for its calls, and calls that differ may never complete.
        apart = {
            recorder.group_name
            for recorder in recorders
            if recorder.check is not None and recorder.check.is_apart()
        }
        keep_for_good([group for group in self._own_groups() if str(group.group_name) in apart])
        self.metrics.recorders.clear()
        if watch is not None:
            watch.close()
        # Close this after the watch, which may still report a call in a group outside the mesh.
        if self._outside is not None:
            self._outside.close()
        if not compare:
            # Other ranks may never make the queued calls.
            self._abort()
        self.torch.close()
        self.store.close()
        resources = self.held.resources
        held = _closed_with_graphs(resources, self.label) if captured else None
        resources.close()
        self._let_go()
        error = differs or (held if compare else None)
        if error is not None:
            raise error

    def abandon(self) -> None:
        """Release everything without waiting for anything, because the mesh will be reopened."""
        self.closed = True
        self._at.clear()
        self.metrics.recorders.clear()
        if self.watch is not None:
            self.watch.close(abandons=True)
        if self._outside is not None:
            self._outside.close()
        for transport in self.transports.values():
            # Abandoned calls need no wait, so suppress the UnwaitedHandle warning.
            transport.tells_unwaited = True
        self._abort()
        self.torch.close()
        if held_calls:
            keep_for_good([*self._own_groups(), default_group()])
            held_calls.clear()
        self.held.resources.close()
        self._let_go()

    def _own_groups(self) -> list[dist.ProcessGroup]:
        transports = self.transports.values()
        return [transport.group for transport in transports if isinstance(transport, ProcessGroupTransport)]

    def _let_go(self) -> None:
        """Release the connections to the store: what refers to a closed mesh must not keep them."""
        del self.held, self.create, self.reopen

    def _abort(self) -> None:
        """Drop queued calls. Runs in a thread, because aborting a backend may block."""
        if aborts := [*self.held.aborts]:
            with suppress(TimeoutError):
                within(_ABORTS_S, partial(abort_all, aborts))

    def leave_to_parent(self) -> None:
        """Called in a forked process, where the connections belong to the parent and no thread of the mesh runs."""
        if not self.closed:
            self.parent, self.closed = self._process, True
            self.store.close(f"belongs to process {self.parent}, from which this one was forked")
            self._at.clear()
            self.watch = self._outside = None


def _lost_by(state: State) -> Callable[[BaseException], MeshcommError | None]:
    """Return `state.lost` without a reference to the state, which refers to the store that this is for."""
    lost = WeakMethod(state.lost)

    def lost_of(error: BaseException) -> MeshcommError | None:
        answer = lost()
        return None if answer is None else answer(error)

    return lost_of


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
_ALL: WeakSet[State] = WeakSet()


def _after_fork() -> None:
    for state in list(_ALL):
        state.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
