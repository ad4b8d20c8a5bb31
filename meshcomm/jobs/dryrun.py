"""`meshcomm dryrun`: run a config's training, or a script, on some ranks of a simulated world."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from meshcomm.config import Config, TopologyConfig, load_config
from meshcomm.dryrun.rank import pretended_step
from meshcomm.dryrun.script import Script, mesh_of_script, script_step
from meshcomm.dryrun.training import dry_facts, dry_training, priced
from meshcomm.dryrun.world import chosen, dry_world
from meshcomm.jobs.starting import world_of
from meshcomm.mesh.environment import how_many_ranks
from meshcomm.predict.links import discovered
from meshcomm.predict.place import Ranking, placed_data

# Common names of the pipeline dim, used if there is no [parallel].
_STAGES: Final = ("pp", "pipeline", "pipe", "stage")


class Exact(NamedTuple):
    """The result of a placement's dry run. peak_bytes: the highest peak memory on any rank."""

    step_s: float
    peak_bytes: int
    fits: bool


def dryrun(
    config: Path | dict[str, Any] | None,
    overrides: Sequence[str],
    world: int | None,
    script: Script | None = None,
    ranks: Sequence[int] = (),
    sample: int = 8,
) -> dict[str, Any]:
    """Run `script`, or the training in `config`, on representative ranks of `world`. Return the results as plain data.

    ranks, sample: additional ranks to run, see `chosen`.
    Raises ConfigError, LaunchError, RankFailed; LayoutError for a rank that does not exist.
    """
    began = time.perf_counter()
    if config is None and world is None:
        raise how_many_ranks("dryrun")
    settings = None if config is None else load_config(config, overrides)
    size = world_of(settings, world)
    if script is None:
        assert settings is not None
        return dry_training(settings, size, ranks, sample)
    layout, asked, objects = mesh_of_script(script, size)
    parallel = getattr(asked, "parallel", None)
    topology = discovered((settings or asked).topology, os.environ)
    stages = None if parallel is None else parallel.pipeline
    # Without a configuration, look for a dim with a common name.
    pipeline = stages or next((dim for dim in layout.dims if dim in _STAGES), None)
    first = chosen(layout, pipeline, also=ranks, sample=sample)
    found = dry_world(
        partial(script_step, script._replace(objects=objects)),
        layout,
        pipeline,
        first,
        replayed=priced(topology),
    )
    return dry_facts(found, None, topology, time.perf_counter() - began)


def mesh_made_by(script: Path, world: int | None) -> dict[str, Any]:
    """Return the configuration of the mesh or DeviceMesh that a script creates as rank 0 of `world`.

    Raises the same errors as `dryrun`.
    """
    if world is None:
        raise how_many_ranks("plan")
    layout, asked, _ = mesh_of_script(Script(script), world)
    mesh: dict[str, Any] = {
        "dims": dict(layout.dims),
        "merge": dict(layout.merge),
        "views": dict(layout.views),
    }
    if layout.rank_order is not None:
        mesh["rank_order"] = list(layout.rank_order)
    if asked.mesh.ranks is not None:
        mesh["ranks"] = list(asked.mesh.ranks)
    return {"mesh": {key: value for key, value in mesh.items() if value}}


def exactly(settings: Config, ranking: Ranking, topology: TopologyConfig) -> tuple[Ranking, list[Exact]]:
    """Dry-run each placement in a ranking, using one rank per pipeline stage. Return the placements, fastest first, and the
    results.

    Placements that exceed the memory limit come last.
    """
    found: list[tuple[bool, float, int, Exact]] = []
    for number, placement in enumerate(ranking.placements):
        placed = load_config(placed_data(settings, placement)).resolved(ranking.world)
        assert placed.parallel is not None
        layout, pipeline = placed.plan(ranking.world).layout, placed.parallel.pipeline
        first = layout.rank_of(0)
        stages = [first] if pipeline is None else sorted(map(int, layout.group_of(first, pipeline)))
        program = partial(pretended_step, placed)
        world = dry_world(program, layout, pipeline, stages, replayed=priced(topology))
        assert world.replay is not None
        peak = max(step.peak.nbytes for step in world.steps.values())
        exact = Exact(world.replay.seconds, peak, peak <= ranking.memory_gb * 1e9)
        found.append((not exact.fits, exact.step_s, number, exact))
    found.sort(key=lambda each: each[:3])
    placements = tuple(ranking.placements[number] for _, _, number, _ in found)
    return ranking._replace(placements=placements), [exact for *_, exact in found]
