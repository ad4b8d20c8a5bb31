"""`meshcomm simulate`: a script as every rank of this process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def simulate(
    config: Path | None,
    script: Path,
    arguments: Sequence[str],
    overrides: Sequence[str],
    world: int | None,
    seed: int,
    explore: int,
    quiet: bool,
) -> dict[str, Any]:
    """Run a script as every rank in this process; returns what it sent, as plain data.

    quiet: what the script prints goes to stderr.
    """
    from contextlib import nullcontext, redirect_stdout

    from meshcomm.simulator.run import simulate_script

    with redirect_stdout(sys.stderr) if quiet else nullcontext():
        return simulate_script(config, script, arguments, overrides, world, seed, explore)
