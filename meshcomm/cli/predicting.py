"""Commands that predict times: costs, place."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshcomm.cli.app import (
    AsJson,
    ConfigFile,
    Operations,
    Overrides,
    World,
    app,
    discovered_topology,
    show,
    show_json,
)


@app.command()
def costs(
    config: ConfigFile,
    world: World = None,
    operation: Operations = None,
    size: Annotated[
        list[str] | None,
        typer.Option("--bytes", help="As in 64MB or 4KiB; several times. Default: 4KiB, 1MiB, 64MiB, 1GiB."),
    ] = None,
    json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Predict what collectives along each dim take on its links, and by which algorithm."""
    from meshcomm.config import load
    from meshcomm.predict.machine import known_machine
    from meshcomm.predict.times import named_operations
    from meshcomm.show.costs import cost_facts, cost_view
    from meshcomm.show.units import read_bytes

    settings = load(config, overrides or ()).resolved(world)
    machine = known_machine(discovered_topology(settings), settings.source)
    sizes = [read_bytes(text) for text in size or ("4KiB", "1MiB", "64MiB", "1GiB")]
    facts = cost_facts(settings.plan(world), machine, named_operations(operation or ()), sizes)
    if json:
        show_json(facts)
        return
    show(cost_view(facts))


@app.command()
def place(
    config: ConfigFile,
    world: Annotated[int, typer.Option(min=1, help="Number of processes to lay the training out on.")],
    keep: Annotated[
        list[str] | None,
        typer.Option(
            "--keep", metavar="DIM", help="Leave this dim's size as the file has it; several times."
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many meshes to show.")] = 10,
    write: Annotated[
        Path | None, typer.Option(help="Write the first mesh, or that of --choose, as a config.")
    ] = None,
    choose: Annotated[int, typer.Option(min=1, help="With --write: which mesh of the table.")] = 1,
    json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Rank all sizes and orders of the dims that can train CONFIG by the step time that a model predicts."""
    from meshcomm.config import load
    from meshcomm.predict.placed import place_config, write_placement
    from meshcomm.show.place import place_facts, place_view

    settings = load(config, overrides or ())
    if choose > 1 and (write is None or choose > top):
        raise typer.BadParameter(f"--choose {choose} wants --write and --top {choose} or more")
    ranking = place_config(settings, world, discovered_topology(settings), keep or (), top)
    assert settings.parallel is not None
    facts = place_facts(ranking, settings.parallel.parts)
    if json:
        show_json(facts)
    else:
        show(place_view(facts))
    if write is not None:
        write_placement(settings, ranking, choose, write)
        typer.echo(f"written: {write}", err=json)
