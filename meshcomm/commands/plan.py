"""Commands that show and check a configuration: plan, lint, view, schema."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from meshcomm.cli.app import (
    AsJson,
    Command,
    ConfigFile,
    Facts,
    Overrides,
    World,
    app,
    discovered_topology,
    show_facts,
)

if TYPE_CHECKING:
    from meshcomm.config import Config

By = Annotated[
    str | None,
    typer.Option(
        metavar="DIM",
        help="Draw the grid with a color for each group along this dim, merged dim or dim of a view. Separate several "
        "dims with commas. Default: the innermost dim.",
    ),
]
Other = Annotated[
    Path | None,
    typer.Option(
        metavar="OTHER",
        help="Compare CONFIG with this config: settings, groups, and ranks that move. --set applies to both.",
    ),
]


@app.command(cls=Command)
def plan(
    config: ConfigFile,
    world: World = None,
    rank: Annotated[
        str | None,
        typer.Option(
            metavar="RANK|COORDS",
            help="Show this rank's coords, node, groups and neighbors, and mark it in the grid: "
            "5, or pp=1,dp=0,tp=1.",
        ),
    ] = None,
    grid: Annotated[
        bool,
        typer.Option("--grid", help="Draw the ranks, with a color for each group and lines between nodes."),
    ] = False,
    by: By = None,
    schedule: Annotated[
        bool,
        typer.Option(
            "--schedule", help="Draw the pipeline schedule: the passes that each rank runs over time."
        ),
    ] = False,
    diff: Other = None,
    export: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the grid to an .svg file instead.")
    ] = None,
    json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Show the dims, the groups and the placement of a rank. Does not require running processes, a GPU or torch.

    CONFIG may be a script, NAME.py. The script then runs as rank 0 of --world-size ranks until it has created its mesh
    or DeviceMesh. With --diff, the exit code is 0 if the two configurations are equal, and 1 if they differ.
    """
    names = "--rank", "--grid", "--by", "--schedule", "--export"
    values = rank, grid or None, by, schedule or None, export
    unused = [name for name, value in zip(names, values, strict=True) if value is not None]
    if diff is not None and unused:
        said = f"--diff only compares: leave out {' and '.join(unused)}"
        raise typer.BadParameter(said)
    if export is not None and (json or schedule):
        raise typer.BadParameter("--export writes only the grid: leave out --json and --schedule")
    from meshcomm.config import load_config
    from meshcomm.config.write import check_ending

    if export is not None:
        check_ending(export, "--export", ".svg")
    given: Any = config
    if config.suffix == ".py":
        from meshcomm.jobs.dryrun import mesh_made_by

        given = mesh_made_by(config, world)
    settings = load_config(given, overrides or ()).resolved(world)
    if diff is not None:
        _compare(settings, load_config(diff, overrides or ()).resolved(world), world, json)
    facts, drawn = _facts(settings, world, rank, by, grid or by is not None or export is not None)
    if export is not None:
        drawn[0].save(export)
        typer.echo(f"written: {export}", err=True)
        return
    from rich.console import Group

    from meshcomm.show.plan import plan_page

    if schedule:
        from meshcomm.show.schedule import ScheduleView, schedule_facts

        facts["schedule"] = schedule_facts(settings, world)
        drawn.append(ScheduleView(facts["schedule"]))
    show_facts(facts, json, lambda _: Group(*plan_page(facts), *drawn))


def _facts(
    settings: Config, world: int | None, rank: str | None, by: str | None, grid: bool
) -> tuple[Facts, list[Any]]:
    """Return the data that describes a plan and, if requested, the grid."""
    from meshcomm.predict.lint import footprint
    from meshcomm.show.grid import RankGrid, grid_facts
    from meshcomm.show.plan import plan_facts, read_rank

    laid_out, topology = settings.plan(world), discovered_topology(settings)
    marked = None if rank is None else read_rank(rank, laid_out.layout)
    facts = plan_facts(laid_out, marked, topology)
    cost = footprint(settings, laid_out, laid_out.layout.world_size)
    if cost.nccl and not cost.undecided:
        facts["footprint"] = cost._asdict()
    if not grid:
        return facts, []
    facts["grid"] = grid_facts(laid_out, _dims(by), topology, marked)
    return facts, [RankGrid(facts["grid"])]


def _compare(a: Config, b: Config, world: int | None, json: bool) -> NoReturn:
    from meshcomm.show.diff import diff_facts, diff_page
    from meshcomm.show.page import page_view

    facts = diff_facts(a, b, a.plan(world), b.plan(world))
    show_facts(facts, json, lambda _: page_view(diff_page(facts)))
    raise typer.Exit(0 if facts["equal"] else 1)


@app.command(cls=Command)
def lint(
    config: ConfigFile,
    world: World = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with code 1 if there is a finding.")] = False,
    json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Report mesh settings that will be slow or fail on the given machines, with the reason and a fix for each."""
    import resource

    from meshcomm.config import load_config
    from meshcomm.predict.lint import lint as find
    from meshcomm.show.lint import lint_facts, lint_text
    from meshcomm.show.page import Line

    settings = load_config(config, overrides or ())
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    topology = discovered_topology(settings)
    findings = find(settings, world, topology, None if soft == resource.RLIM_INFINITY else soft)
    facts = lint_facts(settings, settings.plan(world), topology, findings)
    show_facts(facts, json, lambda _: Line(lint_text(settings.source, facts, findings)))
    raise typer.Exit(int(strict and bool(findings)))


@app.command(cls=Command)
def view(
    target: Annotated[
        Path,
        typer.Argument(metavar="CONFIG|RUN", help="A configuration file, or the folder of a training run."),
    ],
    world: World = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 selects a free one.")] = 0,
    export: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the current page to one file instead of serving it."),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Serve a page that shows the mesh, its traffic and the run's progress in a local browser. Press Ctrl-C to stop."""
    from meshcomm.config.write import check_ending
    from meshcomm.errors import ViewError
    from meshcomm.view.facts import page_facts
    from meshcomm.view.page import export_page
    from meshcomm.view.run import find_target
    from meshcomm.view.server import Server

    if export is not None:
        check_ending(export, "--export", ".html", ".htm", kind=ViewError)
    found = find_target(target, overrides or ())
    facts = page_facts(found.settings, world, discovered_topology(found.settings))
    if export is not None:
        typer.echo(export_page(export, facts, found.folder))
        return
    with Server(facts, found.folder, port) as server:
        try:
            typer.echo(f"{server.url}  ({found.settings.source}; Ctrl-C ends it)")
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo()


@app.command(cls=Command)
def schema() -> None:
    """Print the JSON schema of configurations, for completion and validation in editors."""
    from meshcomm.config.schema import schema_text

    typer.echo(schema_text(), nl=False)


def _dims(by: str | None) -> str | tuple[str, ...] | None:
    names = None if by is None else tuple(name.strip() for name in by.split(","))
    return names[0] if names is not None and len(names) == 1 else names
