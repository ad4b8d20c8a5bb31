"""Commands that say what a config means: plan, lint."""

from __future__ import annotations

from typing import Annotated

import typer

from meshcomm.cli.app import AsJson, ConfigFile, Overrides, World, app, discovered_topology, show, show_json


@app.command()
def plan(
    config: ConfigFile,
    world: World = None,
    rank: Annotated[int | None, typer.Option(help="Show this rank's coords, groups and neighbours.")] = None,
    schedule: Annotated[
        bool, typer.Option("--schedule", help="Draw the pipeline's schedule: who runs which pass when.")
    ] = False,
    json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Show dims, groups and one rank's place, without a process, a GPU or torch."""
    from meshcomm.config import load
    from meshcomm.show.plan import facts_view, plan_facts

    settings = load(config, overrides or ()).resolved(world)
    facts = plan_facts(settings.plan(world), rank, discovered_topology(settings))
    if schedule:
        from meshcomm.show.schedule import schedule_facts

        facts["schedule"] = schedule_facts(settings, world)
    if json:
        show_json(facts)
        return
    show(facts_view(facts))
    if schedule:
        from meshcomm.show.schedule import schedule_view

        show(schedule_view(facts["schedule"]))


@app.command()
def lint(
    config: ConfigFile,
    world: World = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit code 1 where there is a finding.")] = False,
    json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Say what about the mesh will cost time or fail on its machines, why, and what to try."""
    import resource

    from meshcomm.config import load
    from meshcomm.show.lint import lint_facts, lint_text
    from meshcomm.topology import lint as find

    settings = load(config, overrides or ())
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    topology = discovered_topology(settings)
    findings = find(settings, world, topology, None if soft == resource.RLIM_INFINITY else soft)
    facts = lint_facts(settings, settings.plan(world), topology, findings)
    if json:
        show_json(facts)
    else:
        typer.echo(lint_text(settings.source, facts, findings))
    raise typer.Exit(int(strict and bool(findings)))
