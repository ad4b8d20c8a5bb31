"""The configuration of the mesh that `meshcomm.init` opens, from its arguments or the config of `meshcomm run`."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from math import prod
from os import PathLike
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar, cast

from meshcomm.config.mesh import DimOptions, MeshConfig
from meshcomm.config.process import NetworkConfig, ProcessConfig, TopologyConfig
from meshcomm.config.section import Table
from meshcomm.errors import LaunchError, MeshcommError
from meshcomm.layout import Plan
from meshcomm.layout.sizes import toml_dims

if TYPE_CHECKING:
    from meshcomm.config import Config

CONFIG_VARIABLE: Final = "MESHCOMM_CONFIG"
OVERRIDES_VARIABLE: Final = "MESHCOMM_SET"

Source: TypeAlias = "str | PathLike[str] | Config | MeshConfig | Mapping[str, Any]"


class MeshOnly(NamedTuple):
    """The sections of a Config that a mesh needs, without the models of the training sections."""

    mesh: MeshConfig
    process: ProcessConfig = ProcessConfig()
    network: NetworkConfig = NetworkConfig()
    topology: TopologyConfig = TopologyConfig()

    def plan(self, world: int | None) -> Plan:
        """See Config.plan."""
        return self.mesh.plan(world, "Config")


Settings: TypeAlias = "Config | MeshOnly"

# The sections that a mesh needs. All other sections are for training.
_SECTIONS: Final = ("mesh", "process", "network", "topology")
# The job's config file, once this rank has opened a mesh from it. The program may then open meshes of its own.
_TAKEN: ContextVar[str | None] = ContextVar("meshcomm_config_taken", default=None)


def given_keys(**keys: Any) -> dict[str, Any]:
    """Return the given keys of `[mesh]`, with lists of ranks converted to tuples."""
    given = {name: value for name, value in keys.items() if value is not None}
    for name in {"rank_order", "ranks"} & given.keys():
        if isinstance(given[name], Iterable):
            given[name] = tuple(given[name])
    return given


def mesh_of(given: Mapping[str, Any]) -> MeshConfig:
    """Return the `[mesh]` section with these keys. Raises ConfigError."""
    options = given.get("options")
    if isinstance(options, Mapping):  # anything else is reported together with the other problems
        dim_options = {
            name: DimOptions(**options_of_dim) if isinstance(options_of_dim, Mapping) else options_of_dim
            for name, options_of_dim in options.items()
        }
        given = {**given, "options": dim_options}
    return MeshConfig(**given)


def settings_of(config: Source | None, given: dict[str, Any], overrides: Sequence[str]) -> Settings:
    """Return the configuration passed to `init`, or the job's configuration.

    given: keys of `[mesh]` among the keyword arguments.

    Raises ConfigError or LayoutError, and LaunchError if there is no configuration or an argument would have no effect.
    """
    if config is None and not given:
        return _of_the_job(overrides)
    settings = _own(config, given, overrides)
    path = os.environ.get(CONFIG_VARIABLE)
    if path is not None and path != _TAKEN.get():
        _refuse_unused(path, settings)
    return settings


S = TypeVar("S", bound="Settings")


def with_sizes(settings: S, sizes: Mapping[str, int]) -> S:
    """Return the mesh configuration with these dim sizes, or unchanged if `sizes` is empty."""
    if not sizes:
        return settings
    if isinstance(settings, MeshOnly):
        mesh = settings.mesh.model_copy(update={"dims": Table(sizes)})
        return cast(S, settings._replace(mesh=mesh))
    from meshcomm.config.read import load_config

    return cast(S, load_config(settings, [f"mesh.dims={toml_dims(sizes)}"]))


def refuse_alone(settings: Settings) -> None:
    """If no launcher started this process and the mesh needs several processes, raise LaunchError with a command."""
    mesh = settings.mesh
    needed = max(mesh.ranks) + 1 if mesh.ranks is not None else prod(n for n in mesh.dims.values() if n != -1)
    started = multiprocessing.parent_process() is not None or "RAY_RAYLET_PID" in os.environ
    if _fits(settings, 1):
        if started and -1 in mesh.dims.values():
            # Each of several such processes would open a world with one rank.
            raise LaunchError(
                f"the number of processes is unknown, and dims = {toml_dims(mesh.dims)} uses all of them",
                given="a process started by multiprocessing or Ray, without RANK and WORLD_SIZE",
                expected="its rank, and the number of processes",
                hint="set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each process before init;\n"
                "for a mesh of this process alone, use a size of 1 instead of -1",
            )
        return
    if not _fits(settings, needed):
        return  # the number of processes is not the problem
    script = next((word for word in sys.argv[:1] if word.endswith(".py")), "script.py")
    hint = f"torchrun --nproc-per-node {needed} {script}; srun and mpirun work too"
    if "ipykernel" in sys.modules:
        hint = f"meshcomm.simulate(function, dims={dict(mesh.dims)}): every rank is a thread of this notebook"
    elif started or "ray" in sys.modules:
        hint = (
            "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each process before init, as Ray Train does;\n"
            f'or init(rank=..., world_size={needed}, ...) with [process] init = "tcp", address = "HOST:PORT" of rank 0'
        )
    raise LaunchError(
        f"the mesh needs {needed} processes, and no launcher has started this one",
        given=f"dims = {toml_dims(mesh.dims)}; neither RANK nor a variable of Slurm or MPI is set",
        expected=f"{needed} processes, each with its rank",
        hint=hint,
    )


def _fits(settings: Settings, world: int) -> bool:
    with suppress(MeshcommError):
        settings.plan(world)
        return True
    return False


def beside_the_job() -> None:
    """Mark later meshes in this context as part of a simulation inside a program, not as meshes of the job."""
    _TAKEN.set(os.environ.get(CONFIG_VARIABLE))


@contextmanager
def new_job() -> Iterator[None]:
    """Inside the block, no mesh counts as opened from the job's config."""
    token = _TAKEN.set(None)
    try:
        yield
    finally:
        _TAKEN.reset(token)


def _of_the_job(overrides: Sequence[str]) -> Config:
    path = os.environ.get(CONFIG_VARIABLE)
    if path is None:
        raise LaunchError(
            "init was not told which mesh to create",
            given="no config, no dims, and no config from meshcomm run",
            expected="a config file, or dims",
            hint='meshcomm.init("configs/mesh.toml"), meshcomm.init(dims={"dp": -1}), '
            "or meshcomm run CONFIG script.py",
        )
    from meshcomm.config.read import load_config

    settings = load_config(path, [*_overrides(), *overrides])
    _TAKEN.set(path)
    return settings


def _overrides() -> list[str]:
    return os.environ.get(OVERRIDES_VARIABLE, "").splitlines()


def _own(config: Source | None, given: dict[str, Any], overrides: Sequence[str]) -> Settings:
    if config is not None and given:
        raise LaunchError(
            "init got a config and keyword arguments that set the same values",
            given=f"a config, and {', '.join(given)}",
            expected="one of the two",
            hint='overrides=["mesh.dims.tp=4"] changes a config',
        )
    if config is not None and not isinstance(config, MeshConfig):
        from meshcomm.config.read import load_config

        return load_config(config, overrides)
    if overrides:
        kind = f"a {type(config).__name__}" if config is not None else ", ".join(given)
        raise LaunchError(
            "overrides have no effect on these arguments of init",
            given=f"{kind} and overrides {list(overrides)}",
            expected="overrides with a config file or a Config",
            hint="change the object itself" if config is not None else "change the arguments themselves",
        )
    if isinstance(config, MeshConfig):
        return MeshOnly(config)
    return MeshOnly(mesh_of(given))


def _refuse_unused(path: str, own: Settings) -> None:
    """Raise LaunchError if the mesh from `own` would ignore settings of the job's configuration."""
    from meshcomm.config.read import load_config

    of_launcher = load_config(path, _overrides())
    lost = [
        f"{name}.{key}"
        for name in _SECTIONS
        for key, value in getattr(of_launcher, name)
        if key in getattr(of_launcher, name).model_fields_set
        and not _same(value, getattr(getattr(own, name), key))
    ]
    if not lost:
        return
    sets = "".join(f" --set {override}" for override in _overrides())
    raise LaunchError(
        f"the script opens its own mesh, and settings of {path} would have no effect",
        given=f"{path}{sets}: {', '.join(lost)}; the script's meshcomm.init(...) sets other values, or none",
        expected="only one of the two, or the config's mesh first and then the script's own mesh",
        hint="meshcomm.init() without arguments, or no config: meshcomm run (or simulate) --world-size N script.py",
    )


def _same(asked: Any, own: Any) -> bool:
    """Return whether both have the same names in the same order with the same values. A size of -1 matches any size."""
    if isinstance(asked, Mapping) and isinstance(own, Mapping):
        return list(asked) == list(own) and all(_same(asked[name], own[name]) for name in asked)
    return bool(asked == own) or -1 in (asked, own)
