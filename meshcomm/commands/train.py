"""`meshcomm train`: train the model of a config on every rank.

Problems with the config are reported before torch is imported, because the import takes seconds.
"""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final

import typer

from meshcomm.commands.app import ConfigFile, Overrides, Replace, World, command, replacing
from meshcomm.errors import ConfigError

if TYPE_CHECKING:
    from meshcomm.config import Config

# How long ranks may take to finish a step and save a checkpoint after they are asked to end.
_SAVING_S: Final = 30.0


@command()
def train(
    config: ConfigFile,
    world: World = None,
    max_restarts: Annotated[
        int,
        typer.Option(
            min=0, help="Maximum number of times to restart all ranks after one fails; see checkpoint_every."
        ),
    ] = 0,
    replace: Replace = None,
    overrides: Overrides = None,
) -> None:
    """Train the built-in model in parallel. Outside a launcher, start one process per rank on this host.

    The exit code is that of the rank that caused the failure: 1 for an error, 2 for incorrect usage, 128 + signal; 130 after
    Ctrl-C.
    """
    from meshcomm.config import load_config

    overrides = replacing(overrides, replace)
    settings = load_config(config, overrides)
    if settings.train is None or settings.model is None:
        raise ConfigError(
            f"{config} has no settings for {'training' if settings.train is None else 'a model'}",
            given="no [model]"
            if settings.train
            else "a mesh without [parallel], [model], [data] and [train]",
            expected="all four sections, or meshcomm run with a script that creates a meshcomm.train.Trainer",
            hint="meshcomm new writes a config with all of them",
        )
    if world is not None:
        settings.resolved(world)
    with _loading():
        from meshcomm.commands.processes import start_job
    words, body = ["train", str(config)], partial(_on_a_rank, settings)
    raise typer.Exit(start_job(settings, world, words, overrides, body, max_restarts, _SAVING_S))


def _on_a_rank(settings: Config) -> None:
    with _loading():
        from rich.console import Console

        from meshcomm.job.replacing import SAVED
        from meshcomm.mesh.all_ranks import is_first
        from meshcomm.mesh.opening import init
        from meshcomm.train import find_attempt, run
        from meshcomm.train.screen import TrainingReporter

    attempt = find_attempt(os.environ)
    with init(settings) as mesh:
        if not mesh.is_member:
            return
        console = Console(quiet=not is_first(mesh))
        console.print(mesh)
        summary = run(mesh, settings, TrainingReporter(console), attempt)
        mesh.elastic.finish()
    if summary.asked_to_stop:
        raise SystemExit(SAVED)


@contextmanager
def _loading() -> Iterator[None]:
    """Import modules that stay loaded. Garbage collection during these imports would take a fifth of a rank's startup time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        # At exit, Python frees libraries' objects by garbage collection. Without this call, they are reported as leaks.
        atexit.register(gc.unfreeze)
        gc.enable()
