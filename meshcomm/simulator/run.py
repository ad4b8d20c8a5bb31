"""`meshcomm.simulate`: run a function or a script as every rank of a mesh, in this process."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch

from meshcomm.config import Config, MeshConfig, load_config
from meshcomm.config.elastic import ElasticConfig
from meshcomm.errors import LaunchError, MeshcommError
from meshcomm.job.replacing import Sizes, sizes_of
from meshcomm.mesh.opening import init
from meshcomm.mesh.runtime import WORLD
from meshcomm.mesh.source import (
    CONFIG_VARIABLE,
    OVERRIDES_VARIABLE,
    beside_the_job,
    given_keys,
)
from meshcomm.simulator.diagnosis import at_the_end, diagnose, unyielding
from meshcomm.simulator.losses import Losses
from meshcomm.simulator.scheduler import Actor, RankLocals, Scheduler
from meshcomm.simulator.torch_private import leave_groups, ranks_in_threads
from meshcomm.simulator.world import SharedState, SimulatedWorld
from meshcomm.transport.variables import with_variables

T = TypeVar("T")


def simulate(
    fn: Callable[..., T],
    config: str | PathLike[str] | Config | MeshConfig | Mapping[str, Any] | None = None,
    *,
    world_size: int | None = None,
    args: Sequence[Any] = (),
    schedule_seed: int = 0,
    overrides: Sequence[str] = (),
    lose: Mapping[int, int] | None = None,
    **keys: Any,
) -> list[T]:
    """Call `fn(mesh, *args)` as every rank of a mesh, and return the results by rank.

    Every rank is a thread of this process with its own mesh, coords, copy of `args`, random generators and
    default dtype. Only one rank runs at a time. Data, control flow and errors are real, but no process is started
    and no network is used. docs/guide/simulator.md lists the differences from processes.

    Args:
        config, overrides: as for `meshcomm.init`.
        keys: the keys of `[mesh]`, if no config is given: dims, merge, views, options, rank_order, ranks, ...
        world_size: the number of ranks; required if a size is -1.
        schedule_seed: determines which rank runs when several could. The same seed gives the same schedule.
        lose: rank -> the number of the operation at which the rank is lost, counted from 1. An operation is a call
            on a group or on the store. The lost rank does not make that call. A new rank replaces it and calls
            `fn` from the start. The other ranks raise RankLost, as under `meshcomm run --replace`: see
            docs/guide/elastic.md. A lost rank cannot be replaced once another rank has ended.

    Raises, immediately and with no thread left running: DeadlockError if ranks wait in a cycle or for an event
    that no rank will cause; CallMismatchError if ranks make different calls; UnmatchedMessage; HandleNotWaited;
    RankFailed with the exceptions of `fn`, or for a lost rank that cannot be replaced; ConfigError.
    """
    given = given_keys(**keys)
    if (config is None) == (not given):
        raise LaunchError(
            "simulate was not told which mesh to create"
            if config is None
            else "simulate was given two meshes",
            given="neither config nor dims" if config is None else f"a config, and {', '.join(given)}",
            expected="a config, or dims",
            hint='simulate(fn, dims={"dp": 4, "tp": 2})',
        )
    source = MeshConfig(**given) if config is None else config
    settings = load_config(Config(mesh=source) if isinstance(source, MeshConfig) else source, overrides)
    size = settings.mesh.smallest_world() if world_size is None else world_size
    settings.resolved(size)

    def body() -> T:
        beside_the_job()
        with init(settings) as mesh:
            return fn(mesh, *copy.deepcopy(tuple(args)))

    elastic = settings.elastic if settings.elastic.min else None
    sizes = None if lose is None else sizes_of(settings, size)
    return run_ranks(body, size, schedule_seed, settings.mesh.timeout_s, (), lose, elastic, sizes)


def simulate_script(
    config: Path | None,
    script: Path,
    arguments: Sequence[str],
    overrides: Sequence[str],
    world: int | None,
    seed: int,
) -> int:
    """Run `script` as every rank, and return the number of ranks.

    Each rank has its own `__main__`, sys.argv, RANK and LOCAL_RANK. Ranks share the modules that the script imports.
    Raises the same errors as `simulate`, and RankFailed if the script exits with a nonzero code.
    """
    # The script opens its own mesh, so only the number of ranks is taken from this one.
    settings = load_config({"mesh": {"dims": {"rank": -1}}} if config is None else config, overrides)
    size = settings.mesh.smallest_world() if world is None else world
    settings.resolved(size)
    try:
        code = compile(script.read_bytes(), str(script), "exec")
    except SyntaxError as error:
        raise LaunchError(
            f"{script} is not a Python program",
            given=f"line {error.lineno}: {error.msg}",
            expected="a Python file",
            hint=f"python -m py_compile {script}",
        ) from error

    def body() -> None:
        try:
            exec(code, sys.modules["__main__"].__dict__)
        except SystemExit as left:
            if left.code not in (None, 0):
                raise

    variables: dict[str, str] = {}
    if config is not None:
        variables = {CONFIG_VARIABLE: str(config), OVERRIDES_VARIABLE: "\n".join(overrides)}
    argv = [str(script), *arguments]
    # As with `python SCRIPT`, imports search the script's folder first.
    paths = [str(script.resolve().parent), *sys.path]
    with with_variables(variables), patch.object(sys, "path", paths):
        run_ranks(body, size, seed, settings.mesh.timeout_s, argv)
    return size


def run_ranks(
    body: Callable[[], Any],
    size: int,
    seed: int,
    timeout_s: float,
    argv: Sequence[str] = (),
    lose: Mapping[int, int] | None = None,
    elastic: ElasticConfig | None = None,
    sizes: Sizes | None = None,
) -> list[Any]:
    """Call `body` as each of `size` ranks, and return the results. The result is None for a rank that is lost or still waiting
    at the end.

    timeout_s: the mesh's timeout, see `diagnose`. argv: see `RankLocals`. lose: see `simulate`. elastic, sizes: see `Losses`.
    """

    def replacement(process: int) -> Actor:
        return Actor(process, process, RankLocals(process, argv), actors[process].coords)

    actors = [Actor(rank, rank, RankLocals(rank, argv)) for rank in range(size)]
    shared = SharedState(Scheduler(actors, seed, timeout_s), timeout_s)
    if lose is not None:
        losses = shared.losses = Losses(shared, lose, replacement, elastic, sizes)
        for hook in ("loses", "expects", "is_over", "irreplaceable"):
            setattr(shared.scheduler, hook, getattr(losses, hook))

    def live(actor: Actor) -> Any:
        WORLD.set(SimulatedWorld(shared, actor))
        try:
            return body()
        finally:
            leave_groups()

    def sleep(seconds: float) -> None:
        if seconds > 0:
            shared.scheduler.sleeps(seconds)
        really_sleep(seconds)

    threads, really_sleep = torch.get_num_threads(), time.sleep
    # Only one rank runs at a time, and each new thread would start its own torch thread pool.
    torch.set_num_threads(1)
    try:
        # Each rank has its own RANK and LOCAL_RANK.
        with (
            with_variables({"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}),
            patch.object(time, "sleep", sleep),
            ranks_in_threads(_number, lambda *group: _here().group(*group), lambda: _here().meet()),
        ):
            shared.scheduler.run(live, partial(diagnose, shared), partial(unyielding, shared))
            error = shared.scheduler.error or at_the_end(shared)
    finally:
        torch.set_num_threads(threads)
    if error is not None:
        if isinstance(error, MeshcommError):
            error.hint = f"{error.hint}; schedule seed {seed} reproduces it"
        raise error
    return [actor.result for actor in actors]


def _number() -> int | None:
    world = WORLD.get()
    return world.number if isinstance(world, SimulatedWorld) else None


def _here() -> SimulatedWorld:
    """Return the world of the calling rank."""
    world = WORLD.get()
    assert isinstance(world, SimulatedWorld)
    return world
