"""From a plan that all ranks agreed on to a live mesh: groups, watch, and what gives them back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshcomm.comm.diagnosis import name_of_rank
from meshcomm.errors import CommunicationError, MeshcommError
from meshcomm.layout import Group, Layout, Plan
from meshcomm.mesh.agree import agree
from meshcomm.mesh.environment import Environment, gloo_defaults
from meshcomm.mesh.groups import Existing, close_transports, create_transports, open_group
from meshcomm.mesh.mesh import Mesh
from meshcomm.mesh.rendezvous import Meeting, say_prefix, start_default_group
from meshcomm.mesh.runtime import Watching, World, prefixed
from meshcomm.mesh.source import Settings
from meshcomm.mesh.watchdog import Watchdog
from meshcomm.transport import SoloTransport, Transport

if TYPE_CHECKING:
    from meshcomm.config import TopologyConfig


@dataclass(frozen=True)
class Agreed:
    """What this rank knows when all ranks have agreed, and no group exists yet.

    joined: who this rank is in the job. store: of the job, under `prefix`, which is this mesh's own.
    agree_s: the seconds that agreeing took.
    """

    settings: Settings
    joined: Meeting
    plan: Plan
    device: torch.device
    store: dist.Store
    prefix: str
    agree_s: float

    @property
    def rank(self) -> int:
        """This rank's number in the job."""
        return self.joined.rank

    @property
    def is_member(self) -> bool:
        """Whether the mesh covers this rank."""
        return self.rank in self.plan.layout


def create_in_world(world: World, agreed: Agreed) -> Mesh:
    """This rank's mesh on the groups of a world that somebody else provides.

    Called by: every rank of the world.
    """
    began = time.perf_counter()
    plan = agreed.plan

    def create(group: Group, split: bool) -> Transport:
        return world.open(group, agreed.prefix)

    transports: dict[str, Transport] = {}
    watch: Watching | None = None
    if agreed.is_member:
        transports = create_transports(
            plan, agreed.rank, device=agreed.device, whole_world=False, create=create
        )
        watch = world.watch(plan.layout.coords(agreed.rank), agreed.prefix)
    return _mesh(
        agreed,
        began,
        transports,
        watch,
        create,
        transports.clear,
        topology=lambda: agreed.settings.topology,
        # The world compares every call itself, and is told of each.
        validate_calls=None,
    )


def create_groups(agreed: Agreed, source: object, environment: Environment) -> Mesh:
    """This rank's mesh on process groups of torch, each created by the ranks that are in it.

    Called by: every rank of the job. source: what `init` was given; a DeviceMesh lends its groups.
    environment: what the mesh has set, put back when it closes.
    Raises:    CommunicationError naming the group that could not be made.
    """
    began = time.perf_counter()
    settings, joined, plan, device = agreed.settings, agreed.joined, agreed.plan, agreed.device
    rank, store, prefix = agreed.rank, agreed.store, agreed.prefix
    bind = settings.process.device_id is not False and device.type != "cpu"
    # The mesh keeps what ends the process; not the store with it.
    launch = joined.launch
    one_host = launch.one_host
    groups_store = dist.PrefixStore("groups", store)

    def create(group: Group, split: bool) -> Transport:
        with _applied(gloo_defaults(one_host, len(group.ranks))):
            return open_group(group, rank, groups_store, prefix, device, split)

    owned = not dist.is_initialized()
    try:
        if owned:
            with _applied(gloo_defaults(one_host)):
                start_default_group(
                    joined,
                    dist.PrefixStore("world", store),
                    plan.defaults.backend,
                    device,
                    settings.mesh.timeout_s,
                    bind,
                )
            say_prefix(prefix)
    except RuntimeError as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        raise CommunicationError(
            f"rank {rank} could not start torch's default group",
            given=str(error).splitlines()[0],
            expected=f"backend {plan.defaults.backend} to start, and a store that answers",
            hint="look for the first error of the process that holds the store",
        ) from error
    whole_world = plan.layout.world_size == joined.world_size
    transports: dict[str, Transport] = {}
    if agreed.is_member:
        try:
            transports = create_transports(
                plan,
                rank,
                device=device,
                whole_world=whole_world,
                create=create,
                existing=_existing(source, plan, rank),
            )
        except BaseException:
            if owned:
                dist.destroy_process_group()
            raise

    def on_close() -> None:
        close_transports(transports)
        # The groups' threads and sockets go with the last reference, so let go of them now.
        transports.clear()
        if owned and dist.is_initialized():
            dist.destroy_process_group()
        environment.restore()

    watch: Watching | None = None
    if agreed.is_member and plan.for_rank(rank).groups:
        watched = dist.PrefixStore("watch", dist.PrefixStore("mesh", store))
        coords = plan.layout.coords(rank)
        timeouts = {group.label: group.options.timeout_s for group in plan.for_rank(rank).groups}

        def end(error: MeshcommError) -> None:
            from meshcomm.mesh.rank_failure import end_rank

            # A cause that is still silent, a grace after the timeout, will not speak.
            end_rank(error, launch, name_of_rank(rank, {"coords": coords}), patience_s=0.0)

        watch = Watchdog(
            watched,
            rank,
            coords,
            plan.layout.world_size,
            settings.mesh.reports,
            None if settings.mesh.validate_calls == "always" else settings.mesh.validate_calls,
            timeouts=lambda label: timeouts.get(label, plan.defaults.timeout_s),
            end=end,
            alone=joined.pretended,
        )

    def topology() -> TopologyConfig:
        from meshcomm.topology import discovered

        return discovered(settings.topology, os.environ)

    limit = settings.mesh.validate_calls
    return _mesh(
        agreed,
        began,
        transports,
        watch,
        create,
        on_close,
        topology=topology,
        validate_calls=None if limit == "always" else limit,
    )


def _mesh(
    agreed: Agreed,
    began: float,
    transports: dict[str, Transport],
    watch: Watching | None,
    create: Callable[[Group, bool], Transport],
    on_close: Callable[[], None],
    *,
    topology: Callable[[], TopologyConfig],
    validate_calls: int | None,
) -> Mesh:
    def add(mesh: Mesh, wider: Plan, name: str) -> Transport:
        agree(
            prefixed(f"create/{name}", agreed.store),
            mesh.rank,
            mesh.world_size,
            wider.facts(),
            agreed.settings.mesh.timeout_s,
            what=f"the merged dim {name}",
            ranks=mesh.layout.ranks.tolist(),
        )
        family = wider.family(name)
        if family.size == 1:
            return SoloTransport(agreed.device)
        if family.shares is not None:
            return transports[family.shares]
        return create(next(g for g in wider.for_rank(mesh.rank).groups if g.name == name), False)

    return Mesh(
        agreed.plan,
        agreed.rank,
        device=agreed.device,
        launch=agreed.joined.launch,
        store=prefixed("mesh", agreed.store),
        prefix=agreed.prefix,
        topology=topology,
        transports=transports,
        validate_calls=validate_calls,
        watch=watch,
        startup_s={"agree": agreed.agree_s, "create": time.perf_counter() - began},
        add=add,
        on_close=on_close,
    )


class _applied:
    """Variables that are set inside the block unless the user has set them."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables
        self._environment = Environment()

    def __enter__(self) -> None:
        self._environment.default(self._variables)

    def __exit__(self, *_: object) -> None:
        self._environment.restore()


def _existing(source: object, plan: Plan, rank: int) -> Existing | None:
    """The DeviceMesh's own groups, where their rank order is the mesh's."""
    if not isinstance(source, DeviceMesh):
        return None
    found: dict[str, dist.ProcessGroup] = {}
    layout: Layout = plan.layout
    for name in layout.dims:
        group = source.get_group(name)
        if (
            layout.size(name) > 1
            and dist.get_process_group_ranks(group) == layout.group_of(rank, name).tolist()
        ):
            found[name] = group
    return found
