"""`meshcomm run`: run a script on every rank.

Problems with the config or the script are reported before torch is imported, because the import takes seconds.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from meshcomm.commands.app import (
    JsonAtEnd,
    Overrides,
    Replace,
    World,
    announce,
    command,
    replacing,
    show_facts,
)
from meshcomm.commands.scripts import First, ScriptCommand, Second, named
from meshcomm.show.page import Facts


@command(ScriptCommand)
def run(
    context: typer.Context,
    first: First = None,
    second: Second = None,
    world: World = None,
    stats: Annotated[
        bool,
        typer.Option(
            "--stats",
            help="Print rank 0's calls and bytes for each group that the script creates with torch.",
        ),
    ] = False,
    replace: Replace = None,
    json: JsonAtEnd = False,
    overrides: Overrides = None,
) -> None:
    """Run a script with one process per rank. In the script, meshcomm.init() opens the mesh of CONFIG.

    If the script creates its groups only with torch, meshcomm watches those groups: see meshcomm.watch.

    The exit code is that of the rank that caused the failure: 1 for an error, 2 for incorrect usage, the script's exit code,
    128 + signal; 130 after Ctrl-C.

    With --json, the result has exit_code, world_size and error: null, or an object with type, what, given, expected and try of
    the root cause's error, and its rank, name, at (the line) and lines (all that the launcher says).
    """
    config, script, arguments = named("run", first, second, context.args, overrides, world)
    from meshcomm.config import load_config
    from meshcomm.config.elastic import ElasticConfig

    settings, elastic = None, ElasticConfig(replace=replace or 0)
    sets: list[str] = []
    if config is not None:
        sets = replacing(overrides, replace)
        settings = load_config(config, sets)
        elastic = settings.elastic
        if world is not None:
            settings.resolved(world)
    announce("starting", script, settings, world)
    from meshcomm.commands.processes import start_job
    from meshcomm.mesh.source import CONFIG_VARIABLE, OVERRIDES_VARIABLE
    from meshcomm.mesh.watched import watch_if_possible

    def body() -> None:
        from runpy import run_path

        if config is not None:
            os.environ[CONFIG_VARIABLE] = str(config)
            os.environ[OVERRIDES_VARIABLE] = "\n".join(sets)
        watch_if_possible(stats)
        sys.argv = [str(script), *arguments]
        # Like `python SCRIPT`, search for imports in the script's folder first.
        sys.path.insert(0, str(script.resolve().parent))
        run_path(str(script), run_name="__main__")

    paths = [str(script)] if config is None else [str(config), str(script)]
    words = ["run", *["--stats"] * stats, *paths, *arguments]
    result: Facts | None = {} if json else None
    code = start_job(settings, world, words, sets, body, elastic=elastic, result=result)
    if result is not None:
        show_facts(result, True, str)
    raise typer.Exit(code)
