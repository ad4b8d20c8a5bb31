"""Shared by the tests of plans and grids: configurations, commands, and readers of SVG and Markdown."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from typer.testing import CliRunner

from meshcomm.commands import app
from meshcomm.config import TopologyConfig, load_config
from meshcomm.layout import Plan

ROOT = Path(__file__).parents[2]
MESH, GPT, QUICK, LLAMA = (
    f"configs/{name}.toml" for name in ("mesh", "gpt_1024", "quickstart", "llama_405b")
)
SVG = "{http://www.w3.org/2000/svg}"
# A dim of size 1, merged dims in two orders, and views with and without a shared dim.
WIDE: dict[str, Any] = {
    "dims": {"a": 2, "one": 1, "b": 3, "c": 4},
    "merge": {"ac": ["a", "c"], "cb": ["c", "b"]},
    "views": {"other": {"x": 6, "y": 4}, "third": {"a": 2, "p": 3, "q": 4}},
}


class Shown(NamedTuple):
    """The result of a command."""

    code: int
    out: str
    err: str


def run(*words: str, columns: int = 100) -> Shown:
    """Run `meshcomm` with these words in this process, from the repository's root."""
    with contextlib.chdir(ROOT):
        done = CliRunner(env={"COLUMNS": str(columns), "NO_COLOR": "1"}).invoke(
            app, words, prog_name="meshcomm"
        )
    # The user would see an unhandled exception as a traceback.
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return Shown(done.exit_code, "\n".join(line.rstrip() for line in done.stdout.split("\n")), done.stderr)


def python(*words: str, **env: str) -> Shown:
    """Run Python in another process."""
    env = {**os.environ, "COLUMNS": "100", "PYTHONUTF8": "1", "NO_COLOR": "1", **env}
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, cwd=ROOT, env=env, timeout=200
    )
    return Shown(done.returncode, "\n".join(line.rstrip() for line in done.stdout.split("\n")), done.stderr)


def plan_of(**mesh: Any) -> Plan:
    return load_config({"mesh": mesh}).plan(None)


def plan_at(config: str, world: int, *overrides: str) -> Plan:
    return load_config(ROOT / config, overrides).plan(world)


def nodes(per_node: int | None) -> TopologyConfig:
    return TopologyConfig(ranks_per_node=per_node)
