"""`meshcomm.simulate`: a function or a script as every rank of a mesh, in this process."""

from __future__ import annotations

import copy
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Final, TypeVar
from unittest.mock import patch

import torch

from meshcomm.collectives import ALL_TO_ALL, Collective
from meshcomm.config import Config, MeshConfig, load_config
from meshcomm.errors import LaunchError, MeshcommError
from meshcomm.mesh.environment import how_many_ranks, with_variables
from meshcomm.mesh.opening import init
from meshcomm.mesh.runtime import WORLD
from meshcomm.mesh.source import (
    CONFIG_VARIABLE,
    OVERRIDES_VARIABLE,
    beside_the_job,
    given_keys,
    world_of_mesh,
)
from meshcomm.simulator.diagnosis import at_the_end, diagnose, unyielding
from meshcomm.simulator.scheduler import Actor, RankLocals, Scheduler
from meshcomm.simulator.split_optimizers import elementwise_steps
from meshcomm.simulator.transport import SimulatedGroup
from meshcomm.simulator.world import SharedState, SimulatedWorld

T = TypeVar("T")

# What rank c of n puts on its link to the next coord when a collective with a root runs as a ring in coord
# order, for a tensor of `s` bytes that it brings: the textbook counts, as in the PERFORMANCE.md of
# nccl-tests. Those without a root load all links alike, by the factor of their row.
_RING: Final[dict[str, Callable[[int, int, int, int], float]]] = {
    "broadcast": lambda n, s, c, root: 0 if (c + 1) % n == root else s,
    "reduce": lambda n, s, c, root: 0 if c == root else s,
    # Along the ring to the root: each passes on what came from behind it, and its own.
    "gather": lambda n, s, c, root: 0 if c == root else ((c - root - 1) % n + 1) * s,
    "scatter": lambda n, s, c, root: (n - 1 - (c - root) % n) * s,
}


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
    grid = {"dims": dims, "merge": merge, "views": views, "rank_order": rank_order, "ranks": ranks}
    settings = _settings(config, given_keys(**grid, options=options), overrides)
    size = world_of_mesh(settings.mesh) if world_size is None else world_size
    settings.resolved(size)

    def body() -> T:
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
    return _explored(body, size, schedule_seed, tries, settings.mesh.timeout_s)[0]


def _settings(
    config: str | PathLike[str] | Config | MeshConfig | Mapping[str, Any] | None,
    given: dict[str, Any],
    overrides: Sequence[str],
) -> Config:
    """Of a config, or of keys of `[mesh]`. Raises LaunchError for both, or neither."""
    if (config is None) == (not given):
        raise LaunchError(
            "simulate was not told which mesh to make" if config is None else "simulate was told two meshes",
            given="neither config nor dims" if config is None else f"a config, and {', '.join(given)}",
            expected="a config, or dims",
            hint='simulate(fn, dims={"dp": 4, "tp": 2})',
        )
    source = MeshConfig(**given) if config is None else config
    return load_config(Config(mesh=source) if isinstance(source, MeshConfig) else source, overrides)


def simulate_script(
    config: Path | None,
    script: Path,
    arguments: Sequence[str],
    overrides: Sequence[str],
    world: int | None,
    seed: int,
    explore: int,
) -> dict[str, Any]:
    """Run `script` as every rank under `explore` schedules; the traffic of the first, as plain data.

    Each rank has its own `__main__`, sys.argv, RANK and LOCAL_RANK; modules that the script imports
    are shared. Raises what `simulate` raises; an exit with a code other than 0 is a RankFailed.
    """
    if config is None and world is None:
        raise how_many_ranks("simulate")
    # The script says its own mesh; what matters of this one is the number of ranks.
    settings = load_config({"mesh": {"dims": {"rank": -1}}} if config is None else config, overrides)
    size = world_of_mesh(settings.mesh) if world is None else world
    settings.resolved(size)
    try:
        code = compile(script.read_bytes(), str(script), "exec")
    except SyntaxError as error:
        raise LaunchError(
            f"{script} is no Python program",
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
    paths = list(sys.path)
    # As `python SCRIPT` does: imports are looked for beside the script first.
    sys.path.insert(0, str(script.resolve().parent))
    argv = [str(script), *arguments]
    try:
        with with_variables(variables):
            groups = _explored(body, size, seed, explore, settings.mesh.timeout_s, argv)[1]
    finally:
        sys.path[:] = paths
    return {"world": size, "schedules": explore, **traffic_facts(groups, settings.topology.ranks_per_node)}


def _explored(
    body: Callable[[], Any], size: int, seed: int, tries: int, timeout_s: float, argv: Sequence[str] = ()
) -> tuple[list[Any], list[SimulatedGroup]]:
    """`run_ranks` under so many schedules; what the first one gave."""
    found = run_ranks(body, size, seed, timeout_s, argv)
    for other in range(seed + 1, seed + tries):
        run_ranks(body, size, other, timeout_s, argv)
    return found


def run_ranks(
    body: Callable[[], Any], size: int, seed: int, timeout_s: float, argv: Sequence[str] = ()
) -> tuple[list[Any], list[SimulatedGroup]]:
    """Call `body` as each of `size` ranks; what they returned, and their groups, which have counted what was sent.

    timeout_s: of the mesh; see `diagnose`. argv: as for `RankLocals`.
    """
    actors = [Actor(rank, RankLocals(rank, argv)) for rank in range(size)]
    shared = SharedState(Scheduler(actors, seed, timeout_s), timeout_s)

    def live(actor: Actor) -> Any:
        WORLD.set(SimulatedWorld(shared, actor))
        return body()

    def sleep(seconds: float) -> None:
        if seconds > 0:
            shared.scheduler.sleeps()
        really_sleep(seconds)

    threads, really_sleep = torch.get_num_threads(), time.sleep
    # One rank runs at a time, and each new thread would start a pool of torch's own.
    torch.set_num_threads(1)
    try:
        # RANK and LOCAL_RANK are each rank's own.
        with (
            with_variables({"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}),
            patch.object(time, "sleep", sleep),
            elementwise_steps(),
        ):
            shared.scheduler.run(live, partial(diagnose, shared), partial(unyielding, shared))
            error = shared.scheduler.error or at_the_end(shared)
    finally:
        torch.set_num_threads(threads)
    if error is not None:
        if isinstance(error, MeshcommError):
            error.hint = f"{error.hint}; schedule seed {seed} repeats it"
        raise error
    return [actor.result for actor in actors], list(shared.groups.values())


def traffic_facts(groups: Iterable[SimulatedGroup], ranks_per_node: int | None) -> dict[str, Any]:
    """Plain data: one row per dim and operation, and per dim and class of link where known.

    dims:  name, operation, calls and bytes of all ranks together, the rank that brought most.
    links: bytes inside nodes and between them, messages as sent, collectives as a ring in coord order sends
           them; None where `ranks_per_node` is.
    """
    calls: Counter[tuple[str, str]] = Counter()
    brought: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)
    linked: dict[tuple[str, str], defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
    for group in groups:
        for (coord, row, nbytes, root, parts), count in group.moves.items():
            operation, rank = "send" if row is None else row.name, group.ranks[coord]
            calls[group.name, operation] += count
            brought[group.name, operation][rank] += count * nbytes
            for other, loaded in _links(len(group.ranks), coord, row, nbytes, root, parts):
                if ranks_per_node is not None:
                    same = rank // ranks_per_node == group.ranks[other] // ranks_per_node
                    linked[group.name, "node" if same else "network"][rank] += count * loaded
    return {
        "dims": [
            {"dim": name, "operation": operation, "calls": calls[name, operation], **_sums(by_rank)}
            for (name, operation), by_rank in brought.items()
        ],
        "links": None
        if ranks_per_node is None
        else [{"dim": name, "link": link, **_sums(by_rank)} for (name, link), by_rank in linked.items()],
    }


def _links(
    size: int, coord: int, row: Collective | None, nbytes: int, root: int, parts: tuple[int, ...]
) -> Iterator[tuple[int, float]]:
    """(other coord, bytes on the link to it) of one move."""
    if row is None:
        yield root, nbytes
    elif row is ALL_TO_ALL:
        # Straight to each coord.
        for other in range(size):
            if other != coord:
                yield other, parts[other] if parts else nbytes // size
    else:
        ring = _RING.get(row.name)
        load = float(row.bus(size) * row.moved(nbytes, size))
        yield (coord + 1) % size, load if ring is None else ring(size, nbytes, coord, root)


def _sums(by_rank: dict[int, float] | Counter[int]) -> dict[str, int]:
    """The bytes of all ranks, and of the lowest with most."""
    largest = max(sorted(by_rank), key=lambda rank: by_rank[rank])
    return {
        "bytes": round(sum(by_rank.values())),
        "largest_rank": largest,
        "largest_bytes": round(by_rank[largest]),
    }
