"""What a shell offers behind `meshcomm`: config files and the names that they define."""

from __future__ import annotations

import os
from enum import StrEnum
from glob import escape, glob
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from meshcomm.config import MeshConfig

_SUFFIXES = (".toml", ".json", ".yaml", ".yml")
# What the shell sets when it asks; the script that `--show-completion` prints names it.
_ASKED = "_MESHCOMM_COMPLETE"
# typer's own two options know the shell that runs them only; these take any, for whoever keeps the scripts.
Shell = StrEnum("Shell", ["bash", "zsh", "fish", "powershell", "pwsh"])


def complete_config(incomplete: str) -> list[str]:
    """Config files of the folder that is being typed, and of the folders in it whose names fit."""
    # Not the folders themselves: a shell would end the word behind one.
    found = [path for inside in ("*", "*/*") for path in glob(escape(incomplete) + inside)]
    return sorted(path for path in found if path.endswith(_SUFFIXES) and os.path.isfile(path))


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


def _mesh(context: typer.Context) -> MeshConfig | None:
    """The mesh of the config; None where it cannot be read, which is no moment to say so."""
    from meshcomm.config import load
    from meshcomm.errors import MeshcommError

    # Behind an option that still waits for its value, the arguments before it are not sorted yet.
    typed = [str(word) for word in (context.params.get("config"), *context.args)]
    config = next((word for word in typed if word.endswith(_SUFFIXES)), None)
    try:
        return None if config is None else load(config).mesh
    except MeshcommError:
        return None


def answers_shell() -> None:
    """Let typer answer where a shell asks; otherwise nothing is loaded for it."""
    if _ASKED in os.environ:
        from typer.completion import completion_init

        completion_init()


def _given(option: typer.CallbackParam, shell: Shell | None) -> None:
    if shell is None:
        return
    from typer.completion import get_completion_script, install

    if option.name == "show_completion":
        typer.echo(get_completion_script(prog_name="meshcomm", complete_var=_ASKED, shell=shell.value))
    else:
        name, path = install(shell=shell.value, prog_name="meshcomm", complete_var=_ASKED)
        typer.echo(f"completion for {name} is in {path}; it works in the next {name}")
    raise typer.Exit


_SHOWN = "Print the script that completes commands, options and config files."
_INSTALLED = "Add it to the shell's start-up files."
ShowCompletion = Annotated[
    Shell | None, typer.Option("--show-completion", callback=_given, is_eager=True, help=_SHOWN)
]
InstallCompletion = Annotated[
    Shell | None, typer.Option("--install-completion", callback=_given, is_eager=True, help=_INSTALLED)
]
