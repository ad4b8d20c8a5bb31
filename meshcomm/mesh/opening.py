"""Open a mesh from a configuration: meet the other ranks, compare settings, and create groups."""

from __future__ import annotations

import os
import platform
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from weakref import finalize

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshcomm import __version__
from meshcomm.config.mesh import MeshConfig
from meshcomm.errors import (
    CommunicationError,
    LaunchError,
    MeshcommError,
    MeshMismatchError,
    StoreError,
)
from meshcomm.layout import Plan
from meshcomm.mesh.agree import Agreed, agree, leave_together
from meshcomm.mesh.devices import (
    check_backends,
    check_devices,
    choose_backend,
    choose_device,
    refuse_shared,
)
from meshcomm.mesh.existing import Existing, of_device_meshes, of_groups
from meshcomm.mesh.groups import GroupMaker
from meshcomm.mesh.mesh import Mesh
from meshcomm.mesh.rank_failure import end_by, leave_names
from meshcomm.mesh.runtime import PRETENDED, WORLD, World
from meshcomm.mesh.source import MeshOnly, Settings, Source, given_keys, refuse_alone, settings_of, with_sizes
from meshcomm.mesh.state import Held, State
from meshcomm.mesh.watchdog import Watchdog, WatchOptions
from meshcomm.mesh.watched import gives_way, launch_here, reports_of
from meshcomm.rendezvous import keys
from meshcomm.rendezvous.generation import Generation, Generations, generations_of
from meshcomm.rendezvous.job_store import is_serving
from meshcomm.rendezvous.launcher import Launch
from meshcomm.rendezvous.meeting import Meeting, meet, of_this_attempt
from meshcomm.rendezvous.processes import another_job, blame, claim, state_of_rank
from meshcomm.rendezvous.signed import signed
from meshcomm.rendezvous.store import prefixed, store_failed
from meshcomm.transport import Transport
from meshcomm.transport.connections import Connections
from meshcomm.transport.torch_changes import changed
from meshcomm.transport.torch_private import default_store
from meshcomm.transport.variables import (
    SHARED,
    check_interfaces,
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
    with _IN_TURN if WORLD.get() is None else nullcontext():
        return _opened(config, keys, overrides, existing, store=store, rank=rank, world_size=world_size)


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
    with _IN_TURN if WORLD.get() is None else nullcontext():
        return _opened(None, keys, existing=partial(of_groups, groups, keys))


class _Job(NamedTuple):
    """The job, as this process has met it, and the mesh that it asks for.

    problem: why this process has no usable configuration. It still meets the other ranks, so that they receive this error
        instead of waiting.
    existing: groups to use instead of new ones, by name.
    world: replaces processes and groups, in the simulator.
    """

    settings: Settings
    problem: MeshcommError | None
    existing: Mapping[str, dist.ProcessGroup]
    world: World | None
    met: Meeting
    generations: Generations | None


# Threads open meshes in turn, because opening sets environment variables and creates torch's default group.
_IN_TURN = threading.RLock()


def _opened(
    config: Source | None,
    keys: dict[str, Any],
    overrides: Sequence[str] = (),
    existing: Callable[[], Existing] | None = None,
    **meets: Any,
) -> Mesh:
    """Return the opened mesh. With `warm_up`, use all groups once. If a step raises, release everything.

    existing: finds groups, and the config that describes them and replaces `keys`. meets: the program's own rendezvous.
    """
    world, pretended = WORLD.get(), PRETENDED.get()
    launch = launch_here() if world is None else world.launch
    groups: Mapping[str, dist.ProcessGroup] = {}
    problem = None
    try:
        if existing is not None:
            (config, groups), keys = existing(), {}
        settings = settings_of(config, keys, overrides)
    except MeshcommError as error:
        if launch.world_size == 1:
            raise
        settings, problem = MeshOnly(MeshConfig(dims={"all": -1})), error
    if pretended is not None:
        settings = pretended.settings(settings)
    # The default group of another mesh or of the program, which a reopening must not create again.
    keeps_group = dist.is_initialized()
    if world is None:
        gives_way()
        met = _met(settings, launch, **meets)
        generations = None if met.is_fake else generations_of(met.store, met.rank)
    else:
        met, generations = _met_in(world, meets), world.generations
    mesh = Mesh(_joined(_Job(settings, problem, groups, world, met, generations), keeps_group))
    if settings.mesh.warm_up and mesh.is_member:
        with ExitStack() as opening:
            opening.callback(mesh.close)
            mesh.warm_up()
            opening.pop_all()
    if pretended is not None:
        pretended.opened(mesh)
    return mesh


# -- first: meet --------------------------------------------------------------------------------------


def _met(settings: Settings, launch: Launch, store: dist.Store | None = None, **meets: Any) -> Meeting:
    if not dist.is_initialized():
        return meet(settings.process, launch, settings.mesh.timeout_s, store=store, **meets)
    # On torch's fake backend only this rank exists: there is no store, and no rank to agree with.
    fake = dist.get_backend() == "fake"
    default_group_store = signed(
        of_this_attempt(store or (dist.HashStore() if fake else default_store())), "default group"
    )
    return Meeting(default_group_store, dist.get_rank(), dist.get_world_size(), launch, fake, kept=True)


def _met_in(world: World, meets: Mapping[str, Any]) -> Meeting:
    """The ranks of a simulated world have already met, so rendezvous arguments cannot apply."""
    if named := ", ".join(name for name, value in meets.items() if value is not None):
        raise LaunchError(
            f"the ranks have met already: {named} has no effect here",
            given=named,
            expected="no store, rank or world_size in the simulator",
            hint="leave them out; outside the simulator a launcher may set them",
        )
    return Meeting(world.store, world.launch.rank, world.launch.world_size, world.launch)


# -- an attempt -----------------------------------------------------------------------------------------


class _Attempt(NamedTuple):
    """This process's place in one generation of the job, in which it tries to open the mesh.

    meeting: with the ranks of the generation, numbered from 0 without gaps, as torch's default group requires.
    settings: with the dim sizes of the generation.
    """

    job: _Job
    meeting: Meeting
    generation: Generation
    settings: Settings
    connections: Connections | None
    resources: ExitStack

    def of_generation(self, store: Any) -> Any:
        """Return a store under the generation's prefix."""
        number = self.generation.number
        return prefixed(f"generation{number}", store) if number else store


def _attempt(job: _Job) -> _Attempt:
    meeting, generation, connections = job.met, Generation(), None
    if job.generations is not None:
        generation = job.generations.join()
        if job.world is None:
            connections = Connections()
            job.generations.cuts(connections)
    if processes := generation.processes:
        meeting = replace(meeting, rank=processes.index(meeting.rank), world_size=len(processes))
    settings = with_sizes(job.settings, generation.dims)
    return _Attempt(job, meeting, generation, settings, connections, ExitStack())


def _joined(job: _Job, keeps_group: bool) -> State:
    """Run all steps after the first. Repeat these steps if a rank is lost and replaced in the meantime."""
    put_back = changed() if job.world is None else lambda: None
    try:
        return _tried(job, None if keeps_group else partial(_joined, job, False))
    finally:
        put_back()


def _tried(job: _Job, reopen: Callable[[], State] | None) -> State:
    """See _joined. reopen: opens the mesh in a later generation."""
    generations = job.generations
    while True:
        attempt = _attempt(job)
        try:
            making = nullcontext() if attempt.connections is None else attempt.connections.making()
            with making, ExitStack() as opening:
                opening.enter_context(attempt.resources)
                held, number = _placed(attempt)
                planned = _planned(attempt, held)
                agreed = _agreed(attempt, held, number, planned)
                state = _created(attempt, held, planned, agreed, reopen)
                opening.pop_all()
            if generations is not None:
                generations.opened()
            return state
        except MeshcommError as error:
            lost = isinstance(error, CommunicationError | StoreError | MeshMismatchError)
            if generations is not None and isinstance(error, MeshMismatchError) and error.missing:
                generations.hung(dict.fromkeys(error.missing, "has not arrived at the mesh"))
            if generations is None or not generations.newer(generations.announced_s if lost else 0.0):
                raise


def _placed(attempt: _Attempt) -> tuple[Held, int]:
    """Return the mesh's place in the store, and how many meshes this rank has opened there. Each rank counts them, so that the
    prefix is the same on all ranks.
    """
    meeting, world = attempt.meeting, attempt.job.world
    if world is None:
        change_torch(attempt.resources)
    try:
        claim(meeting.store, attempt.job.met.rank, kept=meeting.kept or bool(attempt.generation.number))
        number = attempt.of_generation(meeting.store).add(keys.OPENED.format(meeting.rank), 1)
        prefix = f"meshcomm{number}"
        # Torch has a single list of group names. A mesh that started the default group and a mesh that was opened on that
        # group later count their meshes in different parts of the store.
        if world is None and dist.is_initialized() and not meeting.is_fake:
            outer = signed(default_store(), "default group")
            prefix = f"{outer.get(keys.PREFIX).decode()}.{prefix}" if outer.check([keys.PREFIX]) else prefix
    except RuntimeError as error:
        lost = f"rank {meeting.rank} lost the job's store before the mesh was opened"
        raise store_failed(lost, error) from error
    connections = attempt.connections
    aborts = [] if connections is None else connections.aborts
    attempt.resources.callback(aborts.clear)
    store = attempt.of_generation(meeting.store if connections is None else meeting.store.clone())
    return Held(prefixed(prefix, store), prefix, connections, attempt.resources, aborts), number


def change_torch(resources: ExitStack) -> None:
    """Replace functions of torch until these resources of a mesh are closed."""
    put_back = changed()
    resources.callback(put_back)
    # Of a mesh that is dropped without `close`, too.
    finalize(resources, put_back).atexit = False


# -- second: agree --------------------------------------------------------------------------------------


class _Planned(NamedTuple):
    """The groups of the mesh, and this process's device."""

    plan: Plan
    device: torch.device


def _planned(attempt: _Attempt, held: Held) -> _Planned | MeshcommError:
    """Return the error for groups that this host or torch cannot support, which the other ranks must learn."""
    if attempt.job.problem is not None:
        return attempt.job.problem
    settings, meeting = attempt.settings, attempt.meeting
    try:
        if attempt.job.world is not None:
            device, backend = attempt.job.world.place(settings.mesh.device)
            return _Planned(settings.plan(meeting.world_size).on(device.type, backend), device)
        variables = network_variables(settings.network)
        refuse_conflict(variables)
        attempt.resources.enter_context(with_variables(variables))
        device = choose_device(settings.mesh.device, meeting.launch)
        backend = choose_backend(device)
        if meeting.world_size == 1 and meeting.launch.kind == "single":
            refuse_alone(settings)
        plan = settings.plan(meeting.world_size).on(device.type, backend)
        check_devices(settings, device, plan.defaults.backend, meeting.launch)
        check_backends(plan)
        check_interfaces(plan, settings.network)
        refuse_shared(held.store, meeting.rank, plan, device)
        return _Planned(plan, device)
    except MeshcommError as error:
        return error


def _facts(attempt: _Attempt, planned: _Planned | MeshcommError) -> dict[str, Any]:
    """Return the facts that must be equal on all ranks; a rank that has failed contributes its error."""
    if isinstance(planned, MeshcommError):
        return {"problem": planned.what}
    meeting, mesh = attempt.meeting, attempt.settings.mesh
    environment = {name: os.environ[name] for name in SHARED if name in os.environ}
    return {
        **planned.plan.facts(),
        "world": meeting.world_size,
        **({"job": meeting.launch.job} if meeting.launch.job else {}),
        "validate_calls": mesh.validate_calls,
        "warm_up": mesh.warm_up,
        "versions": {
            "meshcomm": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "environment": environment,
    }


def _agreed(attempt: _Attempt, held: Held, number: int, planned: _Planned | MeshcommError) -> Agreed:
    """Compare this rank's facts with those of the others. Raises this rank's own error, if it has one."""
    meeting, facts = attempt.meeting, _facts(attempt, planned)
    ranks = range(1 if meeting.is_fake else meeting.world_size)
    store = prefixed("agree", held.store)
    try:
        agreed = agree(store, meeting.rank, ranks, facts, attempt.settings.mesh.timeout_s)
    except MeshMismatchError as error:
        blame(error, meeting.store)
        if is_serving(meeting.launch.port):
            # A process that is started for a missing rank joins in this rank's next attempt.
            before = str(number - 1) if number > 1 else ""
            for missing in error.missing:
                meeting.store.compare_set(keys.OPENED.format(missing), before, str(number))
        if attempt.job.world is None:
            leave_together(store, stays=meeting.rank == 0)
        if not isinstance(planned, MeshcommError):
            raise
    if isinstance(planned, MeshcommError):
        # The other ranks have received this error. On this rank, it is more precise than "the ranks differ".
        raise planned
    if attempt.job.generations is not None:
        attempt.job.generations.met()
    return agreed


# -- third: create the groups ---------------------------------------------------------------------------


def _created(
    attempt: _Attempt,
    held: Held,
    planned: _Planned | MeshcommError,
    agreed: Agreed,
    reopen: Callable[[], State] | None,
) -> State:
    """Create this rank's groups and the watchdog. All ranks of a group create it together. Raises CommunicationError."""
    assert isinstance(planned, _Planned)
    meeting, settings, world, (plan, device) = attempt.meeting, attempt.settings, attempt.job.world, planned
    label = plan.layout.label(meeting.rank)
    mine = plan.for_rank(meeting.rank) if meeting.rank in plan.layout else None
    topology: Callable[[], TopologyConfig] = (
        partial(topology_of, settings.topology, None if meeting.is_fake else agreed)
        if world is None
        else lambda: settings.topology
    )
    # Two generations of a simulated world never share groups.
    number = attempt.generation.number
    prefix = f"generation{number}/{held.prefix}" if world is not None and number else held.prefix
    maker = GroupMaker(meeting, device, prefix, world, held)
    if world is None and meeting.rank == 0 and agreed.nodes:
        _warn_of_places(plan, topology())
    maker.start_default_group(plan.defaults.backend, settings)
    limit = settings.mesh.validate_calls
    compared = None if limit == "always" or world is not None else limit
    transports: dict[str, Transport] = {}
    held.resources.callback(transports.clear)
    watch = None
    if mine is not None:
        transports |= maker.transports(plan, mine, attempt.job.existing)
        if world is not None:
            watch = world.watch(mine.coords, prefix)
        elif mine.groups:
            watch = _watch(attempt, held, plan, mine.coords, label, agreed, compared)
    roles = getattr(settings, "parallel", None)
    return State(
        plan=plan,
        launch=meeting.launch,
        rank=meeting.rank,
        label=label,
        mine=mine,
        device=device,
        topology=topology,
        transports=transports,
        watch=watch,
        validate_calls=compared,
        data_dims=None if roles is None else roles.data_dims,
        is_fake=meeting.is_fake,
        generation=attempt.generation,
        generations=attempt.job.generations,
        held=held,
        create=maker.open_later,
        reopen=reopen,
    )


def _watch(
    attempt: _Attempt,
    held: Held,
    plan: Plan,
    coords: Mapping[str, int],
    label: str,
    agreed: Agreed,
    compared: int | None,
) -> Watchdog:
    """Start the watchdog of the mesh's groups. Its callbacks must not keep the store alive."""
    meeting, generation, generations = attempt.meeting, attempt.generation, attempt.job.generations
    last = time.monotonic() + attempt.settings.mesh.timeout_s
    options = WatchOptions(
        plan.defaults.timeout_s,
        partial(end_by, meeting.launch, label),
        reports=reports_of(attempt.settings.mesh.reports, agreed.moment),
        compared=compared,
        alone=meeting.is_fake,
        process_of=lambda rank: state_of_rank(meeting.store, generation.process_of(rank)),
        refused=partial(_refused, meeting, last),
    )
    if generations is not None:
        options = replace(options, lost=generations.lost, hung=generations.hung)
    store = prefixed("mesh/watch", held.store)
    ranks = plan.layout.ranks.tolist()
    watchdog = Watchdog(store, meeting.rank, coords, len(ranks), options)
    if not meeting.is_fake and meeting.rank == min(ranks):
        names = {generation.process_of(other): plan.layout.label(other) for other in ranks}
        leave_names(names, again=bool(generation.number))
    return watchdog


def _warn_of_places(plan: Plan, topology: TopologyConfig) -> None:
    """Warn, once per job, about dims that cross hosts only because ranks are not placed in blocks."""
    from meshcomm.predict.lint import scattered

    if (finding := scattered(plan, topology)) is not None:
        # Attributed to the caller of `init`.
        warnings.warn(str(finding), ScatteredRanks, stacklevel=6)


def topology_of(given: TopologyConfig, agreed: Agreed | None) -> TopologyConfig:
    """Return [topology], with what the ranks have found out about their hosts."""
    from meshcomm.predict.links import discovered

    return discovered(given, os.environ, *((None, ()) if agreed is None else agreed[1:]))


def _refused(meeting: Meeting, last: float) -> MeshcommError | None:
    """Return the error if this rank may belong to another job.

    The check ends at the time `last`, because ranks of this job that arrive later find no mesh to join.
    """
    return None if meeting.launch.job or time.monotonic() > last else another_job(meeting.store)
