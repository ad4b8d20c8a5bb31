"""`meshcomm doctor`: find problems with a host, an installation and a job's environment."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from meshcomm.commands.app import AsJson, Overrides, World, command, no_config, show_facts
from meshcomm.errors import LaunchError
from meshcomm.show.page import Facts, Line
from meshcomm.show.units import count

if TYPE_CHECKING:
    from rich.console import Group

# How long the ranks wait for each other without a config.
_TIMEOUT_S: Final = 60.0
# The style of each level, with errors first.
_STYLES: Final = {"error": "bold red", "warn": "yellow"}


@command()
def doctor(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="[CONFIG]", help="The job's configuration file, for additional checks."),
    ] = None,
    world: World = None,
    json: AsJson = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Also show versions, interfaces, limits and ranks.")
    ] = False,
    overrides: Overrides = None,
) -> None:
    """Find problems with this host, installation and environment, and suggest fixes. Under torchrun, check all ranks.

    The exit code is 1 if a problem would make the job fail.
    """
    if config is None and overrides:
        raise no_config(overrides, "a CONFIG whose settings to override", "meshcomm doctor CONFIG --set ...")
    from meshcomm.config import load_config

    settings = None if config is None else load_config(config, overrides or ())
    from meshcomm.commands.processes import refuse_other_world
    from meshcomm.doctor import examine, examine_together
    from meshcomm.job.rank import as_rank
    from meshcomm.rendezvous.launcher import find_launch

    try:
        launch = find_launch(os.environ)
    except LaunchError:
        # The findings will include the error.
        launch = find_launch({})
    # None on all ranks but the first.
    facts: Facts | None = None
    code = 0

    def together() -> None:
        nonlocal facts, code
        timeout_s = _TIMEOUT_S if settings is None else settings.mesh.timeout_s
        facts, code = examine_together(settings, launch, timeout_s)

    if launch.kind == "single":
        facts = examine(settings, world)
        code = int(any(finding["level"] == "error" for finding in facts["findings"]))
    else:
        refuse_other_world(launch, world)
        as_rank(together, launch, lambda: f"rank {launch.rank}")
    if facts is not None:
        show_facts(facts, json, partial(view, everything=everything))
    raise typer.Exit(code)


def view(facts: Facts, everything: bool = False) -> Group:
    """Return the findings for a rich console, errors first. everything: whether the other facts follow, key by key."""
    from rich.console import Group

    from meshcomm.doctor import Finding

    levels = [finding["level"] for finding in facts["findings"]]
    lines = [Line(f"{count(levels.count('error'), 'error')}, {count(levels.count('warn'), 'warning')}")]
    for level, style in _STYLES.items():
        of_level = [Finding.read(finding) for finding in facts["findings"] if finding["level"] == level]
        lines += [Line(str(finding), style=style) for finding in of_level]
    for title, value in facts.items():
        if everything and value and title != "findings":
            rows = value if isinstance(value, list) else [{name: value[name]} for name in value]
            lines += [Line(f"\n{title}"), *(Line(f"  {_text(row)}") for row in rows)]
    return Group(*lines)


def _text(facts: Facts) -> str:
    """Return facts as text, such as `name eth0, up yes, addresses 10.0.0.7`."""
    return ", ".join(f"{name} {_value_text(value)}" for name, value in facts.items())


def _value_text(value: object) -> str:
    from meshcomm.layout.sizes import coords_text

    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return coords_text(value)
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "-"
    return "-" if value is None else str(value)
