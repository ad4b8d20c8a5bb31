"""Start the processes of a command: one per rank on this host or, inside a launcher, only this rank. Imports torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial

from meshcomm.commands.app import stdout_as_stderr, world_of
from meshcomm.config import Config
from meshcomm.config.elastic import ElasticConfig
from meshcomm.errors import LaunchError
from meshcomm.job.rank import as_rank
from meshcomm.job.spawn import GRACE_S, launch
from meshcomm.job.standby import COMMAND
from meshcomm.job.supervisor import labels_of
from meshcomm.mesh.source import CONFIG_VARIABLE, OVERRIDES_VARIABLE
from meshcomm.rendezvous.generation import VARIABLE
from meshcomm.rendezvous.launcher import Launch, is_helper, launch_of_command
from meshcomm.show.page import Facts


def start_job(
    settings: Config | None,
    world: int | None,
    words: list[str],
    overrides: Sequence[str],
    body: Callable[[], None],
    max_restarts: int = 0,
    grace_s: float = GRACE_S,
    elastic: ElasticConfig | None = None,
    result: Facts | None = None,
) -> int:
    """Run `body` if a launcher started this process as a rank. Otherwise start `meshcomm WORDS` once per rank on this host.

    settings: None for a script that defines its own mesh. world: None to use the size in `settings`. overrides: the values
    of `--set`. elastic: if None, the section of `settings` is used. result: with --json, receives `exit_code`, `world_size`, and the
    `error` of the root cause or None. Return the exit code.
    """
    here = launch_of_command(os.environ)
    if is_helper(os.environ):
        # A job of its own, with the settings of its own command.
        for name in (CONFIG_VARIABLE, OVERRIDES_VARIABLE):
            os.environ.pop(name, None)
    if elastic is None:
        elastic = ElasticConfig() if settings is None else settings.elastic
    if here.kind != "single":
        refuse_other_world(here, world)
        if VARIABLE not in os.environ:
            _refuse_elastic(here, elastic)
        if result is not None:
            raise LaunchError(
                f"--json inside a job that {here.kind} started",
                given=f"--json, launcher {here.kind} with {here.world_size} processes",
                expected="no --json, because only the command that starts the ranks knows how the job ends",
                hint="a training writes run.json and metrics.jsonl into train.out",
            )
        if max_restarts:
            raise LaunchError(
                f"--max-restarts {max_restarts} inside a job that {here.kind} started",
                given=f"--max-restarts {max_restarts}, launcher {here.kind} with {here.world_size} processes",
                expected="no --max-restarts, because the launcher controls restarts",
                hint="torchrun --max-restarts N ... -m meshcomm train CONFIG",
            )
        as_rank(body, here, partial(labels_of(settings, here.world_size), here.rank, {}))
        return 0
    size = world_of(settings, world)
    if settings is not None:
        settings.resolved(size)
    sets = [part for override in overrides for part in ("--set", override)]
    # Options come before the words, because all words after a script's name belong to the script.
    causes: list[Facts] = []
    with stdout_as_stderr(result is not None):
        code = launch(
            [*COMMAND, words[0], *sets, *words[1:]],
            size,
            max_restarts,
            settings,
            grace_s,
            elastic,
            causes.append,
        )
    if result is not None:
        result |= {"exit_code": code, "world_size": size, "error": causes[0] if causes else None}
    return code


def _refuse_elastic(launch: Launch, elastic: ElasticConfig) -> None:
    """Raise LaunchError if lost ranks are to be replaced under another launcher."""
    if elastic.replace or elastic.min:
        given = f"elastic.{elastic.written('replace min')}"
        raise LaunchError(
            f"lost ranks cannot be replaced inside a job that {launch.kind} started",
            given=f"{given}, launcher {launch.kind} with {launch.world_size} processes",
            expected="neither [elastic] nor --replace, because only the job's launcher can start new processes",
            hint="use meshcomm run --replace N on one host, without another launcher; on several hosts\n"
            "python -m meshcomm.job.ray --world-size 8 --replace N train CONFIG",
        )


def refuse_other_world(launch: Launch, world: int | None) -> None:
    """Raise LaunchError if `--world-size` contradicts the launcher."""
    if world is not None and world != launch.world_size:
        raise LaunchError(
            f"--world-size {world} inside a job of {launch.world_size} processes",
            given=f"--world-size {world}, launcher {launch.kind} with {launch.world_size}",
            expected="no --world-size, because the launcher decides",
            hint="remove --world-size",
        )
