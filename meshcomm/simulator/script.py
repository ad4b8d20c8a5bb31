"""A script that calls `meshcomm.init()`, unchanged, as every rank."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from meshcomm.config import load
from meshcomm.errors import LaunchError
from meshcomm.mesh.environment import with_variables
from meshcomm.mesh.launch_environment import how_many_ranks
from meshcomm.mesh.source import CONFIG_VARIABLE, OVERRIDES_VARIABLE
from meshcomm.simulator.own import Own
from meshcomm.simulator.running import run_ranks, world_size_of
from meshcomm.simulator.scheduler import Actor


def simulate_script(
    config: Path | None,
    script: Path,
    arguments: Sequence[str],
    overrides: Sequence[str],
    world: int | None,
    seed: int,
    explore: int,
) -> dict[str, Any]:
    """Run `script` as every rank under `explore` schedules; the traffic of the first, as plain data.

    Each rank has its own `__main__`, sys.argv, RANK and LOCAL_RANK; modules that the script imports
    are shared. Raises what `simulate` raises; an exit with a code other than 0 is a RankFailed.
    """
    if config is None and world is None:
        raise how_many_ranks("simulate")
    # The script says its own mesh; what matters of this one is the number of ranks.
    settings = load({"mesh": {"dims": {"rank": -1}}} if config is None else config, overrides)
    size = world_size_of(settings, world)
    settings.resolved(size)
    try:
        code = compile(script.read_bytes(), str(script), "exec")
    except SyntaxError as error:
        raise LaunchError(
            f"{script} is no Python program",
            given=f"line {error.lineno}: {error.msg}",
            expected="a Python file",
            hint=f"python -m py_compile {script}",
        ) from error

    def own(rank: int, environment: dict[str, str]) -> Own:
        main = ModuleType("__main__")
        main.__file__ = str(script)
        return Own(rank, environment, main, [str(script), *arguments])

    def body(actor: Actor) -> None:
        try:
            exec(code, sys.modules["__main__"].__dict__)
        except SystemExit as left:
            if left.code not in (None, 0):
                raise

    variables: dict[str, str] = {}
    if config is not None:
        variables = {CONFIG_VARIABLE: str(config), OVERRIDES_VARIABLE: "\n".join(overrides)}
    paths = list(sys.path)
    # As `python SCRIPT` does: imports are looked for beside the script first.
    sys.path.insert(0, str(script.resolve().parent))
    found: dict[str, Any] = {}
    try:
        with with_variables(variables):
            for each in range(seed, seed + explore):
                _, ledger = run_ranks(body, size, each, settings.mesh.timeout_s, own)
                if each == seed:
                    found = {
                        "world": size,
                        "schedules": explore,
                        **ledger.facts(settings.topology.ranks_per_node),
                    }
    finally:
        sys.path[:] = paths
    return found
