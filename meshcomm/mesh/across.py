"""Open a mesh over the processes of two jobs, the ground under a link.

The jobs share nothing but a store: each has its own launcher, its own default group or none, and its own torch.
"""

from __future__ import annotations

import math
import os
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist

from meshcomm import __version__
from meshcomm.config.mesh import MeshConfig
from meshcomm.config.process import NetworkConfig, TopologyConfig
from meshcomm.errors import LaunchError, MeshcommError, MeshMismatchError, UnsupportedOp
from meshcomm.layout import Group, GroupOptions, Layout, Plan
from meshcomm.mesh.agree import Agreed, agree, leave_together
from meshcomm.mesh.devices import check_backends
from meshcomm.mesh.groups import GroupMaker
from meshcomm.mesh.mesh import Mesh
from meshcomm.mesh.opening import change_torch, topology_of
from meshcomm.mesh.rank_failure import end_by
from meshcomm.mesh.rank_record import RankRecord
from meshcomm.mesh.runtime import WORLD
from meshcomm.mesh.state import Held, State
from meshcomm.mesh.watchdog import Watchdog, WatchOptions
from meshcomm.mesh.watched import launch_here, reports_of
from meshcomm.rendezvous import keys
from meshcomm.rendezvous.generation import Generation
from meshcomm.rendezvous.launcher import Launch
from meshcomm.rendezvous.meeting import Meeting
from meshcomm.rendezvous.processes import blame, claim, owner_of, process_of_rank, state_of_rank
from meshcomm.rendezvous.signed import unsigned
from meshcomm.rendezvous.store import Unanswered, prefixed, store_failed, within
from meshcomm.transport import SoloTransport, Transport
from meshcomm.transport.connections import Connections
from meshcomm.transport.support import STREAM_ORDERED, backend_on
from meshcomm.transport.variables import SHARED, check_interfaces

DIM: Final = "link"
# How much longer than its timeout an agreement that failed may take to tell all ranks why.
_TELLS_S: Final = 15.0
_CPU: Final = torch.device("cpu")


def across(
    store: dist.Store,
    name: str,
    rank: int,
    world_size: int,
    timeout_s: float,
    *,
    device: torch.device = _CPU,
    backend: str = "gloo",
) -> Mesh:
    """Open a mesh with the single dim "link" over processes of two jobs.

    The mesh uses neither job's default group, store, config or generations: whatever happens to one of them, the other stays
    usable. Errors name its ranks, which are no ranks of a job, and have `of_job = False`. It has no DeviceMesh and no
    `elastic.reopen`: after a loss, close it and open another one.

    store:      a store that all these processes reach. For a TCPStore, a client that only this mesh uses. Rank 0 may serve it: if
                the store is lost, rank 0 is named.
    name:       unique among all meshes that are ever opened in this store. Its keys and the names of its groups begin with it.
    rank, world_size: of this process among all processes of both jobs.
    timeout_s:  seconds for all processes to come, and afterwards for each call, as in `[mesh]`.
    device:     this process's device. On Gloo, it may differ between the processes.
    backend:    a torch.distributed backend, the same in both jobs. A call that hangs raises on Gloo. On NCCL, it ends this
                process, as in every mesh.
    Called by:  exactly these processes.
    Raises:     MeshMismatchError with `missing`, the ranks that did not come in time, or with `mismatched_ranks`, whose settings
                or version of meshcomm differ; LaunchError if two processes have one rank, if the name was used before, or if
                this host lacks the backend; StoreError; CommunicationError; UnsupportedOp in the simulator.
    """
    refuse_simulated(name)
    plan = Plan(Layout({DIM: world_size}), GroupOptions(backend, timeout_s), device=device.type)
    prefix, resources = f"meshcomm/across/{name}", ExitStack()
    held = Held(prefixed(prefix, store), prefix, None, resources, [])
    try:
        with ExitStack() as opening:
            opening.enter_context(resources)
            change_torch(resources)
            agreed = _met(held.store, name, rank, plan)
            state = _created(held, name, rank, plan, device, agreed, _host(store, held.store))
            opening.pop_all()
    except MeshcommError as error:
        error.of_job = False
        raise
    return Mesh(state)


def refuse_simulated(name: str) -> None:
    """Raise UnsupportedOp in the simulator, whose ranks are those of one job."""
    if WORLD.get() is not None:
        raise UnsupportedOp(
            "a link between two jobs cannot be simulated",
            given=f"the link {name} in meshcomm.simulate",
            expected="processes of two jobs",
            hint="a link between two meshes of one job",
        )


def _met(store: Any, name: str, rank: int, plan: Plan) -> Agreed:
    """Wait for the other processes. Raises StoreError also if the process that serves the store has stopped meanwhile."""

    def meet() -> Agreed:
        _claimed(store, name, rank)
        return _agreed(store, name, rank, plan)

    try:
        return within(plan.defaults.timeout_s + _TELLS_S, meet)
    except Unanswered as error:
        lost = f"rank {rank} lost the store before the link {name} was opened"
        raise store_failed(lost, error) from error


def _claimed(store: Any, name: str, rank: int) -> None:
    try:
        claim(store, rank, kept=False)
        if store.add(keys.OPENED.format(rank), 1) == 1:
            return
    except RuntimeError as error:
        raise store_failed(f"rank {rank} lost the store before the link {name} was opened", error) from error
    raise LaunchError(
        f"the link {name} was opened before",
        given=f"rank {rank} opens it again",
        expected="another name for each opening: the store holds what the last one left",
        hint=f"{name}/2",
    )


def _agreed(store: Any, name: str, rank: int, plan: Plan) -> Agreed:
    """Wait for the other processes, and compare this process's settings with theirs."""
    problem: MeshcommError | None = None
    backend = plan.defaults.backend
    # Of each variable that the backends of a group must read identically.
    prefixes = ("GLOO_", "TORCH_GLOO_", "TORCH_DISTRIBUTED_", *["NCCL_"] * ("nccl" in backend))
    facts = plan.facts() | {
        "meshcomm": __version__,
        "environment": {
            each: os.environ[each] for each in SHARED if each in os.environ and each.startswith(prefixes)
        },
    }
    if "nccl" not in backend:
        del facts["device"]
    try:
        check_backends(plan)
        check_interfaces(plan, NetworkConfig())
    except MeshcommError as error:
        facts, problem = {"problem": error.what}, error
    ranks, of_agreement = range(plan.layout.world_size), prefixed("agree", store)
    try:
        agreed = agree(of_agreement, rank, ranks, facts, plan.defaults.timeout_s, f"the link {name}")
    except MeshMismatchError as error:
        blame(error, store)
        leave_together(of_agreement, stays=rank == 0)
        if problem is None:
            raise
    if problem is not None:
        # The others have received this error.
        raise problem
    return agreed


def _host(store: Any, of_mesh: Any) -> int | None:
    """Return the rank whose process serves the store; None if another process does."""
    try:
        owner = owner_of(unsigned(store))
        return 0 if owner is not None and owner.process == process_of_rank(of_mesh, 0) else None
    except RuntimeError:  # the store is lost, and creating the group fails
        return None


def _created(
    held: Held, name: str, rank: int, plan: Plan, device: torch.device, agreed: Agreed, host: int | None
) -> State:
    """Create the group, together with the other processes, and start its watchdog."""
    world_size, mine, of_job = plan.layout.world_size, plan.for_rank(rank), launch_here()
    launch = _launch(of_job, rank, world_size, agreed)
    maker = GroupMaker(
        Meeting(held.store, rank, world_size, launch), device, held.prefix, None, held, of_job=False
    )
    connections = Connections()

    def create(group: Group, split: bool) -> Transport:
        with connections.making():
            return maker.open(group, False)

    transports: dict[str, Transport] = {}
    held.resources.callback(transports.clear)
    held.resources.callback(held.aborts.clear)
    watch = None
    compared = MeshConfig.model_fields["validate_calls"].default
    if mine.groups:
        transports[DIM] = create(mine.groups[0], False)
        held.aborts.append(connections.cut)
        ordered = backend_on(plan.defaults.backend, device) in STREAM_ORDERED
        options = WatchOptions(
            plan.defaults.timeout_s,
            partial(end_by, of_job, f"rank {of_job.rank}") if ordered else lambda error: connections.cut(),
            reports=reports_of(MeshConfig.model_fields["reports"].default, f"{agreed.moment}-{name}"),
            compared=compared,
            process_of=partial(state_of_rank, held.store),
            of_job=False,
            # A job may wait long for the other one.
            warn_after_s=math.inf,
            host=host,
        )
        watch = Watchdog(prefixed("mesh/watch", held.store), rank, mine.coords, world_size, options)
        held.resources.callback(_cut_after_failure, watch.own, connections)
    else:
        transports[DIM] = SoloTransport(device, plan.defaults.backend)
    return State(
        plan=plan,
        launch=launch,
        rank=rank,
        label=mine.label,
        mine=mine,
        device=device,
        topology=partial(topology_of, TopologyConfig(), agreed),
        transports=transports,
        watch=watch,
        validate_calls=compared,
        data_dims=None,
        is_fake=False,
        generation=Generation(),
        generations=None,
        held=held,
        create=create,
        reopen=None,
        of_job=False,
    )


def _cut_after_failure(own: RankRecord, connections: Connections) -> None:
    """Let the others know at once that this process has left: an error that is kept may keep the group, and its connections."""
    if own.failed is not None:
        connections.cut()


def _launch(of_job: Launch, rank: int, world_size: int, agreed: Agreed) -> Launch:
    """Return how the groups connect: on one host, by its loopback interface."""
    one_host = agreed.ranks_per_host == world_size
    return replace(of_job, rank=rank, world_size=world_size, local_size=world_size if one_host else 1)
