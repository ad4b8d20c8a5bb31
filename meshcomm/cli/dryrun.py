"""The command dryrun."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshcomm.cli.app import AsJson, Overrides, World, app, show, show_json
from meshcomm.cli.running import WORDS, First, ScriptCommand, named
from meshcomm.errors import LaunchError


@app.command(cls=ScriptCommand, context_settings=WORDS)
def dryrun(
    context: typer.Context,
    first: First = None,
    second: Annotated[
        str | None,
        typer.Argument(
            metavar="[SCRIPT]",
            help="A Python file in place of the training of CONFIG; what follows it is its own, as of meshcomm run.",
        ),
    ] = None,
    world: World = None,
    rank: Annotated[list[int] | None, typer.Option(help="Run this rank too; several times.")] = None,
    sample: Annotated[
        int, typer.Option(min=0, help="Run so many ranks drawn at random besides those that stand for all.")
    ] = 8,
    seed: Annotated[int, typer.Option(help="Draws the sample.")] = 0,
    steps: Annotated[
        int, typer.Option(min=1, help="Leave SCRIPT after so many of mesh.step(), or steps of a Trainer.")
    ] = 2,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the step as a timeline for Perfetto or chrome://tracing, as JSON."
        ),
    ] = None,
    json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Run a training or a script as ranks of a world that nobody has: do calls meet, does it fit, how long is a step?

    The real program on tensors without values, on one rank of each kind: first, middle and last along each dim,
    every stage, every corner, and a sample. Exit code 1 where calls do not meet, or memory exceeds topology.memory_gbytes.
    """
    from meshcomm.jobs.dryrun import dryrun as job

    if first is None:
        raise LaunchError(
            "neither CONFIG nor SCRIPT was given",
            given="no argument",
            expected="a TOML, JSON or YAML file, or a Python file",
            hint="meshcomm dryrun [CONFIG] [SCRIPT] [ARGUMENTS]",
        )
    config: Path | None = first
    script: Path | None = None
    arguments: list[str] = []
    if first.suffix == ".py" or second is not None:
        config, script, arguments = named("dryrun", first, second, context.args, overrides)
    facts = job(config, script, arguments, overrides or (), world, rank or (), sample, seed, steps, trace)
    if json:
        show_json(facts)
    else:
        from meshcomm.show.dryrun import dry_view

        show(dry_view(facts))
    raise typer.Exit(1 if facts["findings"] or facts["memory"]["fits"] is False else 0)
