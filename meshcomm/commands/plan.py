"""`meshcomm plan`: show the dims, groups and ranks of a mesh, or how two meshes differ."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from meshcomm.commands.app import (
    AsJson,
    ConfigFile,
    Overrides,
    World,
    command,
    discovered_topology,
    show_facts,
)
from meshcomm.show.page import Facts

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

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


@command()
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
    if diff is not None:
        options = {"--rank": rank, "--grid": grid, "--by": by, "--schedule": schedule, "--export": export}
        if unused := [name for name, value in options.items() if value not in (None, False)]:
            raise typer.BadParameter(f"--diff only compares: leave out {' and '.join(unused)}")
    if export is not None and (json or schedule):
        raise typer.BadParameter("--export writes only the grid: leave out --json and --schedule")
    from meshcomm.config import load_config
    from meshcomm.config.write import check_ending
    from meshcomm.predict.lint import footprint
    from meshcomm.show.grid import RankGrid, grid_facts
    from meshcomm.show.plan import plan_facts, read_rank
    from meshcomm.show.schedule import schedule_facts

    if export is not None:
        check_ending(export, "--export", ".svg")
    given: Any = mesh_made_by(config, world) if config.suffix == ".py" else config
    settings = load_config(given, overrides or ()).resolved(world)
    if diff is not None:
        _compare(settings, load_config(diff, overrides or ()).resolved(world), world, json)
    mesh, topology = settings.plan(world), discovered_topology(settings)
    marked = None if rank is None else read_rank(rank, mesh.layout)
    facts = plan_facts(mesh, marked, topology)
    cost = footprint(settings, mesh, mesh.layout.world_size)
    if cost.nccl and not cost.undecided:
        facts["footprint"] = cost._asdict()
    if grid or by is not None or export is not None:
        facts["grid"] = grid_facts(mesh, _dims(by), topology, marked)
    if export is not None:
        RankGrid(facts["grid"]).save(export)
        typer.echo(f"written: {export}", err=True)
        return
    if schedule:
        facts["schedule"] = schedule_facts(settings, world)
    show_facts(facts, json, view)


def mesh_made_by(script: Path, world: int | None) -> Facts:
    """Return the configuration of the mesh or DeviceMesh that a script creates as rank 0 of `world`.

    Raises LaunchError without `world`, and the same errors as `meshcomm dryrun`.
    """
    from meshcomm.dryrun.script import Script, mesh_of_script
    from meshcomm.rendezvous.launcher import how_many_ranks

    if world is None:
        raise how_many_ranks("plan")
    layout, asked, _ = mesh_of_script(Script(script), world)
    mesh = {
        "dims": dict(layout.dims),
        "merge": dict(layout.merge),
        "views": dict(layout.views),
        "rank_order": None if layout.rank_order is None else list(layout.rank_order),
        "ranks": None if asked.mesh.ranks is None else list(asked.mesh.ranks),
    }
    return {"mesh": {key: value for key, value in mesh.items() if value}}


def _dims(by: str | None) -> str | tuple[str, ...] | None:
    names = None if by is None else tuple(name.strip() for name in by.split(","))
    return names[0] if names is not None and len(names) == 1 else names


def _compare(a: Config, b: Config, world: int | None, json: bool) -> NoReturn:
    from meshcomm.show.diff import diff_facts, diff_view

    facts = diff_facts(a, b, a.plan(world), b.plan(world))
    show_facts(facts, json, diff_view)
    raise typer.Exit(0 if facts["equal"] else 1)


def view(facts: Facts) -> Group:
    """Return the tables, then the grid and the schedule if they were asked for, for a rich console."""
    from rich.console import Group

    from meshcomm.show.grid import RankGrid
    from meshcomm.show.plan import plan_page
    from meshcomm.show.schedule import ScheduleView

    parts: list[RenderableType] = [*plan_page(facts)]
    if "grid" in facts:
        parts.append(RankGrid(facts["grid"]))
    if "schedule" in facts:
        parts.append(ScheduleView(facts["schedule"]))
    return Group(*parts)
