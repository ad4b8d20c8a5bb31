"""Commands that ask this machine: bench, doctor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshcomm.cli.app import AsJson, Overrides, World, app


@app.command()
def bench(
    world: Annotated[int, typer.Option(min=2, help="Number of processes.")] = 4,
    megabytes: Annotated[int, typer.Option(min=1, help="Size of the large tensors.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; medians are shown.")] = 9,
) -> None:
    """Measure calls and bandwidth beside raw torch.distributed, in one run on this machine."""
    from meshcomm.jobs.bench import bench as job

    raise typer.Exit(job(megabytes, rounds, world))


@app.command()
def doctor(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="The job's file: more can be checked with it.")
    ] = None,
    world: World = None,
    json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Check this host, installation and environment. Under torchrun: all ranks, in one table.

    Exit code 1 where something would make the job fail.
    """
    from meshcomm.jobs.doctor import doctor as job

    raise typer.Exit(job(config, overrides or (), world, json))
