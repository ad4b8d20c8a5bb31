"""The arguments `[CONFIG] SCRIPT [ARGUMENTS]` of the commands that run a script."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, final

import typer

from meshcomm.commands.app import Command, no_config
from meshcomm.errors import LaunchError

First = Annotated[
    Path | None,
    typer.Argument(
        metavar="[CONFIG]",
        help="A configuration file (TOML, JSON or YAML) for meshcomm.init() without arguments. A file name that "
        "ends in .py is treated as SCRIPT, which then defines the mesh itself.",
    ),
]
Second = Annotated[
    str | None,
    typer.Argument(
        metavar="SCRIPT",
        help="A Python file. All arguments after SCRIPT are passed to the script.",
    ),
]


@final
class ScriptCommand(Command):
    """A command `[OPTIONS] [CONFIG] SCRIPT [ARGUMENTS]`. Arguments after SCRIPT belong to the script."""

    allow_extra_args = True

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Stop parsing options at the first word that ends in .py."""
        script = next((place for place, word in enumerate(args) if word.endswith(".py")), len(args))
        return super().parse_args(ctx, [*args[:script], "--", *args[script:]])


def named(
    command: str, first: Path | None, second: str | None, rest: list[str], overrides: list[str] | None
) -> tuple[Path | None, Path, list[str]]:
    """Return CONFIG (None if not given), SCRIPT, and the script's arguments. Raises ConfigError, LaunchError."""
    usage = f"meshcomm {command} [CONFIG] SCRIPT [ARGUMENTS]"
    if first is None:
        raise LaunchError("no SCRIPT was given", given="no argument", expected="a Python file", hint=usage)
    if first.suffix == ".py":
        config, script = None, first
        arguments = [*([] if second is None else [second]), *rest]
        if overrides:
            expected = "a CONFIG whose settings to override, and a script that calls meshcomm.init()"
            raise no_config(overrides, expected, usage)
    elif second is None:
        raise LaunchError(
            f"no SCRIPT was given after {first}",
            given=str(first),
            expected="a file name that ends in .py, or a Python file after CONFIG",
            hint=usage,
        )
    else:
        config, script, arguments = first, Path(second), rest
    return config, found(script, usage), arguments


def found(script: Path, usage: str) -> Path:
    """Return the script. Raises LaunchError if it does not exist."""
    if not script.is_file():
        from meshcomm.config.read import near_file

        near = near_file(script, script=True)
        way = near if near.startswith("did") else usage
        raise LaunchError(
            f"there is no script {script}", given=str(script), expected="a Python file", hint=way
        )
    return script
