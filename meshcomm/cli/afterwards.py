"""Commands for what a job left behind and for what went wrong: report, doctor, export."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from meshcomm.cli.app import AsJson, Overrides, World, app, no_config, show_facts
from meshcomm.errors import LaunchError

# How long the ranks wait for each other where no config says.
_DOCTOR_TIMEOUT_S: Final = 60.0


@app.command()
def report(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="[DIR]",
            help="Reports of a run, or of runs: the newest is read. Default: meshcomm-reports.",
        ),
    ] = Path("meshcomm-reports"),
) -> None:
    """Put the reports of a job whose calls failed together: who kept whom waiting, and where."""
    from meshcomm.jobs.afterwards import report as job

    typer.echo(job(source))


@app.command()
def doctor(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="The job's file: more can be checked with it.")
    ] = None,
    world: World = None,
    json: AsJson = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Also versions, interfaces, limits and ranks.")
    ] = False,
    overrides: Overrides = None,
) -> None:
    """Find problems of this host, installation and environment, and propose remedies. Under torchrun: of all ranks.

    Exit code 1 where something would make the job fail.
    """
    if config is None and overrides:
        raise no_config(overrides, "a CONFIG whose settings they change", "meshcomm doctor CONFIG --set ...")
    from meshcomm.config import load_config

    settings = None if config is None else load_config(config, overrides or ())
    from meshcomm.doctor import examine, examine_together
    from meshcomm.doctor.finding import Finding, exit_code, view
    from meshcomm.jobs.starting import refuse_other_world
    from meshcomm.launch.rank import as_rank
    from meshcomm.mesh.environment import find_launch

    try:
        here = find_launch(os.environ)
    except LaunchError:
        # It will be among the findings.
        here = find_launch({})
    facts: dict[str, Any] | None = None
    code = 0

    def together() -> None:
        nonlocal facts, code
        timeout_s = _DOCTOR_TIMEOUT_S if settings is None else settings.mesh.timeout_s
        facts, code = examine_together(settings, here, timeout_s)

    if here.kind == "single":
        facts = examine(settings, world)
        code = exit_code(map(Finding.read, facts["findings"]))
    else:
        refuse_other_world(here, world)
        as_rank(together, here, lambda: f"rank {here.rank}")
    if facts is not None:
        show_facts(facts, json, partial(view, everything=everything))
    raise typer.Exit(code)


@app.command()
def export(
    source: Annotated[
        Path,
        typer.Argument(metavar="RUN|CHECKPOINT", help="A run's folder: its last checkpoint; or one of them."),
    ],
    target: Annotated[
        Path, typer.Argument(metavar="FILE", help="The safetensors file, or the folder, to write.")
    ],
    pretrained: Annotated[
        bool,
        typer.Option(
            "--pretrained", help="A folder that from_pretrained of transformers, or of peft, opens."
        ),
    ] = False,
    merged: Annotated[
        bool,
        typer.Option("--merged", help="A folder of the whole model, with its [model.lora] in its weights."),
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(help="With a folder: float32, bfloat16 or float16. Default: that of the weights."),
    ] = None,
    shard_gb: Annotated[
        float | None, typer.Option(min=0, help="With a folder: the largest file, in GB. Default: 5.")
    ] = None,
) -> None:
    """Write a checkpoint's weights into one safetensors file, or a folder for transformers, in one process."""
    from meshcomm.jobs.afterwards import export as job

    typer.echo(job(source, target, pretrained, merged, dtype, shard_gb))
