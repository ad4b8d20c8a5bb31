"""`meshcomm run`: a script on every rank."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from meshcomm.config import load
from meshcomm.jobs.announce import announce


def run(
    config: Path | None, script: Path, arguments: Sequence[str], overrides: Sequence[str], world: int | None
) -> int:
    """Run a script, one process per rank, whose `meshcomm.init()` makes the mesh of `config`.

    Without `config`: `world` ranks of a script that says its own mesh.
    """
    settings = None if config is None else load(config, overrides)
    if settings is not None and world is not None:
        settings.resolved(world)
    announce(None if settings is None else settings.mesh.dims, world)
    # What is wrong has been said by now: torch takes seconds to load.
    from meshcomm.jobs.starting import start_job
    from meshcomm.mesh.source import CONFIG_VARIABLE, OVERRIDES_VARIABLE

    def body() -> None:
        if config is not None:
            os.environ[CONFIG_VARIABLE] = str(config)
            os.environ[OVERRIDES_VARIABLE] = "\n".join(overrides)
        sys.argv = [str(script), *arguments]
        # As `python SCRIPT` does: imports are looked for beside the script first.
        sys.path.insert(0, str(script.resolve().parent))
        runpy.run_path(str(script), run_name="__main__")

    words = [
        "run",
        *([] if config is None else [str(config)]),
        str(script),
        *(["--", *arguments] * bool(arguments)),
    ]
    return start_job(settings, world, words, overrides, body)
