"""Commands for a job's results and failures: report, doctor, export."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from meshcomm.cli.app import AsJson, Command, Overrides, World, app, no_config, show_facts
from meshcomm.errors import LaunchError

# How long the ranks wait for each other without a config.
_DOCTOR_TIMEOUT_S: Final = 60.0


@app.command(cls=Command)
def report(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="[DIR]",
            help="Folder with the reports of one or more runs. The newest run is read. Default: meshcomm-reports.",
        ),
    ] = Path("meshcomm-reports"),
) -> None:
    """Combine the reports of a job with failed calls. Show which ranks waited, for which ranks, and where."""
    from meshcomm.jobs.afterwards import report as job

    typer.echo(job(source))


@app.command(cls=Command)
def doctor(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="[CONFIG]", help="The job's configuration file, for additional checks."),
    ] = None,
    world: World = None,
    json: AsJson = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Also show versions, interfaces, limits and ranks.")
    ] = False,
    overrides: Overrides = None,
) -> None:
    """Find problems with this host, installation and environment, and suggest fixes. Under torchrun, check all ranks.

    The exit code is 1 if a problem would make the job fail.
    """
    if config is None and overrides:
        raise no_config(overrides, "a CONFIG whose settings to override", "meshcomm doctor CONFIG --set ...")
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
        # The findings will include the error.
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


@app.command(cls=Command)
def export(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|CHECKPOINT",
            help="A checkpoint, or a run's folder, whose last checkpoint is exported.",
        ),
    ],
    target: Annotated[
        Path, typer.Argument(metavar="FILE", help="The safetensors file or the folder to write.")
    ],
    pretrained: Annotated[
        bool,
        typer.Option(
            "--pretrained", help="Write a folder that from_pretrained in transformers or peft can read."
        ),
    ] = False,
    merged: Annotated[
        bool,
        typer.Option(
            "--merged", help="Write the full model to a folder, with [model.lora] merged into its weights."
        ),
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Dtype of the weights in a folder: float32, bfloat16 or float16. Default: the dtype of the weights."
        ),
    ] = None,
    shard_gb: Annotated[
        float | None, typer.Option(min=0, help="Maximum file size in a folder, in GB. Default: 5.")
    ] = None,
) -> None:
    """Write a checkpoint's weights to one safetensors file, or to a folder for transformers, in one process."""
    from meshcomm.jobs.afterwards import export as job

    typer.echo(job(source, target, pretrained, merged, dtype, shard_gb))
