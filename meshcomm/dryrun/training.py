"""A dry run of the training of a config: findings, times, and a timeline."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from meshcomm.config import Config, TopologyConfig
from meshcomm.config.write import write_whole
from meshcomm.dryrun.facts import dry_facts
from meshcomm.dryrun.rank import pretended_step
from meshcomm.dryrun.replay import COMPUTE, Replay, Seconds, replay
from meshcomm.dryrun.world import World, dry_world
from meshcomm.errors import ConfigError
from meshcomm.predict.links import span as links_of
from meshcomm.predict.machine import Machine, discovered, machine
from meshcomm.predict.place import ASSUMED_TFLOPS
from meshcomm.predict.times import OPERATIONS, Operation, fastest
from meshcomm.show.timeline import Bar, Row, timeline

if TYPE_CHECKING:
    from meshcomm.comm.spans import Span
    from meshcomm.dryrun.compare import Members

_US: Final = 1e6
# Priced as what carries as much over the same links.
_LIKE: Final[dict[str, Operation]] = {"gather": "reduce", "scatter": "broadcast"}


def dry_training(
    settings: Config, world: int, ranks: Sequence[int], sample: int, seed: int, trace: Path | None = None
) -> dict[str, Any]:
    """Run it as ranks that stand for all of `world`; what was found out, as plain data. Raises as `dry_world`."""
    began = time.perf_counter()
    settings = settings.resolved(world)
    topology = discovered(settings.topology, os.environ)
    found = dry_world(
        partial(pretended_step, settings),
        settings.plan(world).layout,
        None if settings.parallel is None else settings.parallel.pipeline,
        ranks=ranks,
        sample=sample,
        seed=seed,
        replayed=priced(topology),
    )
    return told(found, settings, topology, began, trace)


def told(
    found: World, settings: Config | None, topology: TopologyConfig, began: float, trace: Path | None
) -> dict[str, Any]:
    """As plain data, and as a timeline at `trace`. began: on time.perf_counter."""
    if trace is not None:
        write_trace(trace, found)
    facts = dry_facts(found, settings, topology, time.perf_counter() - began)
    return {**facts, "timeline": picture(found)}


def priced(topology: TopologyConfig) -> Callable[..., Replay]:
    """How calls meet, with times where it is known which ranks share a node."""
    links = machine(topology)
    if links is None:
        return replay
    flop_s = 1e-12 / (topology.tflops or ASSUMED_TFLOPS)
    return partial(replay, seconds=prices(links), flop_s=flop_s)


def prices(machine: Machine) -> Seconds:
    """The alpha-beta time of each call by the best algorithm that a backend would choose, as `meshcomm costs` has it.

    Exchanges of Python objects and barriers, which are small, take nothing.
    """

    @cache
    def priced(operation: Operation, nbytes: int, members: Members) -> float:
        route = links_of(np.array([members]), machine).route
        return fastest(operation, route, nbytes).seconds(nbytes)

    def seconds(span: Span, members: Members) -> float:
        if span.parts:
            return priced("sendrecv", span.nbytes // len(span.parts), members)
        name = span.call.removesuffix(" (torch)")
        operation = _LIKE.get(name) or next((each for each in OPERATIONS if each == name), None)
        return 0.0 if operation is None or not span.nbytes else priced(operation, span.nbytes, members)

    return seconds


def picture(found: World, width: int = 79) -> list[str]:
    """One row of characters for the first rank that was run of each stage; nothing without times.

    F, B, W: forward, backward and weights' passes; other letters: what the rank stands still for, by dim.
    """
    met = found.replay
    if met is None or not met.bars:
        return []
    rows = []
    for stage, steps in found.stages().items():
        rank = steps[0].rank
        bars = [
            Bar(each.name.split()[0] if each.lane == COMPUTE else f"{each.lane} waits", each.began, each.over)
            for each in met.bars
            if each.rank == rank and each.over > each.began
        ]
        rows.append(Row(rank, f"{stage}:{rank}", bars))
    return timeline(rows, width)


def write_trace(path: Path, found: World) -> None:
    """The step in the JSON format of Chrome's tracing, which Perfetto reads too: a process for each rank, a thread for
    what it computes and for each dim. Raises ConfigError where there are no times, or the file cannot be written.
    """
    met = found.replay
    if met is None or not met.bars:
        raise ConfigError(
            "there is no timeline of this step",
            given=f"--trace {path}, and " + ("calls that differ" if met is None else "no times"),
            expected="ranks whose calls meet, and [topology] with ranks_per_node",
            hint="without --trace the command says what differs"
            if met is None
            else "--set topology.ranks_per_node=8",
        )
    events: list[dict[str, Any]] = []
    for rank in found.steps:
        coords = " ".join(f"{dim}={coord}" for dim, coord in found.layout.coords(rank).items())
        events.append(
            {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank} {coords}"}}
        )
    for bar in met.bars:
        events.append(
            {
                "ph": "X",
                "pid": bar.rank,
                "tid": "waits" if bar.lane != COMPUTE else COMPUTE,
                "name": bar.name if bar.lane == COMPUTE else f"{bar.lane} {bar.name}",
                "ts": bar.began * _US,
                "dur": (bar.over - bar.began) * _US,
                "args": {} if bar.lane == COMPUTE else {"until the others come, us": bar.late * _US},
            }
        )
    write_whole(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), given=f"--trace {path}")
