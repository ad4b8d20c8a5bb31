"""The command that opens a page: view."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshcomm.cli.app import Overrides, World, app, discovered_topology


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
    from meshcomm.view.facts import page_facts
    from meshcomm.view.target import find_target

    if export is not None:
        from meshcomm.view.export import check_page

        check_page(export)
    found = find_target(target, overrides or ())
    facts = page_facts(found.settings, world, discovered_topology(found.settings))
    if export is not None:
        from meshcomm.view.export import export_page

        typer.echo(export_page(export, facts, found.folder))
        if open_:
            typer.launch(export.resolve().as_uri())
        return
    from meshcomm.view.server import Server

    with Server(facts, found.folder, port) as server:
        try:
            typer.echo(f"{server.url}  ({found.settings.source}; Ctrl-C ends it)")
            if open_:
                typer.launch(server.url)
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo()
