"""`meshcomm train`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from meshcomm.config import Config, load
from meshcomm.errors import ConfigError
from meshcomm.jobs.announce import announce


def train(config: Path, overrides: Sequence[str], world: int | None, max_restarts: int = 0) -> int:
    """Train as `config` says; returns the exit code. Outside a launcher, starts all ranks here.

    max_restarts: how often all ranks are started again after one of them has failed.
    """
    settings = load(config, overrides)
    if settings.train is None:
        raise ConfigError(
            f"{config} says nothing about training",
            given="a mesh without [parallel], [model], [data] and [train]",
            expected="all four sections",
            hint="configs/quickstart.toml has them all",
        )
    if world is not None:
        settings.resolved(world)
    announce(settings.mesh.dims, world)
    # What is wrong has been said by now: torch takes seconds to load.
    from meshcomm.jobs.starting import start_job

    return start_job(
        settings, world, ["train", str(config)], overrides, lambda: _train(settings), max_restarts
    )


def _train(settings: Config) -> None:
    from rich.console import Console

    from meshcomm.mesh.opening import init
    from meshcomm.train import Silent, find_attempt
    from meshcomm.train import run as run_training
    from meshcomm.train.exchange import is_first
    from meshcomm.train.screen import TrainingReporter

    attempt = find_attempt(os.environ)
    with init(settings) as mesh:
        if not mesh.is_member:
            return
        if is_first(mesh):
            console = Console()
            console.print(mesh)
            run_training(mesh, settings, TrainingReporter(console), attempt)
        else:
            run_training(mesh, settings, Silent(), attempt)
