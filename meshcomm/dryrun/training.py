"""The training of a config as ranks of a world that nobody has."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from meshcomm.config import Config, TopologyConfig
from meshcomm.dryrun.facts import dry_facts
from meshcomm.dryrun.prices import prices
from meshcomm.dryrun.rank import pretended_step
from meshcomm.dryrun.replay import Replay, replay
from meshcomm.dryrun.timeline import picture, write_trace
from meshcomm.dryrun.world import World, dry_world
from meshcomm.predict.machine import discovered, machine
from meshcomm.predict.place import ASSUMED_TFLOPS


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
