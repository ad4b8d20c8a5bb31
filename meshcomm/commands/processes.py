"""Start the processes of a command: one per rank on this host or, inside a launcher, only this rank. Imports torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial

import torch

from meshcomm.config import Config
from meshcomm.config.elastic import ElasticConfig
from meshcomm.errors import LaunchError
from meshcomm.job.rank import as_rank
from meshcomm.job.spawn import GRACE_S, launch
from meshcomm.job.standby import COMMAND
from meshcomm.job.supervisor import labels_of
from meshcomm.mesh.source import CONFIG_VARIABLE, OVERRIDES_VARIABLE, world_of_mesh
from meshcomm.rendezvous.generation import VARIABLE
from meshcomm.rendezvous.launcher import Launch, how_many_ranks, is_helper, launch_of_command


def start_job(
    settings: Config | None,
    world: int | None,
    words: list[str],
    overrides: Sequence[str],
    body: Callable[[], None],
    max_restarts: int = 0,
    grace_s: float = GRACE_S,
    elastic: ElasticConfig | None = None,
) -> int:
    """Run `body` if a launcher started this process as a rank. Otherwise start `meshcomm WORDS` once per rank on this host.

    settings: None for a script that defines its own mesh. world: None to use the size in `settings`. overrides: the values
    of `--set`. elastic: if None, the section of `settings` is used. Return the exit code.
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
    return launch(
        [*COMMAND, words[0], *sets, *words[1:]],
        size,
        max_restarts,
        settings,
        grace_s,
        elastic,
    )


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


def world_of(settings: Config | None, world: int | None) -> int:
    """Return the number of ranks to start: `world` if given, otherwise the number that the mesh sizes require, or one for
    each GPU on this host.
    """
    if world is not None:
        return world
    if settings is None:
        raise how_many_ranks("run")
    if -1 in settings.mesh.dims.values() and settings.mesh.device != "cpu" and torch.cuda.is_available():
        return torch.cuda.device_count()
    return world_of_mesh(settings.mesh)
