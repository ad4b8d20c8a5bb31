"""`meshcomm schema` prints the schema."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from meshcomm.commands import app
from tests.config.test_schema import SCHEMA


def test_the_command_prints_it() -> None:
    printed = CliRunner().invoke(app, ["schema"])
    assert printed.exit_code == 0 and json.loads(printed.stdout) == SCHEMA
