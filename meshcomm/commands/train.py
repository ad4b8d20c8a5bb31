"""`meshcomm train`, `run`, `simulate` and `parity`, which run a config or a script on every rank.

Problems with the config or script are reported before torch is imported, because the import takes seconds.
"""

from __future__ import annotations

import atexit
import gc
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from meshcomm.config import Config, load_config
from meshcomm.config.elastic import ElasticConfig
from meshcomm.errors import ConfigError, LaunchError

# How long ranks may take to finish a step and save a checkpoint after they are asked to end.
_SAVING_S: Final = 30.0


def train(
    config: Path,
    overrides: Sequence[str],
    world: int | None,
    max_restarts: int = 0,
    replace: int | None = None,
) -> int:
    """Train according to `config`. Return the exit code. Outside a launcher, all ranks are started on this host.

    replace: overrides elastic.replace.
    """
    overrides = _replacing(overrides, replace)
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
        from meshcomm.jobs.starting import start_job
    body = partial(_train, settings)
    words = ["train", str(config)]
    return start_job(settings, world, words, overrides, body, max_restarts, _SAVING_S)


def _train(settings: Config) -> None:
    with _loading():
        from rich.console import Console

        from meshcomm.launch.spawn import SAVED
        from meshcomm.mesh.all_ranks import is_first
        from meshcomm.mesh.opening import init
        from meshcomm.train import find_attempt
        from meshcomm.train import run as run_training
        from meshcomm.train.screen import TrainingReporter

    attempt = find_attempt(os.environ)
    with init(settings) as mesh:
        if not mesh.is_member:
            return
        console = Console(quiet=not is_first(mesh))
        console.print(mesh)
        summary = run_training(mesh, settings, TrainingReporter(console), attempt)
        mesh.finish()
    if summary.asked_to_stop:
        raise SystemExit(SAVED)


def _replacing(overrides: Sequence[str], replace: int | None) -> Sequence[str]:
    return overrides if replace is None else [*overrides, f"elastic.replace={replace}"]


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


def run(
    config: Path | None,
    script: Path,
    arguments: Sequence[str],
    overrides: Sequence[str],
    world: int | None,
    *,
    stats: bool = False,
    replace: int | None = None,
) -> int:
    """Run a script on every rank. `meshcomm.init()` in the script creates the mesh of `config`, if given, on `world` ranks.

    replace: overrides elastic.replace. stats: whether rank 0 prints its calls on groups that the script created with torch.
        They are printed when the default group is destroyed.
    """
    if config is not None:
        overrides = _replacing(overrides, replace)
    settings = None if config is None else load_config(config, overrides)
    if settings is not None and world is not None:
        settings.resolved(world)
    from meshcomm.jobs.starting import start_job
    from meshcomm.mesh.source import CONFIG_VARIABLE, OVERRIDES_VARIABLE
    from meshcomm.mesh.watched import watch_if_possible

    def body() -> None:
        if config is not None:
            os.environ[CONFIG_VARIABLE] = str(config)
            os.environ[OVERRIDES_VARIABLE] = "\n".join(overrides)
        watch_if_possible(stats)
        sys.argv = [str(script), *arguments]
        # Like `python SCRIPT`, search for imports in the script's folder first.
        sys.path.insert(0, str(script.resolve().parent))
        runpy.run_path(str(script), run_name="__main__")

    named = [str(each) for each in (config, script) if each is not None]
    words = ["run", *["--stats"] * stats, *named, *arguments]
    elastic = ElasticConfig(replace=replace or 0) if settings is None else settings.elastic
    return start_job(settings, world, words, overrides, body, elastic=elastic)


def parity(
    config: Path,
    overrides: Sequence[str],
    world: int | None,
    steps: int | None,
    tolerance: float,
    script: tuple[Path, Sequence[str]] | None = None,
) -> dict[str, Any]:
    """Compare training on the mesh of `config` with training on one process. Return `Parity.facts`.

    script: the script that creates a Trainer on the mesh from meshcomm.init(), and its arguments. If None, `config` is trained.
    """
    # A script's ranks read the configuration from another folder.
    settings = load_config(config if script is None else config.resolve(), overrides)
    if world is not None:
        settings.resolved(world)
    from meshcomm.jobs.starting import label_of, world_of
    from meshcomm.launch.spawn import launch
    from meshcomm.mesh.environment import launch_of_command
    from meshcomm.train.parity_job import prove

    here = launch_of_command(os.environ)
    if here.kind != "single":
        raise LaunchError(
            f"meshcomm parity inside a job that {here.kind} started",
            given=f"launcher {here.kind} with {here.world_size} processes",
            expected="a single process, because meshcomm parity itself starts the ranks of each mesh",
            hint="run meshcomm parity CONFIG without the launcher",
        )
    size = world_of(settings, world)
    resolved = settings.resolved(size)

    def start(part: Config, words: Sequence[str]) -> int:
        count = size if part.mesh.dims == resolved.mesh.dims else world_of(part, None)
        return launch(list(words), count, 0, lambda rank: label_of(part, rank, count))

    made = None if script is None else (script[0].resolve(), script[1])
    return prove(resolved, steps, tolerance, start, made).facts()
