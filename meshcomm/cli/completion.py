"""What a shell offers behind `meshcomm`: config files and the names that they define."""

from __future__ import annotations

import os
from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from meshcomm.config import MeshConfig

_SUFFIXES = (".toml", ".json", ".yaml", ".yml")
# What the shell sets when it asks; the script that `--show-completion` prints names it.
_ASKED = "_MESHCOMM_COMPLETE"


class Shell(StrEnum):
    """The shells that can be asked to complete."""

    bash = "bash"
    zsh = "zsh"
    fish = "fish"
    powershell = "powershell"
    pwsh = "pwsh"


def complete_config(incomplete: str) -> list[str]:
    """Config files of the folder that is being typed, and of the folders in it whose names fit."""
    folder, start = os.path.split(incomplete)
    found: list[str] = []
    for entry in _entries(folder or "."):
        if not entry.name.startswith(start) or (entry.name.startswith(".") and not start):
            continue
        path = os.path.join(folder, entry.name)
        if entry.is_dir():
            # Not the folder itself: a shell would end the word behind it.
            found += [os.path.join(path, inside.name) for inside in _entries(path) if _is_config(inside)]
        elif _is_config(entry):
            found.append(path)
    return sorted(found)


def complete_dim(context: typer.Context, incomplete: str) -> list[str]:
    """Dims, merged dims and views' dims of the config that was typed before."""
    mesh = _mesh(context)
    if mesh is None:
        return []
    names = [*mesh.dims, *mesh.merge, *(name for sizes in mesh.views.values() for name in sizes)]
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]


def complete_view(context: typer.Context, incomplete: str) -> list[str]:
    """Views of the config that was typed before."""
    mesh = _mesh(context)
    return [] if mesh is None else [name for name in mesh.views if name.startswith(incomplete)]


def answers_shell() -> None:
    """Let typer answer where a shell asks; otherwise nothing is loaded for it."""
    if _ASKED in os.environ:
        from typer.completion import completion_init

        completion_init()


def _shown(shell: Shell | None) -> None:
    if shell is not None:
        from typer.completion import get_completion_script

        script = get_completion_script(prog_name="meshcomm", complete_var=_ASKED, shell=shell.value)
        typer.echo(script)
        raise typer.Exit


def _installed(shell: Shell | None) -> None:
    if shell is not None:
        from typer.completion import install

        name, path = install(shell=shell.value, prog_name="meshcomm", complete_var=_ASKED)
        typer.echo(f"completion for {name} is in {path}; it works in the next {name}")
        raise typer.Exit


ShowCompletion = Annotated[
    Shell | None,
    typer.Option(
        "--show-completion",
        callback=_shown,
        is_eager=True,
        help="Print the script that completes commands, options and config files.",
    ),
]
InstallCompletion = Annotated[
    Shell | None,
    typer.Option(
        "--install-completion",
        callback=_installed,
        is_eager=True,
        help="Add it to the shell's start-up files.",
    ),
]


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except OSError:
        return


def _is_config(entry: os.DirEntry[str]) -> bool:
    return entry.name.endswith(_SUFFIXES) and entry.is_file()


def _mesh(context: typer.Context) -> MeshConfig | None:
    """The mesh of the config; None where it cannot be read, which is no moment to say so."""
    from meshcomm.config import load
    from meshcomm.errors import MeshcommError

    # Behind an option that still waits for its value, the arguments before it are not sorted yet.
    typed = [context.params.get("config"), *context.args]
    for config in typed:
        if config is not None and str(config).endswith(_SUFFIXES):
            try:
                return load(config).mesh
            except MeshcommError:
                return None
    return None
