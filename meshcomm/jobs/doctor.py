"""`meshcomm doctor`: of this host, or of all ranks together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from meshcomm.config import load
from meshcomm.errors import ConfigError, LaunchError
from meshcomm.jobs.starting import refuse_other_world
from meshcomm.launch.rank import as_rank
from meshcomm.mesh.environment import find_launch

# How long the ranks wait for each other where no config says.
_DOCTOR_TIMEOUT_S: Final = 60.0


def doctor(
    config: Path | None, overrides: Sequence[str], world: int | None, json: bool, everything: bool = False
) -> int:
    """Print what is wrong; returns 1 where something is an error, else 0.

    Inside a launcher every rank takes part and rank 0 prints. everything: the facts too.
    """
    from meshcomm.doctor import examine, examine_together
    from meshcomm.doctor.finding import Finding, exit_code

    if config is None and overrides:
        raise ConfigError(
            "--set has no effect without a CONFIG",
            given=" ".join(f"--set {override}" for override in overrides),
            expected="a CONFIG whose settings they change",
            hint="meshcomm doctor CONFIG --set ...",
        )
    settings = None if config is None else load(config, overrides)
    try:
        here = find_launch(os.environ)
    except LaunchError:
        # It will be among the findings.
        here = find_launch({})
    if here.kind == "single":
        facts = examine(settings, world)
        _print_facts(facts, json, everything)
        return exit_code(map(Finding.read, facts["findings"]))
    refuse_other_world(here, world)
    codes: list[int] = []

    def body() -> None:
        timeout_s = _DOCTOR_TIMEOUT_S if settings is None else settings.mesh.timeout_s
        found, code = examine_together(settings, here, timeout_s)
        if found is not None:
            _print_facts(found, json, everything)
        codes.append(code)

    as_rank(body, here, lambda: f"rank {here.rank}")
    return codes[0]


def _print_facts(facts: dict[str, Any], json: bool, everything: bool) -> None:
    if json:
        from json import dumps

        print(dumps(facts, indent=2))
        return
    from meshcomm.doctor.finding import view
    from meshcomm.show.page import terminal

    terminal().print(view(facts, everything), crop=False)
