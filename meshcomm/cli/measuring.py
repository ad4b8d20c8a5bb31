"""Commands that measure or predict times: bench, costs, tune."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshcomm.cli.app import (
    AsJson,
    Command,
    ConfigFile,
    Operations,
    Overrides,
    World,
    app,
    discovered_topology,
    show_facts,
)


@app.command(cls=Command)
def bench(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG]",
            help="The configuration of the mesh to measure. If omitted, a mesh with one dim on the CPU.",
        ),
    ] = None,
    world: Annotated[
        int | None,
        typer.Option(
            "--world-size",
            "--world",
            min=2,
            help="Number of processes; required if a size is -1. Default without CONFIG: 4.",
        ),
    ] = None,
    operation: Operations = None,
    size: Annotated[
        list[str] | None,
        typer.Option(
            "--bytes", help="Size such as 4KiB or 64MB. Repeatable. Default: 4KiB, 64KiB, 1MiB, 16MiB."
        ),
    ] = None,
    dim: Annotated[
        list[str] | None,
        typer.Option(
            "--dim",
            help="A dim, merged dim or dim of a view. Repeatable. Default: all dims that do not share another dim's groups.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds; medians are shown.")] = 9,
    fit: Annotated[
        Path | None,
        typer.Option(
            help="Write a [topology] section to this file, with latencies and bandwidths fitted to the measured times."
        ),
    ] = None,
    json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Measure operations along each dim and compare them with plain torch.distributed in the same run.

    Outside a launcher, the command starts one process per rank on this host.
    """
    from meshcomm.bench.measure import Asked
    from meshcomm.jobs.bench import SIZES, Output
    from meshcomm.jobs.bench import bench as job
    from meshcomm.predict.times import named_operations
    from meshcomm.show.units import read_bytes

    sizes = [read_bytes(text) for text in size or SIZES]
    asked = Asked(named_operations(operation or ()), sizes, dim or (), rounds)
    raise typer.Exit(job(config, overrides or (), world, asked, Output(json, fit)))


@app.command(cls=Command)
def costs(
    config: ConfigFile,
    world: World = None,
    operation: Operations = None,
    size: Annotated[
        list[str] | None,
        typer.Option(
            "--bytes", help="Size such as 64MB or 4KiB. Repeatable. Default: 4KiB, 1MiB, 64MiB, 1GiB."
        ),
    ] = None,
    json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Predict the algorithm and the time of collectives along each dim from the speed of its links."""
    from meshcomm.config import load_config
    from meshcomm.predict.links import known_machine
    from meshcomm.predict.times import named_operations
    from meshcomm.show.costs import cost_facts, cost_view
    from meshcomm.show.units import read_bytes

    settings = load_config(config, overrides or ()).resolved(world)
    machine = known_machine(discovered_topology(settings), settings.source)
    sizes = [read_bytes(text) for text in size or ("4KiB", "1MiB", "64MiB", "1GiB")]
    facts = cost_facts(settings.plan(world), machine, named_operations(operation or ()), sizes)
    show_facts(facts, json, cost_view)


@app.command(cls=Command)
def tune(
    config: ConfigFile,
    world: Annotated[
        int,
        typer.Option(
            "--world-size", "--world", min=1, help="Number of processes to distribute the training over."
        ),
    ],
    keep: Annotated[
        list[str] | None,
        typer.Option("--keep", metavar="DIM", help="Keep this dim at its size in CONFIG. Repeatable."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Number of meshes to show.")] = 10,
    write: Annotated[
        Path | None, typer.Option(help="Write the first mesh in the table to this config file.")
    ] = None,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help="Dry-run the first --top meshes, with one rank of each stage, and rank them by the results.",
        ),
    ] = False,
    json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Rank all dim sizes and orders that can train CONFIG by their predicted step time.

    CONFIG may be a model's config.json.
    """
    from meshcomm.config import load_config
    from meshcomm.config.of_model import is_of_model, placed_on
    from meshcomm.predict.place import place_config, write_placement
    from meshcomm.show.place import place_facts, place_view

    settings = load_config(placed_on(config, world) if is_of_model(config) else config, overrides or ())
    topology = discovered_topology(settings)
    counts = None
    if settings.model is not None and settings.model.pretrained is not None:
        from meshcomm.models.counts import counts_of

        counts = counts_of(settings.model.pretrained)
    ranking = place_config(settings, world, topology, keep or (), top, counts)
    assert settings.parallel is not None
    if exact:
        from meshcomm.jobs.dryrun import exactly

        ranking, ran = exactly(settings, ranking, topology)
    facts = place_facts(ranking, settings.parallel.parts, settings.mesh.device)
    if exact:
        for placement, each in zip(facts["placements"], ran, strict=True):
            placement["exact"] = each._asdict()
    show_facts(facts, json, place_view)
    if write is not None:
        write_placement(settings, ranking, write)
        typer.echo(f"written: {write}", err=json)
