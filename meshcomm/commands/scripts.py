"""Commands that create a project or run ranks, real or simulated: new, train, run, simulate, parity, dryrun."""

from __future__ import annotations

from importlib.resources import files
from os.path import lexists
from pathlib import Path
from typing import Annotated, Any, Final, final

import typer

from meshcomm.cli.app import AsJson, Command, ConfigFile, Overrides, World, app, no_config, show_facts
from meshcomm.errors import LaunchError

First = Annotated[
    Path | None,
    typer.Argument(
        metavar="[CONFIG]",
        help="A configuration file (TOML, JSON or YAML) for meshcomm.init() without arguments. A file name that "
        "ends in .py is treated as SCRIPT, which then defines the mesh itself.",
    ),
]
WORDS = {"allow_extra_args": True}
Second = Annotated[
    str | None,
    typer.Argument(
        metavar="SCRIPT",
        help="A Python file. All arguments after SCRIPT are passed to the script.",
    ),
]

Replace = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Replace up to this many lost ranks with new processes while the other ranks stay alive. Overrides "
        "elastic.replace; see docs/guide/elastic.md.",
    ),
]

# The files that `meshcomm new` writes: the source of each in the starter folder, and the command that runs it.
_STARTER: Final = {
    "config.toml": ("config.toml", "meshcomm train"),
    "hello.py": ("hello.py.txt", "meshcomm run --world-size 8"),
}


@final
class ScriptCommand(Command):
    """A command `[OPTIONS] [CONFIG] SCRIPT [ARGUMENTS]`. Arguments after SCRIPT belong to the script."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Stop parsing options at the first word that ends in .py."""
        script = next((place for place, word in enumerate(args) if word.endswith(".py")), len(args))
        return super().parse_args(ctx, [*args[:script], "--", *args[script:]])


@app.command(cls=Command)
def new(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="[FOLDER]",
            help="The folder to write to, created if missing. Default: the current folder.",
        ),
    ] = Path(),
) -> None:
    """Write config.toml, to train with 8 processes on the CPU, and hello.py, a script for the same mesh.

    Existing files are never overwritten: if FOLDER contains either file, nothing is written.
    """
    paths = {folder / name: starter for name, starter in _STARTER.items()}
    if there := [str(path) for path in paths if lexists(path)]:
        raise LaunchError(
            f"meshcomm new does not overwrite files, and {' and '.join(there)} {'exist' if there[1:] else 'exists'}",
            given=str(folder),
            expected=f"a folder without {' and '.join(_STARTER)}",
            hint=f"meshcomm new {folder / 'demo'}",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, (starter, _) in paths.items():
            with path.open("x", encoding="utf-8", newline="\n") as file:
                file.write((files("meshcomm.cli") / "starter" / starter).read_text(encoding="utf-8"))
    except OSError as error:
        raise LaunchError(
            f"{folder}: cannot be written: {(error.strerror or str(error)).lower()}",
            given=str(folder),
            expected="a folder that can be written or created",
            hint="meshcomm new in another folder",
        ) from None
    for path, (_, command) in paths.items():
        typer.echo(f"{command} {path}")


@app.command(cls=Command)
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
    """Train the built-in model in parallel. Outside a launcher, start one process per rank on this host."""
    from meshcomm.jobs.running import train as job

    raise typer.Exit(job(config, overrides or (), world, max_restarts, replace))


@app.command(cls=ScriptCommand, context_settings=WORDS)
def run(
    context: typer.Context,
    first: First = None,
    second: Second = None,
    world: World = None,
    stats: Annotated[
        bool,
        typer.Option(
            "--stats",
            help="Print rank 0's calls and bytes for each group that the script creates with torch.",
        ),
    ] = False,
    replace: Replace = None,
    overrides: Overrides = None,
) -> None:
    """Run a script with one process per rank. In the script, meshcomm.init() opens the mesh of CONFIG.

    If the script creates its groups only with torch, meshcomm watches those groups: see meshcomm.watch.
    """
    config, script, arguments = named("run", first, second, context.args, overrides)
    from meshcomm.jobs.running import run as job

    raise typer.Exit(job(config, script, arguments, overrides or (), world, stats=stats, replace=replace))


@app.command(cls=ScriptCommand, context_settings=WORDS)
def simulate(
    context: typer.Context,
    first: First = None,
    second: Second = None,
    world: World = None,
    seed: Annotated[int, typer.Option(help="Seed of the schedule, which selects the next rank to run.")] = 0,
    overrides: Overrides = None,
) -> None:
    """Run a script as all ranks in a single process. Deadlocks are detected without a timeout."""
    config, script, arguments = named("simulate", first, second, context.args, overrides)
    from meshcomm.simulator.run import simulate_script

    ranks = simulate_script(config, script, arguments, overrides or (), world, seed)
    typer.echo(f"{ranks} ranks simulated, no deadlock")


@app.command(cls=ScriptCommand, context_settings=WORDS)
def parity(
    context: typer.Context,
    config: ConfigFile,
    script: Annotated[
        str | None,
        typer.Argument(
            metavar="[SCRIPT]",
            help="A Python file that creates a meshcomm.train.Trainer on the mesh of meshcomm.init(). All arguments "
            "after SCRIPT are passed to the script.",
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Number of steps to compare. Default: 20, or all if there are fewer."),
    ] = None,
    world: World = None,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Largest relative difference that counts as equal.")
    ] = 1e-9,
    json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Compare losses, norms, gradients and weights between training on the mesh and in one process, in float64.

    The exit code is 1 if they differ. Smaller meshes are then run to find the first dim that causes a difference.
    """
    from meshcomm.jobs.running import parity as job
    from meshcomm.show.parity import parity_view

    given = None
    if script is not None:
        given = _found(Path(script), "meshcomm parity CONFIG [SCRIPT] [ARGUMENTS]"), context.args
    facts = job(config, overrides or (), world, steps, tolerance, given)
    show_facts(facts, json, parity_view)
    raise typer.Exit(0 if facts["agrees"] else 1)


@app.command(cls=ScriptCommand, context_settings=WORDS)
def dryrun(
    context: typer.Context,
    first: First = None,
    second: Annotated[
        str | None,
        typer.Argument(
            metavar="[SCRIPT]",
            help="A Python file to run instead of training as CONFIG describes. All arguments after SCRIPT are passed "
            "to the script.",
        ),
    ] = None,
    world: World = None,
    rank: Annotated[list[int] | None, typer.Option(help="Also run this rank. Repeatable.")] = None,
    sample: Annotated[
        int,
        typer.Option(min=0, help="Number of random ranks to run in addition to the representative ranks."),
    ] = 8,
    steps: Annotated[
        int,
        typer.Option(min=1, help="Stop SCRIPT after this many calls to mesh.step() or Trainer steps."),
    ] = 2,
    dims: Annotated[
        str | None,
        typer.Option(
            help="The sizes of pp, dp, fsdp, cp, tp and ep, if CONFIG is a model's config.json.",
            metavar="NAME=SIZE,...",
        ),
    ] = None,
    json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Dry-run a training job or a script for a world that is not available. Check calls, memory and step time.

    The real program runs on tensors without values, as one rank of each kind: first, middle and last along each
    dim, every stage, every corner, and a random sample. The exit code is 1 if calls do not match, or if memory
    exceeds topology.memory_gbytes.
    """
    from meshcomm.config.of_model import is_of_model, training_of
    from meshcomm.dryrun.script import Script
    from meshcomm.jobs.dryrun import dryrun as job
    from meshcomm.show.dryrun import dry_view

    if first is None:
        raise LaunchError(
            "neither CONFIG nor SCRIPT was given",
            given="no argument",
            expected="a TOML, JSON or YAML file, or a Python file",
            hint="meshcomm dryrun [CONFIG] [SCRIPT] [ARGUMENTS]",
        )
    config: Path | dict[str, Any] | None = first
    script: Script | None = None
    of_model = is_of_model(first)
    if (dims is not None) != of_model:
        raise LaunchError(
            "a model's config.json contains no dim sizes"
            if of_model
            else "--dims requires a model's config.json",
            given=f"{first}{'' if dims is None else f', --dims {dims}'}",
            expected="a model's config.json and --dims, or a configuration without --dims",
            hint=f"meshcomm dryrun {first} --dims pp=16,fsdp=64,tp=8"
            if of_model
            else "--set mesh.dims={dp=8,tp=2}",
        )
    if of_model:
        config = training_of(first, dims or "")
    elif first.suffix == ".py" or second is not None:
        config, path, arguments = named("dryrun", first, second, context.args, overrides)
        script = Script(path, tuple(arguments), config, tuple(overrides or ()), steps)
    facts = job(config, overrides or (), world, script, rank or (), sample)
    show_facts(facts, json, dry_view)
    raise typer.Exit(1 if facts["findings"] or facts["memory"]["fits"] is False else 0)


def named(
    command: str, first: Path | None, second: str | None, rest: list[str], overrides: list[str] | None
) -> tuple[Path | None, Path, list[str]]:
    """Return CONFIG (None if not given), SCRIPT, and the script's arguments. Raises ConfigError, LaunchError."""
    usage = f"meshcomm {command} [CONFIG] SCRIPT [ARGUMENTS]"
    if first is None:
        raise LaunchError("no SCRIPT was given", given="no argument", expected="a Python file", hint=usage)
    if first.suffix == ".py":
        config, script = None, first
        arguments = [*([] if second is None else [second]), *rest]
        if overrides:
            expected = "a CONFIG whose settings to override, and a script that calls meshcomm.init()"
            raise no_config(overrides, expected, usage)
    elif second is None:
        raise LaunchError(
            f"no SCRIPT was given after {first}",
            given=str(first),
            expected="a file name that ends in .py, or a Python file after CONFIG",
            hint=usage,
        )
    else:
        config, script, arguments = first, Path(second), rest
    return config, _found(script, usage), arguments


def _found(script: Path, usage: str) -> Path:
    """Return the script. Raises LaunchError if it does not exist."""
    if not script.is_file():
        from meshcomm.config.read import near_file

        near = near_file(script, script=True)
        way = near if near.startswith("did") else usage
        raise LaunchError(
            f"there is no script {script}", given=str(script), expected="a Python file", hint=way
        )
    return script
