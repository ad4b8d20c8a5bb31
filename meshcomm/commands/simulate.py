"""`meshcomm simulate`: run a script as all ranks in one process."""

from __future__ import annotations

from typing import Annotated

import typer

from meshcomm.commands.app import Overrides, World, announce, command
from meshcomm.commands.scripts import First, ScriptCommand, Second, named


@command(ScriptCommand)
def simulate(
    context: typer.Context,
    first: First = None,
    second: Second = None,
    world: World = None,
    seed: Annotated[int, typer.Option(help="Seed of the schedule, which selects the next rank to run.")] = 0,
    overrides: Overrides = None,
) -> None:
    """Run a script as all ranks in a single process. Deadlocks are detected without a timeout."""
    config, script, arguments = named("simulate", first, second, context.args, overrides, world)
    from meshcomm.config import load_config

    settings = None if config is None else load_config(config, overrides or ())
    if settings is not None and world is None:
        world = settings.mesh.smallest_world()
    announce("simulating", script, settings, world)
    from meshcomm.simulator.run import simulate_script

    ranks = simulate_script(config, script, arguments, overrides or (), world, seed)
    typer.echo(f"{ranks} ranks simulated, no deadlock")
