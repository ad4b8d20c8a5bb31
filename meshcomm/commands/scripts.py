"""The arguments `[CONFIG] SCRIPT [ARGUMENTS]` of the commands that run a script."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from shlex import join
from typing import Annotated, Any, final

import typer

from meshcomm.commands.app import Command, before_script, is_single, no_config
from meshcomm.errors import LaunchError
from meshcomm.rendezvous.launcher import how_many_ranks

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
        """Stop parsing options at the first word that ends in .py. Name the command's own options that come later.

        The script may have the same options, so they only are an error if the command cannot do without them.
        """
        before = before_script(args)
        rest = args[len(before) :]
        # A second one would count as an argument.
        ours = [word for word in before if word != "--"]
        parsed = super().parse_args(ctx, [*ours, "--", *rest])
        found = [(self._option_of(word), place) for place, word in enumerate(rest[1:], 1)]
        # A value that was given before the script shows that the later one is the script's.
        late = [(option, place) for option, place in found if option and not _is_given(ctx, option)]
        if late and is_single() and not ctx.resilient_parsing:
            self._say_late(ctx, ours, rest, late)
        return parsed

    def _option_of(self, word: str) -> Any:
        """Return the command's option with this name; None if there is none, or for --help."""
        name = word.partition("=")[0]
        return next((each for each in self.params if name in each.opts), None)

    def _say_late(self, ctx: Any, ours: Sequence[str], rest: Sequence[str], late: Sequence[Any]) -> None:
        moved = list[str]()
        kept = list(rest)
        for option, place in reversed(late):
            takes = 1 if option.is_flag or "=" in rest[place] else 2
            moved[:0] = rest[place : place + takes]
            del kept[place : place + takes]
        names = ", ".join(rest[place].partition("=")[0] for _, place in late)
        verb = "stands" if len(late) == 1 else "stand"
        what = f"{names} {verb} behind {rest[0]}, and so {'belongs' if verb == 'stands' else 'belong'} to the script"
        way = join(["meshcomm", str(self.name), *ours, *moved, *kept])
        # Without CONFIG, only the option tells the number of ranks.
        if ctx.params.get("first") == Path(rest[0]) and any(option.name == "world" for option, _ in late):
            raise LaunchError(
                what,
                given=f"a script without CONFIG, and no --world-size before {rest[0]}",
                expected=f"meshcomm's own options before {rest[0]}",
                hint=way,
            )
        print(f"meshcomm: {what}; if meshcomm is meant: {way}", file=sys.stderr)


def _is_given(ctx: Any, option: Any) -> bool:
    return str(ctx.get_parameter_source(option.name).name) == "COMMANDLINE"


def named(
    command: str,
    first: Path | None,
    second: str | None,
    rest: list[str],
    overrides: list[str] | None,
    world: int | None,
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
    script = found(script, usage)
    if config is None and world is None and is_single():
        raise how_many_ranks(command)
    return config, script, arguments


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
