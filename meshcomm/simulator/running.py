"""`meshcomm.simulate`: a program as every rank of a mesh, in this process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, Final, TypeVar

import torch

from meshcomm.comm.handle import UnwaitedHandle
from meshcomm.config import Config, DimOptions, MeshConfig, load
from meshcomm.errors import LaunchError, MeshcommError
from meshcomm.mesh.environment import with_variables
from meshcomm.mesh.opening import init
from meshcomm.mesh.runtime import WORLD
from meshcomm.mesh.source import beside_the_job
from meshcomm.simulator.own import Own
from meshcomm.simulator.scheduler import Actor, Scheduler
from meshcomm.simulator.traffic import Ledger
from meshcomm.simulator.verdicts import Judge
from meshcomm.simulator.world import Ground, SimulatedWorld

T = TypeVar("T")

# Variables with which torch, NCCL or a launcher would tell a process where it is.
_LAUNCHER: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def simulate(
    fn: Callable[..., T],
    config: str | PathLike[str] | Config | MeshConfig | Mapping[str, Any] | None = None,
    *,
    dims: Mapping[str, int] | None = None,
    merge: Mapping[str, Sequence[str]] | None = None,
    views: Mapping[str, Mapping[str, int]] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    rank_order: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
    world_size: int | None = None,
    args: Sequence[Any] = (),
    schedule_seed: int = 0,
    explore: int | None = None,
    overrides: Sequence[str] = (),
) -> list[T]:
    """Call `fn(mesh, *args)` as every rank of a mesh; return the results by rank.

    Every rank is a thread of this process with its own mesh, coords, copy of `args`, random
    generators and default dtype; one runs at a time. Data, control flow and errors are real, no
    process is started and no network used. docs/guide/simulator.md says what differs from processes.

    Args:
        config, dims, merge, views, options, rank_order, ranks, overrides: as for `meshcomm.init`.
        world_size: number of ranks; needed where a size is -1.
        schedule_seed: chooses which rank runs when several could. One seed, one schedule.
        explore: try so many schedules, from `schedule_seed` on, and raise the first failure. The
            results are those of the first.

    Raises, at once and with nothing left running: DeadlockError for ranks that wait in a circle or
    for what nobody will do; CallMismatchError for ranks that call differently; UnmatchedMessage;
    HandleNotWaited; RankFailed with what a rank's `fn` raised; ConfigError.
    """
    keys = {
        "dims": dims,
        "merge": merge,
        "views": views,
        "rank_order": tuple(rank_order) if isinstance(rank_order, Iterable) else rank_order,
        "ranks": tuple(ranks) if isinstance(ranks, Iterable) else ranks,
    }
    given = {name: value for name, value in keys.items() if value is not None}
    settings = _settings(config, given, options, overrides)
    size = world_size_of(settings, world_size)
    settings.resolved(size)

    def body(actor: Actor) -> T:
        beside_the_job()
        with init(settings) as mesh:
            return fn(mesh, *copy.deepcopy(tuple(args)))

    tries = 1 if explore is None else explore
    if tries < 1:
        raise LaunchError(
            f"simulate cannot try {tries} schedules",
            given=f"explore={tries}",
            expected="1 or more",
            hint="explore=20",
        )
    found: list[T] = []
    for seed in range(schedule_seed, schedule_seed + tries):
        results = run_ranks(body, size, seed, settings.mesh.timeout_s)[0]
        if seed == schedule_seed:
            found = results
    return found


def run_ranks(
    body: Callable[[Actor], Any],
    size: int,
    seed: int,
    timeout_s: float,
    own: Callable[[int, dict[str, str]], Own] | None = None,
) -> tuple[list[Any], Ledger]:
    """Call `body` as each of `size` ranks; what they returned, and what they sent.

    timeout_s: of the mesh: a wait in the store for less than half of it ends by itself when nothing
               else can happen; a longer one is a deadlock.
    own:       what a rank has to itself, from its number and its launcher's variables.
    """
    made = own or (lambda rank, environment: Own(rank, environment))
    actors = [Actor(rank, made(rank, launched_as(rank, size))) for rank in range(size)]
    judge = Judge(timeout_s)
    scheduler = Scheduler(actors, seed, judge)
    ground = Ground(scheduler)
    judge.ground = ground

    def live(actor: Actor) -> Any:
        WORLD.set(SimulatedWorld(ground, actor, size))
        return body(actor)

    threads = torch.get_num_threads()
    # One rank runs at a time, and each new thread would start a pool of torch's own.
    torch.set_num_threads(1)
    try:
        # RANK and LOCAL_RANK are each rank's own.
        with (
            with_variables({"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}),
            warnings.catch_warnings(),
        ):
            # It ends in an error here.
            warnings.simplefilter("ignore", UnwaitedHandle)
            scheduler.run(live)
            verdict = scheduler.verdict or judge.at_the_end()
    finally:
        torch.set_num_threads(threads)
    if verdict is not None:
        if isinstance(verdict, MeshcommError):
            verdict.hint = f"{verdict.hint}; schedule seed {seed} repeats it"
        raise verdict
    return [actor.result for actor in actors], ground.ledger


def launched_as(rank: int, size: int) -> dict[str, str]:
    """What a launcher would tell a process in its environment."""
    values = (rank, size, rank, size)
    return {name: str(value) for name, value in zip(_LAUNCHER, values, strict=True)}


def world_size_of(settings: Config, world_size: int | None) -> int:
    """Number of ranks: as given, or as the sizes say. Raises ConfigError where a size is -1."""
    if world_size is not None:
        return world_size
    if settings.mesh.ranks is not None:
        return max(settings.mesh.ranks) + 1
    size = 1
    for part in settings.mesh.sizes(None).values():
        size *= part
    return size


def _settings(
    config: Any,
    given: dict[str, Any],
    options: Mapping[str, Mapping[str, Any]] | None,
    overrides: Sequence[str],
) -> Config:
    if (config is None) == (not given):
        raise LaunchError(
            "simulate was not told which mesh to make" if config is None else "simulate was told two meshes",
            given="neither config nor dims" if config is None else f"a config, and {', '.join(given)}",
            expected="a config, or dims",
            hint='simulate(fn, dims={"dp": 4, "tp": 2})',
        )
    if isinstance(config, MeshConfig):
        config = Config(mesh=config)
    if config is not None:
        return load(config, overrides)
    if options is not None:
        given["options"] = {name: DimOptions(**own) for name, own in options.items()}
    return load(Config(mesh=MeshConfig(**given)), overrides)
