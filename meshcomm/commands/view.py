"""`meshcomm view`: show a mesh or a run in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshcomm.commands.app import Overrides, World, command, discovered_topology
from meshcomm.errors import ViewError


@command()
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
    from meshcomm.view.facts import page_facts
    from meshcomm.view.page import export_page
    from meshcomm.view.run import find_target
    from meshcomm.view.server import Server

    if export is not None:
        check_ending(export, "--export", ".html", ".htm", kind=ViewError)
    viewed = find_target(target, overrides or ())
    facts = page_facts(viewed.settings, world, discovered_topology(viewed.settings))
    if export is not None:
        typer.echo(export_page(export, facts, viewed.folder))
        return
    with Server(facts, viewed.folder, port) as server:
        try:
            typer.echo(f"{server.url}  ({viewed.settings.source}; Ctrl-C ends it)")
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo()
