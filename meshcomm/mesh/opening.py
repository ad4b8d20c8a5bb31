"""From a configuration to a live mesh: meet, agree, create."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshcomm import __version__
from meshcomm.config import Config, DimOptions, MeshConfig, ProcessConfig, load
from meshcomm.errors import LaunchError, LayoutError, MeshcommError, MeshMismatchError
from meshcomm.layout import Layout, Plan
from meshcomm.mesh.agree import agree
from meshcomm.mesh.environment import Environment, gloo_defaults, network_variables
from meshcomm.mesh.groups import Existing, close_transports, create_transports, open_group
from meshcomm.mesh.launcher import Launch, find_launch
from meshcomm.mesh.mesh import Mesh
from meshcomm.mesh.process import (
    Meeting,
    check_devices,
    choose_backend,
    choose_device,
    meet,
    start_default_group,
)
from meshcomm.transport import SoloTransport, Transport
from meshcomm.transport.torch_private import default_store

CONFIG_VARIABLE = "MESHCOMM_CONFIG"
OVERRIDES_VARIABLE = "MESHCOMM_SET"

Source = str | PathLike[str] | Config | MeshConfig | DeviceMesh | Mapping[str, Any]


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
    overrides: Sequence[str] = (),
    store: dist.Store | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> Mesh:
    """Join the job and create this rank's groups.

    Args:
        config: a config file, a Config or MeshConfig, or a torch DeviceMesh whose groups are
            used. None: the keyword arguments, or the config of `meshcomm run`.
        dims, merge, views, options, rank_order, ranks, device, backend, timeout_s, validate_calls:
            the keys of `[mesh]`; they stand in place of a config.
        overrides: as `--set`, for a config.
        store, rank, world_size: meet through this store instead of the launcher's.

    Called by: every process of the job, also those that a mesh on part of the ranks leaves out.
    Before any group exists, all ranks compare what they are about to create, in four store
    operations each. If torch.distributed is already initialised, its default group and store are
    used and left as they are at close.

    Raises: ConfigError, LaunchError, and MeshMismatchError, which every rank gets when one differs.
    """
    keys = {
        "dims": dims,
        "merge": merge,
        "views": views,
        "options": options,
        "rank_order": None if rank_order is None else tuple(rank_order),
        "ranks": None if ranks is None else tuple(ranks),
        "device": device,
        "backend": backend,
        "timeout_s": timeout_s,
        "validate_calls": validate_calls,
    }
    given = {name: value for name, value in keys.items() if value is not None}
    launch = find_launch(os.environ)
    failure: MeshcommError | None = None
    settings = Config(mesh=MeshConfig(dims={"all": -1}))
    try:
        settings = _settings(config, given, overrides)
    except MeshcommError as error:
        # Meet the others all the same, so that they hear of it instead of waiting.
        failure = error
    joined = (
        _meet(settings, launch, store, rank, world_size) if failure is None or launch.world_size > 1 else None
    )
    if joined is None:
        assert failure is not None
        raise failure
    return _open(config, settings, joined, failure)


def _settings(config: Source | None, given: dict[str, Any], overrides: Sequence[str]) -> Config:
    if config is not None and given:
        raise LaunchError(
            "init got a config and keyword arguments that say the same things",
            given=f"a config, and {', '.join(given)}",
            expected="one of the two",
            hint='overrides=["mesh.dims.tp=4"] changes a config',
        )
    if isinstance(config, (Config, str, PathLike)) or (
        isinstance(config, Mapping) and not isinstance(config, DeviceMesh)
    ):
        return load(config, overrides)
    if overrides and config is not None:
        raise LaunchError(
            "overrides have no effect on what init was given",
            given=f"a {type(config).__name__} and overrides {list(overrides)}",
            expected="overrides with a config file or a Config",
            hint="change the object itself",
        )
    if isinstance(config, MeshConfig):
        return Config(mesh=config)
    if isinstance(config, DeviceMesh):
        return Config(mesh=_mesh_config(config))
    if given:
        if "options" in given:
            given["options"] = {name: DimOptions(**own) for name, own in given["options"].items()}
        return Config(mesh=MeshConfig(**given))
    path = os.environ.get(CONFIG_VARIABLE)
    if path is None:
        raise LaunchError(
            "init was not told which mesh to make",
            given="no config, no dims, and no config from meshcomm run",
            expected="a config file, or dims",
            hint='meshcomm.init("configs/mesh.toml"), meshcomm.init(dims={"dp": -1}), '
            "or meshcomm run CONFIG script.py",
        )
    return load(path, [*os.environ.get(OVERRIDES_VARIABLE, "").splitlines(), *overrides])


def _mesh_config(device_mesh: DeviceMesh) -> MeshConfig:
    names = device_mesh.mesh_dim_names
    if not names:
        raise LayoutError(
            "the DeviceMesh has no names for its dims",
            given=f"a DeviceMesh of shape {tuple(device_mesh.shape)}",
            expected="mesh_dim_names",
            hint='init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))',
        )
    order = tuple(device_mesh.mesh.flatten().tolist())
    return MeshConfig(
        dims=dict(zip(names, device_mesh.shape, strict=True)),
        rank_order=order,
        ranks=tuple(sorted(order)) if len(order) != dist.get_world_size() else None,
        device=device_mesh.device_type,
    )


def _meet(
    settings: Config, launch: Launch, store: dist.Store | None, rank: int | None, world_size: int | None
) -> Meeting:
    if dist.is_initialized():
        # Of torch's fake backend only this rank exists: there is no store, and nobody to agree with.
        pretended = dist.get_backend() == "fake"
        found = store or (dist.HashStore() if pretended else default_store())
        return Meeting(found, dist.get_rank(), dist.get_world_size(), launch, pretended)
    process: ProcessConfig = settings.process
    return meet(process, launch, settings.mesh.timeout_s, store=store, rank=rank, world_size=world_size)


def _open(source: Source | None, settings: Config, joined: Meeting, failure: MeshcommError | None) -> Mesh:
    # Each rank counts its own openings in the store: the count is the same on all ranks, restarts
    # and re-opened meshes included, and no two meshes of a job ever meet in the same keys.
    opening = joined.store.add(f"meshcomm/opened/{joined.rank}", 1)
    prefix = f"meshcomm{opening}"
    store = dist.PrefixStore(prefix, joined.store)
    environment = Environment()
    try:
        plan, device = None, torch.device("cpu")
        if failure is None:
            try:
                environment.set(network_variables(settings.network))
                device = choose_device(settings.mesh.device, joined.launch)
                plan = settings.plan(joined.world_size).on(device.type, choose_backend(device))
                check_devices(settings, device, plan.defaults.backend, joined.launch)
            except MeshcommError as error:
                failure = error
        facts: dict[str, Any] = {"problem": failure.what} if failure is not None else {}
        if plan is not None and failure is None:
            facts = {
                **plan.facts(),
                "world": joined.world_size,
                "validate_calls": settings.mesh.validate_calls,
                "versions": _versions(),
            }
        common = dist.PrefixStore("agree", store)
        began = time.perf_counter()
        try:
            comes = 1 if joined.pretended else joined.world_size
            agree(common, joined.rank, comes, facts, settings.mesh.timeout_s)
        except MeshMismatchError:
            if failure is None:
                raise
        if failure is not None or plan is None:
            # Told to the others; here the problem itself says more than that the ranks differ.
            assert failure is not None
            raise failure
        agree_s = time.perf_counter() - began
        return _create(source, settings, joined, plan, device, store, prefix, environment, agree_s)
    except BaseException:
        environment.restore()
        raise


def _create(
    source: Source | None,
    settings: Config,
    joined: Meeting,
    plan: Plan,
    device: torch.device,
    store: dist.Store,
    prefix: str,
    environment: Environment,
    agree_s: float,
) -> Mesh:
    began = time.perf_counter()
    bind = settings.process.device_id is not False and device.type != "cpu"
    connecting = gloo_defaults(joined.launch.one_host)
    with _applied(connecting):
        owned = start_default_group(
            joined,
            dist.PrefixStore("world", store),
            plan.defaults.backend,
            device,
            settings.mesh.timeout_s,
            bind,
        )
        groups_store = dist.PrefixStore("groups", store)
        whole_world = plan.layout.world_size == joined.world_size
        transports: dict[str, Transport] = {}
        if joined.rank in plan.layout:
            try:
                transports = create_transports(
                    plan,
                    joined.rank,
                    store=groups_store,
                    prefix=prefix,
                    device=device,
                    whole_world=whole_world,
                    existing=_existing(source, plan, joined.rank),
                )
            except BaseException:
                if owned:
                    dist.destroy_process_group()
                raise

    def add(mesh: Mesh, wider: Plan, name: str) -> Transport:
        agree(
            dist.PrefixStore(f"create/{name}", store),
            mesh.layout.position(mesh.rank),
            mesh.world_size,
            wider.facts(),
            settings.mesh.timeout_s,
            what=f"the merged dim {name}",
        )
        family = wider.family(name)
        if family.size == 1:
            return SoloTransport(device)
        if family.shares is not None:
            return transports[family.shares]
        group = next(g for g in wider.for_rank(mesh.rank).groups if g.name == name)
        with _applied(connecting):
            return open_group(group, mesh.rank, groups_store, prefix, device, split=False)

    def on_close() -> None:
        close_transports(transports)
        # The groups' threads and sockets go with the last reference, so let go of them now.
        transports.clear()
        if owned and dist.is_initialized():
            dist.destroy_process_group()
        environment.restore()

    return Mesh(
        plan,
        joined.rank,
        device=device,
        store=dist.PrefixStore("mesh", store),
        prefix=prefix,
        transports=transports,
        validate_calls=None if settings.mesh.validate_calls == "always" else settings.mesh.validate_calls,
        reports=settings.mesh.reports,
        startup_s={"agree": agree_s, "create": time.perf_counter() - began},
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


def _existing(source: Source | None, plan: Plan, rank: int) -> Existing | None:
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


def _versions() -> dict[str, str]:
    return {"meshcomm": __version__, "torch": torch.__version__, "python": platform.python_version()}
