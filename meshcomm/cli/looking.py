"""Commands that say what a config means: plan, lint, view, schema."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from meshcomm.cli.app import AsJson, ConfigFile, Overrides, World, app, discovered_topology, show_facts

if TYPE_CHECKING:
    from rich.console import RenderableType

    from meshcomm.config import Config
    from meshcomm.layout import Dims
    from meshcomm.show.page import Part

Export = Annotated[
    Path | None,
    typer.Option("--export", metavar="FILE", help="Write it to a file instead: .svg, .md or .json."),
]

By = Annotated[
    str | None,
    typer.Option(
        metavar="DIM",
        help="Whose groups the grid's colours are: a dim, merged dim, view's dim, or several with commas. "
        "Draws the grid. Default: the innermost dim.",
    ),
]
Other = Annotated[
    Path | None,
    typer.Option(
        metavar="OTHER",
        help="Compare with this config instead: settings, groups and their options, and which ranks "
        "change place. --set changes both.",
    ),
]


@app.command()
def plan(
    config: ConfigFile,
    world: World = None,
    rank: Annotated[
        str | None,
        typer.Option(
            metavar="RANK|COORDS",
            help="Show this rank's coords, node, groups and neighbours, and whom it exchanges what with; mark it in the "
            "grid. 5, or pp=1,dp=0,tp=1; fewer coords list all such ranks.",
        ),
    ] = None,
    grid: Annotated[
        bool, typer.Option("--grid", help="Draw the ranks: a colour for each group, lines between nodes.")
    ] = False,
    by: By = None,
    schedule: Annotated[
        bool, typer.Option("--schedule", help="Draw the pipeline's schedule: who runs which pass when.")
    ] = False,
    tree: Annotated[
        bool,
        typer.Option(
            "--tree",
            help="Show the dims inside each other instead, down to the ranks of the innermost groups; "
            "--json has all of them.",
        ),
    ] = False,
    view: Annotated[
        str | None,
        typer.Option(help="With --tree: a view's dims in place of the base's."),
    ] = None,
    diff: Other = None,
    export: Export = None,
    json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Show dims, groups and one rank's place, without a process, a GPU or torch.

    --export topo.svg is the grid as a picture; in .md and .json it stands after the tables.

    With --diff the exit code is 0 where the two are equal, and 1 where they are not.
    """
    _one_picture(tree, view, diff, {"--rank": rank, "--grid": grid, "--by": by, "--schedule": schedule})
    _one_way_out(export, json)
    if schedule and export is not None and export.suffix.lower() != ".json":
        raise typer.BadParameter("--schedule is drawn on a terminal only; --export FILE.json has its facts")
    from meshcomm.config import load_config

    settings = load_config(config, overrides or ()).resolved(world)
    if diff is not None:
        picture = _difference(settings, load_config(diff, overrides or ()).resolved(world), world)
        _write(picture, export, json)
        raise typer.Exit(0 if picture.facts["equal"] else 1)
    if tree:
        whole = json or (export is not None and export.suffix.lower() == ".json")
        picture = _tree(settings, world, view or "", whole)
    else:
        drawn = grid or by is not None or export is not None
        picture = _tables(settings, world, rank, (_dims(by),) if drawn else (), schedule)
    _write(picture, export, json)


class _Picture(NamedTuple):
    """The output of a command in every form.

    page: for Markdown. shown: for the screen; the page if empty. svg: if omitted, a picture of the screen with `title`.
    """

    facts: dict[str, Any]
    page: Callable[[], Sequence[Part]]
    title: str = ""
    shown: Sequence[RenderableType] = ()
    svg: Callable[[], str] | None = None


def _tree(settings: Config, world: int | None, view: str, whole: bool) -> _Picture:
    from meshcomm.show.page import Line, as_text
    from meshcomm.show.tree import FOLDED, headline, tree_facts, tree_view

    topology = discovered_topology(settings)
    facts = tree_facts(settings.plan(world), view, topology, None if whole else FOLDED)
    drawn = tree_view(facts)
    return _Picture(facts, lambda: [Line(as_text(drawn), drawing=True)], headline(facts), [drawn])


def _difference(a: Config, b: Config, world: int | None) -> _Picture:
    from meshcomm.show.diff import diff_facts, diff_page

    facts = diff_facts(a, b, a.plan(world), b.plan(world))
    return _Picture(facts, lambda: diff_page(facts), " and ".join(facts["sources"]))


def _tables(
    settings: Config, world: int | None, rank: str | None, colours: tuple[Dims | None, ...], schedule: bool
) -> _Picture:
    """colours: whose groups the grid's are; empty where no grid is drawn."""
    from meshcomm.predict.lint import footprint
    from meshcomm.show.grid import RankGrid, grid_facts
    from meshcomm.show.page import page_view
    from meshcomm.show.plan import plan_facts, plan_page
    from meshcomm.show.schedule import ScheduleView, schedule_facts
    from meshcomm.show.where import read_place, where_facts, where_page

    laid_out, topology = settings.plan(world), discovered_topology(settings)
    facts = plan_facts(laid_out, None, topology)
    cost = footprint(settings, laid_out, laid_out.layout.world_size)
    if cost.nccl and not cost.undecided:
        facts["footprint"] = cost._asdict()
    tables, marked = plan_page(facts), None
    if rank is not None:
        placed = where_facts(settings, laid_out, read_place(rank), topology)
        tables += where_page(placed)
        facts |= placed
        marked = placed["ranks"][0] if len(placed["ranks"]) == 1 else None
    shown: list[RenderableType] = [page_view(tables)]
    if not colours:
        grid = None
    else:
        facts["grid"] = grid_facts(laid_out, colours[0], topology, marked)
        grid = RankGrid(facts["grid"])
        shown.append(grid)
    if schedule:
        facts["schedule"] = schedule_facts(settings, world)
        shown.append(ScheduleView(facts["schedule"]))

    def page() -> list[Part]:
        return [*tables, *([] if grid is None else grid.page())]

    return _Picture(facts, page, "", shown, None if grid is None else grid.svg)


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

    from meshcomm.config import load_config
    from meshcomm.predict.lint import lint as find
    from meshcomm.show.lint import lint_facts, lint_text
    from meshcomm.show.page import Folded

    settings = load_config(config, overrides or ())
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    topology = discovered_topology(settings)
    findings = find(settings, world, topology, None if soft == resource.RLIM_INFINITY else soft)
    facts = lint_facts(settings, settings.plan(world), topology, findings)
    show_facts(facts, json, lambda _: Folded(lint_text(settings.source, facts, findings)))
    raise typer.Exit(int(strict and bool(findings)))


@app.command()
def view(
    target: Annotated[
        Path,
        typer.Argument(metavar="CONFIG|RUN", help="A configuration's file, or the folder of a training run."),
    ],
    world: World = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of 127.0.0.1; 0: one that is free.")] = 0,
    export: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the page, as of now, into one file; no server.")
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in the default browser.")] = False,
    overrides: Overrides = None,
) -> None:
    """Serve a page for a browser on this machine: the mesh, its traffic, and the run as it goes on. Ctrl-C ends it."""
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
        if open_:
            typer.launch(export.resolve().as_uri())
        return
    with Server(facts, found.folder, port) as server:
        try:
            typer.echo(f"{server.url}  ({found.settings.source}; Ctrl-C ends it)")
            if open_:
                typer.launch(server.url)
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo()


@app.command()
def schema(
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write it to this file.")] = None,
) -> None:
    """Print the JSON schema of configs: what editors complete, explain and check them by."""
    from meshcomm.config.schema import schema_text

    if out is None:
        typer.echo(schema_text(), nl=False)
        return
    from meshcomm.config.write import write_whole

    write_whole(out, schema_text())
    typer.echo(f"written: {out}", err=True)


def _one_picture(tree: bool, view: str | None, diff: Path | None, others: dict[str, object]) -> None:
    """Refuse an option that would have no effect beside --tree or --diff."""
    if view is not None and not tree:
        raise typer.BadParameter("--view has no effect without --tree")
    chosen = [name for name, given in (("--tree", tree), ("--diff", diff is not None)) if given]
    beside = [name for name, value in others.items() if value is not None and value is not False]
    if chosen and len(chosen) + len(beside) > 1:
        raise typer.BadParameter(f"{' and '.join([*chosen, *beside])}: one of them at a time")


def _dims(by: str | None) -> str | tuple[str, ...] | None:
    names = None if by is None else tuple(name.strip() for name in by.split(","))
    return names[0] if names is not None and len(names) == 1 else names


def _one_way_out(export: Path | None, json: bool) -> None:
    """Refuse what could only be half obeyed, before any work."""
    if export is None:
        return
    if json:
        raise typer.BadParameter("--json prints and --export writes: one of the two")
    from meshcomm.config.write import check_ending
    from meshcomm.show.page import KINDS

    check_ending(export, "--export", *KINDS)


def _write(picture: _Picture, export: Path | None, json: bool) -> None:
    """The facts as a file, as JSON, or on the screen."""
    from rich.console import Group

    from meshcomm.show.page import export as write
    from meshcomm.show.page import page_view, svg_of

    if export is None:
        show_facts(picture.facts, json, lambda _: Group(*picture.shown or [page_view(picture.page())]))
        return
    views = picture.shown or [page_view(picture.page())]
    svg = picture.svg or (lambda: svg_of(views, picture.title))
    write(export, picture.facts, picture.page, svg)
    typer.echo(f"written: {export}", err=True)
