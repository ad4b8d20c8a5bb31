"""How `meshcomm train` and `meshcomm run` become processes: here the launcher, there one rank."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from meshcomm.config import Config, load
from meshcomm.errors import ConfigError, LaunchError, MeshcommError
from meshcomm.mesh.launch import launch
from meshcomm.mesh.launcher import Launch, find_launch
from meshcomm.mesh.opening import CONFIG_VARIABLE, OVERRIDES_VARIABLE, init
from meshcomm.mesh.rank import as_rank


def train(config: Path, overrides: Sequence[str], world: int | None) -> int:
    """Train as `config` says; returns the exit code. Outside a launcher, starts all ranks here."""
    settings = load(config, overrides)
    if settings.train is None:
        raise ConfigError(
            f"{config} says nothing about training",
            given="a mesh without [parallel], [model], [data] and [train]",
            expected="all four sections",
            hint="configs/quickstart.toml has them all",
        )
    return _job(settings, world, ["train", str(config)], overrides, lambda: _train(settings))


def run(
    config: Path, script: Path, arguments: Sequence[str], overrides: Sequence[str], world: int | None
) -> int:
    """Run a script, one process per rank, whose `meshcomm.init()` makes the mesh of `config`."""
    settings = load(config, overrides)
    if not script.is_file():
        raise LaunchError(
            f"there is no script {script}",
            given=str(script),
            expected="a Python file",
            hint="meshcomm run CONFIG SCRIPT [ARGUMENTS]",
        )

    def body() -> None:
        os.environ[CONFIG_VARIABLE] = str(config)
        os.environ[OVERRIDES_VARIABLE] = "\n".join(overrides)
        sys.argv = [str(script), *arguments]
        # As `python SCRIPT` does: imports are looked for beside the script first.
        sys.path.insert(0, str(script.resolve().parent))
        runpy.run_path(str(script), run_name="__main__")

    return _job(settings, world, ["run", str(config), str(script), *arguments], overrides, body)


def bench(megabytes: int, rounds: int, world: int) -> int:
    """Measure meshcomm beside raw torch.distributed; returns the exit code."""
    settings = load({"mesh": {"dims": {"dp": world}, "device": "cpu", "timeout_s": 300.0}})
    words = ["bench", "--megabytes", str(megabytes), "--rounds", str(rounds), "--world", str(world)]
    if find_launch(os.environ).kind == "single":
        from meshcomm.bench.overhead import overhead
        from meshcomm.bench.table import console, rows_table

        console().print(rows_table("calls, fake backend, one process", overhead(rounds)))
    return _job(settings, None, words, (), lambda: _bench(settings, megabytes, rounds))


def _bench(settings: Config, megabytes: int, rounds: int) -> None:
    from meshcomm.bench.table import console, rows_table
    from meshcomm.bench.transfer import large, many

    torch.set_num_threads(1)
    with init(settings) as mesh:
        rows = [*many(mesh, "dp", rounds), *large(mesh, "dp", megabytes, rounds)]
        if mesh.rank == 0:
            console().print(rows_table(f"data, {mesh.size('dp')} processes, {mesh.device.type}", rows))


def _job(
    settings: Config, world: int | None, words: list[str], overrides: Sequence[str], body: object
) -> int:
    assert callable(body)
    here = find_launch(os.environ)
    if here.kind != "single":
        if world is not None and world != here.world_size:
            raise LaunchError(
                f"--world {world} inside a job of {here.world_size} processes",
                given=f"--world {world}, launcher {here.kind} with {here.world_size}",
                expected="no --world: the launcher decides",
                hint="leave --world out",
            )
        as_rank(body, here, lambda: _label(settings, here))
        return 0
    size = _world(settings, world)
    settings.resolved(size)
    sets = [part for override in overrides for part in ("--set", override)]
    # Options go before the words: all that follows a script's name is the script's.
    return launch(["-m", "meshcomm", words[0], *sets, *words[1:]], size)


def _world(settings: Config, world: int | None) -> int:
    if world is not None:
        return world
    mesh = settings.mesh
    if -1 in mesh.dims.values() and mesh.device != "cpu" and torch.cuda.is_available():
        return torch.cuda.device_count()
    if mesh.ranks is not None:
        return max(mesh.ranks) + 1
    size = 1
    for part in mesh.sizes(None).values():
        size *= part
    return size


def _label(settings: Config, here: Launch) -> str:
    try:
        coords = settings.plan(here.world_size).layout.coords(here.rank)
    except MeshcommError:
        return f"rank {here.rank}"
    return f"rank {here.rank} ({' '.join(f'{name}={coord}' for name, coord in coords.items())})"


def _train(settings: Config) -> None:
    from rich.console import Console

    from meshcomm.train import Silent
    from meshcomm.train import run as run_training
    from meshcomm.train.screen import TrainingReporter

    with init(settings) as mesh:
        if not mesh.is_member:
            return
        if mesh.rank == 0:
            console = Console()
            console.print(mesh)
            run_training(mesh, settings, TrainingReporter(console))
        else:
            run_training(mesh, settings, Silent())
