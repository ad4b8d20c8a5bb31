"""`meshcomm schema`: print the JSON schema of configurations."""

from __future__ import annotations

import typer

from meshcomm.commands.app import command


@command()
def schema() -> None:
    """Print the JSON schema of configurations, for completion and validation in editors."""
    from meshcomm.config.schema import schema_text

    typer.echo(schema_text(), nl=False)
