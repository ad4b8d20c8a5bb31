"""Open a mesh from a configuration: meet the other ranks, compare settings, and create groups."""

from __future__ import annotations

import os
import platform
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshcomm import __version__
from meshcomm.comm.diagnosis import INTERFACES, Reason, first_line, reason_of
from meshcomm.config.mesh import MeshConfig
from meshcomm.errors import (
    CommunicationError,
    LaunchError,
    MeshcommError,
    MeshMismatchError,
    RankLost,
    StoreError,
)
from meshcomm.layout import Group, Plan
from meshcomm.mesh.agree import Agreed, agree, leave_together
from meshcomm.mesh.devices import (
    check_backends,
    check_devices,
    choose_backend,
    choose_device,
    refuse_shared,
)
from meshcomm.mesh.existing import Existing, of_device_meshes, of_groups
from meshcomm.mesh.groups import create_transports, open_group
from meshcomm.mesh.launched import end_by, launch_here, reports_of
from meshcomm.mesh.mesh import Mesh
from meshcomm.mesh.rank_failure import leave_names
from meshcomm.mesh.runtime import PRETENDED, WORLD, Runtime, Watching
from meshcomm.mesh.source import MeshOnly, Settings, Source, given_keys, refuse_alone, settings_of, with_sizes
from meshcomm.mesh.watchdog import Watchdog, WatchOptions
from meshcomm.mesh.watched import gives_way
from meshcomm.rendezvous import keys
from meshcomm.rendezvous.generation import FOREVER, Generation, Generations, generations_of
from meshcomm.rendezvous.job_store import is_serving
from meshcomm.rendezvous.meeting import Meeting, meet, of_this_attempt
from meshcomm.rendezvous.processes import another_job, blame, claim, state_of_rank
from meshcomm.rendezvous.signed import signed, unsigned
from meshcomm.rendezvous.store import prefixed, store_failed
from meshcomm.transport import Transport
from meshcomm.transport.connections import Connections
from meshcomm.transport.support import STREAM_ORDERED, backend_on
from meshcomm.transport.torch_private import abort, default_group, default_store, give_back
from meshcomm.transport.variables import (
    NCCL_RECOVERS,
    SHARED,
    check_interfaces,
    gloo_defaults,
    nccl_defaults,
    network_variables,
    refuse_conflict,
    with_variables,
)

if TYPE_CHECKING:
    from meshcomm.config import TopologyConfig


class ScatteredRanks(UserWarning):
    """A dim crosses hosts only because the ranks of a host are not neighbors along that dim."""


def init(
    config: Source | DeviceMesh | list[DeviceMesh] | tuple[DeviceMesh, ...] | None = None,
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
    """Join the job and create this rank's process groups.

    Args:
        config: a configuration file, a Config, a MeshConfig, or torch DeviceMeshes, whose groups are reused. The
            first DeviceMesh defines the dims, each further DeviceMesh defines a view, and flattened dims become
            merged dims. If None, init uses the keyword arguments or, without any, the config of `meshcomm run`. Under
            `meshcomm run CONFIG`, init raises LaunchError if the first mesh ignores settings of CONFIG.
        dims, merge, views, options, rank_order, ranks, device, backend, timeout_s, validate_calls,
            warm_up: the keys of `[mesh]`, given instead of a config or in addition to DeviceMeshes.
        overrides: config overrides, as for `--set`.
        store, rank, world_size: used for the rendezvous instead of the launcher's values.

    Called by: every process of the job, including ranks outside a mesh that covers only some ranks.

    Before any group is created, all ranks compare their settings, with five store operations per rank. With
    `warm_up`, the ranks then use every group once; see `Mesh.warm_up`. If torch.distributed is already
    initialized, init uses the existing default group and store, and closing the mesh does not destroy them.

    Raises: ConfigError, LaunchError, and MeshMismatchError on every rank if one rank differs.
    """
    keys = given_keys(
        dims=dims,
        merge=merge,
        views=views,
        rank_order=rank_order,
        ranks=ranks,
        options=options,
        device=device,
        backend=backend,
        timeout_s=timeout_s,
        validate_calls=validate_calls,
        warm_up=warm_up,
    )
    if isinstance(config, (DeviceMesh, list, tuple)):
        meshes = (config,) if isinstance(config, DeviceMesh) else config
        config, existing = None, partial(of_device_meshes, meshes, keys)
    else:
        existing = None
    made = Opening(config, keys, overrides, existing=existing, store=store, rank=rank, world_size=world_size)
    return made.run()


def from_groups(
    groups: Mapping[str, dist.ProcessGroup],
    *,
    merge: Mapping[str, Sequence[str]] | None = None,
    views: Mapping[str, Mapping[str, int]] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    device: str | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
    validate_calls: int | Literal["always"] | None = None,
    warm_up: bool | None = None,
) -> Mesh:
    """Return a mesh over existing process groups, such as those of Megatron-Core's parallel_state.

        mesh = meshcomm.from_groups({"tp": get_tensor_model_parallel_group(), "dp": ..., "pp": ...})

    groups:    maps each name to this rank's group. Together, the groups must connect all ranks. A name such as
               "dp_cp" whose groups combine the groups of other names becomes a merged dim. A different grid over
               the same ranks becomes a view.
    others:    the keys of `[mesh]`, as for `init`. Additional groups that these keys require are created.
    Called by: every process of the job, with the same names in the same order.
    Raises:    LaunchError before the default group exists; LayoutError if the groups do not form a grid;
               MeshMismatchError on every rank if one rank differs.
    """
    keys = given_keys(
        merge=merge,
        views=views,
        options=options,
        device=device,
        backend=backend,
        timeout_s=timeout_s,
        validate_calls=validate_calls,
        warm_up=warm_up,
    )
    return Opening(None, keys, (), existing=partial(of_groups, groups, keys)).run()


@final
class Opening:
    """Opens a mesh in four steps: meet the other ranks, agree with them, start torch's default group, create the groups.

    A process without a usable configuration still meets the other ranks, so that they receive the error instead of waiting.
    keys: the caller's keys of `[mesh]`.
    existing: finds existing groups, and the keys that describe these groups and replace `keys`.
    store, rank, world_size: the program's own rendezvous, if given.
    """

    def __init__(
        self,
        config: Source | None,
        keys: dict[str, Any],
        overrides: Sequence[str],
        *,
        existing: Callable[[], Existing] | None = None,
        store: dist.Store | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self._given_store, self._rank, self._world_size = store, rank, world_size
        self._existing: Mapping[str, dist.ProcessGroup] = {}
        self._world = WORLD.get()
        self._pretended = PRETENDED.get()
        self._launch = launch_here() if self._world is None else self._world.launch
        self._failure: MeshcommError | None = None
        try:
            if existing is not None:
                (config, self._existing), keys = existing(), {}
            self._settings = settings_of(config, keys, overrides)
        except MeshcommError as error:
            if self._launch.world_size == 1:
                raise
            self._settings, self._failure = MeshOnly(MeshConfig(dims={"all": -1})), error
        if self._pretended is not None:
            self._settings = self._pretended.settings(self._settings)
        self._first_settings = self._settings
        self._generations: Generations | None = None
        self._connections: Connections | None = None
        self._resources = ExitStack()
        self._transports: dict[str, Transport] = {}
        self._clients: dict[bool, Any] = {}
        self._aborts: list[Callable[[], object]] = []

    def run(self) -> Mesh:
        """Return the opened mesh. With `warm_up`, use all groups once. If a step raises, release everything."""
        if self._world is None:
            gives_way()
        # The default group of another mesh or of the program, which `reopen` must not create again.
        self._kept_group = self._world is None and dist.is_initialized()
        self._meeting = self._met = self._meet()
        if self._world is not None:
            self._generations = self._world.generations
        elif not self._meeting.is_fake:
            self._generations = generations_of(self._meeting.store, self._meeting.rank)
        plan, runtime = self._opened()
        with ExitStack() as opening:
            opening.enter_context(runtime.resources)
            mesh = Mesh(plan, runtime)
            if self._settings.mesh.warm_up and mesh.is_member:
                opening.callback(mesh.close)
                mesh.warm_up()
            opening.pop_all()
        if self._pretended is not None:
            self._pretended.opened(mesh)
        return mesh

    def _opened(self) -> tuple[Plan, Runtime]:
        """Run all steps after the first. Repeat these steps if a rank is lost and replaced in the meantime."""
        generations = self._generations
        while True:
            # Released in reverse order when the mesh closes.
            self._resources, self._transports, self._clients = ExitStack(), {}, {}
            self._connections, self._aborts = None, []
            self._resources.callback(self._aborts.clear)
            self._generation = Generation() if generations is None else generations.join()
            self._take_place(self._generation)
            if generations is not None and self._world is None:
                self._connections = Connections()
                self._connections.aborts = self._aborts
                generations.cuts(self._connections)
            try:
                with self._making(), ExitStack() as opening:
                    opening.enter_context(self._resources)
                    runtime = self._steps()
                    opening.pop_all()
                if generations is not None:
                    generations.opened()
                return self._plan, runtime
            except MeshcommError as error:
                lost = isinstance(error, CommunicationError | StoreError | MeshMismatchError)
                if generations is not None and isinstance(error, MeshMismatchError) and error.missing:
                    generations.hung(dict.fromkeys(error.missing, "has not arrived at the mesh"))
                if generations is None or not generations.newer(generations.announced_s if lost else 0.0):
                    raise

    def _take_place(self, generation: Generation) -> None:
        """Adopt the rank of this process and the mesh sizes from a generation.

        Ranks are renumbered, because torch's default group numbers its ranks from 0, without gaps.
        """
        met, processes = self._met, generation.processes
        self._meeting = met
        if processes:
            self._meeting = replace(met, rank=processes.index(met.rank), world_size=len(processes))
        self._settings = with_sizes(self._first_settings, generation.dims)

    def _making(self) -> AbstractContextManager[None]:
        return nullcontext() if self._connections is None else self._connections.making()

    def _steps(self) -> Runtime:
        self._prefix = self._next_prefix()
        self._store = prefixed(self._prefix, self._job_store())
        facts = self._facts()
        self._agreed = self._agree(facts)
        if self._generations is not None:
            self._generations.met()
        self._warn_of_places()
        if self._world is None:
            self._start_default_group()
        return self._create()

    def _job_store(self) -> Any:
        """Return the job's store under the generation's prefix. The connection is cut when a newer generation starts."""
        store = self._meeting.store
        if self._generations is not None and self._world is None:
            store = store.clone()
        return self._of_generation(store)

    def _of_generation(self, store: Any) -> Any:
        number = self._generation.number
        return prefixed(f"generation{number}", store) if number else store

    # -- first: meet ----------------------------------------------------------------------------

    def _meet(self) -> Meeting:
        settings, launch = self._settings, self._launch
        if self._world is not None:
            # The ranks of a simulated world have already met, so rendezvous arguments cannot apply.
            meets = {"store": self._given_store, "rank": self._rank, "world_size": self._world_size}
            if named := ", ".join(name for name, value in meets.items() if value is not None):
                raise LaunchError(
                    f"the ranks have met already: {named} has no effect here",
                    given=named,
                    expected="no store, rank or world_size in the simulator",
                    hint="leave them out; outside the simulator a launcher may set them",
                )
            return Meeting(self._world.store, launch.rank, launch.world_size, launch)
        if dist.is_initialized():
            # On torch's fake backend only this rank exists: there is no store, and no rank to agree with.
            fake = dist.get_backend() == "fake"
            store = self._given_store or (dist.HashStore() if fake else default_store())
            rank, world_size = dist.get_rank(), dist.get_world_size()
            store = signed(of_this_attempt(store), "default group")
            return Meeting(store, rank, world_size, launch, fake, kept=True)
        return meet(
            settings.process,
            launch,
            settings.mesh.timeout_s,
            store=self._given_store,
            rank=self._rank,
            world_size=self._world_size,
        )

    def _next_prefix(self) -> str:
        """Return this mesh's own prefix in the job's store. Each rank counts the meshes that it opens; the count is the same
        on all ranks.
        """
        store, rank = self._meeting.store, self._meeting.rank
        try:
            claim(store, self._met.rank, kept=self._met.kept or bool(self._generation.number))
            store = self._of_generation(store)
            self._number = store.add(keys.OPENED.format(rank), 1)
            prefix = f"meshcomm{self._number}"
            # Torch has a single list of group names. A mesh that started the default group and a mesh that was opened on that
            # group later count their meshes in different parts of the store.
            if self._world is None and dist.is_initialized() and not self._meeting.is_fake:
                outer = signed(default_store(), "default group")
                prefix = (
                    f"{outer.get(keys.PREFIX).decode()}.{prefix}" if outer.check([keys.PREFIX]) else prefix
                )
        except RuntimeError as error:
            raise store_failed(
                f"rank {rank} lost the job's store before the mesh was opened", error
            ) from error
        return prefix

    # -- second: agree --------------------------------------------------------------------------

    def _facts(self) -> dict[str, Any]:
        """Return the facts that must be equal on all ranks; a rank that has failed contributes its error."""
        if self._failure is None:
            try:
                self._plan, self._device = self._planned()
                if self._world is None:
                    devices = prefixed("devices", self._store)
                    refuse_shared(devices, self._meeting.rank, self._plan, self._device)
            except MeshcommError as error:
                self._failure = error
        if self._failure is not None:
            return {"problem": self._failure.what}
        meeting, mesh = self._meeting, self._settings.mesh
        return {
            **self._plan.facts(),
            "world": meeting.world_size,
            **({"job": meeting.launch.job} if meeting.launch.job else {}),
            "validate_calls": mesh.validate_calls,
            "warm_up": mesh.warm_up,
            "versions": {
                "meshcomm": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "environment": {name: os.environ[name] for name in SHARED if name in os.environ},
        }

    def _planned(self) -> tuple[Plan, torch.device]:
        """Return the groups of the mesh, and this process's device.

        Raises an error for groups that this host or torch cannot support.
        """
        settings, meeting = self._settings, self._meeting
        if self._world is not None:
            device, backend = self._world.place(settings.mesh.device)
            return settings.plan(meeting.world_size).on(device.type, backend), device
        variables = network_variables(settings.network)
        refuse_conflict(variables)
        self._resources.enter_context(with_variables(variables))
        device = choose_device(settings.mesh.device, meeting.launch)
        if meeting.world_size == 1 and meeting.launch.kind == "single":
            refuse_alone(settings)
        plan = settings.plan(meeting.world_size).on(device.type, choose_backend(device))
        check_devices(settings, device, plan.defaults.backend, meeting.launch)
        check_backends(plan)
        check_interfaces(plan, settings.network)
        return plan, device

    def _agree(self, facts: Mapping[str, Any]) -> Agreed:
        meeting, store = self._meeting, prefixed("agree", self._store)
        ranks = range(1 if meeting.is_fake else meeting.world_size)
        try:
            agreed = agree(store, meeting.rank, ranks, facts, self._settings.mesh.timeout_s)
        except MeshMismatchError as error:
            blame(error, meeting.store)
            if is_serving(meeting.launch.port):
                # A process that is started for a missing rank joins in this rank's next attempt.
                before = str(self._number - 1) if self._number > 1 else ""
                for missing in error.missing:
                    meeting.store.compare_set(keys.OPENED.format(missing), before, str(self._number))
            if self._world is None:
                leave_together(store, stays=meeting.rank == 0)
            if self._failure is None:
                raise
        if self._failure is not None:
            # The other ranks have received this error. On this rank, it is more precise than "the ranks differ".
            raise self._failure
        return agreed

    # -- third: torch's default group -----------------------------------------------------------

    def _start_default_group(self) -> None:
        """Start the default group, unless the program has started it. Raises CommunicationError."""
        meeting, device, backend = self._meeting, self._device, self._plan.defaults.backend
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if dist.is_initialized():
            return
        # Binding a device would connect all ranks with each other, although only the dims' groups need connections.
        bind = self._settings.process.device_id is True and device.type != "cpu"
        ordered = backend_on(backend, device) in STREAM_ORDERED
        variables = {**gloo_defaults(meeting.launch.one_host), **nccl_defaults(meeting.world_size)}
        try:
            with self._recovering(), with_variables(variables, keep=True):
                dist.init_process_group(
                    backend,
                    store=dist.PrefixStore("world", unsigned(self._client(ordered))),
                    rank=meeting.rank,
                    world_size=meeting.world_size,
                    timeout=timedelta(seconds=self._settings.mesh.timeout_s),
                    device_id=device if bind else None,
                )
            self._resources.callback(give_back, default_group())
            if ordered:
                self._aborts.append(partial(abort, default_group()))
            signed(default_store(), "default group").set(keys.PREFIX, self._prefix)
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {meeting.rank} could not start torch's default group",
                given=first_line(error),
                expected=f"backend {backend} to start, and a store that answers",
                hint=INTERFACES
                if reason_of(error) is Reason.UNREACHABLE
                else "look for the first error reported by the process that hosts the store",
            ) from error

    # -- fourth: create -------------------------------------------------------------------------

    def _create(self) -> Runtime:
        """Create this rank's groups and the watchdog. All ranks of a group create it together. Raises CommunicationError."""
        meeting, plan, settings = self._meeting, self._plan, self._settings
        limit = settings.mesh.validate_calls
        compared = None if limit == "always" or self._world is not None else limit
        self._resources.callback(self._transports.clear)
        watch = None
        if meeting.rank in plan.layout:
            whole_world = self._world is None and plan.layout.world_size == meeting.world_size
            self._transports.update(
                create_transports(
                    plan, meeting.rank, self._device, whole_world, self._open_group, self._existing
                )
            )
            watch = self._watch(compared)
        roles = getattr(settings, "parallel", None)
        return Runtime(
            launch=meeting.launch,
            rank=meeting.rank,
            device=self._device,
            store=self._store,
            prefix=self._prefix,
            topology=self._topology(),
            transports=self._transports,
            watch=watch,
            validate_calls=compared,
            create=self._open_later,
            resources=self._resources,
            data_dims=None if roles is None else roles.data_dims,
            is_fake=meeting.is_fake,
            generation=self._generation,
            generations=self._generations,
            reopen=None if self._kept_group else self._opened,
            aborts=self._aborts,
        )

    def _open_later(self, group: Group, split: bool) -> Transport:
        """Create an additional group for an open mesh."""
        with self._making():
            if self._connections is not None:
                # Use a connection that is cut if a rank is lost in the meantime.
                self._clients.clear()
                self._clients |= dict.fromkeys((False, True), self._connections.own(self._store.clone))
            return self._open_group(group, split)

    def _open_group(self, group: Group, split: bool) -> Transport:
        if self._world is not None:
            return self._world.open(group, self._world_prefix)
        own = backend_on(group.options.backend, self._device) in STREAM_ORDERED
        client, rank = self._client(own), self._meeting.rank
        variables = gloo_defaults(self._meeting.launch.one_host, len(group.ranks))
        # A backend that uses the store after this call may wait for it in a thread that its destructor joins.
        if own or {**variables, **os.environ}["TORCH_GLOO_LAZY_INIT"] == "1":
            client = unsigned(client)
        store = dist.PrefixStore("groups", client)
        with self._recovering(), with_variables(variables, keep=True):
            transport = open_group(group, rank, store, self._prefix, self._device, split)
        self._resources.callback(transport.close)
        if own:
            self._aborts.append(transport.abort)
            if self._generations is not None:
                transport.meet = partial(
                    _meet, dist.PrefixStore(f"meets/{group.name}/{group.index}", store), group, rank
                )
        return transport

    def _recovering(self) -> AbstractContextManager[None]:
        """If lost ranks are replaced, errors in groups created inside the block do not terminate this process."""
        return nullcontext() if self._generations is None else with_variables(NCCL_RECOVERS)

    def _client(self, own: bool) -> Any:
        """Return the mesh's store client, or a separate one for groups that connect at their first call.

        Connecting blocks a client, but the threads that answer for this rank need an idle client. If a rank is lost in
        the meantime, only closing this separate connection ends the blocked call.
        """
        if own not in self._clients:
            make = (
                self._store.clone
                if self._connections is None
                else partial(self._connections.own, self._store.clone)
            )
            self._clients[own] = make() if own else self._store
        return self._clients[own]

    @property
    def _world_prefix(self) -> str:
        """Return a prefix that is unique to the generation, so that two generations never share groups."""
        number = self._generation.number
        return f"generation{number}/{self._prefix}" if number else self._prefix

    def _topology(self) -> Callable[[], TopologyConfig]:
        agreed = None if self._meeting.is_fake else self._agreed
        return partial(_topology, self._settings, agreed, self._world is not None)

    def _warn_of_places(self) -> None:
        """Warn, once per job, about dims that cross hosts only because ranks are not placed in blocks."""
        if self._world is not None or self._meeting.rank or not self._agreed.nodes:
            return
        from meshcomm.predict.lint import scattered

        found = scattered(self._plan, self._topology()())
        if found is not None:
            warnings.warn(str(found), ScatteredRanks, stacklevel=4)

    def _watch(self, compared: int | None) -> Watching | None:
        meeting, plan, generation = self._meeting, self._plan, self._generation
        coords, groups = plan.layout.coords(meeting.rank), plan.for_rank(meeting.rank).groups
        if self._world is not None:
            return self._world.watch(coords, self._world_prefix)
        if not groups:
            return None
        # The watchdog's callbacks must not keep the store alive.
        last = time.monotonic() + self._settings.mesh.timeout_s
        options = WatchOptions(
            plan.defaults.timeout_s,
            partial(end_by, meeting.launch, plan.layout.label(meeting.rank)),
            reports=reports_of(self._settings.mesh.reports, self._agreed.moment),
            compared=compared,
            alone=meeting.is_fake,
            process_of=lambda rank: state_of_rank(meeting.store, generation.process_of(rank)),
            refused=partial(_refused, meeting, last),
            lost=_none_lost if self._generations is None else self._generations.lost,
            hung=None if self._generations is None else self._generations.hung,
        )
        store = prefixed("watch", prefixed("mesh", self._store))
        watchdog = Watchdog(store, meeting.rank, coords, plan.layout.world_size, options)
        ranks = plan.layout.ranks.tolist()
        if not meeting.is_fake and meeting.rank == min(ranks):
            names = {generation.process_of(other): plan.layout.label(other) for other in ranks}
            leave_names(names, again=bool(generation.number))
        return watchdog


def _topology(settings: Settings, agreed: Agreed | None, simulated: bool) -> TopologyConfig:
    if simulated:
        return settings.topology
    from meshcomm.predict.links import discovered

    found = (None, ()) if agreed is None else (agreed.ranks_per_host, agreed.nodes)
    return discovered(settings.topology, os.environ, *found)


def _meet(store: dist.Store, group: Group, rank: int, coords: tuple[int, ...]) -> None:
    """Block until the ranks at `coords` of a group are about to connect. If `coords` is empty, wait for the whole group.

    NCCL cannot be interrupted while it connects ranks, and a lost rank never arrives. This wait ends when the store
    connection is cut.
    """
    name = "-".join(map(str, coords))
    store.set(f"{name}/{group.ranks.index(rank)}", "")
    store.wait([f"{name}/{each}" for each in coords or range(len(group.ranks))], FOREVER)


def _none_lost(what: str, waits: bool, confirms: bool) -> RankLost | None:
    return None


def _refused(meeting: Meeting, last: float) -> MeshcommError | None:
    """Return the error if this rank may belong to another job.

    The check ends at the time `last`, because ranks of this job that arrive later find no mesh to join.
    """
    return None if meeting.launch.job or time.monotonic() > last else another_job(meeting.store)
