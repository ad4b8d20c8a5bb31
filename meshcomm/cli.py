"""The commands of `meshcomm`. What needs torch is imported by the command that needs it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from meshcomm.errors import MeshcommError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from meshcomm.config import Config, TopologyConfig

# Columns of a table that does not go to a terminal.
_WIDTH = 100


class Commands(TyperGroup):
    """All commands. A MeshcommError of any of them ends as its text on stderr and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the arguments name."""
        try:
            return super().invoke(ctx)
        except MeshcommError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Declare the mesh once; every group, collective and message follows from it.",
)

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML, JSON or YAML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a setting; VALUE is TOML, nothing removes the key."
    ),
]

World = Annotated[int | None, typer.Option(help="Number of processes; needed where a size is -1.")]


@app.callback()
def _commands() -> None:
    # With a callback the first argument stays a command's name even while there is one command.
    pass


@app.command()
def plan(
    config: ConfigFile,
    world: World = None,
    rank: Annotated[int | None, typer.Option(help="Show this rank's coords, groups and neighbours.")] = None,
    schedule: Annotated[
        bool, typer.Option("--schedule", help="Draw the pipeline's schedule: who runs which pass when.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")] = False,
    overrides: Overrides = None,
) -> None:
    """Show dims, groups and one rank's place, without a process, a GPU or torch."""
    from meshcomm.config import load
    from meshcomm.show.plan import facts_view, plan_facts

    settings = load(config, overrides or ()).resolved(world)
    facts = plan_facts(settings.plan(world), rank, _discovered(settings))
    if schedule:
        from meshcomm.show.schedule import schedule_facts

        facts["schedule"] = schedule_facts(settings, world)
    if json:
        from json import dumps

        typer.echo(dumps(facts, indent=2))
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
    json: Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")] = False,
    overrides: Overrides = None,
) -> None:
    """Say what about the mesh will cost time or fail on its machines, why, and what to try."""
    import resource

    from meshcomm.config import load
    from meshcomm.show.lint import lint_facts, lint_text
    from meshcomm.topology import lint as find

    settings = load(config, overrides or ())
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    topology = _discovered(settings)
    findings = find(settings, world, topology, None if soft == resource.RLIM_INFINITY else soft)
    facts = lint_facts(settings, settings.plan(world), topology, findings)
    if json:
        from json import dumps

        typer.echo(dumps(facts, indent=2))
    else:
        typer.echo(lint_text(settings.source, facts, findings))
    raise typer.Exit(int(strict and bool(findings)))


@app.command()
def costs(
    config: ConfigFile,
    world: World = None,
    operation: Annotated[
        list[str] | None,
        typer.Option("--op", help="all_reduce, all_gather, ..., sendrecv; several times. Default: all."),
    ] = None,
    size: Annotated[
        list[str] | None,
        typer.Option("--bytes", help="As in 64MB or 4KiB; several times. Default: 4KiB, 1MiB, 64MiB, 1GiB."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")] = False,
    overrides: Overrides = None,
) -> None:
    """Predict what collectives along each dim take on its links, and by which algorithm."""
    from meshcomm.config import load
    from meshcomm.costs.operations import named_operations
    from meshcomm.show.costs import cost_facts, cost_view
    from meshcomm.show.units import read_bytes
    from meshcomm.topology import known_machine

    settings = load(config, overrides or ()).resolved(world)
    machine = known_machine(_discovered(settings), settings.source)
    sizes = [read_bytes(text) for text in size or ("4KiB", "1MiB", "64MiB", "1GiB")]
    facts = cost_facts(settings.plan(world), machine, named_operations(operation or ()), sizes)
    if json:
        from json import dumps

        typer.echo(dumps(facts, indent=2))
        return
    show(cost_view(facts))


@app.command()
def place(
    config: ConfigFile,
    world: Annotated[int, typer.Option(help="Number of processes to lay the training out on.")],
    keep: Annotated[
        list[str] | None,
        typer.Option(
            "--keep", metavar="DIM", help="Leave this dim's size as the file has it; several times."
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many meshes to show.")] = 10,
    write: Annotated[
        Path | None, typer.Option(help="Write the first mesh, or that of --choose, as a config.")
    ] = None,
    choose: Annotated[int, typer.Option(min=1, help="With --write: which mesh of the table.")] = 1,
    json: Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")] = False,
    overrides: Overrides = None,
) -> None:
    """Rank all sizes and orders of the dims that can train CONFIG by the step time that a model predicts."""
    from meshcomm.config import load
    from meshcomm.place.asked import place_config, write_placement
    from meshcomm.show.place import place_facts, place_view

    settings = load(config, overrides or ())
    if choose > 1 and (write is None or choose > top):
        raise typer.BadParameter(f"--choose {choose} wants --write and --top {choose} or more")
    asked = place_config(settings, world, _discovered(settings), keep or (), top)
    facts = place_facts(asked.ranking, world, asked.machine, asked.names, asked.tflops, asked.memory_gb)
    if json:
        from json import dumps

        typer.echo(dumps(facts, indent=2))
    else:
        show(place_view(facts))
    if write is not None:
        write_placement(settings, asked.ranking, choose, world, write)
        typer.echo(f"written: {write}", err=json)


@app.command()
def train(
    config: ConfigFile,
    world: World = None,
    max_restarts: Annotated[
        int,
        typer.Option(
            min=0, help="After a rank fails, start all again, at most so often; see checkpoint_every."
        ),
    ] = 0,
    overrides: Overrides = None,
) -> None:
    """Train the built-in model in parallel. Outside a launcher, starts one process per rank here."""
    from meshcomm import jobs

    raise typer.Exit(jobs.train(config, overrides or (), world, max_restarts))


@app.command(context_settings={"allow_extra_args": True, "allow_interspersed_args": False})
def run(
    context: typer.Context,
    config: ConfigFile,
    script: Annotated[
        Path, typer.Argument(metavar="SCRIPT", help="A Python file; arguments after it are its own.")
    ],
    world: World = None,
    overrides: Overrides = None,
) -> None:
    """Run a script, one process per rank; its meshcomm.init() makes the mesh of CONFIG."""
    from meshcomm import jobs

    raise typer.Exit(jobs.run(config, script, context.args, overrides or (), world))


@app.command(context_settings={"allow_extra_args": True, "allow_interspersed_args": False})
def simulate(
    context: typer.Context,
    config: ConfigFile,
    script: Annotated[
        Path, typer.Argument(metavar="SCRIPT", help="A Python file; arguments after it are its own.")
    ],
    world: World = None,
    seed: Annotated[int, typer.Option(help="Chooses the schedule: which rank runs when several could.")] = 0,
    explore: Annotated[int, typer.Option(min=1, help="Try so many schedules, from --seed on.")] = 1,
    json: Annotated[
        bool, typer.Option("--json", help="Print the traffic as JSON; the script prints to stderr.")
    ] = False,
    overrides: Overrides = None,
) -> None:
    """Run a script as every rank in this one process: a proved deadlock, or a table of what was sent."""
    from meshcomm import jobs

    facts = jobs.simulate(config, script, context.args, overrides or (), world, seed, explore, json)
    if json:
        from json import dumps

        typer.echo(dumps(facts, indent=2))
    else:
        from meshcomm.show.traffic import traffic_view

        show(traffic_view(facts))


@app.command()
def parity(
    config: ConfigFile,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Compare so many steps; 20, or all where there are fewer.")
    ] = None,
    world: World = None,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="The largest relative difference that is none.")
    ] = 1e-9,
    json: Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")] = False,
    overrides: Overrides = None,
) -> None:
    """Compare the same training on its mesh and on one process, in float64: losses, norms, gradients, weights.

    Exit code 1 where they differ; then the first dim to blame is found by running smaller meshes.
    """
    from meshcomm import jobs

    facts = jobs.parity(config, overrides or (), world, steps, tolerance)
    if json:
        from json import dumps

        typer.echo(dumps(facts, indent=2))
    else:
        from meshcomm.show.parity import parity_view

        show(parity_view(facts))
    raise typer.Exit(0 if facts["agrees"] else 1)


@app.command()
def bench(
    world: Annotated[int, typer.Option(min=2, help="Number of processes.")] = 4,
    megabytes: Annotated[int, typer.Option(min=1, help="Size of the large tensors.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; medians are shown.")] = 9,
) -> None:
    """Measure calls and bandwidth beside raw torch.distributed, in one run on this machine."""
    from meshcomm import jobs

    raise typer.Exit(jobs.bench(megabytes, rounds, world))


@app.command()
def doctor(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="The job's file: more can be checked with it.")
    ] = None,
    world: World = None,
    json: Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")] = False,
    overrides: Overrides = None,
) -> None:
    """Check this host, installation and environment. Under torchrun: all ranks, in one table.

    Exit code 1 where something would make the job fail.
    """
    from meshcomm import jobs

    raise typer.Exit(jobs.doctor(config, overrides or (), world, json))


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where ranks left their reports.")],
) -> None:
    """Put the reports of a job whose calls failed together: who kept whom waiting, and where."""
    from meshcomm import jobs

    typer.echo(jobs.report(folder))


@app.command()
def export(
    source: Annotated[
        Path,
        typer.Argument(metavar="RUN|CHECKPOINT", help="A run's folder: its last checkpoint; or one of them."),
    ],
    target: Annotated[Path, typer.Argument(metavar="FILE", help="The safetensors file to write.")],
    weights: Annotated[
        bool, typer.Option("--weights", help="Only the model's tensors, by the names of its modules.")
    ] = False,
) -> None:
    """Write a checkpoint's whole tensors into one safetensors file, in one process."""
    from meshcomm import jobs

    typer.echo(jobs.export(source, target, weights))


@app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="What `meshcomm export` wrote.")],
    out: Annotated[
        Path, typer.Argument(metavar="RUN", help="The train.out of the run that goes on from it.")
    ],
) -> None:
    """Make a checkpoint of an exported file, for `meshcomm train --set train.resume=true`."""
    from meshcomm import jobs

    typer.echo(jobs.import_file(source, out))


def _discovered(settings: Config) -> TopologyConfig:
    """`[topology]`, with what the launcher's environment says."""
    import os

    from meshcomm.topology import discovered

    return discovered(settings.topology, os.environ)


def show(what: RenderableType) -> None:
    """Print a rich renderable, as wide as the terminal, or 100 columns where there is none."""
    import os

    from rich.console import Console

    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=_WIDTH)
    console.print(what)


def main() -> None:
    """The `meshcomm` command."""
    app(prog_name="meshcomm")


if __name__ == "__main__":
    main()
