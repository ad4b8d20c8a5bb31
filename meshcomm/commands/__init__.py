"""The commands of `meshcomm`. A command imports torch only if it needs torch."""

from __future__ import annotations

from meshcomm.cli import afterwards, looking, measuring, running  # noqa: F401
from meshcomm.cli.app import app

__all__ = ["app", "main"]


def main() -> None:
    """Run the `meshcomm` command."""
    app(prog_name="meshcomm")
