"""How `meshcomm train` and `meshcomm run` become processes: here the launcher, there one rank."""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from meshcomm.comm.verdict import doing, name_of_rank, verdict
from meshcomm.config import Config, load
from meshcomm.errors import ConfigError, LaunchError, MeshcommError
from meshcomm.mesh.launch import launch
from meshcomm.mesh.launcher import Launch, find_launch
from meshcomm.mesh.opening import CONFIG_VARIABLE, OVERRIDES_VARIABLE, init
from meshcomm.mesh.rank import as_rank

# How long the ranks wait for each other where no config says.
_DOCTOR_TIMEOUT_S: Final = 60.0


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
    return _job(settings, world, ["train", str(config)], overrides, lambda: _train(settings), max_restarts)


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


def simulate(
    config: Path,
    script: Path,
    arguments: Sequence[str],
    overrides: Sequence[str],
    world: int | None,
    seed: int,
    explore: int,
    quiet: bool,
) -> dict[str, Any]:
    """Run a script as every rank in this process; returns what it sent, as plain data.

    quiet: what the script prints goes to stderr.
    """
    from contextlib import nullcontext, redirect_stdout

    from meshcomm.simulator.script import simulate_script

    with redirect_stdout(sys.stderr) if quiet else nullcontext():
        return simulate_script(config, script, arguments, overrides, world, seed, explore)


def parity(
    config: Path, overrides: Sequence[str], world: int | None, steps: int | None, tolerance: float
) -> dict[str, Any]:
    """Compare the training of `config` on its mesh with one process; returns `Parity.facts`."""
    from meshcomm.train.parity_job import prove

    here = find_launch(os.environ)
    if here.kind != "single":
        raise LaunchError(
            f"meshcomm parity inside a job that {here.kind} started",
            given=f"launcher {here.kind} with {here.world_size} processes",
            expected="one process: it starts one per rank itself, once for each mesh that it compares",
            hint="meshcomm parity CONFIG, without the launcher",
        )
    settings = load(config, overrides)
    size = _world(settings, world)

    def start(part: Config, words: Sequence[str]) -> int:
        count = size if part.mesh.dims == resolved.mesh.dims else _world(part, None)
        return launch(list(words), count, 0, lambda rank: _label(part, rank, count))

    resolved = settings.resolved(size)
    return prove(resolved, steps, tolerance, start).facts()


def bench(megabytes: int, rounds: int, world: int) -> int:
    """Measure meshcomm beside raw torch.distributed; returns the exit code."""
    # Steady state: the comparison of the first calls is over.
    mesh = {"dims": {"dp": world}, "device": "cpu", "timeout_s": 300.0, "validate_calls": 0}
    settings = load({"mesh": mesh})
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


def doctor(config: Path | None, overrides: Sequence[str], world: int | None, json: bool) -> int:
    """Print what is well and what is not; returns 1 where something is an error, else 0.

    Inside a launcher every rank takes part and rank 0 prints.
    """
    from meshcomm.doctor import examine, examine_together
    from meshcomm.doctor.finding import Finding, exit_code

    if config is None and overrides:
        raise ConfigError(
            "--set has no effect without a CONFIG",
            given=" ".join(f"--set {override}" for override in overrides),
            expected="a CONFIG whose settings they change",
            hint="meshcomm doctor CONFIG --set ...",
        )
    settings = None if config is None else load(config, overrides)
    try:
        here = find_launch(os.environ)
    except LaunchError:
        # It will be among the findings.
        here = find_launch({})
    if here.kind == "single":
        facts = examine(settings, world)
        _print_facts(facts, json)
        return exit_code(map(Finding.read, facts["findings"]))
    _no_other_world(here, world)
    codes: list[int] = []

    def body() -> None:
        timeout_s = _DOCTOR_TIMEOUT_S if settings is None else settings.mesh.timeout_s
        found, code = examine_together(settings, here, timeout_s)
        if found is not None:
            _print_facts(found, json)
        codes.append(code)

    as_rank(body, here, lambda: f"rank {here.rank}")
    return codes[0]


def _print_facts(facts: dict[str, Any], json: bool) -> None:
    if json:
        from json import dumps

        print(dumps(facts, indent=2))
        return
    from meshcomm.bench.table import console
    from meshcomm.doctor.view import view

    console().print(view(facts))


def report(folder: Path) -> str:
    """The verdict of the reports in a folder, as text."""
    files = sorted(folder.glob("rank*.json"), key=lambda path: int("0" + path.stem[4:]))
    if not files:
        raise LaunchError(
            f"there are no reports in {folder}",
            given=f"{folder}" if folder.is_dir() else f"{folder}, which is no folder",
            expected="rank0.json, rank1.json, ... as ranks leave them when a call fails",
            hint="mesh.reports in the config says where they go; default meshcomm-reports",
        )
    statuses = {}
    for file in files:
        try:
            status = json.loads(file.read_text())
            statuses[int(status["rank"])] = status
        except (ValueError, KeyError, TypeError) as error:
            raise LaunchError(
                f"{file} is not a report",
                given=str(error),
                expected="a file that a rank wrote",
                hint=f"remove {file}",
            ) from None
    lines = [f"{len(statuses)} report(s) in {folder}", *verdict(statuses)]
    for rank, status in statuses.items():
        if status["failed"] is not None:
            failed = status["failed"]
            lines.append(
                f"{name_of_rank(rank, status)}: {failed['call']} on "
                f"{failed['label']}, at {failed['site']}: {' '.join(failed['error'])}"
            )
        else:
            lines.append(f"{name_of_rank(rank, status)} {doing(status)}")
    return "\n".join(lines)


def export(source: Path, target: Path, weights: bool) -> str:
    """Write a checkpoint, or a run's last one, into a safetensors file; what was done, as text."""
    from meshcomm.train.export import export_checkpoint

    return _moved(export_checkpoint(source, target, weights=weights))


def import_file(source: Path, out: Path) -> str:
    """Make a checkpoint of the run `out` from an exported file; what was done, as text."""
    from meshcomm.train.export import import_checkpoint

    return _moved(import_checkpoint(source, out))


def _moved(moved: Any) -> str:
    size = f"{moved.tensors} tensors, {moved.bytes / 1e6:.1f} MB"
    return f"{moved.source} -> {moved.target}: step {moved.step}, {size}"


def _job(
    settings: Config,
    world: int | None,
    words: list[str],
    overrides: Sequence[str],
    body: Callable[[], None],
    max_restarts: int = 0,
) -> int:
    here = find_launch(os.environ)
    if here.kind != "single":
        _no_other_world(here, world)
        if max_restarts:
            raise LaunchError(
                f"--max-restarts {max_restarts} inside a job that {here.kind} started",
                given=f"--max-restarts {max_restarts}, launcher {here.kind} with {here.world_size} processes",
                expected="no --max-restarts: the launcher restarts, or does not",
                hint="torchrun --max-restarts N ... -m meshcomm train CONFIG",
            )
        as_rank(body, here, lambda: _label(settings, here.rank, here.world_size))
        return 0
    size = _world(settings, world)
    settings.resolved(size)
    sets = [part for override in overrides for part in ("--set", override)]
    # Options go before the words: all that follows a script's name is the script's.
    return launch(
        ["-m", "meshcomm", words[0], *sets, *words[1:]],
        size,
        max_restarts,
        lambda rank: _label(settings, rank, size),
    )


def _no_other_world(here: Launch, world: int | None) -> None:
    if world is not None and world != here.world_size:
        raise LaunchError(
            f"--world {world} inside a job of {here.world_size} processes",
            given=f"--world {world}, launcher {here.kind} with {here.world_size}",
            expected="no --world: the launcher decides",
            hint="leave --world out",
        )


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


def _label(settings: Config, rank: int, world_size: int) -> str:
    try:
        coords = settings.plan(world_size).layout.coords(rank)
    except MeshcommError:
        return f"rank {rank}"
    return f"rank {rank} ({' '.join(f'{name}={coord}' for name, coord in coords.items())})"


def _train(settings: Config) -> None:
    from rich.console import Console

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
