"""The `meshcomm` command, which finds each command in its file, and the options that several commands share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar, cast

import typer
from typer.core import TyperCommand, TyperGroup

from meshcomm.errors import ConfigError, MeshcommError, parts_of

if TYPE_CHECKING:
    from rich.console import RenderableType

    from meshcomm.config import Config, TopologyConfig
    from meshcomm.show.page import Facts

F = TypeVar("F", bound=Callable[..., None])

# Variables in which torchrun, Slurm, Open MPI, MPICH, MVAPICH, jsrun, Flux and PALS store a process's index on its host.
_LOCAL_RANKS: Final = (
    "LOCAL_RANK",
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "JSM_NAMESPACE_LOCAL_RANK",
    "FLUX_TASK_LOCAL_ID",
    "PALS_LOCAL_RANKID",
)

# Commands grouped by purpose, in the order of `--help` and the reference.
GROUPS: Final = {
    "Begin": ("new",),
    "Start ranks": ("run", "train", "simulate"),
    "Look at a mesh": ("plan", "lint", "view", "schema"),
    "Find out what went wrong": ("report", "doctor", "parity"),
    "Measure and predict": ("bench", "costs", "tune", "dryrun", "transfer"),
    "Export weights": ("export",),
}


class Command(TyperCommand):
    """A command whose usage line shows its arguments as they are declared, in every version of typer."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line, such as `[OPTIONS] [CONFIG] SCRIPT [ARGUMENTS]...`."""
        arguments = [str(param.metavar) for param in self.params if param.param_type_name == "argument"]
        return ["[OPTIONS]", *arguments, *["[ARGUMENTS]..."] * ctx.allow_extra_args]


_DECLARED: Final[dict[str, typer.Typer]] = {}


def command(cls: type[TyperCommand] = Command) -> Callable[[F], F]:
    """Declare a command: a function with the name of its file. Its parameters are the command's arguments and options."""

    def declare(function: F) -> F:
        app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        app.command(cls=cls)(function)
        _DECLARED[function.__name__] = app
        return function

    return declare


def function_of(name: str) -> Callable[..., None]:
    """Return the function that declares a command. Imports the command's file."""
    return cast("Callable[..., None]", getattr(import_module(f"meshcomm.commands.{name}"), name))


@cache
def _made(name: str) -> Any:
    function_of(name)
    return typer.main.get_command(_DECLARED[name])


class _Files(Mapping[str, Any]):
    """The commands by name, in the order of GROUPS. A command's file is imported when the command is looked up."""

    def __getitem__(self, name: str) -> Any:
        if name not in [*self]:
            raise KeyError(name)
        return _made(name)

    def __iter__(self) -> Iterator[str]:
        return (name for names in GROUPS.values() for name in names)

    def __len__(self) -> int:
        return sum(map(len, GROUPS.values()))


class Commands(TyperGroup):
    """The group of all commands. If a command raises MeshcommError, the error is printed to stderr, and the exit code is 2."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = cast("Any", _Files())

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order of GROUPS."""
        return [*self.commands]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List every command, group by group, with the full first paragraph of its help."""
        widest = max(map(len, self.commands))
        for title, names in GROUPS.items():
            rows = [(name.ljust(widest), first_paragraph(function_of(name).__doc__)) for name in names]
            with formatter.section(title):
                formatter.write_dl(rows)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Look for --json before a script, because an error may come before the command's own options are parsed."""
        ctx.meta[AsJson] = "--json" in before_script(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the arguments name."""
        try:
            return super().invoke(ctx)
        except MeshcommError as error:
            if ctx.meta[AsJson]:
                show_facts({"error": parts_of(error)}, True, str)
            # All ranks on a host read the same file, so only the first rank reports errors in it.
            local = next((os.environ[name] for name in _LOCAL_RANKS if name in os.environ), "0")
            if local == "0" or not isinstance(error, ConfigError):
                say(error)
            raise typer.Exit(2) from None


def say(error: MeshcommError) -> None:
    """Print an error to stderr. Lines are wrapped only on a terminal."""
    from meshcomm.show.page import Line, terminal

    terminal(10_000, stderr=True).print(Line(str(error)), crop=False)


def before_script(args: Sequence[str]) -> Sequence[str]:
    """Return the arguments up to the first one that ends in .py. All later ones are the script's."""
    return args[: next((place for place, word in enumerate(args) if word.endswith(".py")), len(args))]


def announce(
    verb: str, name: object, settings: Config | None = None, world: int | None = None, end: str = ""
) -> None:
    """Print on stderr what a command is about to do: `starting 8 ranks of mesh.toml: dp=4 tp=2`.

    Called before torch is imported, which takes seconds. A process that a launcher has started as a rank prints nothing.
    """
    if not is_single():
        return
    from meshcomm.layout.sizes import coords_text
    from meshcomm.show.units import count

    how_many, sizes = "one rank per GPU", "" if settings is None else f": {coords_text(settings.mesh.dims)}"
    if settings is None or not counts_gpus(settings, world):
        world = world_of(settings, world)
        how_many = count(world, "rank")
        sizes = "" if settings is None else f": {coords_text(settings.resolved(world).mesh.sizes(world))}"
    print(f"meshcomm: {verb} {how_many} of {name}{sizes}{end}", file=sys.stderr, flush=True)


def is_single() -> bool:
    """Return whether no launcher has started this process as a rank."""
    from meshcomm.rendezvous.launcher import launch_of_command

    return launch_of_command(os.environ).kind == "single"


def counts_gpus(settings: Config, world: int | None) -> bool:
    """Return whether the number of ranks to start is that of the GPUs of this host, if there are any."""
    return world is None and -1 in settings.mesh.dims.values() and settings.mesh.device != "cpu"


def world_of(settings: Config | None, world: int | None) -> int:
    """Return the number of ranks to start: `world` if given, otherwise the number that the mesh sizes require, or one for
    each GPU on this host.
    """
    if world is not None:
        return world
    # A script without CONFIG has one: see `named`.
    assert settings is not None
    if counts_gpus(settings, world):
        import torch

        if torch.cuda.is_available():
            return torch.cuda.device_count()
    return settings.mesh.smallest_world()


def first_paragraph(text: str | None) -> str:
    """Return the first paragraph of a command's help, on one line."""
    return " ".join((text or "").strip().split("\n\n")[0].split())


app = typer.Typer(
    cls=Commands,
    # The help is as wide as the terminal.
    context_settings={"max_content_width": 10_000},
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Communication along named mesh dimensions for PyTorch: plan, run, check and predict.",
)

ConfigFile = Annotated[
    Path,
    typer.Argument(metavar="CONFIG", help="A configuration file: TOML, JSON or YAML."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a setting. VALUE is TOML or a bare word; an empty VALUE removes the key.",
    ),
]


def checked_world(world: int | None) -> int | None:
    from meshcomm.config.mesh import check_world

    check_world(world)
    return world


World = Annotated[
    int | None,
    typer.Option(
        "--world-size",
        "--world",
        callback=checked_world,
        help="Number of processes; required if a size is -1.",
    ),
]
Operations = Annotated[
    list[str] | None,
    typer.Option("--op", help="Operation: all_reduce, all_gather, ..., sendrecv. Repeatable. Default: all."),
]
Replace = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Replace up to this many lost ranks with new processes while the other ranks stay alive. Overrides "
        "elastic.replace; see docs/guide/elastic.md.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
# Of the commands whose processes print, too.
JsonAtEnd = Annotated[
    bool,
    typer.Option(
        "--json", help="Print the result as JSON on stdout, at the end. All other output goes to stderr."
    ),
]


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version
        from platform import python_version

        from meshcomm import __version__

        typer.echo(f"meshcomm {__version__}, torch {version('torch')}, Python {python_version()}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option(
        "--version",
        callback=_version,
        is_eager=True,
        help="Print the versions of meshcomm, torch and Python.",
    ),
]


@app.callback()
def _commands(version: Version = False) -> None:
    # With a callback, the first argument is a command's name even if there is only one command.
    pass


def replacing(overrides: Sequence[str] | None, replace: int | None) -> list[str]:
    """Return the overrides, with elastic.replace as in `--replace`, if given."""
    return [*(overrides or ()), *([] if replace is None else [f"elastic.replace={replace}"])]


def no_config(overrides: Sequence[str], expected: str, hint: str) -> ConfigError:
    """Return the error for --set without a config."""
    given = " ".join(f"--set {override}" for override in overrides)
    return ConfigError("--set has no effect without a CONFIG", given=given, expected=expected, hint=hint)


def discovered_topology(settings: Config) -> TopologyConfig:
    """Return `[topology]`, completed with values from the launcher's environment variables."""
    from meshcomm.predict.links import discovered

    return discovered(settings.topology, os.environ)


@contextmanager
def stdout_as_stderr(redirected: bool) -> Iterator[None]:
    """In this block, what this process and those that it starts print on stdout goes to stderr, if `redirected`."""
    if not redirected:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def show_facts(facts: Facts, json: bool, view: Callable[[Facts], RenderableType], width: int = 100) -> None:
    """Print facts as JSON, or as rendered by `view`, at the width of the terminal, or `width` columns if there is none.

    `view` reads nothing but the facts, so that `--json` lacks nothing that a table shows. tests/commands/test_app.py checks it.
    """
    if json:
        from json import dumps

        typer.echo(dumps(facts, indent=2))
    else:
        from meshcomm.show.page import terminal

        terminal(width).print(view(facts), crop=False)
