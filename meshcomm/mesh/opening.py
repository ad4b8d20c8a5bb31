"""From a configuration to a live mesh: meet, agree, create."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshcomm import __version__
from meshcomm.comm.diagnosis import INTERFACES, Reason, first_line, reason_of
from meshcomm.config.mesh import MeshConfig
from meshcomm.errors import CommunicationError, LaunchError, MeshcommError, MeshMismatchError
from meshcomm.layout import Group, Plan
from meshcomm.mesh.agree import agree, leave_together
from meshcomm.mesh.devices import (
    check_backends,
    check_devices,
    choose_backend,
    choose_device,
    refuse_shared,
)
from meshcomm.mesh.environment import (
    SHARED,
    Launch,
    check_interfaces,
    find_launch,
    gloo_defaults,
    nccl_defaults,
    network_variables,
    refuse_conflict,
    with_variables,
)
from meshcomm.mesh.groups import create_transports, open_group
from meshcomm.mesh.mesh import Mesh
from meshcomm.mesh.rank_failure import end_rank, leave_names
from meshcomm.mesh.rendezvous import Meeting, another_job, blame, claim, meet, of_this_attempt, state_of_rank
from meshcomm.mesh.runtime import PRETENDED, WORLD, Runtime, Watching, World
from meshcomm.mesh.source import MeshOnly, Settings, Source, given_keys, refuse_alone, settings_of
from meshcomm.mesh.torch_store import prefixed, store_failed
from meshcomm.mesh.watchdog import Watchdog, WatchOptions
from meshcomm.transport import Transport
from meshcomm.transport.support import STREAM_ORDERED, backend_on
from meshcomm.transport.torch_private import default_group, default_store, give_back

if TYPE_CHECKING:
    from meshcomm.config import TopologyConfig

# In the default group's store: the prefix of the mesh that made the group.
_PREFIX: Final = "meshcomm/prefix"


def init(
    config: Source | None = None,
    *,
    dims: Mapping[str, int] | None = None,
    merge: Mapping[str, Sequence[str]] | None = None,
    views: Mapping[str, Mapping[str, int]] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    rank_order: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
    device: str | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
    validate_calls: int | Literal["always"] | None = None,
    warm_up: bool | None = None,
    overrides: Sequence[str] = (),
    store: dist.Store | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> Mesh:
    """Join the job and create this rank's groups.

    Args:
        config: a config file, a Config or MeshConfig, or a torch DeviceMesh whose groups are
            used. None: the keyword arguments, or the config of `meshcomm run`. Where that one would
            go unused, as the first mesh of the program says other things, init refuses.
        dims, merge, views, options, rank_order, ranks, device, backend, timeout_s, validate_calls,
            warm_up: the keys of `[mesh]`; they stand in place of a config.
        overrides: as `--set`, for a config.
        store, rank, world_size: meet through this store instead of the launcher's.

    Called by: every process of the job, also those that a mesh on part of the ranks leaves out.
    Before any group exists, all ranks compare what they are about to create, in five store
    operations each. With `warm_up` they then use every group once: the mesh's `warm_up_s` has the
    seconds by name. If torch.distributed is already initialised, its default group and store are
    used and left as they are at close.

    Raises: ConfigError, LaunchError, and MeshMismatchError, which every rank gets when one differs.
    """
    grid = {"dims": dims, "merge": merge, "views": views, "rank_order": rank_order, "ranks": ranks}
    calls = {"timeout_s": timeout_s, "validate_calls": validate_calls, "warm_up": warm_up}
    given = given_keys(**grid, options=options, device=device, backend=backend, **calls)
    world = WORLD.get()
    launch = _launch() if world is None else world.launch
    failure: MeshcommError | None = None
    try:
        settings = settings_of(config, given, overrides)
    except MeshcommError as error:
        if launch.world_size == 1:
            raise
        # Meet the others all the same, so that they hear of it instead of waiting.
        settings, failure = MeshOnly(MeshConfig(dims={"all": -1})), error
    pretended = PRETENDED.get()
    if pretended is not None:
        settings = pretended.settings(settings)
    if world is not None:
        # Its ranks have met; whoever says how to meet means another one.
        meeting = {"store": store, "rank": rank, "world_size": world_size}
        if named := ", ".join(name for name, value in meeting.items() if value is not None):
            raise LaunchError(
                f"init was told how to meet the other ranks, which have met: {named} has no effect here",
                given=named,
                expected="no store, rank or world_size in the simulator",
                hint="leave them out; outside the simulator a launcher may say them",
            )
        joined = Meeting(world.store, launch.rank, launch.world_size, launch)
    elif dist.is_initialized():
        # Of torch's fake backend only this rank exists: there is no store, and nobody to agree with.
        fake = dist.get_backend() == "fake"
        found = of_this_attempt(store or (dist.HashStore() if fake else default_store()))
        joined = Meeting(found, dist.get_rank(), dist.get_world_size(), launch, fake, kept=True)
    else:
        joined = meet(
            settings.process, launch, settings.mesh.timeout_s, store=store, rank=rank, world_size=world_size
        )
    with ExitStack() as opening:
        resources = opening.enter_context(ExitStack())
        mesh = _open(config, settings, joined, failure, world, resources)
        if settings.mesh.warm_up and mesh.is_member:
            opening.callback(mesh.close)
            mesh.warm_up()
        opening.pop_all()
    if pretended is not None:
        pretended.opened(mesh)
    return mesh


def _launch() -> Launch:
    """Who this process is: by the launcher, or by torch's default group, which need not know the launcher's variables."""
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return find_launch(os.environ)
    rank, world = dist.get_rank(), dist.get_world_size()
    with suppress(LaunchError):
        found = find_launch(os.environ)
        if (found.rank, found.world_size) == (rank, world):
            return found
    # Lightning sets LOCAL_RANK alone.
    local = os.environ.get("LOCAL_RANK", "")
    return Launch("torch", rank, world, int(local) if local.isdecimal() else 0, 1, placed=local.isdecimal())


def _open(
    source: Source | None,
    settings: Settings,
    joined: Meeting,
    failure: MeshcommError | None,
    world: World | None,
    resources: ExitStack,
) -> Mesh:
    # Each rank counts its own openings in the store: the count is the same on all ranks, restarts
    # and re-opened meshes included, and no two meshes of a job ever meet in the same keys.
    try:
        claim(joined.store, joined.rank, kept=joined.kept)
        prefix = f"meshcomm{joined.store.add(f'meshcomm/opened/{joined.rank}', 1)}"
        # The mesh that made the default group and one that is opened beside it count each in a part of the store
        # of its own; torch has one list of names for both.
        if world is None and dist.is_initialized() and not joined.pretended:
            outer = default_store()
            prefix = f"{outer.get(_PREFIX).decode()}.{prefix}" if outer.check([_PREFIX]) else prefix
    except RuntimeError as error:
        lost = f"rank {joined.rank} lost the job's store before the mesh was opened"
        raise store_failed(lost, error) from error
    store = prefixed(prefix, joined.store)
    facts: dict[str, Any] = {}
    if failure is None:
        try:
            plan, device = _plan(settings, joined, world, resources)
            if world is None:
                refuse_shared(prefixed("devices", store), joined.rank, plan, device)
            facts = {
                **plan.facts(),
                "world": joined.world_size,
                **({"job": joined.launch.job} if joined.launch.job else {}),
                "validate_calls": settings.mesh.validate_calls,
                "warm_up": settings.mesh.warm_up,
                "versions": {
                    "meshcomm": __version__,
                    "torch": torch.__version__,
                    "python": platform.python_version(),
                },
                "environment": {name: os.environ[name] for name in SHARED if name in os.environ},
            }
        except MeshcommError as error:
            failure = error
    if failure is not None:
        facts = {"problem": failure.what}
    common = prefixed("agree", store)
    began = time.perf_counter()
    try:
        comes = 1 if joined.pretended else joined.world_size
        agreed = agree(common, joined.rank, comes, facts, settings.mesh.timeout_s)
    except MeshMismatchError as error:
        blame(error, joined.store)
        if world is None:
            leave_together(common, stays=joined.rank == 0)
        if failure is None:
            raise
    if failure is not None:
        # Told to the others; here the problem itself says more than that the ranks differ.
        raise failure
    agree_s = time.perf_counter() - began
    reports = _reports(settings.mesh.reports, agreed.moment)
    per_host = None if joined.pretended else agreed.ranks_per_host
    runtime = _create(
        source, settings, joined, plan, device, store, prefix, world, resources, reports, per_host
    )
    return Mesh(plan, runtime, {"agree": agree_s, "create": time.perf_counter() - began - agree_s})


def _plan(
    settings: Settings, joined: Meeting, world: World | None, resources: ExitStack
) -> tuple[Plan, torch.device]:
    """The groups of the mesh, and this process's device; refuses what this host or torch lacks."""
    if world is not None:
        device, backend = world.place(settings.mesh.device)
        return settings.plan(joined.world_size).on(device.type, backend), device
    variables = network_variables(settings.network)
    refuse_conflict(variables)
    resources.enter_context(with_variables(variables))
    device = choose_device(settings.mesh.device, joined.launch)
    if joined.world_size == 1 and joined.launch.kind == "single":
        refuse_alone(settings)
    plan = settings.plan(joined.world_size).on(device.type, choose_backend(device))
    check_devices(settings, device, plan.defaults.backend, joined.launch)
    check_backends(plan)
    check_interfaces(plan, settings.network)
    return plan, device


def _reports(folder: str, moment: str) -> str:
    """The run's own folder in `folder`: its time and, where the launcher names it, its job."""
    named = (os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"))
    job = next((name for name in named if name not in ("", "none")), "")
    return os.path.join(folder, re.sub(r"[^\w.-]", "-", f"{moment}-{job}".rstrip("-"))) if folder else ""


def _create(
    source: object,
    settings: Settings,
    joined: Meeting,
    plan: Plan,
    device: torch.device,
    store: dist.Store,
    prefix: str,
    world: World | None,
    resources: ExitStack,
    reports: str,
    per_host: int | None,
) -> Runtime:
    """This rank's groups, each created by the ranks that are in it, and what watches them.

    Raises CommunicationError naming the group that could not be made.
    """
    # What the mesh keeps ends the process; not the store with it.
    rank, launch, limit = joined.rank, joined.launch, settings.mesh.validate_calls
    compared = None if limit == "always" or world is not None else limit
    is_member = rank in plan.layout
    transports: dict[str, Transport] = {}
    resources.callback(transports.clear)
    watch: Watching | None = None
    if world is None and device.type == "cuda":
        torch.cuda.set_device(device)
    if world is None and not dist.is_initialized():
        # A bound device connects all ranks with all at once, where the groups of the dims would do.
        bind = settings.process.device_id is True and device.type != "cpu"
        try:
            with with_variables(
                {**gloo_defaults(launch.one_host), **nccl_defaults(joined.world_size)}, keep=True
            ):
                dist.init_process_group(
                    plan.defaults.backend,
                    store=dist.PrefixStore("world", store),
                    rank=rank,
                    world_size=joined.world_size,
                    timeout=timedelta(seconds=settings.mesh.timeout_s),
                    device_id=device if bind else None,
                )
            resources.callback(give_back, default_group())
            default_store().set(_PREFIX, prefix)
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {rank} could not start torch's default group",
                given=first_line(error),
                expected=f"backend {plan.defaults.backend} to start, and a store that answers",
                hint=INTERFACES
                if reason_of(error) is Reason.UNREACHABLE
                else "look for the first error of the process that holds the store",
            ) from error

    clients: dict[bool, dist.Store] = {}

    def create(group: Group, split: bool) -> Transport:
        if world is not None:
            return world.open(group, prefix)
        # A backend that connects at a group's first call keeps its client of the store busy for so long, and the
        # threads that answer for this rank have to get through.
        own = backend_on(group.options.backend, device) in STREAM_ORDERED
        if own not in clients:
            clients[own] = store.clone() if own else store
        with with_variables(gloo_defaults(launch.one_host, len(group.ranks)), keep=True):
            transport = open_group(
                group, rank, dist.PrefixStore("groups", clients[own]), prefix, device, split
            )
        resources.callback(transport.close)
        return transport

    def topology() -> TopologyConfig:
        if world is not None:
            return settings.topology
        from meshcomm.predict.machine import discovered

        return discovered(settings.topology, os.environ, per_host)

    if is_member:
        whole_world = world is None and plan.layout.world_size == joined.world_size
        existing = source if isinstance(source, DeviceMesh) else None
        transports.update(create_transports(plan, rank, device, whole_world, create, existing))
        coords, groups = plan.layout.coords(rank), plan.for_rank(rank).groups

        def end(error: MeshcommError) -> None:
            # A cause that is still silent, a grace after the timeout, will not speak; but one that this rank waits for
            # may be about to say whom it waits for itself.
            # Ranks of another job are no ranks that speak for this one.
            asks = replace(launch, address=None) if isinstance(error, LaunchError) else launch
            end_rank(error, asks, plan.layout.label(rank), patience_s=1.0)

        # Ranks of this job that come later find no mesh to join.
        last = time.monotonic() + settings.mesh.timeout_s

        def refused() -> MeshcommError | None:
            return None if launch.job or time.monotonic() > last else another_job(joined.store)

        if world is not None:
            watch = world.watch(coords, prefix)
        elif groups:
            options = WatchOptions(
                plan.defaults.timeout_s,
                end,
                reports=reports,
                compared=compared,
                alone=joined.pretended,
                process_of=partial(state_of_rank, joined.store),
                refused=refused,
            )
            own_store = dist.PrefixStore("watch", dist.PrefixStore("mesh", store))
            watch = Watchdog(own_store, rank, coords, plan.layout.world_size, options)
            if not joined.pretended and rank == min(plan.layout.ranks.tolist()):
                leave_names({other: plan.layout.label(other) for other in plan.layout.ranks.tolist()})
    roles = getattr(settings, "parallel", None)
    return Runtime(
        launch,
        rank,
        device,
        store,
        prefix,
        topology,
        transports,
        watch,
        compared,
        create,
        resources,
        None if roles is None else roles.data_dims,
        joined.pretended,
    )
