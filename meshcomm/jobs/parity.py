"""`meshcomm parity`: the same training on its mesh and on one process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshcomm.config import Config, load
from meshcomm.errors import LaunchError


def parity(
    config: Path, overrides: Sequence[str], world: int | None, steps: int | None, tolerance: float
) -> dict[str, Any]:
    """Compare the training of `config` on its mesh with one process; returns `Parity.facts`."""
    settings = load(config, overrides)
    if world is not None:
        settings.resolved(world)
    # What is wrong has been said by now: torch takes seconds to load.
    from meshcomm.jobs.starting import label_of, world_of
    from meshcomm.launch.spawn import launch
    from meshcomm.mesh.environment import find_launch
    from meshcomm.train.parity_job import prove

    here = find_launch(os.environ)
    if here.kind != "single":
        raise LaunchError(
            f"meshcomm parity inside a job that {here.kind} started",
            given=f"launcher {here.kind} with {here.world_size} processes",
            expected="one process: it starts one per rank itself, once for each mesh that it compares",
            hint="meshcomm parity CONFIG, without the launcher",
        )
    size = world_of(settings, world)

    def start(part: Config, words: Sequence[str]) -> int:
        count = size if part.mesh.dims == resolved.mesh.dims else world_of(part, None)
        return launch(list(words), count, 0, lambda rank: label_of(part, rank, count))

    resolved = settings.resolved(size)
    return prove(resolved, steps, tolerance, start).facts()
