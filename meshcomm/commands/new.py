"""`meshcomm new`: write the first files of a project."""

from __future__ import annotations

from os.path import lexists
from pathlib import Path
from typing import Annotated, Final

import typer

from meshcomm.commands.app import command
from meshcomm.errors import LaunchError

# The files that `meshcomm new` writes: the source of each in the starter folder, and the command that runs it.
_STARTER: Final = {
    "config.toml": ("config.toml", "meshcomm train"),
    "hello.py": ("hello.py.txt", "meshcomm run --world-size 8"),
}


@command()
def new(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="[FOLDER]",
            help="The folder to write to, created if missing. Default: the current folder.",
        ),
    ] = Path(),
) -> None:
    """Write config.toml, to train with 8 processes on the CPU, and hello.py, a script for the same mesh.

    Existing files are never overwritten: if FOLDER contains either file, nothing is written.
    """
    from importlib.resources import files

    paths = {folder / name: starter for name, starter in _STARTER.items()}
    if existing := [str(path) for path in paths if lexists(path)]:
        raise LaunchError(
            f"meshcomm new does not overwrite files, and {' and '.join(existing)} {'exist' if existing[1:] else 'exists'}",
            given=str(folder),
            expected=f"a folder without {' and '.join(_STARTER)}",
            hint=f"meshcomm new {folder / 'demo'}",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, (starter, _) in paths.items():
            with path.open("x", encoding="utf-8", newline="\n") as file:
                file.write((files("meshcomm.commands") / "starter" / starter).read_text(encoding="utf-8"))
    except OSError as error:
        raise LaunchError(
            f"{folder}: cannot be written: {(error.strerror or str(error)).lower()}",
            given=str(folder),
            expected="a folder that can be written or created",
            hint="meshcomm new in another folder",
        ) from None
    for path, (_, starts) in paths.items():
        typer.echo(f"{starts} {path}")
