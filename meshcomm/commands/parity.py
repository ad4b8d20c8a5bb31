"""`meshcomm parity`: compare training on a mesh with training in one process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from meshcomm.commands.app import (
    AsJson,
    ConfigFile,
    Overrides,
    World,
    announce,
    command,
    show_facts,
    world_of,
)
from meshcomm.commands.scripts import ScriptCommand, found
from meshcomm.errors import LaunchError
from meshcomm.show.page import Cells, Facts, Line, View, page_view

if TYPE_CHECKING:
    from meshcomm.config import Config

# How many parameters the table has at most.
_ROWS: Final = 10


@command(ScriptCommand)
def parity(
    context: typer.Context,
    config: ConfigFile,
    script: Annotated[
        str | None,
        typer.Argument(
            metavar="[SCRIPT]",
            help="A Python file that creates a meshcomm.train.Trainer on the mesh of meshcomm.init(). All arguments "
            "after SCRIPT are passed to the script.",
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Number of steps to compare. Default: 20, or all if there are fewer."),
    ] = None,
    world: World = None,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Largest relative difference that counts as equal.")
    ] = 1e-9,
    json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Compare losses, norms, gradients and weights between training on the mesh and in one process, in float64.

    The exit code is 1 if they differ. Smaller meshes are then run to find the first dim that causes a difference.
    """
    program = None
    if script is not None:
        path = found(Path(script), "meshcomm parity CONFIG [SCRIPT] [ARGUMENTS]").resolve()
        program = path, context.args
        # The script's ranks read the configuration from another folder.
        config = config.resolve()
    from meshcomm.config import load_config

    settings = load_config(config, overrides or ())
    if world is not None:
        settings.resolved(world)
    from meshcomm.rendezvous.launcher import launch_of_command

    here = launch_of_command(os.environ)
    if here.kind != "single":
        raise LaunchError(
            f"meshcomm parity inside a job that {here.kind} started",
            given=f"launcher {here.kind} with {here.world_size} processes",
            expected="a single process, because meshcomm parity itself starts the ranks of each mesh",
            hint="run meshcomm parity CONFIG without the launcher",
        )
    announce("comparing", config, settings, world, " with one process, which trains first")
    from meshcomm.job.spawn import launch
    from meshcomm.train.parity_job import prove

    size = world_of(settings, world)
    resolved = settings.resolved(size)

    def start(part: Config, words: Sequence[str]) -> int:
        count = size if part.mesh.dims == resolved.mesh.dims else world_of(part, None)
        announce("starting", config, part, count)
        return launch(list(words), count, 0, part)

    facts = prove(resolved, steps, tolerance, start, program).facts()
    show_facts(facts, json, view)
    raise typer.Exit(0 if facts["agrees"] else 1)


def view(facts: Facts) -> View:
    """Return the worst value of each quantity, the ten worst parameters, and the verdict. facts: see `Parity.facts`."""
    from meshcomm.layout.sizes import coords_text

    worst = sorted(facts["differences"], key=_size, reverse=True)
    rows = [
        next(difference for difference in worst if difference["kind"] == kind)
        for kind in ("loss", "gradient norm")
    ]
    # Show each parameter once, with its weight or its gradient, whichever differs more.
    worst_of: dict[str, Facts] = {}
    for one in worst:
        if one["kind"] in ("weight", "gradient"):
            worst_of.setdefault(one["name"], one)
    rows += [*worst_of.values()][:_ROWS]
    if len(worst_of) > _ROWS:
        rest = f"{len(worst_of) - _ROWS} more parameters, none worse"
        rows.append({**[*worst_of.values()][_ROWS], "kind": "others", "name": rest, "rank": ""})
    table = Cells.of(
        rows,
        {
            "quantity": "kind",
            ">absolute": lambda difference: (
                None if difference["relative"] is None else f"{difference['absolute']:.1e}"
            ),
            ">relative": ("relative", "{:.1e}".format),
            "step or parameter": lambda difference: (
                difference["name"] + (f": {difference['note']}" if difference["relative"] is None else "")
            ),
            ">rank": ("rank", str),
        },
    )
    head = (
        f"{coords_text(facts['dims'])} compared with one process: the first {facts['steps']} steps, float64"
    )
    notes = [f"changed for the comparison: {note}" for note in facts["notes"]]
    notes += [f"the model: {facts['original']}"] if facts["original"] else []
    verdict = [_verdict(facts)] + ([] if facts["blame"] is None else [facts["blame"]["words"]])
    return page_view([Line("\n".join([head, *notes])), table, Line("\n".join(verdict))])


def _verdict(facts: Facts) -> str:
    tolerance = f"{facts['tolerance']:g}"
    differences = facts["differences"]
    if facts["agrees"]:
        return f"agrees: all differences are within {tolerance} (worst: {max(map(_size, differences)):.1e})"
    over = sum(_size(difference) > facts["tolerance"] for difference in differences)
    one = facts["first"]
    return (
        f"differs: {over} of {len(differences)} quantities by more than {tolerance}; "
        f"first the {one['kind']} of {one['name']}"
    )


def _size(difference: Facts) -> float:
    return float("inf") if difference["relative"] is None else float(difference["relative"])
