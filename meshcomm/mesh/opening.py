"""From a configuration to a live mesh: meet, agree, create."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from meshcomm import __version__
from meshcomm.config.mesh import MeshConfig
from meshcomm.errors import LaunchError, MeshcommError, MeshMismatchError, StoreError
from meshcomm.mesh.agree import agree, leave_together
from meshcomm.mesh.creating import Agreed, create_groups, create_in_world
from meshcomm.mesh.devices import check_backends, check_devices, choose_backend, choose_device
from meshcomm.mesh.environment import Environment, network_variables, shared_variables
from meshcomm.mesh.launch_environment import Launch, find_launch
from meshcomm.mesh.mesh import Mesh
from meshcomm.mesh.rank_claim import blame, claim
from meshcomm.mesh.rendezvous import (
    Meeting,
    meet,
    of_this_attempt,
    outer_prefix,
)
from meshcomm.mesh.runtime import WORLD, World, prefixed
from meshcomm.mesh.source import MeshOnly, Settings, Source, settings_of
from meshcomm.transport.torch_private import default_store


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
    keys = {
        "dims": dims,
        "merge": merge,
        "views": views,
        "options": options,
        "rank_order": tuple(rank_order) if isinstance(rank_order, Iterable) else rank_order,
        "ranks": tuple(ranks) if isinstance(ranks, Iterable) else ranks,
        "device": device,
        "backend": backend,
        "timeout_s": timeout_s,
        "validate_calls": validate_calls,
        "warm_up": warm_up,
    }
    given = {name: value for name, value in keys.items() if value is not None}
    world = WORLD.get()
    launch = find_launch(os.environ) if world is None else world.launch
    failure: MeshcommError | None = None
    settings: Settings = MeshOnly(MeshConfig(dims={"all": -1}))
    try:
        settings = settings_of(config, given, overrides)
    except MeshcommError as error:
        # Meet the others all the same, so that they hear of it instead of waiting.
        failure = error
    if failure is not None and launch.world_size == 1:
        raise failure
    if world is not None:
        return _open(config, settings, _met(world, store, rank, world_size), failure, world)
    return _open(config, settings, _meet(settings, launch, store, rank, world_size), failure, None)


def _meet(
    settings: Settings, launch: Launch, store: dist.Store | None, rank: int | None, world_size: int | None
) -> Meeting:
    if dist.is_initialized():
        # Of torch's fake backend only this rank exists: there is no store, and nobody to agree with.
        pretended = dist.get_backend() == "fake"
        found = store or (dist.HashStore() if pretended else default_store())
        return Meeting(
            of_this_attempt(found), dist.get_rank(), dist.get_world_size(), launch, pretended, True
        )
    return meet(
        settings.process, launch, settings.mesh.timeout_s, store=store, rank=rank, world_size=world_size
    )


def _met(world: World, store: dist.Store | None, rank: int | None, world_size: int | None) -> Meeting:
    """A world's ranks have met; whoever says how to meet means another one."""
    given = {"store": store, "rank": rank, "world_size": world_size}
    named = [name for name, value in given.items() if value is not None]
    if named:
        raise LaunchError(
            f"init was told how to meet the other ranks, which have met: {', '.join(named)} has no effect here",
            given=", ".join(named),
            expected="no store, rank or world_size in the simulator",
            hint="leave them out; outside the simulator a launcher may say them",
        )
    return Meeting(world.store, world.launch.rank, world.launch.world_size, world.launch)


def _open(
    source: Source | None,
    settings: Settings,
    joined: Meeting,
    failure: MeshcommError | None,
    world: World | None,
) -> Mesh:
    # Each rank counts its own openings in the store: the count is the same on all ranks, restarts
    # and re-opened meshes included, and no two meshes of a job ever meet in the same keys.
    try:
        claim(joined.store, joined.rank, kept=joined.kept)
        opening = joined.store.add(f"meshcomm/opened/{joined.rank}", 1)
        outer = "" if world is not None or joined.pretended else outer_prefix()
    except RuntimeError as error:
        raise StoreError(
            f"rank {joined.rank} lost the job's store before the mesh was opened",
            given=str(error).splitlines()[0],
            expected="a store that lives as long as the job: in the launcher, in rank 0, or a file",
            hint="look for the first error of the process that holds the store",
        ) from error
    prefix = f"{outer}meshcomm{opening}"
    store = prefixed(prefix, joined.store)
    environment = Environment()
    try:
        plan, device = None, torch.device("cpu")
        if failure is None:
            try:
                if world is not None:
                    device, backend = world.place(settings.mesh.device)
                    plan = settings.plan(joined.world_size).on(device.type, backend)
                else:
                    environment.set(network_variables(settings.network))
                    device = choose_device(settings.mesh.device, joined.launch)
                    plan = settings.plan(joined.world_size).on(device.type, choose_backend(device))
                    check_devices(settings, device, plan.defaults.backend, joined.launch)
                    check_backends(plan)
            except MeshcommError as error:
                failure = error
        facts: dict[str, Any] = {"problem": failure.what} if failure is not None else {}
        if plan is not None and failure is None:
            facts = {
                **plan.facts(),
                "world": joined.world_size,
                "validate_calls": settings.mesh.validate_calls,
                "warm_up": settings.mesh.warm_up,
                "versions": _versions(),
                "environment": shared_variables(),
            }
        common = prefixed("agree", store)
        began = time.perf_counter()
        try:
            comes = 1 if joined.pretended else joined.world_size
            agree(common, joined.rank, comes, facts, settings.mesh.timeout_s)
        except MeshMismatchError as error:
            blame(error, joined.store)
            if world is None:
                leave_together(common, stays=joined.rank == 0)
            if failure is None:
                raise
        if failure is not None or plan is None:
            # Told to the others; here the problem itself says more than that the ranks differ.
            assert failure is not None
            raise failure
        agreed = Agreed(settings, joined, plan, device, store, prefix, time.perf_counter() - began)
        mesh = create_groups(agreed, source, environment) if world is None else create_in_world(world, agreed)
        if settings.mesh.warm_up and mesh.is_member:
            try:
                mesh.warm_up()
            except BaseException:
                mesh.close()
                raise
        return mesh
    except BaseException:
        environment.restore()
        raise


def _versions() -> dict[str, str]:
    return {"meshcomm": __version__, "torch": torch.__version__, "python": platform.python_version()}
