"""Commands that ask this machine: bench, doctor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshcomm.cli.app import AsJson, Operations, Overrides, World, app
from meshcomm.cli.completion import complete_config, complete_dim


@app.command()
def bench(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG]",
            autocompletion=complete_config,
            help="Whose mesh is measured. Without: one dim, on the CPU, and calls before a byte moves.",
        ),
    ] = None,
    world: Annotated[
        int | None,
        typer.Option(min=2, help="Number of processes; needed where a size is -1, 4 without CONFIG."),
    ] = None,
    operation: Operations = None,
    size: Annotated[
        list[str] | None,
        typer.Option("--bytes", help="As in 4KiB or 64MB; several times. Default: 4KiB, 64KiB, 1MiB, 16MiB."),
    ] = None,
    dim: Annotated[
        list[str] | None,
        typer.Option(
            "--dim",
            autocompletion=complete_dim,
            help="A dim, merged dim or view's dim; several times. Default: all with groups of their own.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; medians are shown.")] = 9,
    alone: Annotated[
        bool, typer.Option("--alone", help="One group along a dim, while the others wait.")
    ] = False,
    startup: Annotated[
        bool,
        typer.Option(
            "--startup",
            help="Start jobs of 8 cold and 64 forked processes (or --world) beside init_device_mesh.",
        ),
    ] = False,
    svg: Annotated[Path | None, typer.Option(help="Draw bandwidth over size.")] = None,
    fit: Annotated[
        Path | None,
        typer.Option(help="Write the links' latency and bandwidth as a [topology] that fits the times."),
    ] = None,
    json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Measure operations along each dim beside raw torch.distributed, in one run.

    Outside a launcher, starts one process per rank here.
    """
    if startup:
        from meshcomm.jobs.startup import startup as start_job

        unused = {"CONFIG": config, "--op": operation, "--bytes": size, "--dim": dim, "--alone": alone}
        unused |= {"--svg": svg, "--fit": fit, "--set": overrides}
        raise typer.Exit(start_job(world, rounds, json, [name for name, value in unused.items() if value]))
    from meshcomm.jobs.bench import Output
    from meshcomm.jobs.bench import bench as job

    output = Output(json, svg, fit)
    code = job(config, overrides or (), world, operation or (), size or (), dim or (), rounds, alone, output)
    raise typer.Exit(code)


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
