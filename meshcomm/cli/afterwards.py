"""Commands for what a job left behind and for what went wrong: report, doctor, export, import."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshcomm.cli.app import AsJson, Overrides, World, app


@app.command()
def report(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="[DIR|TRACE]",
            help="Reports of a run, or of runs: the newest is read; or a file of mesh.trace. "
            "Default: meshcomm-reports.",
        ),
    ] = Path("meshcomm-reports"),
    timeline: Annotated[
        bool, typer.Option("--timeline", help="Draw who was in which call when, a row for each rank.")
    ] = False,
) -> None:
    """Put the reports of a job whose calls failed together: who kept whom waiting, and where."""
    from meshcomm.jobs.afterwards import report as job
    from meshcomm.jobs.afterwards import timeline_of

    typer.echo(timeline_of(source) if timeline else job(source))


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
    from meshcomm.jobs.doctor import doctor as job

    raise typer.Exit(job(config, overrides or (), world, json, everything))


@app.command()
def export(
    source: Annotated[
        Path,
        typer.Argument(metavar="RUN|CHECKPOINT", help="A run's folder: its last checkpoint; or one of them."),
    ],
    target: Annotated[
        Path, typer.Argument(metavar="FILE", help="The safetensors file, or the folder, to write.")
    ],
    weights: Annotated[
        bool, typer.Option("--weights", help="Only the model's tensors, by the names of its modules.")
    ] = False,
    pretrained: Annotated[
        bool,
        typer.Option(
            "--pretrained", help="A folder that from_pretrained of transformers opens, of such a model."
        ),
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(help="With --pretrained: float32, bfloat16 or float16. Default: that of the weights."),
    ] = None,
    shard_gb: Annotated[
        float | None, typer.Option(min=0, help="With --pretrained: the largest file, in GB. Default: 5.")
    ] = None,
) -> None:
    """Write a checkpoint's whole tensors into one safetensors file, or a folder of them, in one process."""
    from meshcomm.jobs.afterwards import export as job

    typer.echo(job(source, target, weights, pretrained, dtype, shard_gb))


@app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="What `meshcomm export` wrote.")],
    out: Annotated[
        Path, typer.Argument(metavar="RUN", help="The train.out of the run that goes on from it.")
    ],
) -> None:
    """Make a checkpoint of an exported file, for `meshcomm train --set train.resume=true`."""
    from meshcomm.jobs.afterwards import import_file as job

    typer.echo(job(source, out))
