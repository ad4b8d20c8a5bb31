"""The commands of `meshcomm`: a file for each, with its arguments, its work and its view.

A file imports what takes time (torch, numpy, pydantic, rich) in its functions, because `meshcomm --help` and a shell's
completion import the file.
"""

from __future__ import annotations

from meshcomm.commands.app import app

__all__ = ["app", "main"]


def main() -> None:
    """Run the `meshcomm` command."""
    app(prog_name="meshcomm")
